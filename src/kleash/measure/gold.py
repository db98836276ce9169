"""Proxy against gold along a training: where gold peaks, and where the two part (seed 004, section 7; Gao et
al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kleash.measure.evaluation import Evaluation, Sample


@dataclass(frozen=True)
class Point:
    """One evaluation along a path: a training step (or the beta of a sweep), drift, proxy and gold with
    gold's error.
    """

    step: float
    drift: float | None
    reward: float
    gold: float
    gold_stderr: float | None = None

    @classmethod
    def of(cls, evaluation: Evaluation, step: float) -> Point | None:
        """From an evaluation; None where it lacks reward or gold."""
        if evaluation.reward is None or evaluation.gold is None:
            return None
        drift = None if evaluation.drift is None else evaluation.drift.mean
        return cls(step, drift, evaluation.reward.mean, evaluation.gold.mean, evaluation.gold.stderr)


def points_from_metrics(metrics: Iterable[Mapping[str, Any]], split: str | None = None) -> list[Point]:
    """The records of metrics.jsonl that hold both reward and gold, in the order of steps; `split` keeps one
    of them.
    """
    points = [
        Point(
            record["step"],
            record.get("kl/exact"),
            record["reward/mean"],
            record["gold/mean"],
            record.get("gold/stderr"),
        )
        for record in metrics
        if record.get("reward/mean") is not None
        and record.get("gold/mean") is not None
        and (split is None or record.get("split") == split)
    ]
    return sorted(points, key=lambda point: point.step)


@dataclass(frozen=True)
class Separation:
    """Where proxy and gold part.

    peak: the point of highest gold. flat: the steps of the first and last point whose gold is within one
    standard error of it (equal to the peak's own step where errors are unknown): how sharply the peak is
    known. fall: gold at the peak − at the end. parted: the first point after the peak where gold is lower by
    more than `errors` standard errors of the difference while reward is no lower than at the peak; None where
    there is none. agreement: share of successive pairs of points at which reward and gold move the same way
    (steps at which neither moves are left out), None without one.
    """

    peak: Point
    flat: tuple[float, float]
    fall: float
    parted: Point | None
    agreement: float | None


def separation(points: Sequence[Point], errors: float = 2.0) -> Separation | None:
    """Where gold peaks along a path and where it parts from the proxy; None for fewer than two points."""
    if len(points) < 2:
        return None
    at = max(range(len(points)), key=lambda i: points[i].gold)
    peak = points[at]
    near = [p.step for p in points if p.gold >= peak.gold - (peak.gold_stderr or 0.0)]
    after = (
        p
        for p in points[at + 1 :]
        if p.reward >= peak.reward and peak.gold - p.gold > errors * _error(peak, p)
    )
    return Separation(
        peak, (near[0], near[-1]), peak.gold - points[-1].gold, next(after, None), _agreement(points)
    )


def _error(one: Point, other: Point) -> float:
    return ((one.gold_stderr or 0.0) ** 2 + (other.gold_stderr or 0.0) ** 2) ** 0.5


def _agreement(points: Sequence[Point]) -> float | None:
    moves = [(b.reward - a.reward) * (b.gold - a.gold) for a, b in zip(points, points[1:], strict=False)]
    moves = [move for move in moves if move != 0.0]
    return sum(move > 0 for move in moves) / len(moves) if moves else None


def pairwise_agreement(samples: Sequence[Sample]) -> float | None:
    """Share of pairs of responses to one prompt that reward and gold put in the same order; ties of either
    left out.

    One half is chance: there the proxy no longer says which response is better. None where no pair is left.
    """
    agree = total = 0
    pools: dict[int, list[tuple[float, float]]] = {}
    for s in samples:
        if s.reward is not None and s.gold is not None:
            pools.setdefault(s.group, []).append((s.reward, s.gold))
    for pool in pools.values():
        for i, (reward, gold) in enumerate(pool):
            for other_reward, other_gold in pool[:i]:
                product = (reward - other_reward) * (gold - other_gold)
                agree, total = agree + (product > 0), total + (product != 0)
    return agree / total if total else None
