"""Paired differences: the same prompts, prompt by prompt."""

from __future__ import annotations

import math

import pytest
from handmade import evaluation, sample

from kleash.errors import UsageError
from kleash.measure import Evaluation, compare, difference

EASY = [0.0, 10.0, 20.0, 30.0]


def runs() -> tuple[Evaluation, Evaluation]:
    """A gain of about 1 on prompts whose own level varies by 30."""
    base = evaluation([sample(g, reward=level) for g, level in enumerate(EASY)])
    gains = [0.9, 1.1, 1.2, 0.8]
    return evaluation([sample(g, reward=EASY[g] + gain) for g, gain in enumerate(gains)]), base


def test_pairing_removes_what_the_prompts_differ_in() -> None:
    run, base = runs()
    paired = difference(run, base, "reward")
    unpaired = difference(Evaluation.from_json(run.to_json(samples=False)), base, "reward")
    assert paired is not None and unpaired is not None
    assert paired.mean == pytest.approx(1.0) and unpaired.mean == pytest.approx(1.0)
    assert paired.paired and paired.higher and not paired.lower
    assert not unpaired.paired and not unpaired.higher
    half = 3.18245 * math.sqrt(sum(d * d for d in (0.1, 0.1, 0.2, 0.2)) / 3 / 4)
    assert paired.interval.high == pytest.approx(1.0 + half, rel=2e-3)


def test_prompts_are_paired_by_number_and_missing_ones_left_out() -> None:
    run = evaluation([sample(2, reward=22.0), sample(0, reward=1.0), sample(1, reward=None)])
    base = evaluation([sample(g, reward=level) for g, level in enumerate(EASY[:3])])
    found = difference(run, base, "reward")
    assert found is not None and found.mean == 1.5 and found.interval.units == 2


def test_only_what_both_measured_is_compared() -> None:
    run, base = runs()
    assert set(compare(run, base)) == {"reward", "drift", "distinct_bigrams", "length"}
    assert difference(run, base, "gold") is None


def test_different_prompts_references_or_sampling_are_refused() -> None:
    run, base = runs()
    for name, value in (
        ("prompts_hash", "x"),
        ("fixed_length", True),
        ("max_new_tokens", 9),
        ("samples_per_prompt", 3),
    ):
        other = Evaluation.from_json(base.to_json() | {name: value})
        with pytest.raises(UsageError, match="cannot be compared: their"):
            compare(run, other)
    one, other = (
        Evaluation.from_json(e.to_json() | {"conventions": {"reference": r}})
        for e, r in ((run, "a"), (base, "b"))
    )
    with pytest.raises(UsageError, match=r"their reference differ \(a against b\)"):
        compare(one, other)
