"""Run some trainings in a process of their own: `worker.py OUT NAME…`; started by tests, alone or by
accelerate.

Each process writes what it ended with to OUT/NAME.rankN.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import conftest as tiny
from kleash.config import build
from kleash.models import identity
from kleash.training.api import _open, _start, find_method
from kleash.training.console import Console
from kleash.training.loop import Loop
from kleash.training.processes import Processes
from kleash.training.setup import prepare

torch.set_num_threads(1)

# Rank 0 gets the row of nine trained tokens, rank 1 that of two.
UNEQUAL = [
    {"prompt": "the cat", "completion": " sat on the mat and then ran home"},
    {"prompt": "the dog", "completion": " home"},
]
CASES: dict[str, dict[str, Any]] = {
    "sft": {"micro_batch_size": 1},
    "sft-odd": {"data": tiny.demonstration_rows(3), "eval_fraction": 0.0, "batch_size": 3, "steps": 3},
    "sft-unequal": {"data": UNEQUAL, "eval_fraction": 0.0, "batch_size": 2, "steps": 3},
    "dpo": {"micro_batch_size": 1},
    "dpo-live": {"cache_reference": False},
    "reward": {
        "learning_rate": 1e-3
    },  # the head starts at 0 and Adam magnifies the rounding of small gradients
    "reinforce": {},
    "reinforce-math": {"reward": ["math:want", tiny.count_good]},  # a verifier's children beside each rank
    "grpo": {
        "minibatches": 2,
        "rollout_epochs": 2,
        "curriculum": "edge",
        "kl_control": "constraint",
        "kl_target": 0.5,
        "batch_size": 16,
        "steps": 3,
    },
    "grpo-batch": {"scale": "batch_std", "micro_batch_size": 4, "batch_size": 16, "steps": 2},
    "dapo": {"batch_size": 16, "steps": 2},
    "ppo": {
        "value": "separate",
        "ptx_data": tiny.demonstration_rows(5),
        "ptx_coef": 0.5,
        "ptx_batch_size": 2,
        "batch_size": 16,
        "steps": 3,
    },
}


def run_case(name: str, out: Path) -> None:
    """Train one case and record what this process ends with."""
    method = find_method(name.split("-")[0])
    config = build(method.config, tiny.options(method.name, out / name, eval_every=2, **CASES[name]))
    processes = Processes()
    run = _open(config, processes)
    job = prepare(method, config, processes)
    loop = Loop(job, run, Console(quiet=True))
    _start(job, run, loop, Console(quiet=True))
    loop.train()
    memory = job.models.memory.to_json()
    record = {"identity": identity(job.models.learner), "world": processes.world, "metrics": run.metrics,
              "memory": memory}  # fmt: skip
    processes.wait()
    (out / f"{name}.rank{processes.rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    os.environ["KLEASH_CACHE"] = str(Path(sys.argv[1]) / f"cache{os.environ.get('RANK', '')}")
    for case in sys.argv[2:]:
        run_case(case, Path(sys.argv[1]))
