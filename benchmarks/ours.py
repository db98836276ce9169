"""KLeash's side: `kleash.train` itself, as a user calls it, checks before step 1 and the save included."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.job import Answer, Job
from benchmarks.rows import GROUP, MICRO_BATCHES, planned_steps, vowels
from kleash.training import train as kleash_train


def train(job: Job) -> Answer:
    """Times and losses of every step, from metrics.jsonl."""
    started = time.perf_counter()
    run = kleash_train(job.method, **options(job))
    elapsed = time.perf_counter() - started
    rows = [row for row in run.metrics if row["split"] == "train"]
    seconds = [row["time/step"] for row in rows]
    if job.online:
        tokens = [job.batch_size * job.new_tokens] * job.steps
    else:
        tokens = planned_steps(job.rows, job.method, job.model, job.max_length, job.batch_size).tokens
    return Answer(
        seconds, tokens[: job.steps], [row["loss"] for row in rows], start_seconds=elapsed - sum(seconds)
    )


def options(job: Job) -> dict[str, Any]:
    """The options of a recipe; the last measurement on samples is left out, for the other side has none."""
    extra: dict[str, Any] = {}
    if job.method == "dpo":
        extra["cache_reference"] = job.task == "dpo-cached"
    if job.online:
        extra = {
            "reward": vowels, "beta": 0.0, "samples_per_prompt": GROUP, "max_new_tokens": job.new_tokens,
            "fixed_length": True, "micro_batch_size": job.batch_size // MICRO_BATCHES,
            "log_exact_kl_every": job.steps + 1, "samples_every": job.steps + 1, "samples_kept": 0,
        }  # fmt: skip
    if job.method == "reward":
        extra["eval_data"] = str(Path(job.folder) / "held-out.jsonl")
    return {
        "model": job.model,
        "data": str(job.rows),
        "out": str(Path(job.out) / "run"),
        "steps": job.steps,
        "batch_size": job.batch_size,
        "max_length": job.max_length,
        "learning_rate": job.learning_rate,
        "dtype": job.dtype,
        "eval_fraction": 0.0,
        "measure": False,
        "quiet": True,
        **extra,
    }
