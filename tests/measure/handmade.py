"""Evaluations written by hand, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kleash.measure import Evaluation, Sample, clustered
from kleash.measure.diversity import distinct_shares
from kleash.measure.evaluation import sample_value


def sample(
    group: int,
    ids: Sequence[int] = (1, 2, 3),
    *,
    reward: float | None = None,
    gold: float | None = None,
    drift: float = 0.0,
    logp_ref: float = -1.0,
) -> Sample:
    """A response of the given ids; its drift sits on its first token."""
    kl = [drift] + [0.0] * (len(ids) - 1)
    ref = [logp_ref] * len(ids)
    logp = [r + k for r, k in zip(ref, kl, strict=True)]
    return Sample(
        f"p{group}", "", [f"t{i}" for i in ids], list(ids), logp, ref, kl, reward, gold, True, group
    )


def evaluation(samples: Sequence[Sample], **changes: Any) -> Evaluation:
    """What `measure` would make of the samples."""
    group = torch.tensor([one.group for one in samples])
    made = Evaluation(
        prompts=len(group.unique()),
        samples_per_prompt=len(samples) // len(group.unique()),
        max_new_tokens=24,
        temperature=1.0,
        fixed_length=False,
        seed=0,
        seconds=0.0,
        prompts_hash="h",
        samples=list(samples),
    )
    for metric in ("drift", "reward", "gold", "length"):
        values = [sample_value(one, metric) for one in samples]
        setattr(
            made, metric, clustered(torch.tensor([float("nan") if v is None else v for v in values]), group)
        )
    shares = distinct_shares([one.ids for one in samples], group)
    made.distinct_bigrams = clustered(shares, torch.arange(len(shares)))
    for name, value in changes.items():
        setattr(made, name, value)
    return made
