"""One page for one run, or one page that compares several: `kleash report` and `kleash compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kleash.errors import UsageError
from kleash.report import charts, view
from kleash.report.folder import RunFolder, mapping, read_run, unique_labels
from kleash.report.html import render, write_page
from kleash.report.samples import Column, SideBySide, columns_over_time, final_rows, side_by_side
from kleash.report.table import Entry, ended_shares, measured_columns
from kleash.report.text import format_seconds, format_value, shorten

Sections = list[tuple[str, str]]


def write_report(
    run_paths: Sequence[Path], out: Path, title: str | None = None, labels: Sequence[str] | None = None
) -> Path:
    """Write a self-contained page about one run folder, or comparing several, and return its path.

    Reads only files of the run folders. A missing or half-written file is named on the page. `out` is the
    file to write, or a folder (then report.html in it). Labels default to the folders' names.

    Raises UsageError for a path that is not a run folder, RunError when the page cannot be written.
    """
    if not run_paths:
        raise UsageError("No run folder was given; expected at least one, e.g. `kleash report runs/dpo`.")
    paths = [Path(path) for path in run_paths]
    if labels is not None and len(labels) != len(paths):
        raise UsageError(
            f"{len(labels)} labels were given for {len(paths)} run folders; give one for each, in order."
        )
    names = list(labels) if labels is not None else unique_labels(paths)
    runs = [read_run(path, label) for path, label in zip(paths, names, strict=True)]
    return write_page(_page(runs, title), Path(out))


def _page(runs: list[RunFolder], title: str | None) -> str:
    labels = [run.label for run in runs]
    single = len(runs) == 1
    entries = [Entry(run.label, run.evaluation, run.seconds) for run in runs]
    series = [charts.Series(run.label, run.metrics) for run in runs]
    drift = [charts.frontier_chart(entries)] + charts.path_charts(series)
    first = 1 if single else 0  # one run is not drawn in the grey of a reference
    parts: dict[str, Any] = {
        "columns": measured_columns(entries),
        "intervals": [] if single else charts.interval_charts(entries, labels),
        "statements": [(run.label, found) for run in runs if (found := view.statements(_verdict(run)))],
        "curves": charts.curve_charts(series, labels, first) + charts.pass_rate_charts(series),
        "drift": [chart for chart in drift if chart is not None],
        "samples": _samples(runs),
        "checks": [(run.label, listed) for run in runs if (listed := _checks(run))],
        "conventions": _conventions(runs),
        "settings": [(run.label, run.config) for run in runs if run.config],
        "manifests": [(run.label, facts) for run in runs if (facts := _provenance(run))],
    }
    return render(
        "run.html.j2",
        view.scripts(parts["intervals"], parts["curves"], parts["drift"]),
        kicker="KLeash run" if single else f"KLeash comparison of {len(runs)} runs",
        title=title or (labels[0] if single else shorten(", ".join(labels), 90)),
        notes=[note for run in runs for note in run.notes + view.cautions(run)]
        + ([] if single else view.mismatches(runs)),
        sections=_sections(parts, single),
        runs=runs,
        labels=labels,
        entries=entries,
        colours=view.colours(len(runs) + first)[first:],
        has_ended=ended_shares(entries),
        verdicts=[_headline(run) for run in runs if _verdict(run).get("summary")],
        facts=_facts(runs[0]) if single else [],
        reward_parts=view.reward_parts(runs),
        differing=[] if single else _differing(runs),
        **parts,
    )


def _sections(parts: dict[str, Any], single: bool) -> Sections:
    shown = {
        "columns": ("table", "Measured" if single else "Comparison"),
        "statements": ("verdict", "Verdict"),
        "curves": ("curves", "Training"),
        "drift": ("drift", "Proxy and gold"),
        "samples": ("samples", "Samples"),
        "checks": ("checks", "Checks"),
        "conventions": ("conventions", "Conventions"),
        "settings": ("settings", "Configuration"),
        "manifests": ("provenance", "Provenance"),
    }
    return [shown[key] for key in shown if (parts[key].groups if key == "samples" else parts[key])]


def _verdict(run: RunFolder) -> dict[str, Any]:
    return dict(mapping(run.evaluation.get("verdict")))


def _headline(run: RunFolder) -> dict[str, str]:
    verdict = _verdict(run)
    return {"label": run.label, "summary": str(verdict["summary"]), "tone": view.tone(verdict)}


def _facts(run: RunFolder) -> list[str]:
    """One line under the title: method, model, seed, steps, time."""
    facts = [
        f"{key} {format_value(run.config[key])}"
        for key in ("method", "model", "beta", "seed")
        if key in run.config
    ]
    steps = [row["step"] for row in run.metrics if isinstance(row.get("step"), int)]
    if steps:
        facts.append(f"{max(steps)} steps")
    if run.seconds is not None:
        facts.append(f"{format_seconds(run.seconds)} of training")
    return [*facts, str(run.path)]


def _samples(runs: list[RunFolder]) -> SideBySide:
    if len(runs) == 1:
        return side_by_side(columns_over_time(runs[0].samples))
    return side_by_side([Column(run.label, final_rows(run.samples), index) for index, run in enumerate(runs)])


def _checks(run: RunFolder) -> list[view.Check]:
    return view.checks(run.manifest.get("checks")) or view.checks(run.evaluation.get("checks"))


def _conventions(runs: list[RunFolder]) -> list[tuple[str, dict[str, Any]]]:
    """Conventions and settings of each run's measurement and training; runs that agree are shown once."""
    found: list[tuple[str, dict[str, Any]]] = []
    for run in runs:
        items = view.without(run.manifest.get("conventions", {})) | view.without(
            run.evaluation.get("conventions", {})
        )
        items |= {
            name: value for name, value in view.measurement(run).items() if name != "seconds of measuring"
        }
        for index, (label, known) in enumerate(found):
            if known == items:
                found[index] = (f"{label}, {run.label}", known)
                break
        else:
            if items:
                found.append((run.label, items))
    return found


def _provenance(run: RunFolder) -> dict[str, Any]:
    return view.without(run.manifest, "conventions", "checks")


def _differing(runs: list[RunFolder]) -> list[tuple[str, list[Any]]]:
    """Settings whose values are not the same in all runs (the output folder aside)."""
    keys = list(dict.fromkeys(str(key) for run in runs for key in run.config))
    rows = [(key, [run.config.get(key) for run in runs]) for key in keys if key != "out"]
    return [(key, values) for key, values in rows if len({repr(value) for value in values}) > 1]
