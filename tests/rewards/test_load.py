"""Loading rewards: every kind of specification, and the message for every one that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kleash.errors import UsageError
from kleash.rewards import CombinedReward, Length, Number, Regex, load_reward, score_texts


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def values(reward: Any, responses: list[str]) -> list[float]:
    return score_texts(reward, ["p"] * len(responses), responses).values.tolist()


def test_a_function_in_a_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "grade.py",
        "def words(responses):\n    return [float(len(r.split())) for r in responses]\n",
    )
    reward = load_reward(f"{file}:words")
    assert values(reward, ["a b", "c"]) == [2.0, 1.0]


def test_a_file_may_import_its_neighbour_and_define_dataclasses(tmp_path: Path) -> None:
    write(tmp_path / "neighbour_of_grade.py", "SCALE = 3.0\n")
    file = write(
        tmp_path / "grade.py",
        "from dataclasses import dataclass\nfrom neighbour_of_grade import SCALE\n@dataclass\nclass "
        "Judge:\n    scale: float\n    def __call__(self, responses):\n        return [self.scale] * "
        "len(responses)\njudge = Judge(SCALE)\n",
    )
    before = list(sys.path)
    assert values(load_reward(f"{file}:judge"), ["a"]) == [3.0]
    assert sys.path == before
    sys.modules.pop("neighbour_of_grade")


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    rewards = []
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        file = write(
            tmp_path / folder / "grade.py", f"def f(responses):\n    return [{value}] * len(responses)\n"
        )
        rewards.append(f"{file}:f")
    combined = load_reward(rewards)
    assert isinstance(combined, CombinedReward)
    assert list(combined.rewards) == ["f", "f_2"]
    assert values(combined, ["x"]) == [3.0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*nowhere.py \(looked from"):
        load_reward(str(tmp_path / "nowhere.py:grade"))


def test_a_missing_function_is_named_with_those_there_are(tmp_path: Path) -> None:
    file = write(tmp_path / "grade.py", "from math import sqrt\nLIMIT = 3\ndef grade_words(responses): ...\n")
    with pytest.raises(
        UsageError, match=r"no function 'grade_word'; it defines grade_words\. Did you mean .*:grade_words"
    ):
        load_reward(f"{file}:grade_word")
    with pytest.raises(UsageError, match="'LIMIT' in .* is not a function"):
        load_reward(f"{file}:LIMIT")
    with pytest.raises(
        UsageError, match=r"name of the function is missing; .* Write reward=.*grade.py:grade_words"
    ):
        load_reward(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import os\nimport no_such_module_here\n",
            r"ModuleNotFoundError: .*no_such_module_here.*grade.py, line 2\)",
        ),
        ("def f(:\n", r"SyntaxError: .*grade.py, line 1\)"),
        ("x = 1\n\nraise ValueError('no key')\n", r"ValueError: no key .*grade.py, line 3\)"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 .*grade.py, line 2\)"),
    ],
)
def test_a_file_that_raises_on_import_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "grade.py", text)
    with pytest.raises(UsageError, match="cannot be imported: " + message):
        load_reward(f"{file}:grade")


def test_rules_by_name() -> None:
    assert load_reward("length:200") == Length(200)
    assert load_reward("number:solution") == Number("solution")
    assert load_reward("regex:^yes") == Regex("^yes")
    assert load_reward("regex:a:b") == Regex("a:b")
    with pytest.raises(UsageError, match="no rule 'lenght:3'; did you mean 'length'"):
        load_reward("lenght:3")
    with pytest.raises(UsageError, match="length:abc: expected a number of tokens"):
        load_reward("length:abc")
    with pytest.raises(UsageError, match=r"regex: '\(' is not a regular expression"):
        load_reward("regex:(")


def test_weights_must_be_numbers() -> None:
    for weight in ("0.5", None, True, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="expected a finite number"):
            load_reward({"length:3": weight})


@pytest.mark.parametrize("spec", [None, 3, "", "  "])
def test_what_is_no_reward_at_all(spec: Any) -> None:
    with pytest.raises(UsageError, match=r"is not a reward; a reward is `file.py:function`"):
        load_reward(spec)


def test_empty_and_nested_combinations_are_refused() -> None:
    with pytest.raises(UsageError, match="the list is empty"):
        load_reward([])
    with pytest.raises(UsageError, match="itself a combination"):
        load_reward([["length:3"], "length:4"])


def test_a_module_that_reads_tensors_is_refused() -> None:
    with pytest.raises(UsageError, match="a Linear cannot be called on text"):
        load_reward(torch.nn.Linear(2, 1))


def test_what_is_loaded_is_returned_as_it_is() -> None:
    combined = load_reward(["length:3", "length:5"])
    assert load_reward(combined) is combined


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:grade", "gold=nowhere.py:grade: there is no file"),
        ("lenght:3", "gold: there is no rule 'lenght:3'; did you mean 'length'"),
        (
            "maths",
            r"gold: there is no rule 'maths'; did you mean 'math'\? .*boxed, math, gym, language, regex",
        ),
        ("length:abc", "gold length:abc: expected a number of tokens"),
        ("length:²", "gold length:²: expected a number of tokens"),
        ("length:0", "gold length: the maximum must be at least 1"),
        ("regex:(", "gold regex: '\\(' is not a regular expression"),
        ("/no/such/folder", "gold: there is no folder /no/such/folder"),
        ({"length:3": "x"}, "gold: the weight of length:3"),
        ([], "gold: the list is empty"),
        (["length:3", "lenght:3"], "gold: there is no rule 'lenght:3'"),
        (3, "gold: 3 is not a reward"),
    ],
)
def test_messages_name_the_option_the_value_came_from(spec: Any, message: str) -> None:
    with pytest.raises(UsageError, match="^" + message):
        load_reward(spec, option="gold")


def test_a_file_that_fails_names_the_option(tmp_path: Path) -> None:
    file = write(tmp_path / "grade.py", "def grade(responses): ...\nraise ValueError('no key')\n")
    with pytest.raises(UsageError, match=f"^gold={file}:grade: the file cannot be imported"):
        load_reward(f"{file}:grade", option="gold")
    file = write(tmp_path / "other.py", "def grade(responses): ...\n")
    with pytest.raises(UsageError, match=f"^gold={file}:grad: .* Did you mean"):
        load_reward(f"{file}:grad", option="gold")


def test_a_rule_knows_its_option_when_it_meets_the_rows() -> None:
    for name in ("exact", "number"):
        with pytest.raises(UsageError, match=f"^gold {name}: the prompts have no column 'answer'"):
            score_texts(load_reward(name, option="gold"), ["p"], ["r"])
    with pytest.raises(UsageError, match="^gold number: column 'answer' of response 1 holds 'blue'"):
        score_texts(load_reward("number", option="gold"), ["p"], ["r"], {"answer": ["blue"]})
