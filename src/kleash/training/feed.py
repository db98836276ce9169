"""Where a step's micro-batches come from. `step(n)` depends on n and the options alone, so a resumed run
needs no cursor.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from kleash.data import plan_epoch
from kleash.errors import UsageError
from kleash.methods.base import Context, Method, Models, Step, Update
from kleash.methods.curriculum import draw
from kleash.methods.options import TrainConfig
from kleash.training.processes import Processes


class Feed(Protocol):
    """Steps are numbered from 1. `held_out` is the evaluation's work; `first` a few batches to check the
    start on.
    """

    steps_per_epoch: float

    def step(self, number: int) -> Step: ...
    def held_out(self) -> Step: ...


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """A seed for everything random in one step of one process."""
    return random.Random(f"{seed}/{step}/{rank}").getrandbits(62)


class OfflineFeed:
    """Batches of a fixed data set: each epoch a new order, each item once an epoch over all processes."""

    def __init__(
        self,
        method: Method,
        items: Sequence[Any],
        held_out: Sequence[Any],
        config: TrainConfig,
        pad_id: int,
        processes: Processes,
    ) -> None:
        self.method, self.config, self.pad_id, self.processes = method, config, pad_id, processes
        self.items = [*items, *held_out]  # held-out items follow, so that a position names an item of either
        self.train, self.eval = range(len(items)), range(len(items), len(items) + len(held_out))
        self.steps_per_epoch: float = math.ceil(len(items) / config.batch_size)
        self._epoch = -1
        self._plan: list[list[list[int]]] = []

    def step(self, number: int) -> Step:
        """Micro-batches of step `number`."""
        epoch, within = divmod(number - 1, int(self.steps_per_epoch))
        if epoch != self._epoch:
            self._plan, self._epoch = self.plan(self.train, self.config.seed, epoch), epoch
        return Step([self._update(self._plan[within])])

    def held_out(self) -> Step:
        """Every held-out item once."""
        plan = self.plan(self.eval, 0, 0) if self.eval else []
        return Step([self._update(rows) for rows in plan])

    def _update(self, micro_batches: list[list[int]]) -> Update:
        assert self.method.count is not None
        batches = list(self.batches(micro_batches))
        return Update(batches, sum(self.method.count(batch) for batch in batches))

    def plan(self, positions: range, seed: int, epoch: int) -> list[list[list[int]]]:
        """This process's share of an epoch over some positions: steps of micro-batches of positions."""
        plan = plan_epoch(
            [self.items[i].length for i in positions],
            batch_size=self.config.batch_size,
            micro_batch_size=self.config.micro_batch_size,
            token_budget=self.config.micro_batch_tokens,
            seed=seed,
            epoch=epoch,
            rank=self.processes.rank,
            world=self.processes.world,
            rows_per_item=self.method.rows_per_item,
        )
        return [[[positions[i] for i in rows] for rows in step] for step in plan]

    def batches(self, micro_batches: list[list[int]]) -> Iterator[Any]:
        """Collated batches of the given positions; empty ones, which keep processes in step, are left out."""
        assert self.method.collate is not None
        for rows in micro_batches:
            if rows:
                batch = self.method.collate([self.items[i] for i in rows], self.pad_id, index=rows)
                yield batch.to(self.processes.device)


class OnlineFeed:
    """Batches that the policy samples itself, from prompts visited in a new order each epoch."""

    def __init__(
        self,
        method: Method,
        models: Models,
        prompts: Sequence[Any],
        held_out: Sequence[Any],
        config: Any,
        processes: Processes,
    ) -> None:
        self.method, self.models, self.prompts, self.eval = method, models, prompts, held_out
        self.config, self.processes = config, processes
        self.per_step = config.batch_size // config.samples_per_prompt
        if self.per_step % processes.world:
            raise UsageError(
                f"batch_size={config.batch_size} is {self.per_step} prompts a step, which {processes.world} "
                "processes cannot share evenly: choose a multiple."
            )
        share, parts = self.per_step // processes.world, getattr(config, "minibatches", 1)
        if parts > share:
            raise UsageError(
                f"minibatches={parts} of {share} prompts on each of {processes.world} processes: a minibatch "
                "holds whole groups of every process, so there can be at most as many as prompts on each."
            )
        self.steps_per_epoch = len(prompts) / self.per_step

    def step(self, number: int) -> Step:
        """Sample and score this process's prompts of step `number`."""
        share = self.per_step // self.processes.world
        self.models.learner.eval()
        places = self._places(number)
        mine = places[self.processes.rank * share :][:share]
        prompts = [self.prompts[place] for place in mine]
        context = Context(
            step=number,
            generator=torch.Generator().manual_seed(step_seed(self.config.seed, number, self.processes.rank)),
            gather=self.processes.gather,
            keep_samples=self.processes.main and (number == 1 or number % self.config.samples_every == 0),
            exact_kl=number == 1 or number % self.config.log_exact_kl_every == 0,
            more=self._further(number, places),
        )
        assert self.method.collect is not None
        return self.method.collect(self.models, prompts, self.config, context)

    def held_out(self) -> Step:
        """Sample and score the held-out prompts; the same draws each time, so that evaluations differ by the
        policy only.
        """
        prompts = list(self.eval)[self.processes.rank :: self.processes.world]
        if not prompts:
            return Step([])
        context = Context(
            step=0,
            generator=torch.Generator().manual_seed(step_seed(self.config.seed, 0, self.processes.rank)),
            gather=self.processes.gather,
            exact_kl=True,
        )
        assert self.method.probe is not None
        return self.method.probe(self.models, prompts, self.config, context)

    def _places(self, number: int) -> list[int]:
        """Positions of all processes' prompts of a step: all prompts in turn, or drawn by the curriculum."""
        config = self.config
        if getattr(config, "curriculum", "off") == "off":
            return [self._visit((number - 1) * self.per_step + i) for i in range(self.per_step)]
        numbers = [prompt.number for prompt in self.prompts]
        limits = config.retire_after, config.revisit_every
        return draw(self.models.memory, numbers, self.per_step, number, config.seed, *limits)

    def _further(self, number: int, taken: list[int]) -> Callable[[int], list[Any]]:
        """Prompts for groups that are sampled again: this process's share of those not taken, in a random
        order.
        """
        others = sorted(set(range(len(self.prompts))) - set(taken))
        random.Random(f"{self.config.seed}/further/{number}").shuffle(others)
        others = others[self.processes.rank :: self.processes.world]

        def more(count: int) -> list[Any]:
            chosen, others[:] = others[:count], others[count:]
            return [self.prompts[place] for place in chosen]

        return more

    def _visit(self, place: int) -> int:
        """The prompt at a place of the endless sequence of shuffled epochs."""
        epoch, within = divmod(place, len(self.prompts))
        if getattr(self, "_epoch", None) != epoch:
            self._order = list(range(len(self.prompts)))
            random.Random(f"{self.config.seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[within]
