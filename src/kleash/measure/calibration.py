"""Calibration: does a preference held with 80 % confidence turn out right 80 % of the time? (seed 004,
section 7)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kleash.functional import brier_score, expected_calibration_error


@dataclass(frozen=True)
class Bin:
    """One bar of a reliability diagram: mean confidence and share right of the `count` predictions inside."""

    confidence: float
    right: float
    count: int


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error and Brier score of probabilities against what happened, and the diagram."""

    error: float
    brier: float
    count: int
    bins: list[Bin]


def calibration(probabilities: Tensor, outcomes: Tensor, bins: int = 10) -> Calibration:
    """Of probabilities (N,) in [0, 1] and outcomes (N,) of 0 and 1; empty bins are left out."""
    probabilities, outcomes = probabilities.double(), outcomes.double()
    place = torch.bucketize(probabilities, torch.arange(1, bins, dtype=torch.float64) / bins)
    members = [place == b for b in place.unique().tolist()]
    return Calibration(
        float(expected_calibration_error(probabilities, outcomes, bins)),
        float(brier_score(probabilities, outcomes)),
        len(probabilities),
        [Bin(float(probabilities[m].mean()), float(outcomes[m].mean()), int(m.sum())) for m in members],
    )


def preference_calibration(margins: Tensor, bins: int = 10) -> Calibration:
    """Of a reward model, or a policy's implicit reward, on held-out pairs: margins r(chosen) − r(rejected),
    (N,).

    The predicted winner is the one with the higher score, held with confidence σ(|margin|) ≥ 1/2
    (Bradley–Terry), and is right where the margin is positive. A margin of 0 is not right, as in the
    accuracy.
    """
    margins = margins.double()
    return calibration(torch.sigmoid(margins.abs()), margins > 0, bins)
