"""The trained model on disk: a folder that `from_pretrained` reads anywhere, there complete or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kleash.errors import RunError, UsageError
from kleash.models import RewardModel
from kleash.models.load import quiet_transformers
from kleash.training.adapters import merged


def check_room(policy: Any, path: Path) -> None:
    """UsageError where the disk has no room for the trained model, before anything is trained for nothing."""
    size = _bytes(policy)
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise UsageError(
            f"out={path.parent}: the trained model needs {size:,} bytes and the disk has {free:,} left. Make "
            "room, or choose another out=."
        )


def _bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def save_model(policy: Any, tokenizer: Any, path: Path) -> None:
    """Write the policy, adapters folded in, and its tokenizer to `path`, replacing what is there once all is
    written.
    """
    model: Any = merged(policy)
    size = _bytes(model)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        with quiet_transformers():
            if isinstance(model, RewardModel):
                model.save(temporary)
            else:
                model.save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
        if path.exists():
            shutil.rmtree(path)
        os.rename(temporary, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"{path} could not be written ({error}); the model needs {size:,} bytes. What was saved before "
            "is intact. Make room; if the run saved checkpoints, resume=true goes on from the newest."
        ) from error
