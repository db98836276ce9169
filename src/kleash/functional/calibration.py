"""Do stated probabilities come true as often as they say? Scores of probabilities against what happened."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_floats, wide


def _check(probs: Tensor, outcomes: Tensor) -> tuple[Tensor, Tensor]:
    check_floats(1, probs=probs)
    if outcomes.shape != probs.shape:
        raise ValueError(f"outcomes must be {tuple(probs.shape)} like probs, got {tuple(outcomes.shape)}")
    if probs.numel() == 0:
        raise ValueError("probs is empty: there is nothing to score")
    if not ((probs >= 0) & (probs <= 1)).all():
        raise ValueError(f"probs must lie in [0, 1], got {probs.min().item():g} to {probs.max().item():g}")
    if not ((outcomes == 0) | (outcomes == 1)).all():
        raise ValueError("outcomes must be 0 or 1 (or bool)")
    return wide(probs), outcomes.to(wide(probs).dtype)


def expected_calibration_error(probs: Tensor, outcomes: Tensor, bins: int = 15) -> Tensor:
    """Σ_b (n_b/n)·|mean outcome - mean probability| over bins of equal width (https://arxiv.org/abs/1706.04599).

    probs (N,) in [0, 1], outcomes (N,) of 0/1 or bool -> scalar in [0, 1]. Bin b holds (b/bins,
    (b+1)/bins], the first one 0 as well. Depends on `bins`, and overstates the error of small samples;
    `brier_score` does neither.

    >>> expected_calibration_error(torch.tensor([0.9, 0.9, 0.2, 0.2]), torch.tensor([1, 0, 0, 0]), bins=10)
    tensor(0.3000)
    """
    probs, outcomes = _check(probs, outcomes)
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    inner = torch.arange(1, bins, device=probs.device, dtype=probs.dtype) / bins
    gaps = probs.new_zeros(bins).index_add_(0, torch.bucketize(probs, inner), outcomes - probs)
    return gaps.abs().sum() / len(probs)


def brier_score(probs: Tensor, outcomes: Tensor) -> Tensor:
    """Mean of (probability - outcome)²: a proper score, 0 at best, 0.25 for always saying one half.

    probs (N,) in [0, 1], outcomes (N,) of 0/1 or bool -> scalar.

    >>> brier_score(torch.tensor([0.9, 0.4]), torch.tensor([True, False]))
    tensor(0.0850)
    """
    probs, outcomes = _check(probs, outcomes)
    return (probs - outcomes).square().mean()
