"""From a measured KL to the next β. Plain numbers in and out; whoever trains keeps β."""

from __future__ import annotations

import math


def adaptive_beta(
    beta: float, kl: float, target: float, horizon_steps: float = 10.0, clip: float = 0.2
) -> float:
    """β·(1 + e/horizon_steps), e = clip(KL/target - 1, ±clip): a KL that is *held at* the target.

    The proportional controller of Ziegler et al. 2019 (https://arxiv.org/abs/1909.08593, section 2.2), whose
    gain 0.1 is horizon_steps = 10 updates. KL above the target raises β, below it lowers β, by at most
    clip/horizon_steps of β at a time. kl and target in nats a response, measured alike; a sampled kl may be
    negative. Raises ValueError if beta or target is not above 0 (0 would stay 0), if clip is not in (0, 1)
    or horizon_steps below 1, and on a KL that is not finite.

    >>> [round(adaptive_beta(0.1, kl, target=6.0), 4) for kl in (3.0, 6.0, 6.6, 60.0)]
    [0.098, 0.1, 0.101, 0.102]
    """
    _check(kl=kl, beta=beta, target=target)
    if not (0 < clip < 1 and horizon_steps >= 1):
        raise ValueError(
            f"clip must lie in (0, 1) and horizon_steps be at least 1, got {clip} and {horizon_steps}"
        )
    error = min(max(kl / target - 1, -clip), clip)
    return beta * (1 + error / horizon_steps)


def lagrangian_beta(beta: float, kl: float, delta: float, rate: float) -> float:
    """max(0, β + rate·(KL - δ)): dual ascent for max E[r] subject to KL ≤ δ.

    β is the constraint's multiplier. The dual, the maximum over policies of E[r] - β·(KL - δ), has the slope
    δ - KL in β; this is a projected gradient step down it, on β itself and not on its logarithm, so that β
    reaches exactly 0 where the constraint does not bind, and leaves it again. Where it binds, KL ends *at* δ
    and β at the value whose optimal policy has that KL. kl and delta in nats a response; rate in units of β
    a nat (a reward on another scale wants another rate; too large a one oscillates). Raises ValueError if
    beta is negative, if delta or rate is not above 0, and on a KL that is not finite.

    >>> [round(lagrangian_beta(0.1, kl, delta=6.0, rate=0.01), 4) for kl in (0.0, 5.0, 6.0, 10.0)]
    [0.04, 0.09, 0.1, 0.14]
    >>> lagrangian_beta(0.01, 0.0, delta=6.0, rate=0.01)
    0.0
    """
    if beta < 0:
        raise ValueError(f"beta must be at least 0, got {beta}")
    _check(kl=kl, delta=delta, rate=rate)
    return max(0.0, beta + rate * (kl - delta))


def _check(kl: float, **positive: float) -> None:
    for name, value in positive.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value}")
    if not math.isfinite(kl):
        raise ValueError(f"kl must be finite, got {kl}: no β follows from it")
