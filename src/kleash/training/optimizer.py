"""AdamW over float32 weights, and the learning rate as a function of the step alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kleash.errors import UsageError
from kleash.methods.options import TrainConfig


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name; a tied one comes once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on matrices only. Weights below float32 raise UsageError: small steps would
    be lost in them.
    """
    parameters = trainable(model)
    low = [name for name, p in parameters.items() if p.dtype not in (torch.float32, torch.float64)]
    if low:
        raise UsageError(
            f"model: {low[0]} and {len(low) - 1} more weights are {parameters[low[0]].dtype}; steps of 1e-4 "
            "on a weight of 1 are lost in that format. Give the model in float32; dtype=bfloat16 sets the "
            "precision of its products alone."
        )
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        fused=True,
    )


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """The rate of step `step` (from 1) of `total`: rising over warmup_steps, then constant, or falling to 0
    after the last.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - 1 - config.warmup_steps) / max(1, total - config.warmup_steps)
    shape = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * shape


def clip_gradient(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale the gradient down to `limit` where it is longer; returns its length before that (inf or nan if it
    is broken).
    """
    return torch.nn.utils.clip_grad_norm_(parameters, limit, error_if_nonfinite=False)
