"""Policy-gradient objectives over response tokens. Advantages are constants here, and that is checked."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_detached, check_floats, check_mask, wide
from .ratio import clip_bounds
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
    low, high = clip_bounds(epsilon, epsilon_high)
    ratio, advantages = wide(ratio), wide(advantages)
    # At a tie `minimum` gives half the gradient to each side and `clamp` passes its half on at the boundary.
    return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def cispo_objective(
    logp: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    epsilon: float | None = None,
    epsilon_high: float = 0.4,
) -> Tensor:
    """stop-gradient(clip(ρ, 1-ε, 1+ε_high))·A·log π, to be maximised (CISPO, MiniMax-M1).

    https://arxiv.org/abs/2506.13585. logp, ratio and advantages of one shape, elementwise. The clip
    bounds the *weight* of a token and never takes its gradient away: d/d log π is clip(ρ)·A everywhere.
    epsilon=None is no lower bound, as published. The ratio is detached here, that is the method; the value
    itself means nothing, its gradient does.

    >>> cispo_objective(*torch.tensor([[-1.0, -1.0], [1.5, 0.7], [2.0, -1.0]]), epsilon=0.2)
    tensor([-2.8000,  0.8000])
    """
    check_floats(logp=logp, ratio=ratio, advantages=advantages)
    check_detached(advantages=advantages)
    low, high = clip_bounds(1.0 if epsilon is None else epsilon, epsilon_high)
    return wide(ratio).detach().clamp(low, high) * wide(advantages) * wide(logp)


def sapo_objective(
    ratio: Tensor,
    advantages: Tensor,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """(4/τ)·σ(τ·(ρ - 1))·A, to be maximised: a soft gate in place of the clip (SAPO).

    https://arxiv.org/abs/2511.20347. τ is temperature_positive where A > 0, else temperature_negative (a
    higher one closes sooner). ratio and advantages of one shape, elementwise. d/d log π is
    4·σ(x)·(1 - σ(x))·ρ·A with x = τ·(ρ - 1): that of REINFORCE at ρ = 1, and fading smoothly on both sides.
    The value has an offset: (2/τ)·A at ρ = 1.

    >>> sapo_objective(torch.tensor([1.3, 1.3]), torch.tensor([2.0, -1.0]))
    tensor([ 4.5955, -2.2023])
    """
    check_floats(ratio=ratio, advantages=advantages)
    check_detached(advantages=advantages)
    if not (temperature_positive > 0 and temperature_negative > 0):
        raise ValueError(
            "temperature_positive and temperature_negative must be above 0, "
            f"got {temperature_positive} and {temperature_negative}"
        )
    ratio, advantages = wide(ratio), wide(advantages)
    temperature = torch.where(advantages > 0, temperature_positive, temperature_negative).to(ratio.dtype)
    return 4 / temperature * (temperature * (ratio - 1)).sigmoid() * advantages
