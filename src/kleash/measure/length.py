"""How much of a reward gain is length (seed 004, section 7; Singhal et al. 2023,
https://arxiv.org/abs/2310.03716).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kleash.measure.evaluation import Evaluation

Point = tuple[float, float]  # (length, reward) of one response


@dataclass(frozen=True)
class LengthShare:
    """A reward gain taken apart.

    gain: mean reward of the run − of the baseline. length_gain: mean length of the run − of the baseline,
    tokens. slope: reward a token within the two sets. explained = slope·length_gain; share = explained/gain.
    matched_gain: the gain among responses of like length; matched_share = 1 − matched_gain/gain;
    matched_coverage: share of the run's responses that had a like-length counterpart. None where it is
    undefined: no gain, or no common lengths.
    """

    gain: float
    length_gain: float
    slope: float
    explained: float
    share: float | None
    matched_gain: float | None
    matched_share: float | None
    matched_coverage: float


def length_share(run: Evaluation, baseline: Evaluation, bins: int = 10) -> LengthShare | None:
    """Share of the reward gain that length explains, by regression and by matching; None without rewards and
    samples.

    Regression: the slope is that of reward on length *within* each set, pooled, so a difference between the
    two sets cannot pass for an effect of length. Matching: responses fall into `bins` bins of equally many
    responses by length; in each bin that holds both, run − baseline, weighted by the run's responses there.
    Both shares may be below 0 (length speaks against the gain) or above 1.
    """
    first, second = _points(run), _points(baseline)
    if not first or not second:
        return None
    gain = _mean([r for _, r in first]) - _mean([r for _, r in second])
    length_gain = _mean([length for length, _ in first]) - _mean([length for length, _ in second])
    slope = _slope_within([first, second])
    matched, coverage = _matched_gain(first, second, bins)
    return LengthShare(
        gain=gain,
        length_gain=length_gain,
        slope=slope,
        explained=slope * length_gain,
        share=slope * length_gain / gain if gain > 0 else None,
        matched_gain=matched,
        matched_share=1 - matched / gain if gain > 0 and matched is not None else None,
        matched_coverage=coverage,
    )


def _points(evaluation: Evaluation) -> list[Point]:
    return [(float(len(s.ids)), s.reward) for s in evaluation.samples if s.reward is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _slope_within(sets: Sequence[list[Point]]) -> float:
    """Least-squares slope with an intercept for each set; 0 where all lengths of a set are equal."""
    above = below = 0.0
    for points in sets:
        length, reward = _mean([p[0] for p in points]), _mean([p[1] for p in points])
        above += sum((x - length) * (y - reward) for x, y in points)
        below += sum((x - length) ** 2 for x, _ in points)
    return above / below if below > 0 else 0.0


def _matched_gain(run: list[Point], baseline: list[Point], bins: int) -> tuple[float | None, float]:
    """Gain at like length, and the share of the run's responses it rests on."""
    lengths = sorted(length for length, _ in run + baseline)
    edges = sorted({lengths[len(lengths) * k // bins] for k in range(1, bins)})
    gains, weights = [], []
    for k in range(len(edges) + 1):
        inside = [
            [r for length, r in points if sum(length >= e for e in edges) == k] for points in (run, baseline)
        ]
        if inside[0] and inside[1]:
            gains.append(_mean(inside[0]) - _mean(inside[1]))
            weights.append(len(inside[0]))
    total = sum(weights)
    matched = sum(g * w for g, w in zip(gains, weights, strict=True)) / total if total else None
    return matched, total / len(run)
