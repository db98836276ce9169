"""From scored rollouts to what gradient steps are made of: micro-batches, minibatches, passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kleash.data.batches import Batch, plan_epoch
from kleash.functional.reduce import Reduction
from kleash.methods.base import Update
from kleash.sampling import Rollouts


@dataclass
class PolicyBatch:
    """Sampled responses as they are trained on. What a token has is (N, L), aligned with the trained tokens.

    advantages; logp, as sampled; used (N,), the responses that count (the others lack a score); logp_ref,
    where the loss needs it; logp_old, of the policy that sampled, as the training forward gives it: a batch
    without it is on its first pass before any update, and the loss fills it in. values_old and returns belong
    to PPO. beta is the KL coefficient of this step.
    """

    batch: Batch
    advantages: Tensor
    logp: Tensor
    used: Tensor
    temperature: float
    forbidden: tuple[int, ...]
    beta: float = 0.0
    logp_ref: Tensor | None = None
    logp_old: Tensor | None = None
    values_old: Tensor | None = None
    returns: Tensor | None = None

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return self.batch.real_tokens

    @property
    def trained_tokens(self) -> int:
        """Tokens that are targets."""
        return self.batch.trained_tokens

    def to(self, device: torch.device | str) -> PolicyBatch:
        """The same batch with every tensor on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor | Batch)}
        return replace(self, **moved)

    @classmethod
    def of(
        cls, rollouts: Rollouts, rows: list[int], used: Tensor, tokens: dict[str, Tensor], beta: float = 0.0
    ) -> PolicyBatch:
        """The given rows of rollouts; `tokens` are (N, L) tensors by field name, cut to the longest row."""
        part = rollouts.take(rows)
        width = int(part.response_mask.sum(1).max())
        cut = {name: values[rows, :width] for name, values in tokens.items()}
        return cls(
            part.to_batch(), logp=part.logp[:, :width], used=used[rows], temperature=part.temperature,
            forbidden=part.forbidden, beta=beta, **cut,
        )  # fmt: skip


def micro_batches(
    rollouts: Rollouts, groups: Sequence[int], size: int, rows: int | None, tokens: int | None
) -> list[list[int]]:
    """Row numbers of each micro-batch over some groups of `size` rows: whole groups, longest first, of at
    most `rows` rows and `tokens` padded tokens.
    """
    if not groups:
        return []
    lengths = (rollouts.prompt_mask.sum(1) + rollouts.response_mask.sum(1)).view(-1, size).amax(1).tolist()
    plan = plan_epoch(
        [lengths[group] for group in groups],
        batch_size=len(groups),
        micro_batch_size=None if rows is None else max(1, rows // size),
        token_budget=tokens,
        rows_per_item=size,
        seed=0,
        epoch=0,
    )
    return [[groups[at] * size + i for at in places for i in range(size)] for places in plan[0]]


def make_updates(
    rollouts: Rollouts,
    batch_of: Callable[[list[int]], PolicyBatch],
    *,
    used: Tensor,
    live: Tensor,
    size: int,
    reduction: Reduction,
    minibatches: int,
    passes: int,
    limits: tuple[int | None, int | None],
    generator: torch.Generator,
) -> list[Update]:
    """The updates that are made on one set of rollouts: `passes` times over `minibatches` parts of them.

    A minibatch holds whole groups, drawn at random where there are several, and is the same in every pass.
    `used` (N,) are the responses that its loss is averaged over; `live` (N,) those that can have a gradient:
    a group without any is counted and not computed. `limits`: rows and padded tokens of a micro-batch.
    """
    count = len(rollouts) // size
    order = torch.randperm(count, generator=generator) if minibatches > 1 else torch.arange(count)
    parts = []
    for groups in torch.tensor_split(order, minibatches):
        chosen = sorted(groups.tolist())
        alive = [g for g in chosen if bool(live[g * size : (g + 1) * size].any())]
        batches = [batch_of(rows) for rows in micro_batches(rollouts, alive, size, *limits)]
        members = [g * size + i for g in chosen for i in range(size)]
        parts.append(Update(batches, items_of(rollouts.response_mask[members], used[members], reduction)))
    return parts * passes


def items_of(mask: Tensor, used: Tensor, reduction: Reduction) -> float:
    """What the summed loss is divided by: tokens, or responses that have any (see `functional.aggregate`)."""
    counted = mask & used[:, None]
    return float(counted.sum() if reduction == "token-mean" else counted.any(1).sum())
