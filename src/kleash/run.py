"""A run's folder: plain files that anything can read, written so that a crash leaves each of them whole.

runs/NAME/  config.yaml  manifest.json  metrics.jsonl  samples.jsonl  evaluation.json  model/
checkpoints/step-N/
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kleash.errors import RunError, UsageError

FILES = (
    "config.yaml",
    "manifest.json",
    "metrics.jsonl",
    "samples.jsonl",
    "evaluation.json",
    "pass_rates.json",
    "model",
    "checkpoints",
)


class Run:
    """One run folder. Reading is lazy: every property reads its file, absent ones are empty."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The options in force, with `method`."""
        file = self.path / "config.yaml"
        return yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}

    @property
    def manifest(self) -> dict[str, Any]:
        """Versions, hardware, seed, data hashes and counts, conventions, parents."""
        return self._read_json("manifest.json")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl in the order written."""
        return self._read_lines("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Rows of samples.jsonl in the order written."""
        return self._read_lines("samples.jsonl")

    @property
    def evaluation(self) -> dict[str, Any]:
        """The measurement at the end of the run."""
        return self._read_json("evaluation.json")

    @property
    def model(self) -> Path:
        """The folder of the trained model, for `from_pretrained`."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """The folder that holds the checkpoints."""
        return self.path / "checkpoints"

    def write_config(self, values: dict[str, Any]) -> None:
        """Write config.yaml."""
        write_text(self.path / "config.yaml", yaml.safe_dump(values, sort_keys=False, allow_unicode=True))

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the JSON files whole; NaN and infinities are refused, because JSON has none."""
        write_text(self.path / name, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def append(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows to a JSONL file."""
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        with writing(self.path / name, len(text)), open(self.path / name, "a", encoding="utf-8") as file:
            file.write(text)

    def truncate(self, step: int) -> None:
        """Forget metrics and samples later than `step`, and those of an end reached before: a resumed run
        writes nothing twice.
        """
        for name in ("metrics.jsonl", "samples.jsonl"):
            rows = [row for row in self._read_lines(name) if row["step"] <= step and not row.get("measured")]
            if (self.path / name).exists():
                write_text(
                    self.path / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                )

    def _read_json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def _read_lines(self, name: str) -> list[dict[str, Any]]:
        file = self.path / name
        if not file.exists():
            return []
        return list(_whole_lines(file))


def _whole_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file; a last line that a crash cut short is not a row."""
    text = file.read_text(encoding="utf-8", errors="replace")
    for line in text.split("\n")[:-1]:  # not splitlines: JSON may hold U+2028 as it is
        if line.strip():
            yield json.loads(line)


def open_run(path: str | Path) -> Run:
    """Read an old run; UsageError where the folder is not one."""
    run = Run(path)
    if not run.path.is_dir():
        raise UsageError(f"{path} is not a run folder: there is no such folder.")
    if not any((run.path / name).exists() for name in FILES):
        raise UsageError(f"{path} is not a run folder: it holds none of {', '.join(FILES)}.")
    return run


def create_run(path: str | Path, resumable: bool = False) -> Run:
    """A new run in an absent or empty folder; UsageError where the folder is in use or cannot be written.
    `resumable` has the message say how a run that is in it goes on.
    """
    run = Run(path)
    if run.path.is_dir() and any(run.path.iterdir()):
        raise UsageError(
            f"out={run.path}: the folder is not empty. Choose another"
            + (" out=, or resume=true to go on with the run in it." if resumable else " folder.")
        )
    check_writable(run.path)
    return run


def reopen_run(path: str | Path) -> Run:
    """The run in a folder, to be written on; UsageError where there is none or it cannot be written."""
    run = Run(path)
    if not run.path.is_dir():
        raise UsageError(
            f"resume=true, out={run.path}: there is no such folder, so there is no run to go on with."
        )
    check_writable(run.path)
    return run


def free_name(parent: str | Path, name: str) -> Path:
    """The first of `parent/name`, `parent/name-2`, … that does not exist."""
    path, number = Path(parent) / name, 1
    while path.exists():
        number += 1
        path = Path(parent) / f"{name}-{number}"
    return path


def check_writable(path: Path) -> None:
    """Make the folder if it is not there; UsageError where it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(
            f"out={path}: the folder cannot be written ({error.strerror or error}). Choose a folder you may "
            "write to."
        ) from error


@contextmanager
def writing(path: Path, size: int) -> Iterator[None]:
    """Turn a failed write of about `size` bytes into a RunError with the path and what was needed."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror or error}; about {size:,} bytes were needed. "
            "Everything saved before is intact. Make room; a run that saved checkpoints goes on with "
            "resume=true."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a temporary name beside it, to the disk, then renamed."""
    data = text.encode("utf-8")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path, len(data)):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
