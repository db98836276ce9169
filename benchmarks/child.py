"""One measurement in a process of its own: `python -m benchmarks.child job.json answer.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.job import Answer, Job, load_request, peak_resident_bytes
from kleash.allocator import keep_freed_memory


def main(request: str, reply: str) -> None:
    """Do what the request says and write what was measured. Both sides get the allocator settings that
    `kleash` sets for itself; KLEASH_MALLOC=default leaves both without.
    """
    keep_freed_memory()
    job = load_request(request)
    torch.set_num_threads(job.threads)
    answer = chosen(job)(job)
    answer.peak_bytes = peak_resident_bytes()
    Path(reply).write_text(json.dumps(asdict(answer)), encoding="utf-8")


def chosen(job: Job) -> Callable[[Job], Answer]:
    """The code for a task and side; imported only now, so that neither side carries the other's libraries."""
    if job.task.startswith("sampling"):
        from benchmarks import sampling

        return sampling.ours if job.side == "kleash" else sampling.theirs
    if job.side == "kleash":
        from benchmarks import ours

        return ours.train
    from benchmarks import theirs

    return theirs.train


if __name__ == "__main__":
    main(*sys.argv[1:])
