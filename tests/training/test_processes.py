"""Two gloo processes, started by `accelerate launch`, do what one process does."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parent / "worker.py"
pytestmark = pytest.mark.timeout(300)  # two launches, which a busy machine takes minutes for
OFFLINE = ["sft", "sft-odd", "sft-unequal", "dpo", "dpo-live", "reward"]
ONLINE = ["reinforce", "grpo", "grpo-batch", "dapo", "ppo"]
if find_spec("math_verify"):
    ONLINE.append("reinforce-math")
CASES = [*OFFLINE, *ONLINE]


def start(command: list[str], folder: Path) -> None:
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(WORKER), str(folder), *CASES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same trainings in one process and in two."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    start([sys.executable], one)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    launch = (
        "-m accelerate.commands.launch --num_processes 2 --num_machines 1 --multi_gpu --mixed_precision no"
    )
    start([sys.executable, *launch.split(), "--dynamo_backend", "no", "--main_process_port", port], two)
    return one, two


def record(folder: Path, case: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{case}.rank{rank}.json").read_text())


@pytest.mark.parametrize("case", OFFLINE)
def test_report_56_57_two_processes_are_one_big_batch(case: str, folders: tuple[Path, Path]) -> None:
    """Loss, gradient length and every metric agree, although the ranks hold different numbers of tokens."""
    one, two = record(folders[0], case), record(folders[1], case)
    assert (one["world"], two["world"]) == (1, 2)
    assert len(one["metrics"]) == len(two["metrics"]) > 2
    for alone, together in zip(one["metrics"], two["metrics"], strict=True):
        assert alone.keys() == together.keys()
        for key, value in alone.items():
            if not key.startswith(("seconds", "time/", "tokens/per_second")):
                assert together[key] == (
                    value if isinstance(value, str) else pytest.approx(value, rel=1e-4, abs=1e-5)
                ), key
    assert one["metrics"][0]["loss"] == pytest.approx(two["metrics"][0]["loss"], rel=1e-6)
    assert one["metrics"][0]["optim/grad_norm"] == pytest.approx(
        two["metrics"][0]["optim/grad_norm"], rel=1e-5
    )


@pytest.mark.parametrize("case", CASES)
def test_report_70_ranks_stay_in_step_and_end_with_equal_weights(
    case: str, folders: tuple[Path, Path]
) -> None:
    """Also with three rows on two processes, where one has an empty micro-batch; value models and what a
    method remembers included.
    """
    first, second = (record(folders[1], case, rank) for rank in (0, 1))
    assert (first["identity"], first["memory"]) == (second["identity"], second["memory"])


@pytest.mark.parametrize("case", ONLINE)
def test_two_processes_log_what_one_does(case: str, folders: tuple[Path, Path]) -> None:
    """They sample other responses than one process would; as many, and the same things are known of them."""
    one, two = record(folders[0], case), record(folders[1], case)
    assert (one["world"], two["world"]) == (1, 2) and len(one["metrics"]) == len(two["metrics"]) > 2
    for alone, together in zip(one["metrics"], two["metrics"], strict=True):
        assert alone.keys() == together.keys()
        assert all(math.isfinite(value) for value in together.values() if isinstance(value, float))
    if case.partition("-")[0] not in (
        "reinforce",
        "dapo",
    ):  # one has no memory of prompts; the other samples again as it must
        visits = [sum(map(len, each["memory"]["tries"].values())) for each in (one, two)]
        assert visits[0] == visits[1] > 0
