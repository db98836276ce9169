"""Losses on pairs of a preferred and a rejected response."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from ._checks import check_floats, wide
from .optimal import implicit_reward
from .reduce import PairReduction, reduce_pairs


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    center: float = 0.0,
    reduction: PairReduction = "mean",
) -> Tensor:
    """-log σ(r_w - r_l - margin) + center·(r_w + r_l)², the log taken before the mean (seed 003, §14.2).

    chosen, rejected, margin (N,): scalar rewards of the two responses, and how far apart they should be.
    Only differences are identified; `center` > 0 also draws the sum of each pair to 0
    (https://arxiv.org/abs/2312.09244). Returns a scalar, or (N,) with reduction="none". ln 2 where the
    rewards are equal.

    >>> import torch
    >>> bradley_terry_loss(torch.tensor([1.2]), torch.tensor([0.7]))
    tensor(0.4741)
    """
    check_floats(1, chosen=chosen, rejected=rejected)
    chosen, rejected = wide(chosen), wide(rejected)
    gap = chosen - rejected
    if margin is not None:
        check_floats(1, margin=margin, chosen=chosen)
        gap = gap - wide(margin)
    loss = -logsigmoid(gap)
    if center:
        loss = loss + center * (chosen + rejected).square()
    return reduce_pairs(loss, reduction)


def dpo_loss(
    logp_w: Tensor,
    logp_l: Tensor,
    logp_ref_w: Tensor,
    logp_ref_l: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    reduction: PairReduction = "mean",
) -> tuple[Tensor, Tensor, Tensor]:
    """-log σ(M) with M = β·(log π_w/π_ref,w - log π_l/π_ref,l) (DPO, https://arxiv.org/abs/2305.18290).

    With label_smoothing ε, -(1-ε)·log σ(M) - ε·log σ(-M): a share ε of the labels is taken to be flipped
    (cDPO). All four (N,): log-probabilities of whole responses, summed over their tokens
    (`sequence_logprob`). Returns loss, reward_w, reward_l; the rewards are β·log-ratio (Eq. 11), (N,),
    detached. Gradient with respect to the winner's log-probability: -β·σ(-M). ln 2 while the policy still
    equals the reference.

    >>> import torch
    >>> loss, reward_w, reward_l = dpo_loss(*torch.tensor([[-1.0], [-3.0], [0.0], [0.0]]), beta=0.1)
    >>> loss, reward_w - reward_l
    (tensor(0.5981), tensor([0.2000]))
    """
    check_floats(1, logp_w=logp_w, logp_l=logp_l, logp_ref_w=logp_ref_w, logp_ref_l=logp_ref_l)
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    reward_w = implicit_reward(logp_w, logp_ref_w, beta)
    reward_l = implicit_reward(logp_l, logp_ref_l, beta)
    margin = reward_w - reward_l
    loss = -(1 - label_smoothing) * logsigmoid(margin)
    if label_smoothing:
        loss = loss - label_smoothing * logsigmoid(-margin)
    return reduce_pairs(loss, reduction), reward_w.detach(), reward_l.detach()
