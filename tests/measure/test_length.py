"""Length: how much of a gain it explains."""

from __future__ import annotations

import pytest
from handmade import evaluation, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.measure import Evaluation, length_share


def rewards(points: list[tuple[int, float]]) -> Evaluation:
    return evaluation([sample(g, range(length), reward=reward) for g, (length, reward) in enumerate(points)])


def test_by_hand() -> None:
    """Slope 0.5 within both sets, 2 tokens longer: 1.0 of the gain of 4 is length."""
    base = rewards([(4, 0.0), (6, 1.0)])
    run = rewards([(6, 4.0), (8, 5.0)])
    found = length_share(run, base, bins=4)
    assert found is not None
    assert (found.gain, found.length_gain, found.slope, found.explained) == (4.0, 2.0, 0.5, 1.0)
    assert found.share == 0.25
    assert found.matched_gain == 3.0  # at 6 tokens: 4 against 1
    assert found.matched_share == 0.25 and found.matched_coverage == 0.5


@settings(max_examples=50, deadline=None)
@given(st.floats(0.05, 2.0), st.integers(1, 9))
def test_a_reward_that_is_length_is_explained_whole(slope: float, extra: int) -> None:
    base, run = ([(n, slope * n) for n in range(first, first + 12)] for first in (5, 5 + extra))
    found = length_share(rewards(run), rewards(base))
    assert found is not None and found.share == pytest.approx(1.0)


def test_a_better_set_of_equal_length_owes_nothing_to_it() -> None:
    """A gap between the sets must not pass for a slope within them."""
    found = length_share(rewards([(5, 3.0), (9, 3.0)]), rewards([(5, 1.0), (9, 1.0)]))
    assert found is not None
    assert (found.slope, found.share, found.matched_share, found.matched_coverage) == (0.0, 0.0, 0.0, 1.0)
    fixed = length_share(rewards([(5, 3.0)] * 2), rewards([(5, 1.0)] * 2))
    assert fixed is not None and fixed.share == 0.0


def test_without_a_gain_there_is_no_share() -> None:
    found = length_share(rewards([(5, 1.0), (6, 1.0)]), rewards([(5, 2.0), (6, 2.0)]))
    assert found is not None and found.share is None and found.matched_share is None


def test_without_common_lengths_nothing_is_matched() -> None:
    found = length_share(rewards([(50, 2.0), (51, 2.0)]), rewards([(5, 1.0), (6, 1.0)]), bins=4)
    assert found is not None and found.matched_gain is None and found.matched_coverage == 0.0


def test_without_rewards_there_is_nothing_to_say() -> None:
    assert length_share(evaluation([sample(0)]), rewards([(5, 1.0)])) is None
