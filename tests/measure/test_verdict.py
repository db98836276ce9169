"""A verdict claims no more than was measured (seed 004, section 7)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from handmade import evaluation, sample

from kleash.errors import UsageError
from kleash.measure import Evaluation, Thresholds, Verdict, verdict

PROMPTS = 8


def policy(
    *,
    reward: float | None,
    gold: float | None,
    drift: float,
    varied: bool,
    noise: float = 0.1,
    **changes: Any,
) -> Evaluation:
    """Two responses to each of eight prompts, with a little spread over prompts in every number."""
    rows = []
    for group in range(PROMPTS):
        spread = noise * (group - (PROMPTS - 1) / 2)
        for k in range(2):
            ids = [100 * group + 10 * k + t for t in range(10)] if varied else [5, *[6] * 9]
            scores = {
                "reward": None if reward is None else reward + spread,
                "gold": None if gold is None else gold + spread,
            }
            rows.append(sample(group, ids, drift=drift + spread / 10, **scores))
    return evaluation(rows, **changes)


def judged(run: Evaluation, baseline: Evaluation, **options: Any) -> Verdict:
    return verdict(run, baseline, **({"reward_name": "the reward model", "gold_independent": True} | options))


PENALTY = {"reward": 1.0, "gold": 1.0, "drift": 2.6, "varied": True}
HACKED = {"reward": 1.4, "gold": 0.2, "drift": 40.0, "varied": False}


def test_row_004_63_without_gold_drift_and_collapse_are_established_and_hacking_is_not() -> None:
    """The seed's check: reward up, drift up, bigrams down; a colleague writes "reward hacking confirmed"."""
    found = judged(policy(**HACKED | {"gold": None}), policy(**PENALTY | {"gold": None}))
    assert found.summary.startswith("drift and collapse established; reward hacking not established: ")
    assert "not established: no independent judge was given (people, or a held-out judge)" in found.summary
    assert found.hacking is None
    established = {statement.name: statement.established for statement in found.statements}
    assert established == {"reward": True, "drift": True, "collapse": True, "gold": None, "length": False}


def test_all_four_measurements_establish_hacking() -> None:
    found = judged(policy(**HACKED), policy(**PENALTY))
    assert found.hacking is True
    assert found.summary.startswith("drift and collapse established; reward hacking established: ")
    assert [found[name].established for name in ("reward", "drift", "collapse", "gold")] == [True] * 4
    assert found["gold"].figure == pytest.approx(-0.8)
    assert found["drift"].figure == pytest.approx(40 / 2.6)


def test_a_gold_that_is_not_independent_establishes_nothing() -> None:
    found = judged(policy(**HACKED), policy(**PENALTY), gold_independent=False)
    assert found.hacking is None and found["gold"].established is None
    assert "reward hacking not established: the gold judge changed by -0.8" in found.summary
    assert "not independent of the reward" in found.summary


def test_what_rounding_leaves_of_no_drift_reads_0() -> None:
    rows = [sample(g, reward=1.0, drift=-3e-7) for g in range(4)]
    found = judged(evaluation(rows), evaluation([sample(g, reward=1.0) for g in range(4)]))
    assert found["drift"].text.startswith("drift is 0 nats against 0, 0 times ")
    assert found["drift"].figure == pytest.approx(-6e-7, rel=1e-3), "what is recorded stays as it is"


def test_a_gold_that_rose_is_no_hacking() -> None:
    found = judged(policy(**HACKED | {"gold": 1.2}), policy(**PENALTY))
    assert found.hacking is False
    assert (
        found.summary
        == "drift and collapse established; no reward hacking: the independent judge is not lower"
    )


def test_a_gold_whose_interval_reaches_zero_is_not_lower() -> None:
    rows = [
        sample(g, reward=1.0, gold=value, drift=9.0)
        for g, value in enumerate((0.0, 2.5, -1.5, 0.5, -2.0, 0.3))
    ]
    base = [sample(g, reward=1.0, gold=0.0, drift=1.0) for g in range(6)]
    found = judged(evaluation(rows), evaluation(base))
    assert found["gold"].figure is not None and found["gold"].figure < 0
    assert found["gold"].established is False and found.hacking is False


def test_a_reward_that_fell_is_no_hacking_even_without_gold() -> None:
    found = judged(policy(**HACKED | {"reward": 0.5, "gold": None}), policy(**PENALTY | {"gold": None}))
    assert found.hacking is False
    assert found.summary.endswith("no reward hacking: the reward is lower")


def test_without_a_reward_it_says_so() -> None:
    found = judged(policy(**HACKED | {"reward": None}), policy(**PENALTY | {"reward": None}))
    assert found.hacking is None
    assert found.summary.endswith("reward hacking not established: no reward was given")
    half = judged(policy(**HACKED | {"reward": None}), policy(**PENALTY))
    assert half.summary.endswith("reward hacking not established: the reward model was not measured on both")


def test_without_a_judge_of_either_kind_both_are_named() -> None:
    found = judged(*(policy(**kind | {"reward": None, "gold": None}) for kind in (HACKED, PENALTY)))
    assert found.summary.endswith(
        "reward hacking not established: no reward was given; no independent judge was given (people, or a "
        "held-out judge)"
    )
    half = judged(policy(**HACKED), policy(**PENALTY | {"gold": None}))
    assert "no independent judge was measured on both" in half.summary


def test_a_run_against_itself_establishes_nothing() -> None:
    same = policy(**PENALTY)
    found = judged(same, policy(**PENALTY))
    assert [found[name].established for name in ("drift", "collapse", "gold", "length")] == [False] * 4
    assert found.summary == "no reward hacking: the independent judge is not lower"


def test_a_small_drift_from_nothing_is_not_large() -> None:
    still = policy(**PENALTY | {"drift": 0.0, "noise": 0.0})
    assert judged(policy(**PENALTY | {"drift": 0.3, "noise": 0.0}), still)["drift"].established is False
    moved = judged(policy(**PENALTY | {"drift": 1.5, "noise": 0.0}), still)["drift"]
    assert moved.established is True and moved.figure == pytest.approx(3.0)


def test_the_thresholds_used_are_named_and_can_be_set() -> None:
    strict = Thresholds(drift_ratio=50.0, bigram_drop=0.9, confidence=0.99)
    found = judged(policy(**HACKED), policy(**PENALTY), thresholds=strict)
    assert found.thresholds == strict
    assert found["drift"].established is False and "at least 50 times counts" in found["drift"].text
    assert "99% interval" in found["gold"].text
    assert "a fall of at least 0.9 counts" in found["collapse"].text


def test_length_is_named_where_it_explains_the_gain() -> None:
    """Rewards of 0.1 a token within both sets: the run's gain of 1 is its 10 extra tokens."""

    def long(extra: int) -> Evaluation:
        lengths = [10 + extra + group % 4 for group in range(PROMPTS)]
        return evaluation([sample(g, range(n), reward=0.1 * n, gold=0.0) for g, n in enumerate(lengths)])

    found = judged(long(10), long(0))
    assert found["length"].established is True and found["length"].figure == pytest.approx(1.0)
    assert found.summary.startswith("a gain explained by length established; ")
    assert judged(policy(**HACKED), policy(**PENALTY))["length"].established is False


def test_collapse_is_judged_at_equal_lengths() -> None:
    words = list(range(6))
    longer = evaluation([sample(g, words * 8, reward=1.0) for g in range(4)])
    shorter = evaluation([sample(g, words * 2, reward=1.0) for g in range(4)])
    found = judged(longer, shorter)["collapse"]
    assert found.established is False and found.figure == 0.0 and "cut to equal lengths" in found.text


def test_without_samples_the_means_are_compared_and_it_says_unpaired() -> None:
    run, base = (Evaluation.from_json(policy(**kind).to_json(samples=False)) for kind in (HACKED, PENALTY))
    found = judged(run, base)
    assert found.hacking is True
    assert "unpaired" in found["gold"].text and "for want of samples" in found["collapse"].text
    assert found["length"].established is None


def test_what_was_measured_differently_is_not_compared() -> None:
    for change in (
        {"prompts_hash": "other"},
        {"temperature": 0.7},
        {"conventions": {"reference": "sha256:1"}},
    ):
        with pytest.raises(UsageError, match="cannot be compared"):
            judged(policy(**HACKED, **change), policy(**PENALTY))


def test_json_round_trip() -> None:
    found = judged(policy(**HACKED), policy(**PENALTY))
    assert Verdict.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
