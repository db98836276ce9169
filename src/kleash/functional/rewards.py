"""Rewards of single tokens, and what is still to come after each. Time is zero-based: r_0 comes first."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_floats, check_mask, wide


@torch.no_grad()
def token_rewards(
    score: Tensor, logp: Tensor, logp_ref: Tensor, beta: float, mask: Tensor | None = None
) -> Tensor:
    """r_t = -β·(log π(y_t) - log π_ref(y_t)) + [t = last]·score (seed 004, Eq. 5). Carries no gradient.

    score (N,), logp, logp_ref, mask (N, L) -> (N, L), masked slots 0. The score lands on each row's own
    last real token; a row without tokens has nowhere to put it and stays 0. Without the last token's score
    a row sums to -β·log-ratio. Raises ValueError on a score that is not finite: leave missing scores out
    first.

    >>> logp, logp_ref = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.5, -2.0, -2.5]])
    >>> token_rewards(torch.tensor([2.0]), logp, logp_ref, beta=0.1)
    tensor([[-0.0500,  0.0000,  1.8000]])
    """
    check_floats(2, logp=logp, logp_ref=logp_ref)
    check_floats(1, score=score)
    if len(score) != len(logp):
        raise ValueError(f"score must be ({len(logp)},), one a row of logp, got {tuple(score.shape)}")
    if not score.isfinite().all():
        row = int((~score.isfinite()).nonzero()[0])
        raise ValueError(
            f"score must be finite, got {score[row].item()} at row {row}; leave missing scores out first"
        )
    mask = check_mask(mask, logp)
    penalty = (beta * (wide(logp_ref) - wide(logp))).masked_fill(~mask, 0.0)
    return penalty + _last_real(mask) * wide(score).unsqueeze(1)


def _last_real(mask: Tensor) -> Tensor:
    """True at the last True of each row: no other follows it."""
    following = mask.flip(1).cumsum(1).flip(1)
    return mask & (following == 1)


@torch.no_grad()
def returns_to_go(rewards: Tensor, mask: Tensor | None = None, gamma: float = 1.0) -> Tensor:
    """G_t = Σ_{k≥t} γ^(k-t)·r_k (seed 000, gotcha 1). Carries no gradient.

    rewards, mask (N, L) -> (N, L). Masked slots do not exist: they give 0, add nothing, and cost no discount
    (padding on either side, or another speaker's tokens in between).

    >>> returns_to_go(torch.tensor([[-0.05, 0.0, 1.8]]), gamma=0.9)
    tensor([[1.4080, 1.6200, 1.8000]])
    """
    check_floats(2, rewards=rewards)
    mask = check_mask(mask, rewards)
    rewards = wide(rewards)
    out = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, t], rewards[:, t] + gamma * following, following)
        out[:, t] = following
    return out.masked_fill(~mask, 0.0)


def overlong_penalty(lengths: Tensor, maximum: int, buffer: int) -> Tensor:
    """0 up to maximum - buffer, falling linearly to -1 at maximum, -1 beyond: to be added to the score.

    DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, Eq. 13). lengths (any shape) in
    tokens, whole numbers or floats; the result float32 or better. Raises ValueError unless
    1 <= buffer <= maximum.

    >>> overlong_penalty(torch.tensor([10, 16, 18, 20, 21]), maximum=20, buffer=4)
    tensor([ 0.0000,  0.0000, -0.5000, -1.0000, -1.0000])
    """
    if not 1 <= buffer <= maximum:
        raise ValueError(f"buffer must lie in [1, maximum], got {buffer} with maximum {maximum}")
    return ((maximum - buffer - wide(lengths)) / buffer).clamp(-1.0, 0.0)


def missing_end_penalty(score: Tensor, ended: Tensor, penalty: float) -> Tensor:
    """score - penalty·[the response has no end token]: once a response, whatever its length.

    score and ended (bool) of one shape -> that shape. A missing score (nan) stays missing. `penalty` is
    taken off, so it is at least 0; ValueError if not.

    >>> missing_end_penalty(torch.tensor([2.0, 2.0]), torch.tensor([True, False]), penalty=0.5)
    tensor([2.0000, 1.5000])
    """
    check_floats(score=score)
    if ended.dtype != torch.bool or ended.shape != score.shape:
        raise ValueError(
            f"ended must be {tuple(score.shape)} of bool, got {tuple(ended.shape)} of {ended.dtype}"
        )
    if not penalty >= 0:
        raise ValueError(f"penalty is taken off the score and must be at least 0, got {penalty}")
    return wide(score) - penalty * ~ended
