"""Ratios of probabilities: the policy against the one that sampled, and how many of them a clip stops."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ._checks import check_choice, check_detached, check_floats, check_mask, wide

RATIO_LIMIT = 20.0
"""log-ratio above which a ratio is constant: e^20 ≈ 4.9e8 times any advantage still has a finite square."""


def importance_ratio(
    logp: Tensor, logp_old: Tensor, mask: Tensor | None = None, level: Literal["token", "sequence"] = "token"
) -> Tensor:
    """ρ = π/π_old, by token or one a sequence, for the surrogates of PPO, GRPO and GSPO.

      token     exp(logp_t - logp_old_t)                               d ρ_t/d logp_t = ρ_t
      sequence  exp((1/m)·Σ_t (logp_t - logp_old_t)), m real tokens  d ρ/d logp_t = ρ/m

    "sequence" is GSPO's (https://arxiv.org/abs/2507.18071), the geometric mean of the token ratios: it does
    not grow with length. Every token of the row holds it, so that "sequence-token-mean" over tokens gives
    ρ·A its whole gradient; advantages are then one a sequence. logp, logp_old, mask (N, L) -> (N, L);
    masked slots, and rows without tokens, are 1 and carry no gradient. The log-ratio is clamped from above
    at RATIO_LIMIT, beyond which the ratio is constant and without gradient. Raises ValueError if logp_old
    requires grad.

    >>> importance_ratio(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.3]]), level="sequence")
    tensor([[1.4918, 1.4918]])
    """
    check_choice("level", level, ("token", "sequence"))
    check_floats(2, logp=logp, logp_old=logp_old)
    check_detached(logp_old=logp_old)
    gap, mask = _gaps(logp, logp_old, mask)
    if level == "sequence":
        gap = _over_row(gap.sum(1) / mask.sum(1).clamp(min=1), mask)
    return gap.clamp(max=RATIO_LIMIT).exp()


@torch.no_grad()
def truncated_importance_weight(
    logp_trainer: Tensor,
    logp_sampler: Tensor,
    cap: float = 2.0,
    mask: Tensor | None = None,
    level: Literal["token", "sequence", "sequence-mean"] = "token",
) -> Tensor:
    """min(π_trainer/π_sampler, cap): what a sample counts where another program drew it. Carries no gradient.

    Both are the *same* weights, before the update, as two programs compute them; truncation
    (https://doi.org/10.1198/106186008X320456) trades a bias for bounded variance. By `level`,

      token          exp(d_t), d = logp_trainer - logp_sampler
      sequence       exp(Σ_t d_t): the exact weight of a response; it grows and shrinks with length
      sequence-mean  exp((1/m)·Σ_t d_t), m real tokens: does not, and is no longer that weight

    logp_trainer, logp_sampler, mask (N, L) -> (N, L), masked slots 1. cap=inf gives the raw weights (up to
    e^RATIO_LIMIT); the share above the cap is worth logging beside the mean of both. The weights are right
    only if both programs give probability to the same tokens: top-p or top-k on one side biases them. Raises
    ValueError if cap is not above 0.

    >>> logp_trainer, logp_sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]])
    >>> truncated_importance_weight(logp_trainer, logp_sampler)
    tensor([[1.6487, 2.0000]])
    """
    check_choice("level", level, ("token", "sequence", "sequence-mean"))
    check_floats(2, logp_trainer=logp_trainer, logp_sampler=logp_sampler)
    if not cap > 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    gap, mask = _gaps(logp_trainer, logp_sampler, mask)
    if level != "token":
        tokens = mask.sum(1).clamp(min=1) if level == "sequence-mean" else 1
        gap = _over_row(gap.sum(1) / tokens, mask)
    return gap.clamp(max=RATIO_LIMIT).exp().clamp(max=cap).masked_fill(~mask, 1.0)


@torch.no_grad()
def clip_shares(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> dict[str, int]:
    """How many tokens stand outside the clip of `clipped_surrogate`, and on which branch.

      above_dead   ρ > 1+ε_high, A > 0: no gradient      above_alive  ρ > 1+ε_high, A < 0
      below_dead   ρ < 1-ε,      A < 0: no gradient      below_alive  ρ < 1-ε,      A > 0
      tokens       all real tokens

    Counts, not shares: add them up over micro-batches and processes and divide once. ratio, advantages and
    mask of one shape. A token with A = 0 has no gradient to lose and counts in `tokens` alone.

    >>> clip_shares(torch.tensor([1.5, 1.5, 0.5, 1.0]), torch.tensor([2.0, -2.0, -1.0, 1.0]))
    {'above_dead': 1, 'below_dead': 1, 'above_alive': 1, 'below_alive': 0, 'tokens': 4}
    """
    check_floats(ratio=ratio, advantages=advantages)
    low, high = clip_bounds(epsilon, epsilon_high)
    mask = check_mask(mask, ratio)
    above, below = mask & (wide(ratio) > high), mask & (wide(ratio) < low)
    found = {
        "above_dead": above & (advantages > 0),
        "below_dead": below & (advantages < 0),
        "above_alive": above & (advantages < 0),
        "below_alive": below & (advantages > 0),
        "tokens": mask,
    }
    counts = torch.stack([where.sum() for where in found.values()]).tolist()  # one transfer, not five
    return dict(zip(found, counts, strict=True))


def clip_bounds(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    """1-ε and 1+ε_high; epsilon_high defaults to epsilon."""
    high = epsilon if epsilon_high is None else epsilon_high
    if not (0 <= epsilon <= 1 and high >= 0):
        raise ValueError(
            f"epsilon must lie in [0, 1] and epsilon_high be at least 0, got {epsilon} and {high}"
        )
    return 1 - epsilon, 1 + high


def _gaps(logp: Tensor, logp_other: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """logp - logp_other with masked slots 0, and the mask."""
    mask = check_mask(mask, logp)
    return (wide(logp) - wide(logp_other)).masked_fill(~mask, 0.0), mask


def _over_row(rows: Tensor, mask: Tensor) -> Tensor:
    """(N,) -> (N, L): each row's value at its real tokens, 0 elsewhere."""
    return rows.unsqueeze(1).expand(mask.shape).masked_fill(~mask, 0.0)
