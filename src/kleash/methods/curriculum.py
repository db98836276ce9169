"""Which prompts are worth sampling: how often each was answered right, and a draw that prefers the edge of
ability.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kleash.methods.base import Context, Memory, Sums, total
from kleash.methods.online import Scored

if TYPE_CHECKING:
    from kleash.methods.policy_gradient import PolicyConfig


def visit(memory: Memory, scored: Scored, config: PolicyConfig, context: Context, room: int) -> Sums:
    """Take a step's groups into the memory, those of all processes; returns their metrics.

    The scores as given decide what has spread and what is right, of the responses that have one: a missing
    score is no wrong answer, and a group without any score is not counted. `room`: the most prompts that a
    process can have.
    """
    size = config.samples_per_prompt
    right = (scored.scores.values >= config.pass_score).view(-1, size).sum(1)
    tried = scored.scores.present.view(-1, size).sum(1)
    flat = ~has_spread(scored, size)[tried > 0]
    rows = torch.full((room, 3), -1, dtype=torch.long)
    rows[: len(right)] = torch.stack([torch.tensor(scored.numbers[::size]), right.cpu(), tried.cpu()], 1)
    for number, passed, known in context.gather(rows).tolist():
        if known > 0:
            memory.tries.setdefault(number, []).append([context.step, passed, known])
    right, tried = right[tried > 0], tried[tried > 0]
    return {
        "groups/all_right": total(flat & (right == tried)),
        "groups/all_wrong": total(flat & (right == 0)),
        **pass_rate_metrics(right, tried),
    }


def has_spread(scored: Scored, size: int) -> Tensor:
    """(G,) whether a group's scores differ, before penalties: those teach length alone where the answers are
    equally good. Responses that do not count are left out, and one alone has no spread.
    """
    groups = scored.scores.values.masked_fill(~scored.used, torch.nan).view(-1, size)
    low = groups.masked_fill(groups.isnan(), torch.inf).amin(1)
    high = groups.masked_fill(groups.isnan(), -torch.inf).amax(1)
    return high > low


def pass_rate_metrics(right: Tensor, tried: Tensor) -> Sums:
    """Mean pass rate of a step's prompts, and the share of prompts in five bins of it: 0, up to a third, up
    to two thirds, below 1, and 1. right (G,) of tried (G,) responses, at least one each.
    """
    rate = right.double() / tried
    bins = {
        "none": rate == 0,
        "low": (rate > 0) & (rate <= 1 / 3),
        "middle": (rate > 1 / 3) & (rate <= 2 / 3),
        "high": (rate > 2 / 3) & (rate < 1),
        "all": rate == 1,
    }
    return {"pass/mean": total(rate), **{f"pass/{name}": total(inside) for name, inside in bins.items()}}


def weight(visits: Sequence[Sequence[int]], step: int, retire_after: int, revisit_every: int) -> float:
    """How much a prompt is worth drawing: 4p(1−p) with p its last pass rate, smoothed by one right and one
    wrong response; 1 where it was never tried; 0 while it rests.

    It rests after `retire_after` visits in a row with every response right, and comes back once every
    `revisit_every` steps.
    """
    if not visits:
        return 1.0
    last = visits[-retire_after:]
    if len(last) == retire_after and all(right == tried for _, right, tried in last):
        return 1.0 if step - visits[-1][0] >= revisit_every else 0.0
    _, right, tried = visits[-1]
    p = (right + 1) / (tried + 2)
    return 4 * p * (1 - p)


def draw(
    memory: Memory, numbers: Sequence[int], count: int, step: int, seed: int, retire_after: int,
    revisit_every: int,
) -> list[int]:  # fmt: skip
    """Positions of `count` prompts, without replacement and in proportion to their weights (Efraimidis and
    Spirakis 2006); resting ones fill up where the others do not suffice. The same on every process.
    """
    random_ = random.Random(f"{seed}/draw/{step}")
    keys = []
    for place, number in enumerate(numbers):
        w = weight(memory.tries.get(number, ()), step, retire_after, revisit_every)
        u = random_.random()
        keys.append((u ** (1 / w) if w > 0 else u - 1.0, place))
    keys.sort(reverse=True)
    return [place for _, place in keys[:count]]
