"""KL(policy‖reference): exactly, over the vocabulary, and estimated from the sampled token alone.

The estimators (Schulman 2020, http://joschu.net/blog/kl-approx.html) take samples *from the policy*. As
measurements k1 and k3 are unbiased and k2 is not; k1 can be negative. As losses they are other things: the
expected gradient of k1 is zero, that of k2 is the gradient of KL(policy‖reference), and that of k3 the
gradient of KL(reference‖policy).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ._checks import check_choice, check_detached, check_floats, check_mask, wide

K3_LIMIT = 40.0
"""log(reference/policy) above which `kl_k3` is constant: e^40 ≈ 2.4e17 still has a finite float32 square."""


def exact_kl(logits: Tensor, logits_ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """Σ_t Σ_v π(v|·)·(log π(v|·) - log π_ref(v|·)) along the response (seed 004, Eq. 4).

    logits, logits_ref (N, L, V), mask (N, L) -> (N,) in nats. On responses sampled from the policy its mean
    is an unbiased estimate of the sequence KL, without the noise of the sampled token. 0·log 0 = 0: a token
    with policy probability 0 counts nothing, also where the reference excludes it too; a token that only
    the reference excludes makes the row inf. Differentiable; masked positions are left out before anything
    is computed.

    >>> exact_kl(torch.tensor([[[0.0, -torch.inf, -torch.inf]]]), torch.tensor([[[0.8, 0.19, 0.01]]]).log())
    tensor([0.2231])
    """
    check_floats(3, logits=logits, logits_ref=logits_ref)
    mask = check_mask(mask, logits[..., 0])
    log_p = wide(logits[mask]).log_softmax(-1)
    log_q = wide(logits_ref[mask]).log_softmax(-1)
    p = log_p.exp()
    gap = torch.where(p > 0, log_p - log_q, 0.0)
    per_position = (p * gap).sum(-1)
    return per_position.new_zeros(mask.shape).masked_scatter(mask, per_position).sum(1)


def _log_ratio(logp: Tensor, logp_ref: Tensor) -> Tensor:
    check_floats(logp=logp, logp_ref=logp_ref)
    return wide(logp) - wide(logp_ref)


def kl_k1(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """log π - log π_ref of the sampled token. Unbiased, may be negative. Any shape, elementwise, nats."""
    return _log_ratio(logp, logp_ref)


def kl_k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """(log π - log π_ref)² / 2. Biased, never negative. Any shape, elementwise, nats."""
    return _log_ratio(logp, logp_ref).square() / 2


def kl_k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """(r - 1) - log r with r = π_ref / π. Unbiased and never negative. Any shape, elementwise, nats.

    e^d - 1 - d loses every digit near d = 0, in float32 even by way of expm1, so |d| < 0.1 takes the series
    d²/2·(1 + d/3·(1 + d/4·(…))). d = log r is clamped from above at K3_LIMIT, beyond which the value is
    constant and without gradient: one token the policy has all but abandoned must not turn a batch into
    inf.

    >>> kl_k3(torch.tensor([-1.0001, -101.0]), torch.tensor([-1.0001, -1.0])).isfinite().all()
    tensor(True)
    """
    d = -_log_ratio(logp, logp_ref)
    d = d.clamp(max=K3_LIMIT)
    tail = torch.zeros_like(d)
    for n in range(12, 2, -1):
        tail = d / n * (1 + tail)
    near_zero = d.square() / 2 * (1 + tail)
    return torch.where(d.abs() < 0.1, near_zero, d.expm1() - d)


def kl_loss(
    logp: Tensor, logp_ref: Tensor, estimator: Literal["k2", "k3"] = "k2", mask: Tensor | None = None
) -> Tensor:
    """A KL term of the loss, by token of the policy's own samples, to be minimised: its slope is what counts.

      k2  (log π/π_ref)²/2            expected gradient: that of KL(π‖π_ref) at each visited state
      k3  r - 1 - log r, r = π_ref/π  expected gradient: that of KL(π_ref‖π) there, the other direction

    Neither sees that a token changes which states come after it; "KL in the reward" (`token_rewards`) does.
    The expectations are over the policy's samples: with tokens of an older policy multiply by
    `importance_ratio`, detached. logp, logp_ref and mask of one shape -> that shape, masked slots 0 and
    without gradient. Raises ValueError if logp_ref requires grad, and on "k1", whose expected gradient is
    zero: E[∇ log π] = 0, whatever the reference.

    >>> kl_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -2.0]]))
    tensor([[0.5000, 0.0000]])
    """
    if estimator == "k1":
        raise ValueError(
            "estimator='k1' cannot be a loss: the expected gradient of log π - log π_ref is zero, it pulls "
            "nowhere; put it into the reward (token_rewards), or use 'k2' or 'k3'"
        )
    check_choice("estimator", estimator, ("k2", "k3"))
    check_floats(logp=logp, logp_ref=logp_ref)
    check_detached(logp_ref=logp_ref)
    hidden = ~check_mask(mask, logp)
    logp, logp_ref = wide(logp).masked_fill(hidden, 0.0), wide(logp_ref).masked_fill(hidden, 0.0)
    return kl_k2(logp, logp_ref) if estimator == "k2" else kl_k3(logp, logp_ref)
