"""Drift: how far the policy has moved from the reference, exactly at every position of its own responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kleash.functional import kl_k1, kl_k2, kl_k3
from kleash.models import PositionStats, autocast, batch_kl
from kleash.models.forward import Dtype
from kleash.sampling import Progress, Rollouts

if TYPE_CHECKING:
    from kleash.measure.evaluation import Sample

FIELDS = ("kl", "logp", "logp_ref", "entropy", "mask")


def rollout_kl(
    policy: nn.Module,
    reference: nn.Module,
    rollouts: Rollouts,
    *,
    dtype: Dtype = "float32",
    batch_rows: int = 64,
    progress: Progress | None = None,
) -> PositionStats:
    """Exact KL, log-probs and entropy at every position of N rollouts, (N, L) on the CPU (the terms of Eq.
    4).

    At the rollouts' own temperature and without the ids that were removed when they were sampled.
    `batch_rows` bounds the rows of one forward pass; logits are never held. `dtype` is that of the matrix
    products: in bfloat16 their rounding adds some 1e-3 nats a token.
    """
    device = next(policy.parameters()).device
    parts: list[PositionStats] = []
    with autocast(dtype, device.type):
        for rows in _chunks(rollouts, batch_rows):
            batch = rollouts.take(rows).to_batch().to(device)
            parts.append(
                batch_kl(
                    policy, reference, batch, temperature=rollouts.temperature, forbidden=rollouts.forbidden
                )
            )
            if progress is not None:
                progress(rows[-1] + 1, len(rollouts), "measured")
    return _joined(parts)


def _chunks(rollouts: Rollouts, rows: int) -> list[list[int]]:
    """Row numbers in chunks of at most `rows`, whole groups together where they fit, so that prompts stay
    shared.
    """
    _, counts = torch.unique_consecutive(rollouts.group, return_counts=True)
    chunks: list[list[int]] = []
    start = 0
    for count in counts.tolist():
        for first in range(start, start + count, rows):
            group = list(range(first, min(first + rows, start + count)))
            if chunks and len(chunks[-1]) + len(group) <= rows:
                chunks[-1] += group
            else:
                chunks.append(group)
        start += count
    return chunks


def _joined(parts: Sequence[PositionStats]) -> PositionStats:
    width = max(part.mask.shape[1] for part in parts)
    columns = (
        torch.cat([pad(getattr(part, name), (0, width - part.mask.shape[1])).cpu() for part in parts])
        for name in FIELDS
    )
    return PositionStats(*columns)


def response_sums(stats: PositionStats) -> dict[str, Tensor]:
    """Each response's drift and the sampled estimates beside it, (N,) float64, nats.

    drift = Σ_t KL_t, exact given the prefix. kl_k1, kl_k2, kl_k3 = Σ_t of the per-token estimators on the
    sampled token (Schulman 2020). On the policy's own samples the means of drift, k1 and k3 agree in
    expectation; k2 is biased.
    """
    logp, logp_ref = stats.logp.double(), stats.logp_ref.double()
    tokens = {
        "drift": stats.kl.double(),
        "kl_k1": kl_k1(logp, logp_ref),
        "kl_k2": kl_k2(logp, logp_ref),
        "kl_k3": kl_k3(logp, logp_ref),
    }
    return {name: torch.where(stats.mask, value, 0.0).sum(-1) for name, value in tokens.items()}


@dataclass(frozen=True)
class WorstToken:
    """The position with the largest exact KL, and its share of all drift: a token that blew up shows here."""

    sample: int
    position: int
    token: str
    kl: float
    share: float


def worst_token(samples: Sequence[Sample]) -> WorstToken | None:
    """Which token of which sample moved furthest; None where nothing moved."""
    total = sum(sum(sample.kl) for sample in samples)
    places = [(kl, i, t) for i, sample in enumerate(samples) for t, kl in enumerate(sample.kl)]
    kl, i, t = max(places, default=(0.0, 0, 0))
    return WorstToken(i, t, samples[i].tokens[t], kl, kl / total) if total > 0 else None
