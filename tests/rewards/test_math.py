"""`math`: equality as mathematics, judged where a model's text can do no harm."""

from __future__ import annotations

import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kleash.errors import UsageError
from kleash.rewards import Math, load_reward, score_texts
from kleash.verifiers import pool

pytestmark = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs the extra verifiers")


def box(text: str) -> str:
    return f"\\boxed{{{text}}}"


EQUAL = [
    (box(r"\frac12"), "0.5"),
    (box(r"\frac{1}{2}"), "1/2"),
    (box("1,234"), "1234"),
    (box(r"1\,234"), "1234"),
    (box(r"1{,}234.50"), "1234.5"),
    (box("50%"), "0.5"),
    (box(r"50\%"), "50"),
    (box("٤٢"), "42"),
    (box("−3"), "-3"),
    (box("x=5"), "5"),
    (box(r"5\text{ cm}"), "5"),
    (box(r"\$5"), "5"),
    (box(r"90^\circ"), "90"),
    (box(r"\{2,1\}"), r"\{1,2\}"),
    (box("[1,2)"), "[1, 2)"),
    (box(r"(-\infty,3)"), r"(-\infty, 3)"),
    (box("x^2+2x+1"), "(x+1)^2"),
    (box(r"\sqrt{8}"), r"2\sqrt{2}"),
    (box(r"1\frac{1}{2}"), "1.5"),
    (box(r"2 \times 10^3"), "2000"),
    (box("1/0"), "1/0"),
    (box("7" * 10_000), "7" * 10_000),
    ("so 3 + 4 = 7\n#### 7", "7"),
    ("7 eggs are left, so the answer is $\\frac{14}{2}$.", "7"),
    ("It is 3, no, the answer is 7", "Thus 3 + 4 = " + box("7")),
    ("7", 7),
    ("That makes 7.", "3 + 4 = 7\n#### 7"),
]
DIFFERENT = [
    (box("0.4"), "0.5"),
    (box("3"), "-3"),
    (box("1/0"), "5"),
    (box("5"), "1/0"),
    (box("2/0"), "1/0"),
    (box("(2,1)"), "(1,2)"),
    (box("[1,2]"), "[1,2)"),
    (box(r"\{1,2,3\}"), r"\{1,2\}"),
    (box("1.414"), r"\sqrt{2}"),
    (box("8" * 10_000), "7"),
    (box("x"), "y"),
    (box(""), "5"),
    ("", "5"),
    (" \n ", "5"),
    ("I do not know", "5"),
    ("\ud800", "5"),
    (box("4") + " or rather " + box("5") + box("6"), "5"),
]


@pytest.mark.parametrize(("pairs", "score"), [(EQUAL, 1.0), (DIFFERENT, 0.0)])
def test_equality(pairs: list[tuple[str, Any]], score: float) -> None:
    scores = Math()(responses=[r for r, _ in pairs], answer=[a for _, a in pairs])
    found = [(r[:40], str(a)[:40], got) for (r, a), got in zip(pairs, scores, strict=True)]
    assert not [row for row in found if row[2] != score]


BOMBS = {
    "tower": "9^{9^{9^9}}",
    "factorials": "((100!)!)!",
    "parentheses": "(" * 3_000 + "1" + ")" * 3_000,
    "fractions": r"\frac{1}{" * 2_000 + "1" + "}" * 2_000,
    "sum": r"\sum_{i=1}^{10000000000} i^{i}",
}


def test_what_explodes_scores_0_is_counted_and_spares_the_others() -> None:
    responses = [box("7"), *map(box, BOMBS.values()), box(r"\frac{14}{2}")]
    started = time.perf_counter()
    scores = score_texts(Math(seconds=0.5), ["p"] * 7, responses, {"answer": ["7"] * 7})
    assert scores.values.tolist() == [1.0, *[0.0] * 5, 1.0] and scores.missing == 0
    assert scores.hung >= 3, scores  # deep nesting may be refused before it takes long
    assert time.perf_counter() - started < 90


def test_code_in_a_response_is_inert(tmp_path: Path) -> None:
    written = tmp_path / "written"
    code = f"__import__('os').system('touch {written}')"
    responses = [code, box(code), box(rf"\text{{{code}}}"), f"the answer is {code}", f"${code}$"]
    scores = Math()(responses=responses, answer=["5"] * 5)
    assert scores == [0.0] * 5 and not written.exists()


def test_nothing_is_evaluated_in_this_process() -> None:
    assert Math()(responses=[box(r"\frac{2}{4}")], answer=["1/2"]) == [1.0]
    assert "math_verify" not in sys.modules


def test_equal_text_needs_no_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Child", None)  # to start one would fail
    assert Math()(responses=[box(" x+1 "), box(""), "", box("5.")], answer=["x + 1", "1", "2", 5]) == [
        1,
        0,
        0,
        1,
    ]


def test_a_reference_that_cannot_be_read_leaves_no_score_and_says_so() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"reward math: 3 responses have no score.*first is response 2: col"
    ):
        scores = Math()(responses=["5"] * 4, answer=["5", None, " ", "(("])
    assert scores == [1.0, None, None, None]
    with pytest.warns(RuntimeWarning, match="finds no mathematics"):
        assert Math()(responses=[box("8" * 10_000)], answer=["7" * 10_000]) == [None]


def test_by_name_with_a_column_and_as_gold() -> None:
    assert load_reward("math") == Math() and load_reward("math:solution") == Math("solution")
    with pytest.raises(
        UsageError, match="^gold math: the prompts have no column 'solution'.*as in `math:answer`"
    ):
        score_texts(load_reward("math:solution", option="gold"), ["p"], ["r"], {"answer": ["5"]})


def test_it_is_called_once_whatever_the_workers_and_has_its_own_time() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = score_texts(
            Math(), ["p"] * 2, [box("0.5"), box("3")], {"answer": ["1/2"] * 2}, timeout=1e-9, workers=2
        )
    assert scores.values.tolist() == [1.0, 0.0] and scores.hung == 0


def test_in_a_weighted_sum() -> None:
    reward = load_reward({"math": 0.7, "format:answer": 0.3})
    scores = score_texts(reward, ["p"], [box("0.5")], {"answer": ["1/2"]})
    assert scores.values.tolist() == pytest.approx([0.7])
    assert {name: part.tolist() for name, part in scores.parts.items()} == {"math": [1.0], "format": [0.0]}


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pool.PACKAGES, "math", ("no_such_module", "math-verify"))
    with pytest.raises(UsageError, match=r"^gold=math needs the package math-verify"):
        load_reward("math", option="gold")
