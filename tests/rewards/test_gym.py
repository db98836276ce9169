"""`gym`: scores of reasoning-gym's tasks, in child processes."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kleash.data import read_rows
from kleash.errors import UsageError
from kleash.rewards import Gym, load_reward, score_texts
from kleash.rewards.verified import loose_answer

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra verifiers")


def columns(*sources: str) -> dict[str, list[Any]]:
    rows = [row for source in sources for row in read_rows(source, "prompts").rows]
    return {name: [row.columns[name] for row in rows] for name in ("answer", "gym_task", "gym_entry")}


def test_right_and_wrong_answers() -> None:
    rows = columns("gym:letter_counting?size=3")
    right = [f"I count. <answer>{answer}</answer>" for answer in rows["answer"]]
    assert Gym()(responses=right, **rows) == [1.0] * 3
    assert Gym()(responses=["<answer>977</answer>"] * 3, **rows) == [0.0] * 3
    assert Gym()(responses=["", "<answer></answer>", " "], **rows) == [0.0] * 3


def test_strict_wants_the_tags() -> None:
    rows = columns("gym:letter_counting?size=2")
    loose = [f"The answer is {answer}." for answer in rows["answer"]]
    assert Gym()(responses=loose, **rows) == [1.0, 1.0]
    assert Gym(strict=True)(responses=loose, **rows) == [0.0, 0.0]
    assert load_reward("gym:strict") == Gym(strict=True) and load_reward("gym") == Gym()
    assert load_reward("gym:letter_counting") == Gym("letter_counting")


@pytest.mark.parametrize(
    ("response", "expected", "answer"),
    [
        ("I see 3 of them, so 4", "7", "4"),
        ("There are 12 letters.\n\nThe answer is: 4.", "7", "4"),
        ("None", "7", "None"),
        ("Sorted, it is\nThe final answer: cat, dog.", "ant, bee", "cat, dog"),
        ("Here it is:\n1 2\n3 4\n", "5 6\n7 8", "1 2\n3 4"),
        (r"so \boxed{4} is it", "7", "4"),
        ("A sentence.", "Another one.", "A sentence."),
        ("", "7", ""),
        ("so -1,234.5", "2", "-1,234.5"),
    ],
)
def test_the_answer_of_a_response_without_tags(response: str, expected: str, answer: str) -> None:
    assert loose_answer(response, expected) == answer


def test_each_row_is_scored_by_its_own_task_and_parameters() -> None:
    rows = columns(
        "gym:puzzle24?size=1&min_value=6&max_value=6", "gym:puzzle24?size=1", "gym:chain_sum?size=1"
    )
    assert rows["gym_task"] == ["puzzle24?min_value=6&max_value=6", "puzzle24", "chain_sum"]
    answer = "<answer>8 * 3 * 1 * 1</answer>"  # 24, but not of sixes
    assert Gym()(responses=[answer] * 3, **rows) == [0.01, 1.0, 0.0]
    with pytest.raises(UsageError, match=r"reward gym:chain_sum: response 1 is to a prompt of puzzle24"):
        Gym("chain_sum")(responses=["", "", ""], **rows)


def test_tuples_in_an_entry_reach_the_scorer() -> None:
    rows = columns("gym:rearc?size=1")
    assert Gym()(responses=[f"<answer>{rows['answer'][0]}</answer>"], **rows) == [1.0]


EVALUATING = {
    "string_insertion": "__import__('os').system('touch {file}')",
    "spiral_matrix": "__import__('os').system('touch {file}')",
    "binary_matrix": "[__import__('os').system('touch {file}')]",
    "n_queens": "__import__('os').system('touch {file}')",
    "simple_integration": "__import__('os').system('touch {file}')",
    "polynomial_multiplication": "eval(\"__import__('os').system('touch {file}')\")",
    "puzzle24": "exec(\"open('{file}', 'w')\") or 24",
    "countdown": "sin(\"__import__('os').system('touch {file}')\")",
}


def test_code_in_an_answer_is_inert_where_a_scorer_evaluates_answers(tmp_path: Path) -> None:
    written = tmp_path / "written"
    rows = columns(*(f"gym:{task}?size=1" for task in EVALUATING))
    responses = [f"<answer>{code.format(file=written)}</answer>" for code in EVALUATING.values()]
    scores = Gym()(responses=responses, **rows)
    assert all(score is not None and score <= 0.05 for score in scores) and not written.exists()


def test_scorers_that_evaluate_answers_still_read_right_ones() -> None:
    rows = columns(*(f"gym:{task}?size=1" for task in EVALUATING if task != "n_queens"))
    responses = [f"<answer>{answer}</answer>" for answer in rows["answer"]]
    assert Gym()(responses=responses, **rows) == [1.0] * len(responses)
    rows = columns("gym:string_insertion?size=1")
    assert Gym()(responses=[f"<answer>{list(rows['answer'][0])}</answer>"], **rows) == [0.1]  # a list: partly


def test_a_bomb_is_stopped_and_counted() -> None:
    rows = columns("gym:countdown?size=2")
    responses = ["<answer>9**9**9**9</answer>", f"<answer>{rows['answer'][1]}</answer>"]
    scores = score_texts(Gym(seconds=0.5), ["p"] * 2, responses, rows)
    assert scores.values.tolist() == [0.0, 1.0] and (scores.hung, scores.missing) == (1, 0)


def test_rows_of_no_task_have_no_score() -> None:
    rows = columns("gym:letter_counting?size=1")
    mixed = {name: [*values, None] for name, values in rows.items()}
    with pytest.warns(RuntimeWarning, match="first is response 2: the row is of no task"):
        assert Gym()(responses=["<answer>977</answer>"] * 2, **mixed) == [0.0, None]
    broken = rows | {"gym_entry": ["{'answer': "]}
    with pytest.warns(RuntimeWarning, match="first is response 1: SyntaxError"):
        assert Gym()(responses=["5"], **broken) == [None]


def test_prompts_of_another_kind_say_what_to_read() -> None:
    with pytest.raises(UsageError, match=r"^gold gym: the prompts have no column 'gym_task'.*data=gym:"):
        score_texts(load_reward("gym", option="gold"), ["p"], ["r"])


def test_the_package_is_not_imported_here() -> None:
    columns("gym:letter_counting?size=1")
    assert "reasoning_gym" not in sys.modules
