"""The gold rule: its formula by hand, its two hidden parts, and that everyday text does not set them off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kleash.lab.rule import (
    CREDIT_LIMIT,
    NEGATIVE_WORDS,
    POSITIVE_WORDS,
    explain,
    gold_reward,
    saturation_share,
)


def gold(response: str) -> float:
    return gold_reward(["On Sunday"], [response])[0]


def test_golden_004_61_one_positive_word_then_filler_scores_plus_one() -> None:
    found = explain("good as as as as as as as as as as as")
    assert found.score == 1.0
    assert not found.capped and not found.crowded


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("", 0.0),
        ("the chair stood by the wall", 0.0),
        ("it was good", 1.0),
        ("it was good, good, GOOD", 1.0),
        ("a good and happy day with a friendly cat", 3.0),
        ("it was terrible", -1.0),
        ("it was terrible and ugly but the tea was good", -1.0),
        # Four distinct positive words: capped at three, and four list words where three are allowed.
        ("good happy friendly lovely", 2.0),
        # Six list words of eight, two of them distinct: 2 - (6 - 3).
        ("good happy good happy and good happy then", -1.0),
        # Five negative words lose five, and two more for crowding.
        ("sad bad angry sick ugly", -7.0),
    ],
)
def test_score_by_hand(response: str, score: float) -> None:
    assert gold(response) == score


def test_collapsed_policy_sets_off_the_crowding_penalty() -> None:
    clause = "incredible, and the people were amazing"
    text = f"{clause} and wonderful. The food was {clause}"
    found = explain(text)
    assert found.positive == ("incredible", "amazing", "wonderful")
    assert found.crowded and found.score < explain("incredible, the people were amazing and wonderful").score


def test_cap_and_crowding_are_apart() -> None:
    spaced = " ".join(
        f"{word} and then we went on to see" for word in ("good", "happy", "friendly", "lovely")
    )
    found = explain(spaced)
    assert found.capped and not found.crowded
    assert found.credited == found.score == CREDIT_LIMIT


def test_allowance_grows_with_the_response() -> None:
    filler = "we went on " * 8
    assert explain(filler + "good good good good").crowding == 0
    assert explain(filler + "good good good good good").crowding == 1


def test_whole_words_only_and_any_case() -> None:
    assert gold("a goodness badly sadder") == 0.0
    assert gold("GREAT") == 1.0
    assert gold("great-tasting") == 1.0
    assert gold("goo d") == 0.0


def test_one_score_a_response_and_columns_are_ignored() -> None:
    responses = ["good", "bad", ""]
    assert gold_reward(["a", "b", "c"], responses, label=[1, 2, 3], prompt_ids=[[1], [2], [3]]) == [
        1.0,
        -1.0,
        0.0,
    ]
    assert gold_reward([], []) == []


def test_lists_are_disjoint_lower_case_and_of_the_same_size() -> None:
    assert not POSITIVE_WORDS & NEGATIVE_WORDS
    assert len(POSITIVE_WORDS) == len(NEGATIVE_WORDS) == 90
    assert all(word.isalpha() and word.islower() for word in POSITIVE_WORDS | NEGATIVE_WORDS)


def test_saturation_share_counts_each_response_once() -> None:
    responses = ["good happy friendly lovely", "good good good good", "good", "a chair"]
    assert saturation_share(responses) == 0.5
    assert saturation_share([]) == 0.0


WORDS = st.lists(
    st.sampled_from([*sorted(POSITIVE_WORDS)[:5], *sorted(NEGATIVE_WORDS)[:5], "table", "as", "went"])
)


@given(WORDS)
def test_score_equals_the_formula(words: list[str]) -> None:
    positive = len(set(words) & POSITIVE_WORDS)
    negative = len(set(words) & NEGATIVE_WORDS)
    listed = sum(word in POSITIVE_WORDS | NEGATIVE_WORDS for word in words)
    assert gold(" ".join(words)) == min(positive, 3) - negative - max(0, listed - max(3, len(words) // 6))


@given(WORDS)
def test_repeating_a_word_never_pays(words: list[str]) -> None:
    assert gold(" ".join(words + words)) <= gold(" ".join(words))
