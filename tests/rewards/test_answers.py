"""Finding an answer in a response, and comparing it as text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.errors import UsageError
from kleash.rewards import Boxed, load_reward, score_texts
from kleash.rewards.answers import boxed, marked, normal, tagged


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{4}, then \boxed{5}.", "5"),
        (r"so \boxed{\frac{1}{2}} and not \boxed{3", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed {a\}b\{}", r"a\}b\{"),
        (r"}} \boxed{1} {", "1"),
        (r"\boxed{}", ""),
        (r"\\boxed{4}", "4"),
        (r"\fbox{4}", None),
        (r"\boxed 5", None),
        (r"\boxed{5", None),
        ("", None),
    ],
)
def test_the_last_balanced_box(text: str, content: str | None) -> None:
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer> 5\n</answer>", "5"),
        ("<answer>4</answer> no: <answer>5</answer>!", "5"),
        ("<answer>4</answer> and <answer>5", "4"),
        ("<answer>4</answer> stray </answer>", "4"),
        ("<answer></answer>", ""),
        ("</answer><answer>", None),
        ("5", None),
    ],
)
def test_the_last_pair_of_tags(text: str, content: str | None) -> None:
    assert tagged(text) == content


def test_a_marked_answer_is_in_a_box_or_after_the_hashes() -> None:
    assert marked("40 + 2\n#### 42") == "42"
    assert marked("#### 41\n\\boxed{42}") == "42"
    assert marked("42") is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("$5$", " 5. ", True),
        (r"\text{Yes}", "yes", True),
        (r"\left( 1,\, 2 \right)", "(1,2)", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"1{,}234\,567", "1234567", True),
        ("٤٢", "42", True),
        ("４２", "42", True),
        ("−3", "-3", True),
        ("New  York", "new york", True),
        ("2 3", "23", False),
        ("1,234", "1234", False),
        ("1/2", "0.5", False),
        ("-3", "3", False),
        ("x²", "x2", False),
        (r"\leftarrow", "arrow", False),
    ],
)
def test_answers_equal_as_text(one: str, other: str, same: bool) -> None:
    assert (normal(one) == normal(other)) is same


@pytest.mark.parametrize(
    "piece", [r"\boxed{", "{", "}", r"\boxed{1}", "\\", " ", r"\text{", "1{,}", "<answer>"]
)
def test_long_text_takes_linear_time(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    started = time.process_time()
    boxed(text), tagged(text), normal(text)
    assert time.process_time() - started < 5


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="\\boxed{}<answer>/ 1٤²\ud800", max_size=40))
def test_no_text_breaks_the_search(text: str) -> None:
    for found in (boxed(text), tagged(text)):
        assert found is None or found in text
    assert normal(normal(text)) == normal(text)


def test_boxed_rule() -> None:
    responses = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", "1/2", r"\boxed{ \dfrac{1}{2} }", ""]
    assert Boxed()(responses=responses, answer=[r"\frac{1}{2}"] * 5) == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert load_reward("boxed:solution") == Boxed("solution")
    assert Boxed()(responses=[r"\boxed{7}"], answer=[r"Thus 3 + 4 = \boxed{7}."]) == [1.0]
    assert Boxed()(responses=[r"\boxed{7}"], answer=[7]) == [1.0]


def test_boxed_without_its_column_says_so() -> None:
    with pytest.raises(UsageError, match="^reward boxed: the prompts have no column 'answer'"):
        score_texts(Boxed(), ["p"], ["r"])
