"""The trained model on disk: a folder that `from_pretrained` reads anywhere, there complete or not at all."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
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

    Where that fails, the model is written to the system's temporary folder instead, so that its training is
    not lost, and RunError says where it is and how to move it.
    """
    model: Any = merged(policy)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(model, tokenizer, temporary)
        if path.exists():
            shutil.rmtree(path)
        os.rename(temporary, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"{path} could not be written ({error}); the model needs {_bytes(model):,} bytes. "
            + _rescue(model, tokenizer, path)
        ) from error


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    folder.mkdir()
    with quiet_transformers():
        if isinstance(model, RewardModel):
            model.save(folder)
        else:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)


def _rescue(model: Any, tokenizer: Any, path: Path) -> str:
    """Write the model to the system's temporary folder; what became of it, in words."""
    spare: Path | None = None
    try:
        spare = Path(tempfile.mkdtemp(prefix="kleash-")) / path.name
        _write(model, tokenizer, spare)
    except (OSError, SafetensorError) as error:
        if spare is not None:
            shutil.rmtree(spare.parent, ignore_errors=True)
        return (
            f"Nor could the temporary folder take it ({error}), so it is lost, but what was saved before is "
            "intact. Make room; if the run saved checkpoints, resume=true goes on from the newest."
        )
    move = f"mv {shlex.quote(str(spare))} {shlex.quote(str(path))}"
    if path.exists():
        move = f"rm -r {shlex.quote(str(path))} && {move}"
    return (
        f"The trained model is whole in {spare}, and the run ends unmeasured. Make room, and move it before "
        f"the temporary folder is emptied: {move}"
    )
