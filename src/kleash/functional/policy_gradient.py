"""Policy-gradient objectives over response tokens. Advantages are constants here, and that is checked."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_detached, check_floats, check_mask, wide
from .reduce import Reduction, reduce


def reinforce_loss(
    logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    reduction: Reduction = "sequence-mean",
    length: int | None = None,
) -> Tensor:
    """-(1/N)·Σ_i Σ_t A_it·log π(y_it) (seed 004, Eq. 6): minus its gradient is the REINFORCE estimate.

    logp, mask (N, L); advantages (N, L), or (N,) for one a sequence. `reduction` and `length` as in `reduce`;
    the default sums over tokens and averages over sequences. Returns a scalar ("none": (N, L)).
    Raises ValueError if the advantages require grad: nothing is detached silently.

    >>> reinforce_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.5, 1.0]]))
    tensor(2.5000)
    """
    check_floats(2, logp=logp)
    check_detached(advantages=advantages)
    if advantages.ndim == 1 and len(advantages) == len(logp):
        advantages = advantages.unsqueeze(1).expand_as(logp)
    check_floats(advantages=advantages, logp=logp)
    hidden = ~check_mask(mask, logp)
    # Both factors are masked, not the product: 0·nan would still reach the gradient.
    loss = -wide(advantages).masked_fill(hidden, 0.0) * wide(logp).masked_fill(hidden, 0.0)
    return reduce(loss, mask, reduction, length)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float = 0.2, epsilon_high: float | None = None
) -> Tensor:
    """min(ρ·A, clip(ρ, 1-ε, 1+ε_high)·A), to be maximised (PPO, https://arxiv.org/abs/1707.06347, Eq. 7).

    ratio ρ = π/π_old and advantages of one shape, whatever it is; epsilon_high defaults to epsilon (DAPO
    raises it). The minimum is pessimistic on both sides: d/d log π is ρ·A, except 0 where ρ > 1+ε_high with
    A > 0 or ρ < 1-ε with A < 0. At the boundaries the gradient is alive.

    >>> clipped_surrogate(torch.tensor([1.5, 1.5]), torch.tensor([2.0, -2.0]))
    tensor([ 2.4000, -3.0000])
    """
    check_floats(ratio=ratio, advantages=advantages)
    check_detached(advantages=advantages)
    high = epsilon if epsilon_high is None else epsilon_high
    if not (0 <= epsilon <= 1 and high >= 0):
        raise ValueError(
            f"epsilon must lie in [0, 1] and epsilon_high be at least 0, got {epsilon} and {high}"
        )
    ratio, advantages = wide(ratio), wide(advantages)
    # At a tie `minimum` gives half the gradient to each side and `clamp` passes its half on at the boundary.
    return torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + high) * advantages)
