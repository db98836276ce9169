"""One measurement: what the parent asks of a child process, and what the child answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kleash.errors import RunError

ROOT = Path(__file__).resolve().parents[1]
Task = Literal["sft", "reward", "dpo", "dpo-cached", "grpo", "rloo", "sampling-grouped", "sampling-distinct"]
Side = Literal["kleash", "trl", "generate-autocast", "generate-bfloat16"]


@dataclass(frozen=True)
class Job:
    """A task for one side in one process. `folder` holds the rows; `out` is for what the run writes."""

    task: Task
    side: Side
    model: str
    folder: str
    threads: int
    max_length: int = 256
    batch_size: int = 4
    steps: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    learning_rate: float = 1e-6
    new_tokens: int = 48
    repeats: int = 0
    out: str = ""

    @property
    def method(self) -> str:
        """The training method, whichever variant of it is measured."""
        return self.task.removesuffix("-cached")

    @property
    def rows(self) -> Path:
        """The file of rows it trains on."""
        names = {"sft": "demonstrations", "grpo": "questions", "rloo": "questions"}
        return Path(self.folder) / f"{names.get(self.task, 'pairs')}.jsonl"

    @property
    def online(self) -> bool:
        """Whether the task trains on what it samples."""
        return self.task in ("grpo", "rloo")


@dataclass
class Answer:
    """What a child measured. seconds: of each optimizer step, or of each repetition of a sampling call.
    tokens: real tokens of each step, or new tokens of each call. losses: of each step, in full precision.
    peak_bytes: largest resident memory of the process over its life. start_seconds: from the request to the
    first step, models loaded and data prepared.
    """

    seconds: list[float]
    tokens: list[int]
    losses: list[float] = field(default_factory=list)
    start_seconds: float = 0.0
    peak_bytes: int = 0


def run_job(job: Job, *, keep_memory: bool = True) -> Answer:
    """Run a job in a process of its own; RunError with the end of its output where it fails."""
    with tempfile.TemporaryDirectory(prefix="kleash-benchmark-") as out:
        request, reply = Path(out) / "job.json", Path(out) / "answer.json"
        request.write_text(json.dumps({**asdict(job), "out": out}), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.child", str(request), str(reply)],
            cwd=ROOT,
            env=environment(job, Path(out), keep_memory),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode or not reply.exists():
            tail = "\n".join(done.stdout.splitlines()[-25:])
            raise RunError(f"{job.task} on the side of {job.side} failed (exit {done.returncode}):\n{tail}")
        return Answer(**json.loads(reply.read_text(encoding="utf-8")))


def environment(job: Job, out: Path, keep_memory: bool) -> dict[str, str]:
    """The child's environment: threads, no hub, caches of its own so that nothing is warm, allocator."""
    values = {
        "OMP_NUM_THREADS": str(job.threads),
        "MKL_NUM_THREADS": str(job.threads),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(out / "datasets"),
        "KLEASH_CACHE": str(out / "kleash"),
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    return {**os.environ, **values, "KLEASH_MALLOC": "keep" if keep_memory else "default"}


def peak_resident_bytes() -> int:
    """The largest resident memory this process has had (VmHWM)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RunError("/proc/self/status has no VmHWM line: peak memory is measured on Linux alone.")


def load_request(file: str) -> Job:
    """The job a parent wrote."""
    values: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    return Job(**values)
