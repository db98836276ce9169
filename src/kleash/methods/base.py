"""What a method is: a Config, a loss over a batch, and how its rows become batches. The loop knows nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kleash.data.items import Example
from kleash.data.sources import Kind
from kleash.data.tokenise import Tokenised
from kleash.methods.options import TrainConfig
from kleash.models.value import ValueModel

Sums = dict[
    str, tuple[float, float]
]  # name -> (sum, count): the mean over micro-batches and processes is sum / count


@dataclass
class Memory:
    """What an online method carries from step to step: plain data, saved with every checkpoint, equal on all
    processes.

    beta: the KL coefficient as it stands, where it is controlled. tries: for each prompt by its row number,
    [step, right, scored] of each of its visits.
    """

    beta: float | None = None
    tries: dict[int, list[list[int]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it (keys are texts there)."""
        return {"beta": self.beta, "tries": {str(k): v for k, v in self.tries.items()}}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take over what `to_json` gave."""
        self.beta = record["beta"]
        self.tries = {int(k): v for k, v in record["tries"].items()}


@dataclass
class Models:
    """Everything a loss may look at. `policy` is what is trained; the reference never learns."""

    policy: nn.Module
    tokenizer: Any
    reference: nn.Module | None = None
    reward: Callable[..., Any] | None = None
    gold: Callable[..., Any] | None = None
    reference_logps: Tensor | None = (
        None  # (items, responses of an item): log π_ref(y|x) by data-set position, if cached
    )
    value: ValueModel | None = None  # PPO's estimate of the return
    mixed: list[Example] = field(default_factory=list)  # demonstrations mixed in (PPO-ptx)
    memory: Memory = field(default_factory=Memory)

    @property
    def learner(self) -> nn.Module:
        """Everything that learns, under the names in checkpoints: the policy, and the value model if any."""
        if self.value is None:
            return self.policy
        return nn.ModuleDict({"policy": self.policy, "value": self.value})


@dataclass
class LossOutput:
    """The loss of each item of a batch (a token, a pair, a response), to be summed and divided by the step's
    count.
    """

    per_item: Tensor
    metrics: Sums = field(default_factory=dict)


@dataclass
class Update:
    """One gradient step's micro-batches, and the number of items that their summed losses are divided by."""

    micro_batches: list[Any]
    items: float


@dataclass
class Step:
    """One step's work on this process: an update of an offline method; of an online one, all the updates
    that are made on its rollouts.
    """

    updates: list[Update]
    metrics: Sums = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Context:
    """Where an online step stands. `gather` joins equally shaped tensors of all processes along their first
    axis.
    """

    step: int
    generator: torch.Generator
    gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
    keep_samples: bool = False
    exact_kl: bool = False
    more: Callable[[int], Sequence[Any]] = lambda count: []  # further prompts, where groups are resampled


@dataclass(frozen=True)
class Method:
    """One row of the table of methods.

    kind: the rows it reads. tokenise(rows, tokenizer, config) -> Tokenised. loss(models, batch, config) ->
    LossOutput. An offline method has collate(items, pad_id, index), count(batch) -> items in it, and
    rows_per_item; an online one collect(models, prompts, config, context) -> Step instead, and probe, which
    measures without making updates. build(model, tokenizer, config) -> the module to train, the model itself
    unless given. prepare(models, config) adds what the method needs beside the policy. finish(policy,
    batches, config) -> a record kept with the model and in evaluation.json.
    """

    name: str
    summary: str
    config: type[TrainConfig]
    kind: Kind
    tokenise: Callable[..., Tokenised[Any]]
    loss: Callable[[Models, Any, Any], LossOutput]
    conventions: Callable[[Any], Mapping[str, str]]
    collate: Callable[..., Any] | None = None
    count: Callable[[Any], int] | None = None
    rows_per_item: int = 1
    collect: Callable[[Models, Sequence[Any], Any, Context], Step] | None = None
    probe: Callable[[Models, Sequence[Any], Any, Context], Step] | None = None
    build: Callable[..., nn.Module] | None = None
    prepare: Callable[[Models, Any], None] | None = None
    finish: Callable[[Any, Iterable[Any], Any], dict[str, Any]] | None = None
    initial_loss: Callable[[Any], float] | None = None
    notes: Callable[[Any], list[str]] = lambda config: []  # what a default takes for granted
    uses_reference: bool = False
    sums: Callable[..., Tensor] | None = (
        None  # (model, batch) -> (items, responses): what the reference cache holds
    )

    @property
    def online(self) -> bool:
        """Whether it trains on text it samples itself."""
        return self.collect is not None

    @property
    def generates(self) -> bool:
        """Whether what it trains is a language model, whose samples can be measured."""
        return self.build is None


def total(values: Tensor, count: float | None = None) -> tuple[float, float]:
    """A metric of a batch as (sum, count), detached from the graph."""
    return float(values.detach().double().sum()), float(values.numel() if count is None else count)
