"""Proxy and gold along a path, and how far a policy's text lies from the reward model's."""

from __future__ import annotations

import math

import pytest
import torch
from handmade import evaluation, sample

from kleash.functional import optimal_policy
from kleash.measure import (
    Evaluation,
    Point,
    extrapolation,
    pairwise_agreement,
    points_from_metrics,
    separation,
)


def lab() -> list[Point]:
    """The signature of the seed's lab: gold peaks near step 23 and falls while the reward creeps on."""
    rows = [
        (0, 0.0, 0.0, 0.2),
        (10, 8.0, 0.9, 1.6),
        (20, 22.0, 1.4, 2.8),
        (45, 40.0, 1.45, 2.5),
        (70, 56.0, 1.48, 2.0),
    ]
    return [Point(step, drift, reward, gold, 0.1) for step, drift, reward, gold in rows]


def test_rows_004_51_and_55_the_peak_and_where_the_two_part() -> None:
    found = separation(lab())
    assert found is not None
    assert found.peak.step == 20 and found.peak.drift == 22.0
    assert found.fall == pytest.approx(0.8)
    assert found.parted is not None and found.parted.step == 45
    assert found.agreement == 0.5
    assert found.flat == (20, 20)


def test_a_fall_within_the_error_is_not_a_parting() -> None:
    points = [Point(0, 0.0, 0.0, 0.0, 0.2), Point(1, 1.0, 1.0, 1.0, 0.2), Point(2, 2.0, 2.0, 0.8, 0.2)]
    found = separation(points)
    assert found is not None and found.parted is None and found.flat == (1, 2)


def test_a_fall_together_with_the_reward_is_not_a_parting() -> None:
    points = [Point(0, 0.0, 0.0, 0.0, 0.0), Point(1, 1.0, 1.0, 1.0, 0.0), Point(2, 2.0, 0.5, 0.2, 0.0)]
    found = separation(points)
    assert found is not None and found.parted is None and found.agreement == 1.0


def test_row_004_53_the_peak_of_the_beta_dial_with_its_flatness() -> None:
    """The closed-form path of the seed's demo: gold peaks at beta 0.659, and is within 0.0008 of it for
    0.63–0.69.
    """
    ref, reward, gold = (
        torch.tensor(v, dtype=torch.float64) for v in ((0.8, 0.19, 0.01), (0.0, 1.0, 2.0), (0.0, 1.0, -1.0))
    )
    points = []
    for thousandths in range(10000, 99, -1):
        beta = thousandths / 1000
        probs, _ = optimal_policy(ref, reward, beta)
        drift = float((probs * (probs / ref).log()).sum())
        points.append(Point(beta, drift, float(probs @ reward), float(probs @ gold), 0.0008))
    found = separation(points)
    assert found is not None
    assert abs(found.peak.step - 0.659) < 1e-3
    assert found.peak.gold == pytest.approx(0.351305, abs=1e-6) and found.peak.drift == pytest.approx(
        0.4098, abs=1e-3
    )
    high, low = found.flat
    assert low <= 0.63 and high >= 0.69 and high - low < 0.09
    assert found.parted is not None and found.fall > 1


def test_points_come_from_the_records_that_hold_both() -> None:
    records = [
        {"step": 2, "split": "eval", "reward/mean": 1.0, "gold/mean": 0.5, "kl/exact": 3.0},
        {"step": 1, "split": "eval", "reward/mean": 0.0, "gold/mean": 0.1},
        {"step": 1, "split": "train", "reward/mean": 0.0, "gold/mean": 0.1},
        {"step": 3, "split": "train", "loss": 1.0},
        {"step": 4, "split": "eval", "reward/mean": 1.0, "gold/mean": None},
    ]
    assert points_from_metrics(records, split="eval") == [Point(1, None, 0.0, 0.1), Point(2, 3.0, 1.0, 0.5)]
    assert len(points_from_metrics(records)) == 3
    assert separation(points_from_metrics([])) is None


def test_pairwise_agreement_of_proxy_and_gold() -> None:
    scores = [(0, 1.0, 1.0), (0, 2.0, 2.0), (0, 3.0, 0.0), (1, 1.0, 5.0), (1, 1.0, 6.0), (2, 9.0, None)]
    rows = [sample(group, reward=reward, gold=gold) for group, reward, gold in scores]
    assert pairwise_agreement(rows) == pytest.approx(
        1 / 3
    )  # three pairs of prompt 0; the tie and the missing are left out
    assert pairwise_agreement(rows[3:]) is None


def test_row_004_12_text_beyond_the_reward_models_own_is_shown() -> None:
    own = evaluation([sample(g, logp_ref=-1.0 - g / 100) for g in range(100)])
    assert extrapolation(own, own) is not None
    same = extrapolation(own, own)
    assert same is not None and same.outside == pytest.approx(0.02) and same.surprise == same.surprise_text
    far = extrapolation(
        evaluation([sample(0, logp_ref=-6.0), sample(1, logp_ref=-0.1), sample(2, logp_ref=-1.5)]), own
    )
    assert far is not None and far.outside == pytest.approx(2 / 3) and math.isclose(far.surprise, 7.6 / 3)
    assert extrapolation(Evaluation.from_json(own.to_json(samples=False)), own) is None
