"""The trained model on disk: a folder that `from_pretrained` reads anywhere, there complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging as hf_logging

from kleash.errors import RunError
from kleash.models import RewardModel
from kleash.training.adapters import merged


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers shows a bar for every file it writes; ours is enough."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def save_model(policy: Any, tokenizer: Any, path: Path) -> None:
    """Write the policy, adapters folded in, and its tokenizer to `path`, replacing what is there once all is
    written.
    """
    model: Any = merged(policy)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
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
            "is intact: make room and go on with resume=true."
        ) from error
