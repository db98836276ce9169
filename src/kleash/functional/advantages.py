"""How much better than expected: baselines and advantages. Nothing here carries a gradient.

A baseline that depends on the prompt alone leaves the policy gradient unbiased. A batch or group mean also
contains the sample itself, and shrinks the expected gradient by (N-1)/N; leave-one-out does not.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ._checks import check_choice, check_floats, check_mask, wide

Scale = Literal["std", "sample_std", "batch_std", "none"]


@torch.no_grad()
def position_baseline(returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """b_t = mean of G_t over the rows that have a token at position t (seed 004, Eq. 6).

    returns, mask (N, L) -> (L,); 0 at a position that no row has. The mean includes the row it is
    subtracted from: with N rows the expected gradient is (N-1)/N of the unbiased one, a factor that the
    learning rate absorbs.

    >>> position_baseline(torch.tensor([[1.0, 5.0], [3.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
    tensor([2., 5.])
    """
    check_floats(2, returns=returns)
    mask = check_mask(mask, returns)
    return wide(returns).masked_fill(~mask, 0.0).sum(0) / mask.sum(0).clamp(min=1)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman 2016, https://arxiv.org/abs/1506.02438, Eq. 16).

    δ_t = r_t + γ·V_{t+1} - V_t,  A_t = δ_t + γλ·A_{t+1},  returns = A + V; V is 0 after the last real
    token. rewards, values, mask (N, L) -> advantages, returns, both (N, L), masked slots 0. values[:, t] is
    the estimate *before* token t. λ = 1 gives G_t - V_t, λ = 0 the TD error. Masked slots do not exist, as
    in `returns_to_go`.

    >>> advantages, _ = gae(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.6]]))
    >>> advantages
    tensor([[0.7510, 0.5800, 0.4000]])
    """
    check_floats(2, rewards=rewards, values=values)
    mask = check_mask(mask, rewards)
    rewards, values = wide(rewards), wide(values)
    advantages = torch.zeros_like(rewards)
    next_advantage = rewards.new_zeros(len(rewards))
    next_value = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        real = mask[:, t]
        error = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(real, error + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(real, values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = advantages.masked_fill(~mask, 0.0)
    return advantages, (advantages + values).masked_fill(~mask, 0.0)


@torch.no_grad()
def group_advantages(
    rewards: Tensor, group_size: int, scale: Scale = "std", groups: Tensor | None = None
) -> Tensor:
    """A_i = (r_i - mean of its group) / s (GRPO, https://arxiv.org/abs/2402.03300; seed 003, §14.5).

    `scale` names s: "std" the group's population deviation (divide by n), "sample_std" the one that divides
    by n - 1 (TRL, verl), "batch_std" the population deviation of all rewards, "none" 1 (Dr. GRPO). No
    epsilon anywhere.

    rewards (N,) with the members of a group side by side, or (N/group_size, group_size); with `groups` (N,)
    of ids the members may stand in any order. Same shape back. Missing rewards are nan: left out of the
    statistics, advantage 0. A group without spread, or with fewer than two rewards, is exactly 0: it
    teaches nothing, count such groups. Raises ValueError on group_size < 2 and on infinite rewards.

    >>> group_advantages(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]), 5)
    tensor([ 0.8165,  0.8165,  0.8165, -1.2247, -1.2247])
    """
    check_choice("scale", scale, ("std", "sample_std", "batch_std", "none"))
    rows, order = _by_group(rewards, group_size, groups)
    centred, counts = _centred(rows)
    squares = centred.square().sum(1, keepdim=True)
    if scale == "none":
        return _restore(centred, order, rewards)
    if scale == "batch_std":
        everything, count = _centred(rows.reshape(1, -1))
        deviation = (everything.square().sum() / count.clamp(min=1)).sqrt()
    else:
        divisor = counts if scale == "std" else counts - 1
        deviation = (squares / divisor.clamp(min=1)).sqrt()
    return _restore(torch.where(deviation > 0, centred / deviation, 0.0), order, rewards)


@torch.no_grad()
def leave_one_out_advantages(rewards: Tensor, group_size: int, groups: Tensor | None = None) -> Tensor:
    """A_i = r_i - mean of the others in its group (RLOO, https://arxiv.org/abs/2402.14740): unbiased.

    Equals n/(n-1) times the centred reward. Arguments, missing rewards and errors as in `group_advantages`.

    >>> leave_one_out_advantages(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]), 5)
    tensor([ 0.5000,  0.5000,  0.5000, -0.7500, -0.7500])
    """
    rows, order = _by_group(rewards, group_size, groups)
    centred, counts = _centred(rows)
    return _restore(centred * counts / (counts - 1).clamp(min=1), order, rewards)


@torch.no_grad()
def maxrl_advantages(rewards: Tensor, group_size: int, groups: Tensor | None = None) -> Tensor:
    """A_i = (r_i - mean of its group) / mean of its group (MaxRL, https://arxiv.org/abs/2602.02710).

    For rewards that are at least 0, success or failure first of all: where a share q of the group succeeds, a
    success is worth (1 - q)/q and a failure -1, so rare successes weigh most. With success probability p the
    expected gradient over groups of n is Σ_{k=1}^{n-1} (1 - p)^(k-1)·∇p, the first n - 1 terms of ∇ log p. A
    group whose mean is 0, or without spread, is exactly 0. Arguments, missing rewards and errors as in
    `group_advantages`; raises ValueError also on negative rewards.

    >>> maxrl_advantages(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]), 5)
    tensor([ 0.6667,  0.6667,  0.6667, -1.0000, -1.0000])
    """
    rows, order = _by_group(rewards, group_size, groups)
    if (rows < 0).any():
        row = int((rewards.reshape(-1) < 0).nonzero()[0])
        raise ValueError(
            f"rewards must be at least 0 (MaxRL divides by their mean), "
            f"got {rewards.reshape(-1)[row].item()} at row {row}"
        )
    centred, counts = _centred(rows)
    mean = rows.nansum(1, keepdim=True) / counts.clamp(min=1)
    return _restore(torch.where(mean > 0, centred / mean, 0.0), order, rewards)


def _centred(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows minus their mean over what is not nan (nan becomes 0), and how many entries that was, (R, 1)."""
    real = ~rows.isnan()
    counts = real.sum(1, keepdim=True)
    # Shifted by the smallest first: equal rewards become exactly 0, a large common offset costs nothing.
    lowest = rows.masked_fill(~real, torch.inf).amin(1, keepdim=True)
    shifted = (rows - lowest).masked_fill(~real, 0.0)
    mean = shifted.sum(1, keepdim=True) / counts.clamp(min=1)
    return (shifted - mean).masked_fill(~real, 0.0), counts


def _by_group(rewards: Tensor, group_size: int, groups: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(G, group_size) in float32 or better, and the order that brought the members side by side."""
    check_floats(rewards=rewards)
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2 (a group of one has no spread), got {group_size}")
    if rewards.ndim not in (1, 2) or (rewards.ndim == 2 and rewards.shape[1] != group_size):
        raise ValueError(
            f"rewards must be (N,) or (N/{group_size}, {group_size}), got {tuple(rewards.shape)}"
        )
    if rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not split into groups of {group_size}")
    flat = wide(rewards).reshape(-1)
    if flat.isinf().any():
        row = int(flat.isinf().nonzero()[0])
        raise ValueError(f"rewards must be finite (nan where missing), got {flat[row].item()} at row {row}")
    if groups is None:
        return flat.view(-1, group_size), None
    if groups.shape != flat.shape:
        raise ValueError(f"groups must be {tuple(flat.shape)}, one id a reward, got {tuple(groups.shape)}")
    ids, sizes = groups.unique(return_counts=True)
    if (sizes != group_size).any():
        at = int((sizes != group_size).nonzero()[0])
        raise ValueError(f"group {ids[at].item()} has {sizes[at].item()} rewards, expected {group_size}")
    order = groups.argsort(stable=True)
    return flat[order].view(-1, group_size), order


def _restore(rows: Tensor, order: Tensor | None, like: Tensor) -> Tensor:
    flat = rows.reshape(-1)
    if order is not None:
        flat = torch.empty_like(flat).index_copy_(0, order, flat)
    return flat.view(like.shape)
