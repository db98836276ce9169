"""A disk that cannot hold the trained model: said before training; where it fills up meanwhile, nothing
trained is lost (kind of report 67).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from kleash.errors import RunError, UsageError
from kleash.lab.tiny import write_tiny_model
from kleash.models import identity, load_model
from kleash.training import train
from kleash.training.save import save_model

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


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Have weights beneath these folders fail as on a full disk, half of them written."""
    real = LlamaForCausalLM.save_pretrained

    def save_pretrained(model: Any, path: Path, **options: Any) -> None:
        if any(path.is_relative_to(folder) for folder in folders):
            (path / "model.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(model, path, **options)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save_pretrained)


@pytest.mark.parametrize("method", ["sft", "reinforce"])
def test_a_disk_that_filled_up_meanwhile_loses_no_training(
    method: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(method, **tiny.options(method, tmp_path / "whole"))
    spare = tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    fill_the_disk(monkeypatch, tmp_path / "a run")
    with pytest.raises(RunError, match="No space left on device") as raised:
        train(method, **tiny.options(method, tmp_path / "a run"))
    run = tmp_path / "a run"
    assert raised.value.exit_code == 1 and sorted(p.name for p in run.iterdir() if "model" in p.name) == []
    move = re.search(r"emptied: (mv .*)", str(raised.value))
    assert move is not None
    subprocess.run(move[1], shell=True, check=True)
    assert identity(load_model(run)[0]) == identity(load_model(whole.path)[0])


def test_a_rescued_model_takes_the_place_of_the_one_before(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny.model(seed=1), tiny.tokenizer(), tmp_path / "run")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fill_the_disk(monkeypatch, tmp_path / f".run.{os.getpid()}.tmp")
    with pytest.raises(RunError) as raised:
        save_model(tiny.model(seed=2), tiny.tokenizer(), tmp_path / "run")
    assert identity(load_model(tmp_path / "run")[0]) == identity(tiny.model(seed=1))
    subprocess.run(str(raised.value).split("emptied: ")[1], shell=True, check=True)
    assert identity(load_model(tmp_path / "run")[0]) == identity(tiny.model(seed=2))


def test_a_disk_and_a_temporary_folder_that_are_both_full_leave_nothing_behind(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    fill_the_disk(monkeypatch, tmp_path)
    options = tiny.options("sft", tmp_path / "run", save_every=2)
    with pytest.raises(RunError, match=r"it is lost, but what was saved before is intact.*resume=true"):
        train("sft", **options)
    assert list(spare.iterdir()) == [] and not list((tmp_path / "run").glob("*model*"))
    monkeypatch.undo()
    resumed = train("sft", **{**options, "resume": True})
    assert load_model(resumed.path)
