"""What a figure was measured on: processor, memory, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.job import ROOT

LIBRARIES = ("torch", "transformers", "accelerate", "trl")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, its bfloat16 instructions, and the versions of what is compared."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((line.split(":", 1)[1].split() for line in facts if line.startswith("flags")), [])
    model = next((line.split(":", 1)[1].strip() for line in facts if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "bfloat16": [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags],
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def commit() -> str:
    """The commit that is measured; "+" where the library or the benchmarks have changes beyond it."""
    head = _git("rev-parse", "--short=10", "HEAD")
    return head + ("+" if _git("status", "--porcelain", "--", "src", "benchmarks") else "")


def today() -> str:
    """The date, for the record."""
    return date.today().isoformat()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
