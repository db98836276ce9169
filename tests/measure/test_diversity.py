"""Variety: the share of distinct bigrams, by hand and at equal lengths."""

from __future__ import annotations

import pytest
import torch
from handmade import evaluation, sample

from kleash.measure import distinct_share, distinct_shares_matched
from kleash.measure.diversity import distinct_shares


def test_by_hand() -> None:
    assert distinct_share([["a", "b", "a", "b"]]) == pytest.approx(2 / 3)  # ab, ba, ab
    assert distinct_share([["a", "b"], ["a", "b"]]) == 0.5  # pooled over the samples
    assert distinct_share([["a", "b"], ["b", "a"]]) == 1.0  # no bigram crosses two samples
    assert distinct_share([[1, 1, 1, 1]], n=1) == 0.25
    assert distinct_share([["a"], []]) is None


def test_row_004_61_good_as_as_as_has_hardly_a_distinct_bigram() -> None:
    assert distinct_share([["good", *["as"] * 23]] * 4) == pytest.approx(2 / 92)


def test_each_prompt_is_pooled_alone() -> None:
    rows = [[1, 2, 3], [1, 2, 3], [4, 5, 6], [7, 8, 9], [5], [5]]
    shares = distinct_shares(rows, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert shares[:2].tolist() == [0.5, 1.0] and shares[2].isnan()


def test_section_e_13_equal_lengths_or_length_passes_for_variety() -> None:
    """A longer text from the same cycle of words has a lower share; cut to equal lengths the difference is
    gone.
    """
    short = evaluation([sample(0, list(range(6)) * 2)])
    long = evaluation([sample(0, list(range(6)) * 8)])
    assert long.by_prompt("distinct_bigrams")[0] < short.by_prompt("distinct_bigrams")[0]
    matched = distinct_shares_matched(long, short)
    assert matched == {0: (pytest.approx(6 / 11), pytest.approx(6 / 11))}
