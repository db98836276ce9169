"""Read a run folder as plain files, forgivingly: a missing or half-written file becomes a note."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kleash.errors import UsageError

TRAINING_FILES = ("config.yaml", "manifest.json", "metrics.jsonl")
MEASURED_FILES = ("samples.jsonl", "evaluation.json")
KNOWN_FILES = TRAINING_FILES + MEASURED_FILES

Row = dict[str, Any]


@dataclass
class RunFolder:
    """What one run folder holds. Anything that could not be read is empty here and named in `notes`."""

    path: Path
    label: str
    config: Row = field(default_factory=dict)
    manifest: Row = field(default_factory=dict)
    metrics: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    evaluation: Row = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Training time: `seconds` of the last metrics row, or None when nothing was trained."""
        times = [row["seconds"] for row in self.metrics if isinstance(row.get("seconds"), (int, float))]
        return float(max(times)) if times else None


def read_run(path: Path, label: str | None = None, expected: tuple[str, ...] | None = None) -> RunFolder:
    """Read the run folder at `path`; files in `expected` that are absent are noted.

    By default every file of a run is expected, or samples and evaluation alone in a folder without any trace
    of training (a measured model).

    Raises UsageError when `path` is not a folder, or holds none of the files of a run.
    """
    if not path.is_dir():
        found = "is a file" if path.is_file() else "does not exist"
        raise UsageError(f"{path} {found}; expected a run folder, as `kleash train … out=FOLDER` writes it.")
    if not any((path / name).is_file() for name in KNOWN_FILES):
        raise UsageError(
            f"{path} is not a run folder: it holds none of {', '.join(KNOWN_FILES)}. "
            "Give the folder that was the `out` of a training or a measurement."
        )
    if expected is None:
        trained = any((path / name).is_file() for name in TRAINING_FILES)
        expected = KNOWN_FILES if trained else MEASURED_FILES
    run = RunFolder(path, label or path.resolve().name)
    run.config = _read_object(run, "config.yaml", expected)
    run.manifest = _read_object(run, "manifest.json", expected)
    run.evaluation = _read_object(run, "evaluation.json", expected)
    run.metrics = _read_lines(run, "metrics.jsonl", expected)
    run.samples = _read_lines(run, "samples.jsonl", expected)
    return run


def read_json_file(path: Path, what: str) -> Row:
    """The JSON object in `path`; UsageError (naming line and column) if it is missing or broken."""
    if not path.is_file():
        raise UsageError(f"{path} is missing; expected {what}.")
    try:
        value = json.loads(_read_text(path)[0])
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path} is not complete JSON: {error.msg} at line {error.lineno}, column {error.colno}. "
            f"Expected {what}; if it was cut short, run the command that writes it again."
        ) from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}; expected {what}, a JSON object.")
    return value


def _read_text(path: Path) -> tuple[str, bool]:
    """The file as text, and whether every byte was valid UTF-8 (bad bytes become U+FFFD)."""
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    text = data.decode("utf-8", errors="replace")
    return text, "\ufffd" not in text or "\ufffd".encode() in data


def _read_object(run: RunFolder, name: str, expected: tuple[str, ...]) -> Row:
    path = run.path / name
    if not path.is_file():
        if name in expected:
            run.notes.append(f"{run.label}: {name} is missing.")
        return {}
    text, valid = _read_text(path)
    if not valid:
        run.notes.append(f"{run.label}: {name} holds bytes that are not UTF-8; they are shown as \ufffd.")
    try:
        value = yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)
    except json.JSONDecodeError as error:
        run.notes.append(
            f"{run.label}: {name} is not complete JSON (line {error.lineno}: {error.msg}); left out."
        )
        return {}
    except yaml.YAMLError as error:
        run.notes.append(f"{run.label}: {name} is not valid YAML ({' '.join(str(error).split())}); left out.")
        return {}
    if not isinstance(value, dict):
        run.notes.append(f"{run.label}: {name} does not hold a mapping; left out.")
        return {}
    return value


def _read_lines(run: RunFolder, name: str, expected: tuple[str, ...]) -> list[Row]:
    path = run.path / name
    if not path.is_file():
        if name in expected:
            run.notes.append(f"{run.label}: {name} is missing.")
        return []
    text, valid = _read_text(path)
    if not valid:
        run.notes.append(f"{run.label}: {name} holds bytes that are not UTF-8; they are shown as \ufffd.")
    rows: list[Row] = []
    bad: list[int] = []
    lines = text.split("\n")  # not splitlines(): U+2028 and friends may stand inside a JSON string
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad.append(number)
    if bad == [len(lines)]:
        run.notes.append(f"{run.label}: the last line of {name} was cut short (line {bad[0]}); left out.")
    elif bad:
        where = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        run.notes.append(f"{run.label}: {name} has {len(bad)} unreadable line(s) (line {where}); left out.")
    if not rows and not bad:
        run.notes.append(f"{run.label}: {name} is empty.")
    return rows


def unique_labels(paths: list[Path]) -> list[str]:
    """Folder names as labels, with as many parent folders as it takes to tell equal names apart."""
    resolved = [path.resolve() for path in paths]
    labels = []
    for index, path in enumerate(resolved):
        depth = 1
        while depth < len(path.parts) - 1 and any(
            other.parts[-depth:] == path.parts[-depth:] for other in resolved if other != path
        ):
            depth += 1
        label = "/".join(path.parts[-depth:])
        repeats = resolved[:index].count(path)
        labels.append(label if not repeats else f"{label} ({repeats + 1})")
    return labels


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one: parts of a file may be missing or of a wrong type."""
    return value if isinstance(value, Mapping) else {}
