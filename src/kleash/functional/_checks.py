"""What every function asks of its inputs: one message, at the top, that names the argument."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """At least float32: sums of bfloat16 log-probabilities lose whole nats."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def check_floats(ndim: int | None = None, **tensors: Tensor) -> None:
    """Every tensor is floating point, of the given rank, and shaped like the first."""
    first, lead = next(iter(tensors.items()))
    for name, x in tensors.items():
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}")
        if ndim is not None and x.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimension(s), got shape {tuple(x.shape)}")
        if x.shape != lead.shape:
            shapes = f"{tuple(x.shape)} and {tuple(lead.shape)}"
            raise ValueError(f"{name} and {first} must have the same shape, got {shapes}")


def check_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    """The mask itself, or one that keeps everything."""
    if mask is None:
        return torch.ones(like.shape, dtype=torch.bool, device=like.device)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (True = a real token), got {mask.dtype}")
    if mask.shape != like.shape:
        raise ValueError(f"mask must be {tuple(like.shape)} like the values, got {tuple(mask.shape)}")
    return mask


def check_detached(**tensors: Tensor) -> None:
    """No tensor carries a gradient: it is a constant of the objective, and the caller meant that."""
    for name, x in tensors.items():
        if x.requires_grad:
            raise ValueError(
                f"{name} must not require grad: compute it without gradient or call .detach() on it"
            )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
