"""The optimum of E[r] - β·KL(π‖π_ref) in closed form, and the reward that a policy implies."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_floats, wide


def optimal_policy(ref_probs: Tensor, rewards: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """π*(y) = π_ref(y)·e^(r(y)/β) / Z, and log Z (seed 004, Eq. 8). The optimum's objective is β·log Z.

    ref_probs, rewards (..., Y) enumerate *all* responses in the last dimension -> probs (..., Y), log_z
    (...). For responses that can be listed only: Z over all texts of a language model is out of reach, and
    no estimate of it is made here. Responses with reference probability 0 keep it. Stable for small β
    (worked in logarithms). Raises ValueError if beta is not positive or ref_probs is not a distribution.

    >>> ref_probs, rewards = torch.tensor([0.80, 0.19, 0.01]), torch.tensor([0.0, 1.0, 2.0])
    >>> probs, log_z = optimal_policy(ref_probs, rewards, beta=1.0)
    >>> probs, log_z.exp()
    (tensor([0.5754, 0.3715, 0.0531]), tensor(1.3904))
    """
    check_floats(ref_probs=ref_probs, rewards=rewards)
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    ref_probs = wide(ref_probs)
    if (ref_probs < 0).any() or not torch.allclose(ref_probs.sum(-1), ref_probs.new_ones(()), atol=1e-4):
        raise ValueError("ref_probs must be non-negative and sum to 1 in the last dimension")
    log_weights = ref_probs.log() + wide(rewards) / beta
    log_z = log_weights.logsumexp(-1)
    return (log_weights - log_z.unsqueeze(-1)).exp(), log_z


def implicit_reward(logp: Tensor, logp_ref: Tensor, beta: float) -> Tensor:
    """r = β·(log π(y) - log π_ref(y)) (seed 004, Eq. 11): the reward π is optimal for, up to a constant.

    Any shape, elementwise; differentiable. The constant, β·log Z, is one a prompt and cancels between its
    responses.
    """
    check_floats(logp=logp, logp_ref=logp_ref)
    return beta * (wide(logp) - wide(logp_ref))
