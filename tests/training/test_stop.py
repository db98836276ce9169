"""Stopping: Ctrl-C, kill, a full disk, a broken checkpoint; nothing that was saved is lost."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kleash.errors import RunError, UsageError
from kleash.run import Run
from kleash.training import Interrupted, train
from kleash.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from kleash.training.interrupt import Interrupt
from kleash.training.optimizer import make_optimizer

SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import conftest as tiny
import torch
from kleash.errors import KLeashError
from kleash.training import train
torch.set_num_threads(1)
options = tiny.options("dpo", sys.argv[1], **{options!r})
{hook}
try:
    train("dpo", **options)
except KLeashError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""
STOP_AT_7 = """
import kleash.training.loop as loop
step = loop.Loop._step
def _step(self, number, total):
    row = step(self, number, total)
    if number == 7:
        for _ in range(int(sys.argv[2])):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
    return row
loop.Loop._step = _step
"""
KILL_WHILE_SAVING = """
import kleash.training.checkpoint as checkpoint
write = checkpoint._write_tensors
def _write(tensors, path):
    if "step-000004" in str(path) and path.name == "optimizer.safetensors":
        with open(path, "wb") as file:
            file.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    write(tensors, path)
checkpoint._write_tensors = _write
"""


def run_script(folder: Path, hook: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    script = SCRIPT.format(tests=str(here), hook=hook, options=options)
    environment = {
        **os.environ, "PYTHONPATH": str(here.parents[1] / "src"), "OMP_NUM_THREADS": "1",
        "KLEASH_CACHE": str(folder / "cache"),
    }  # fmt: skip
    command = [sys.executable, "-c", script, str(folder / "run"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_report_68_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tiny: Any, tmp_path: Path) -> None:
    done = run_script(tmp_path, STOP_AT_7, "1", steps=20, eval_every=4)
    assert done.returncode == 130, done.stderr
    assert f"kleash train {tmp_path / 'run' / 'config.yaml'} resume=true" in " ".join(done.stderr.split())
    run = Run(tmp_path / "run")
    assert run.metrics[-1]["step"] == 7 and [p.name for p in checkpoints(run.checkpoints)] == ["step-000007"]
    resumed = train("dpo", **tiny.options("dpo", run.path, steps=20, eval_every=4, resume=True))
    whole = train("dpo", **tiny.options("dpo", tmp_path / "whole", steps=20, eval_every=4))
    a, b = (load_file(r.path / "model" / "model.safetensors") for r in (resumed, whole))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert [row["step"] for row in resumed.metrics] == [row["step"] for row in whole.metrics]


def test_report_68_a_second_ctrl_c_quits_at_once(tmp_path: Path) -> None:
    done = run_script(tmp_path, STOP_AT_7, "2", steps=20)
    assert done.returncode == 130 and checkpoints(tmp_path / "run" / "checkpoints") == []


def test_ctrl_c_is_python_s_own_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt(lambda: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupted_has_its_own_exit_code() -> None:
    assert Interrupted("x").exit_code == 130


def test_report_67_kill_9_while_saving_leaves_the_checkpoint_before(tiny: Any, tmp_path: Path) -> None:
    done = run_script(tmp_path, KILL_WHILE_SAVING, steps=6, save_every=2, keep_checkpoints=5)
    assert done.returncode == -signal.SIGKILL
    run = Run(tmp_path / "run")
    assert [p.name for p in checkpoints(run.checkpoints)] == ["step-000002"]
    assert any(path.name.endswith(".tmp") for path in run.checkpoints.iterdir())
    options = {"steps": 6, "save_every": 2, "keep_checkpoints": 5}
    resumed = train("dpo", **tiny.options("dpo", run.path, resume=True, **options))
    whole = train("dpo", **tiny.options("dpo", tmp_path / "whole", **options))
    assert [row["loss"] for row in resumed.metrics] == [row["loss"] for row in whole.metrics]
    assert [p.name for p in sorted(run.checkpoints.iterdir())] == [
        "step-000002",
        "step-000004",
        "step-000006",
    ]


@pytest.fixture
def trained(tiny: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model and an optimizer with moments."""
    from kleash.config import build
    from kleash.methods.sft import Config

    model = tiny.model()
    optimizer = make_optimizer(model, build(Config, {"data": []}))
    model(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    optimizer.step()
    return model, optimizer


def test_report_67_a_full_disk_is_named_and_earlier_checkpoints_stay(trained: Any, tmp_path: Path) -> None:
    """A real failure of the file system (a limit on file size) in the middle of writing."""
    model, optimizer = trained
    save_checkpoint(tmp_path, 1, model, optimizer, {"seconds": 1.0}, keep=3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(RunError, match=r"step-000002 could not be written .* it needs [\d,]+ bytes"):
            save_checkpoint(tmp_path, 2, model, optimizer, {"seconds": 2.0}, keep=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert load_checkpoint(tmp_path / "step-000001", model, optimizer)["seconds"] == 1.0


@pytest.mark.parametrize("damage", ["missing file", "short file", "no state", "half a state"])
def test_report_67_an_incomplete_checkpoint_is_never_taken(damage: str, trained: Any, tmp_path: Path) -> None:
    model, optimizer = trained
    for step in (1, 2):
        save_checkpoint(tmp_path, step, model, optimizer, {}, keep=3)
    broken = tmp_path / "step-000002"
    if damage == "missing file":
        (broken / "optimizer.safetensors").unlink()
    elif damage == "short file":
        (broken / "weights.safetensors").write_bytes((broken / "weights.safetensors").read_bytes()[:-1])
    elif damage == "no state":
        (broken / "state.json").unlink()
    else:
        (broken / "state.json").write_text('{"step": 2, "fi')
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000001"]


def test_only_the_newest_checkpoints_are_kept(trained: Any, tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, *trained, {}, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000010"]


def test_report_77_checkpoints_hold_no_pickle(trained: Any, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, *trained, {}, keep=1)
    assert sorted(p.name for p in path.iterdir()) == [
        "optimizer.safetensors",
        "state.json",
        "weights.safetensors",
    ]
    moments = load_file(path / "optimizer.safetensors")
    assert {key.split("|")[1] for key in moments} == {"step", "exp_avg", "exp_avg_sq"}


def test_a_checkpoint_of_another_model_is_refused(trained: Any, tiny: Any, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, *trained, {}, keep=1)
    with pytest.raises(UsageError, match="is of another model"):
        load_checkpoint(path, tiny.model(hidden=16), trained[1])


def test_report_65_resume_without_a_checkpoint_raises(tiny: Any, tmp_path: Path) -> None:
    train("sft", **tiny.options("sft", tmp_path / "run", steps=1))
    with pytest.raises(UsageError, match="holds no complete checkpoint"):
        train("sft", **tiny.options("sft", tmp_path / "run", steps=2, resume=True))
    with pytest.raises(UsageError, match="no such folder"):
        train("sft", **tiny.options("sft", tmp_path / "absent", resume=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": 1e-3}, "learning_rate=0.001, but the run was started with learning_rate=0.01"),
        ({"data": [{"prompt": "the", "completion": " dog"}] * 9}, "is not what it was"),
        ({"steps": 9}, "which schedule=linear depends on"),
    ],
    ids=["option", "data", "schedule"],
)
def test_resuming_as_another_run_is_refused(
    changed: dict[str, Any], message: str, tiny: Any, tmp_path: Path
) -> None:
    data = tiny.demonstrations(9)
    common = {"save_every": 2, "schedule": "linear", "data": data, "eval_fraction": 0.0}
    train("sft", **tiny.options("sft", tmp_path / "run", steps=2, **common))
    with pytest.raises(UsageError, match=message):
        train(
            "sft", **tiny.options("sft", tmp_path / "run", **{"steps": 2, **common, **changed}, resume=True)
        )


def test_report_65_resume_prints_where_it_goes_on(tiny: Any, tmp_path: Path, capsys: Any) -> None:
    train("sft", **tiny.options("sft", tmp_path / "run", steps=2, save_every=2))
    train("sft", **tiny.options("sft", tmp_path / "run", steps=3, save_every=2, resume=True, quiet=False))
    assert "step 2 of 3 is done" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_is_past_the_steps_asked_for_is_left_as_it_is(tiny: Any, tmp_path: Path) -> None:
    run = train("sft", **tiny.options("sft", tmp_path / "run", steps=4, save_every=2))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"with 2 steps, but 4 are done in .*step-000004.*steps=4 or more"):
        train("sft", **tiny.options("sft", tmp_path / "run", steps=2, save_every=2, resume=True))
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_run_resumed_after_its_last_step_only_measures(tiny: Any, tmp_path: Path) -> None:
    options = {"steps": 2, "save_every": 2, "measure": True}
    first = train("sft", **tiny.options("sft", tmp_path / "run", **options))
    rows, samples, evaluation = first.metrics, first.samples, first.evaluation
    again = train("sft", **tiny.options("sft", tmp_path / "run", resume=True, **options))
    assert (again.metrics, again.samples) == (rows, samples)
    assert (
        again.evaluation["drift"] == evaluation["drift"]
        and again.evaluation["held_out"] == evaluation["held_out"]
    )
    assert json.loads((again.path / "manifest.json").read_text())["method"] == "sft"
