"""Tokenised rows to padded tensors, and the order in which an epoch visits them.

Masks are made here from positions (how many ids a row has, where its response starts) and never from the ids,
so a padding id that equals the end token can hide nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kleash.data.items import Example, Pair
from kleash.errors import UsageError


@dataclass
class Batch:
    """Rows of tokens, right-padded; the value in padded places is never read.

    tokens (N,T) long; attention_mask (N,T) bool, the real tokens; response_mask (N,T) bool, the trained
    tokens (never column 0, which has nothing before it). Consecutive runs of `group_size` rows share a
    prompt: group g's rows agree on their first `shared_prefix[g]` tokens. `index` holds the data-set position
    of each item, (N,) or, for pairs, (N/2,).
    """

    tokens: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    group_size: int = 1
    shared_prefix: Tensor | None = None
    index: Tensor | None = None

    def __len__(self) -> int:
        """Number of rows N."""
        return self.tokens.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with every tensor on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    @property
    def response_lengths(self) -> Tensor:
        """Trained tokens of each row, (N,) long."""
        return self.response_mask.sum(1)

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.attention_mask.sum())

    @property
    def trained_tokens(self) -> int:
        """Tokens that are targets."""
        return int(self.response_mask.sum())


def collate_examples(items: Sequence[Example], pad_id: int, index: Sequence[int] | None = None) -> Batch:
    """Demonstrations to a batch of one row each; `index` (optional) is kept as `Batch.index`."""
    rows = [(e.prompt_ids + e.response_ids, [False] * len(e.prompt_ids) + e.trained) for e in items]
    return _pad(rows, pad_id, index=index)


def collate_pairs(items: Sequence[Pair], pad_id: int, index: Sequence[int] | None = None) -> Batch:
    """Preferences to a batch of two rows each: row 2i is chosen, row 2i+1 rejected, sharing their prompt."""
    rows = [
        (pair.prompt_ids + response, [False] * len(pair.prompt_ids) + [True] * len(response))
        for pair in items
        for response in (pair.chosen_ids, pair.rejected_ids)
    ]
    batch = _pad(rows, pad_id, index=index)
    batch.group_size = 2
    batch.shared_prefix = torch.tensor([len(pair.prompt_ids) for pair in items], dtype=torch.long)
    return batch


def _pad(rows: list[tuple[list[int], list[bool]]], pad_id: int, index: Sequence[int] | None) -> Batch:
    """Right-pad (ids, trained) rows to the longest; raises ValueError on a row nothing can be learnt from."""
    width = max((len(ids) for ids, _ in rows), default=0)
    tokens = torch.full((len(rows), width), pad_id, dtype=torch.long)
    attention = torch.zeros(len(rows), width, dtype=torch.bool)
    response = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (ids, trained) in enumerate(rows):
        if len(ids) != len(trained):
            raise ValueError(f"row {i} of the batch has {len(ids)} ids but {len(trained)} mask entries")
        if not any(trained) or trained[0]:
            raise ValueError(
                f"row {i} of the batch must have a trained token, and a token before the first of them"
            )
        tokens[i, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        attention[i, : len(ids)] = True
        response[i, : len(ids)] = torch.tensor(trained, dtype=torch.bool)
    return Batch(
        tokens, attention, response, index=None if index is None else torch.tensor(index, dtype=torch.long)
    )


def plan_epoch(
    lengths: Sequence[int],
    *,
    batch_size: int,
    micro_batch_size: int | None = None,
    token_budget: int | None = None,
    seed: int,
    epoch: int,
    rank: int = 0,
    world: int = 1,
    rows_per_item: int = 1,
) -> list[list[list[int]]]:
    """This rank's share of one epoch: optimizer steps -> micro-batches -> data-set positions.

    A pure function of its arguments, so a resumed run needs no saved state. Over the ranks every position
    appears once; a step holds `batch_size` items (the last one what is left). Within a step items are sorted
    by length, longest first, and cut into micro-batches of at most `micro_batch_size` items and
    `token_budget` padded tokens (`rows_per_item` x items x longest; pairs have 2 rows an item). Every rank
    gets equally many micro-batches per step, so that all issue the same collectives; where items are few,
    some are empty lists. Raises UsageError on impossible limits.
    """
    _check_limits(lengths, batch_size, micro_batch_size, token_budget, rows_per_item, rank, world)
    order = list(range(len(lengths)))
    random.Random(f"{seed}/{epoch}").shuffle(
        order
    )  # the shuffle of a string seed is the same on every platform
    steps = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    budget = None if token_budget is None else token_budget // rows_per_item
    return [_micro_batches(step, lengths, micro_batch_size, budget, world)[rank::world] for step in steps]


def _check_limits(
    lengths: Sequence[int],
    batch: int,
    micro: int | None,
    budget: int | None,
    rows: int,
    rank: int,
    world: int,
) -> None:
    for name, value in (("batch_size", batch), ("micro_batch_size", micro), ("micro_batch_tokens", budget)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} must be at least 1.")
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} of {world} processes does not exist.")
    longest = rows * max(lengths, default=0)
    if budget is not None and longest > budget:
        raise UsageError(
            f"micro_batch_tokens={budget} cannot hold the longest item, which takes {longest} tokens ({rows} "
            f"row(s) of {longest // rows}): raise micro_batch_tokens or lower max_length."
        )


def _micro_batches(
    step: list[int], lengths: Sequence[int], rows: int | None, budget: int | None, world: int
) -> list[list[int]]:
    """One step's items as a multiple of `world` micro-batches, as few and as even as fit."""
    step = sorted(step, key=lambda i: -lengths[i])
    rows = rows or max(1, -(-len(step) // world))
    most = budget if budget is not None else len(step) * lengths[step[0]]
    count = -(-len(_cut(step, lengths, rows, most)) // world) * world
    low, high = (
        lengths[step[0]],
        most,
    )  # bisect the smallest padded size that still gives `count` micro-batches
    while low < high:
        middle = (low + high) // 2
        if len(_cut(step, lengths, rows, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    cuts = _cut(step, lengths, rows, high)
    return cuts + [[] for _ in range(count - len(cuts))]


def _cut(step: list[int], lengths: Sequence[int], rows: int, budget: int) -> list[list[int]]:
    """Greedy cut of items sorted longest first: at most `rows` items and `budget` padded tokens each."""
    cuts: list[list[int]] = []
    for i in step:
        if cuts and len(cuts[-1]) < rows and (len(cuts[-1]) + 1) * lengths[cuts[-1][0]] <= budget:
            cuts[-1].append(i)
        else:
            cuts.append([i])
    return cuts
