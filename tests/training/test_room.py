"""A disk that cannot hold the trained model is said before training, not after it (kind of report 67)."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from kleash.errors import UsageError
from kleash.lab.tiny import write_tiny_model
from kleash.training import train

Usage = namedtuple("Usage", "total used free")


def test_no_room_for_the_model_is_refused_before_step_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "model")
    rows = [{"prompt": "The soup", "completion": f" was {word}"} for word in ("good", "bad", "warm", "cold")]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000, 900, 100))
    with pytest.raises(UsageError, match="the disk has 100 left"):
        train("sft", model=str(model), data=rows, out=str(tmp_path / "run"), eval_fraction=0.0, quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
