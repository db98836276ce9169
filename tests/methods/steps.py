"""One step of an online method on a tiny model, with sampled responses or with responses made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from enumerated import sampling
from torch import Tensor

from kleash.config import build
from kleash.data.items import PromptIds
from kleash.methods import METHODS
from kleash.methods.base import Context, LossOutput, Models, Step, Update
from kleash.methods.group import TABLE
from kleash.models import frozen_copy, response_logprobs
from kleash.sampling import Rollouts

ONLINE = [name for name, method in METHODS.items() if method.online]
GROUP = list(TABLE)
FAMILY = ["ppo", *GROUP]  # the methods of policy_gradient.py
SHAPE = {"data": [], "batch_size": 8, "samples_per_prompt": 4, "max_new_tokens": 6, "max_length": 200}


def varied(responses: list[str], response_ids: list[list[int]]) -> list[float]:
    """A score that differs between responses, whatever they are: 0 to 4."""
    return [float(sum(ids) % 5) for ids in response_ids]


def constant(value: float | None) -> Callable[..., list[float | None]]:
    """A reward that gives every response the same."""
    return lambda responses: [value] * len(responses)


def listed(*values: float | None) -> Callable[..., list[float | None]]:
    """A reward that gives the responses of a call these scores, in order."""
    return lambda responses: list(values)


@dataclass
class Bench:
    """A method, its options, and models that it has prepared; the policy does not start as the reference."""

    name: str
    config: Any
    models: Models
    prompts: list[PromptIds]

    def collect(self, rollouts: Rollouts | None = None, **context: Any) -> Step:
        """The method's own step: on responses that it samples, or on `rollouts`."""
        settings = {"step": 2, "generator": torch.Generator().manual_seed(0), **context}
        method, prompts = METHODS[self.name], self.prompts
        assert method.collect is not None
        if rollouts is None:
            return method.collect(self.models, prompts, self.config, Context(**settings))
        with sampling(rollouts):
            prompts = prompts[: int(rollouts.group.max()) + 1]
            return method.collect(self.models, prompts, self.config, Context(**settings))

    def loss(self, batch: Any) -> LossOutput:
        """The method's own loss."""
        return METHODS[self.name].loss(self.models, batch, self.config)

    def mean_loss(self, update: Update) -> Tensor:
        """The loss of an update as the loop divides it."""
        sums = [self.loss(batch).per_item.sum() for batch in update.micro_batches]
        return torch.stack(sums).sum() / max(update.items, 1.0) if sums else torch.zeros(())

    def gradient(self, update: Update) -> Tensor:
        """d mean_loss / d policy, as one vector; zero where the loss does not reach a weight."""
        self.models.learner.zero_grad()
        loss = self.mean_loss(update)
        if loss.requires_grad:
            loss.backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.models.policy.parameters()]
        return torch.cat([part.flatten() for part in parts])

    def learn(self, update: Update, rate: float) -> None:
        """One plain gradient step on everything that learns."""
        self.models.learner.zero_grad()
        self.mean_loss(update).backward()
        with torch.no_grad():
            for parameter in self.models.learner.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad

    def rollouts(self, lengths: Sequence[int], ended: bool = True, seed: int = 0) -> Rollouts:
        """Random responses of these lengths, group by group, as the policy would have sampled them; `ended`:
        the last token is the end token.
        """
        size, end = self.config.samples_per_prompt, self.models.tokenizer.eos_token_id
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 30, (len(lengths), max(lengths)), generator=generator)
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        if ended:
            ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = end
        group = torch.arange(len(lengths) // size).repeat_interleave(size)
        prompts = torch.tensor([self.prompts[g].prompt_ids for g in group.tolist()])
        made = Rollouts(
            prompts, torch.ones_like(prompts, dtype=torch.bool), ids, mask, torch.zeros(ids.shape),
            torch.full((len(ids),), ended), group, [self.prompts[g].text for g in group.tolist()],
            [self.models.tokenizer.decode(row[keep]) for row, keep in zip(ids, mask, strict=True)],
        )  # fmt: skip
        return replace(made, logp=self.logp(self.models.policy, made))

    @staticmethod
    def logp(model: Any, rollouts: Rollouts) -> Tensor:
        """(N, L) log-probs of the responses under a model."""
        ids = rollouts.prompt_ids, rollouts.response_ids
        with torch.no_grad():
            return response_logprobs(model, *ids, rollouts.prompt_mask, rollouts.response_mask)


def in_two(one: Callable[..., Any], other: Callable[..., Any]) -> tuple[Any, Any]:
    """What two processes get: each calls its function with a `gather` that joins what both give to it. What
    is given must not depend on what came back before.
    """
    given: list[list[Tensor]] = [[], []]
    for mine, work in zip(given, (one, other), strict=True):
        work(gather=lambda tensor, mine=mine: mine.append(tensor) or tensor)
    assert [t.shape for t in given[0]] == [t.shape for t in given[1]], "gathered tensors have one shape"
    joined = [iter([torch.cat(pair) for pair in zip(*given, strict=True)]) for _ in given]
    return tuple(
        work(gather=lambda tensor, mine=mine: next(mine))
        for mine, work in zip(joined, (one, other), strict=True)
    )


def bench(
    name: str, tiny: Any, *, start: int = 2, prompts: int | None = None, tokenizer: Any = None, **changes: Any
) -> Bench:
    """A method on the tiny model of seed 1 with that of seed `start` as reference."""
    options = {**SHAPE, "reward": varied, **changes}
    config = build(METHODS[name].config, options)
    tokenizer = tokenizer or tiny.tokenizer()
    models = Models(tiny.model(1), tokenizer, frozen_copy(tiny.model(start)), reward=config.reward)
    method = METHODS[name]
    if method.prepare is not None:
        method.prepare(models, config)
    count = prompts or config.batch_size // config.samples_per_prompt
    rows = [
        PromptIds(tokenizer(row["prompt"])["input_ids"], row["prompt"], number=number)
        for number, row in enumerate(tiny.prompts(count), 1)
    ]
    return Bench(name, config, models, rows)
