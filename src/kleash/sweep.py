"""A grid of training runs, one after the other, and its frontier: reward and gold against drift."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kleash.config import build
from kleash.config import options as describe
from kleash.errors import UsageError
from kleash.report import Entry, write_report
from kleash.run import Run, create_run, write_text
from kleash.training import Interrupted, find_method, train

SETTINGS = "sweep.json"
SUMMARISED = ("reward", "gold", "drift", "distinct_bigrams", "length")


@dataclass(frozen=True)
class Sweep:
    """A finished sweep: its runs in the order of the grid, the summary over seeds, and the page."""

    runs: list[Run]
    summary: list[Entry]
    page: Path


def run_sweep(
    method: str,
    base: Mapping[str, Any],
    grid: Mapping[str, Sequence[str]],
    out: str | Path,
    say: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """Train `method` with the options `base` at every point of `grid`, into a folder of `out` each.

    Called again with the same `out` it skips the runs that are finished and resumes one that was
    interrupted; `grid` may have grown meanwhile, `base` may not have changed. UsageError for an empty grid,
    an unknown key, or an `out` in use.
    """
    check_grid(method, grid)
    points = list(grid_points(grid))
    for point in points:
        build(find_method(method).config, {**base, **point})  # a wrong value costs no run before it
    folder = _open(Path(out), {"method": method, "base": {key: str(value) for key, value in base.items()}})
    runs = []
    for number, point in enumerate(points, start=1):
        say(f"Run {number} of {len(points)}: {point_name(point)}")
        runs.append(_train_point(method, {**base, **point}, folder / point_name(point), say))
    summary = summarise([(point, run) for point, run in zip(points, runs, strict=True)])
    page = write_report(
        [run.path for run in runs], folder / "report.html", title=f"Sweep of {', '.join(grid)}"
    )
    return Sweep(runs, summary, page)


def split_grid(method: str, values: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Overrides parted into fixed options and a grid: a value with commas is a list of points, unless its
    option is a list.
    """
    lists = {o.name for o in describe(find_method(method).config) if o.type.startswith("list of")}
    swept = {key: value.split(",") for key, value in values.items() if "," in value and key not in lists}
    return {key: value for key, value in values.items() if key not in swept}, swept


def check_grid(method: str, grid: Mapping[str, Sequence[str]]) -> None:
    """UsageError unless there is something to sweep, no value is empty or comes twice, and `out` is not
    swept.
    """
    if not grid:
        raise UsageError(
            "there is nothing to sweep: give at least one option several values, for example beta=0.01,0.1."
        )
    for key, values in grid.items():
        if len(set(values)) < len(values) or not all(value.strip() for value in values):
            raise UsageError(f"{key}={','.join(values)}: a value is empty or comes twice. Write key=a,b,c.")
    if "out" in grid:
        raise UsageError("out cannot be swept: each run has its own folder inside --out.")


def grid_points(grid: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Every combination of the values, the last key fastest."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def point_name(point: Mapping[str, str]) -> str:
    """The folder of one point, for example `beta=0.1,seed=0`; separators of paths become dashes."""
    return ",".join(f"{key}={value}" for key, value in point.items()).replace("/", "-").replace("\\", "-")


def summarise(runs: Sequence[tuple[Mapping[str, str], Run]]) -> list[Entry]:
    """One entry for each point with its seeds joined: mean over seeds, and the error of that mean from
    their spread.

    A point with one seed keeps the measurement's own error (over prompts).
    """
    groups: dict[str, list[Run]] = {}
    for point, run in runs:
        label = point_name({key: value for key, value in point.items() if key != "seed"}) or "all seeds"
        groups.setdefault(label, []).append(run)
    return [Entry(label, _joined(group), _seconds(group)) for label, group in groups.items()]


def _joined(runs: Sequence[Run]) -> dict[str, Any]:
    if len(runs) == 1:
        return runs[0].evaluation
    joined: dict[str, Any] = {}
    for name in SUMMARISED:
        means = [found["mean"] for run in runs if (found := run.evaluation.get(name)) is not None]
        if len(means) == len(runs):
            error = statistics.stdev(means) / math.sqrt(len(means))
            joined[name] = {"mean": statistics.fmean(means), "stderr": error, "count": len(means)}
    return joined


def _seconds(runs: Sequence[Run]) -> float | None:
    times = [max((row.get("seconds", 0.0) for row in run.metrics), default=0.0) for run in runs]
    return statistics.fmean(times) if times else None


def _open(folder: Path, settings: dict[str, Any]) -> Path:
    """The sweep's folder: new, or one that holds a sweep of the same method and fixed options."""
    file = folder / SETTINGS
    if not file.exists():
        create_run(folder)
    elif (before := json.loads(file.read_text(encoding="utf-8"))) != settings:
        raise UsageError(
            f"out={folder} holds a sweep with {before}, and this one has {settings}. Choose another --out."
        )
    write_text(file, json.dumps(settings, indent=2) + "\n")
    return folder


def _train_point(method: str, options: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> Run:
    """One run of the grid: finished already, resumed from its checkpoint, or new."""
    run = Run(folder)
    if run.evaluation:
        say(f"{folder} is finished.")
        return run
    resume = run.checkpoints.is_dir() and any(run.checkpoints.glob("step-*"))
    if folder.exists() and not resume:
        shutil.rmtree(folder)  # begun by an earlier call of this sweep and left before its first checkpoint
    try:
        return train(method, **{**options, "out": str(folder), "resume": resume})
    except Interrupted as stopped:
        raise Interrupted(f"{stopped} The same sweep command goes on with all that is left.") from stopped
