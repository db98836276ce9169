"""Checkpoints: a folder that appears complete or not at all. Plain safetensors and JSON, nothing that could
run code.

    checkpoints/step-000010/  weights.safetensors  optimizer.safetensors  state.json

Holds the weights that learn. Randomness needs no state: every step seeds itself from the run's seed and its
number.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kleash.errors import RunError, UsageError
from kleash.training.optimizer import trainable

STATE, WEIGHTS, OPTIMIZER = "state.json", "weights.safetensors", "optimizer.safetensors"


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write `folder/step-NNNNNN` under a temporary name and rename it when all of it is on the disk; then
    drop the oldest.

    A failed write leaves earlier checkpoints as they are and raises RunError with the path and the bytes
    needed.
    """
    weights: dict[str, Tensor] = {name: p.detach().cpu().contiguous() for name, p in trainable(model).items()}
    moments = _optimizer_tensors(model, optimizer)
    size = sum(t.numel() * t.element_size() for t in (*weights.values(), *moments.values()))
    final = folder / f"step-{step:06d}"
    if final in checkpoints(folder):
        return final  # saved a moment ago; the same step is the same bits
    temporary = folder / f".step-{step:06d}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        _write_tensors(weights, temporary / WEIGHTS)
        _write_tensors(moments, temporary / OPTIMIZER)
        files = {name: (temporary / name).stat().st_size for name in (WEIGHTS, OPTIMIZER)}
        (temporary / STATE).write_text(
            json.dumps({"step": step, "files": files, **state}, indent=2), encoding="utf-8"
        )
        _sync(temporary / STATE)
        _sync(temporary)
        if final.exists():
            shutil.rmtree(final)  # incomplete, or it would have been returned above
        os.rename(temporary, final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"checkpoint {final} could not be written ({error}); it needs {size:,} bytes. Earlier "
            f"checkpoints are intact: {_names(folder)}. Make room; resume=true goes on from the newest of "
            "them."
        ) from error
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. What a crash left half-written is not among them."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name) and _complete(path)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def remove_leftovers(folder: Path) -> None:
    """Delete what interrupted writes left behind."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's weights and moments in place; returns its state. UsageError where it is of another
    model.
    """
    parameters = trainable(model)
    weights, moments = load_file(path / WEIGHTS), load_file(path / OPTIMIZER)
    if set(weights) != set(parameters) or any(weights[n].shape != p.shape for n, p in parameters.items()):
        raise UsageError(
            f"checkpoint {path} is of another model: it holds {len(weights)} weights and the model in the "
            f"options has {len(parameters)} that learn, with other names or shapes. Resume with the options "
            "the run was started with."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    for key, tensor in moments.items():
        name, slot = key.split("|")
        optimizer.state[parameters[name]][slot] = tensor.to(parameters[name].device)
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}|{slot}": value.detach().cpu().contiguous()
        for name, parameter in trainable(model).items()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    _sync(path)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(path: Path) -> bool:
    """Whether every file a checkpoint lists is there in full."""
    if not (path / STATE).exists():
        return False
    try:
        files = json.loads((path / STATE).read_text(encoding="utf-8"))["files"]
    except (json.JSONDecodeError, KeyError):
        return False
    return all(
        (path / name).exists() and (path / name).stat().st_size == size for name, size in files.items()
    )


def _names(folder: Path) -> str:
    return ", ".join(path.name for path in checkpoints(folder)) or "none yet"
