"""Rules: right, and always a float."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.errors import UsageError
from kleash.rewards import ExactMatch, Length, Number, Regex, Tags, score_texts
from kleash.rewards.rules import last_number


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("the answer is -3", "-3", 1.0),
        ("3", "-3", 0.0),
        ("the answer is -3", "3", 0.0),
        ("so it is −3.", -3, 1.0),
        ("it costs $1,234.50", "1234.5", 1.0),
        ("three quarters, 3/4", "0.75", 1.0),
        ("about 0.3333333", "1/3", 1.0),
        ("10 - 3 = 7", "7", 1.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
        ("#### 42", "… so 40 + 2\n#### 42", 1.0),
    ],
)
def test_report_75_numbers_keep_their_sign_and_always_score_a_float(
    response: str, answer: Any, expected: float
) -> None:
    scores = Number()(responses=[response], answer=[answer])
    assert scores == [expected] and isinstance(scores[0], float)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-3", -3.0),
        ("5-3", 3.0),
        ("10-20", 20.0),
        ("(-3)", -3.0),
        ("\\boxed{-3}", -3.0),
        ("x=-.5", -0.5),
        ("-$5", -5.0),
        ("3.", 3.0),
        ("3e2", 300.0),
        ("2024-01-05", 5.0),
        ("1/0", None),
        ("none here", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


@settings(max_examples=50, deadline=None)
@given(st.integers(-(10**9), 10**9), st.text(max_size=20))
def test_any_integer_is_found_at_the_end_of_any_text(value: int, before: str) -> None:
    assert last_number(f"{before} answer: {value}") == value
    assert last_number(f"{before} answer: {value:,}") == value


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_no_text_breaks_a_rule(text: str) -> None:
    for rule in (ExactMatch(), Number(), Regex(r"\d"), Tags()):
        columns = {"answer": ["1"]} if isinstance(rule, (ExactMatch, Number)) else {}
        scores = rule(responses=[text], **columns)
        assert len(scores) == 1 and isinstance(scores[0], float) and scores[0] in (0.0, 1.0)


def test_number_tolerance_is_the_wider_of_absolute_and_relative() -> None:
    rule = Number(tolerance=0.01)
    assert rule(responses=["0.005", "1005", "1020"], answer=["0", "1000", "1000"]) == [1.0, 1.0, 0.0]


def test_an_answer_without_a_number_is_the_data_fault_it_is() -> None:
    with pytest.raises(UsageError, match="column 'answer' of response 2 holds 'blue'"):
        Number()(responses=["1", "2"], answer=["1", "blue"])


def test_a_rule_without_its_column_says_so() -> None:
    with pytest.raises(UsageError, match="no column 'answer' .* `exact:answer`"):
        score_texts(ExactMatch(), ["p"], ["r"])


def test_exact_match() -> None:
    assert ExactMatch()(responses=["  New  York\n", "Boston"], answer=["new york", "Bos ton"]) == [1.0, 0.0]
    assert ExactMatch(strict=True)(responses=["a", "A"], answer=["a", "a"]) == [1.0, 0.0]


def test_regex() -> None:
    assert Regex("yes.no")(responses=["oh yes\nno", "yes"]) == [1.0, 0.0]
    assert Regex("yes", whole=True)(responses=["yes", "yes!"]) == [1.0, 0.0]


def test_length_falls_from_the_maximum_to_twice_it() -> None:
    ids = [[0] * n for n in (0, 4, 6, 8, 20)]
    assert Length(4)(responses=[""] * 5, response_ids=ids) == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert Length(2, unit="words")(responses=["a b", "a b c"], response_ids=[[], []]) == [1.0, 0.5]
    with pytest.raises(UsageError, match="at least 1 token, not 0"):
        Length(0)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\n</think>\n<answer></answer>\n", 1.0),
        ("<think>a</think>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("so <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_in_order_each_once(response: str, expected: float) -> None:
    assert Tags()(responses=[response]) == [expected]
