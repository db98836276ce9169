"""What a run will take: memory by part, and time, from one micro-batch forward and backward."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kleash.models import autocast
from kleash.training.adapters import AdaptersOff
from kleash.training.optimizer import trainable
from kleash.training.setup import Job, reward_models


@dataclass(frozen=True)
class Cost:
    """Bytes by part and seconds of an optimizer step, on this process."""

    parts: dict[str, int]
    seconds: float

    @property
    def total(self) -> int:
        """All parts together, bytes."""
        return sum(self.parts.values())


def estimate_cost(job: Job) -> Cost:
    """Try the first micro-batch; nothing is updated. Activations are what it keeps for the backward pass."""
    trained = sum(p.numel() * p.element_size() for p in trainable(job.models.learner).values())
    seconds, activations = _try_step(job)
    parts = {
        "weights": _bytes(job.models.policy),
        "value": _bytes(job.models.value),
        "gradients": trained,
        "optimizer": 2 * trained,
        "reference": _bytes(job.models.reference),
        "reward": sum(_bytes(judge.model) for judge in reward_models(job.models.reward)),
        "activations": activations,
    }
    return Cost(parts, seconds)


def _bytes(model: nn.Module | None) -> int:
    if model is None or isinstance(model, AdaptersOff):
        return 0
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _try_step(job: Job) -> tuple[float, int]:
    """Seconds of a step, extrapolated from its first micro-batch, and bytes kept for the backward pass."""
    started = time.perf_counter()
    with autocast(job.config.dtype, job.processes.device.type):
        batches = [batch for update in job.feed.step(1).updates for batch in update.micro_batches]
    collecting = time.perf_counter() - started
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in job.models.learner.parameters()}
    started = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with autocast(job.config.dtype, job.processes.device.type):
            loss = job.method.loss(job.models, batches[0], job.config).per_item.sum()
        loss.backward()
    seconds = time.perf_counter() - started
    for parameter in job.models.learner.parameters():
        parameter.grad = None
    return collecting + seconds * len(batches), sum(size for at, size in kept.items() if at not in weights)
