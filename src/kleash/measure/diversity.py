"""Variety among the samples of one prompt: what a KL penalty does not protect (seed 004, section 7; Kirk et
al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kleash.measure.evaluation import Evaluation

Tokens = Sequence[Hashable]


def distinct_share(responses: Sequence[Tokens], n: int = 2) -> float | None:
    """Distinct token n-grams / all token n-grams, pooled over one prompt's responses; None where there is no
    n-gram.

    1 where no n-gram occurs twice. The share falls with the number of tokens pooled, so compare it at equal
    lengths and equally many samples (`distinct_shares_matched` does).
    """
    grams = [tuple(tokens[i : i + n]) for tokens in responses for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def distinct_shares(responses: Sequence[Tokens], group: Tensor, n: int = 2) -> Tensor:
    """`distinct_share` of each prompt, (G,) in the order of the group numbers; nan where a prompt has no
    n-gram.
    """
    pools: dict[int, list[Tokens]] = {}
    for tokens, number in zip(responses, group.tolist(), strict=True):
        pools.setdefault(number, []).append(tokens)
    shares = [distinct_share(pools[number], n) for number in sorted(pools)]
    return torch.tensor([math.nan if share is None else share for share in shares])


def distinct_shares_matched(
    run: Evaluation, baseline: Evaluation, n: int = 2
) -> dict[int, tuple[float, float]]:
    """Both evaluations' shares for each prompt, with the i-th responses of both cut to the shorter of the
    two.

    Both shares are then over equally many n-grams, so that a difference in length cannot pass for one in
    variety.
    """
    pools = [_pools(evaluation) for evaluation in (run, baseline)]
    shares = {}
    for number in sorted(pools[0].keys() & pools[1].keys()):
        pairs = list(zip(pools[0][number], pools[1][number], strict=False))
        cut = [[side[: min(len(pair[0]), len(pair[1]))] for side in pair] for pair in pairs]
        first, second = (distinct_share([pair[i] for pair in cut], n) for i in (0, 1))
        if first is not None and second is not None:
            shares[number] = (first, second)
    return shares


def _pools(evaluation: Evaluation) -> dict[int, list[list[int]]]:
    pools: dict[int, list[list[int]]] = {}
    for sample in evaluation.samples:
        pools.setdefault(sample.group, []).append(sample.ids)
    return pools
