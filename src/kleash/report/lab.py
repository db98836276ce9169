"""The lab's page: verdict, final table, checkpoints, curves, rewards against drift, samples side by side.

`lab.json` stands in the lab folder, beside one run folder a policy:

    {"preset", "seed", "model", "machine": {…}, "seconds_total", "skipped": [str],
     "rule": {"positive": n, "negative": n, "cap_share", "crowding_share", "mean"},
     "pairs": {"sampled", "ties", "train", "held_out"},
     "reward_model": {"accuracy", "identity"},
     "policies": [{"name", "label", "path", "seconds"?}, …],          path relative to the lab folder
     "checkpoints": [{"name", "passed": bool|null, "measured", "threshold", "seed_reference"}],
     "verdict": {"hacking": bool|null, "summary",
                 "statements": [{"name", "established": bool|null, "text", "figure"}]},
     "sweep": [{"beta", "reward", "gold", "drift", "drift_stderr"}],
     "conventions": {…}, "checks": [{"name", "passed", "figure"}]}

Every key may be missing; what is missing is named on the page. `seconds` of a policy, when given, stands in
the table in place of the last training time in its metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kleash.errors import UsageError
from kleash.report import charts, view
from kleash.report.folder import RunFolder, mapping, read_json_file, read_run
from kleash.report.html import render, write_page
from kleash.report.samples import Column, final_rows, side_by_side
from kleash.report.table import Entry, ended_shares, measured_columns
from kleash.report.text import finite, format_seconds, format_value

EXPECTED: dict[str, type] = {
    "policies": list,
    "checkpoints": list,
    "verdict": dict,
    "conventions": dict,
    "checks": list,
    "rule": dict,
    "pairs": dict,
    "reward_model": dict,
}


@dataclass
class Lab:
    """A lab folder as read: lab.json and the run folder of every policy that is there."""

    facts: dict[str, Any]
    runs: list[RunFolder]
    seconds: list[float | None]
    notes: list[str] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        return [
            Entry(run.label, run.evaluation, time) for run, time in zip(self.runs, self.seconds, strict=True)
        ]


def write_lab_report(lab_dir: Path) -> Path:
    """Write `lab_dir`/report.html from lab.json and the policies' run folders, and return its path.

    Raises UsageError when lab.json is missing or broken, RunError when the page cannot be written; a policy's
    missing folder or file is named on the page.
    """
    lab = read_lab(Path(lab_dir))
    return write_page(_page(lab), Path(lab_dir) / "report.html")


def read_lab(lab_dir: Path) -> Lab:
    """Read lab.json (format above) and the run folders it names."""
    if not lab_dir.is_dir():
        raise UsageError(
            f"{lab_dir} is not a folder; expected a lab's folder, as `kleash lab --out FOLDER` writes it."
        )
    facts = read_json_file(lab_dir / "lab.json", "the facts of a lab, as `kleash lab` writes them")
    notes = [
        f"lab.json has no {key}." if not facts.get(key) else f"lab.json: {key} is not a {kind.__name__}."
        for key, kind in EXPECTED.items()
        if not facts.get(key) or not isinstance(facts[key], kind)
    ]
    lab = Lab(facts, [], [], notes)
    for number, policy in enumerate(view.records(facts.get("policies")), start=1):
        _add_policy(lab, lab_dir, policy, number)
    return lab


def _add_policy(lab: Lab, lab_dir: Path, policy: Mapping[str, Any], number: int) -> None:
    name, path = policy.get("name"), policy.get("path")
    label = str(policy.get("label") or name or f"policy {number}")
    if not isinstance(path, str) or not path:
        lab.notes.append(f"{label}: lab.json names no folder for it (policies, entry {number}, path).")
        return
    expected: tuple[str, ...] = ("evaluation.json", "samples.jsonl")
    if name != "reference":
        expected += ("metrics.jsonl",)
    try:
        run = read_run(lab_dir / path, label, expected)
    except UsageError as error:
        lab.notes.append(f"{label}: {error}")
        run = RunFolder(lab_dir / path, label)
    lab.runs.append(run)
    lab.seconds.append(finite(policy.get("seconds")) or run.seconds)
    lab.notes += run.notes


def _page(lab: Lab) -> str:
    facts, entries = lab.facts, lab.entries
    labels = [run.label for run in lab.runs]
    verdict = mapping(facts.get("verdict"))
    skipped = facts.get("skipped")
    parts = _parts(lab, labels)
    return render(
        "lab.html.j2",
        view.scripts(parts["intervals"], parts["curves"], parts["drift"]),
        kicker="KLeash lab report",
        title=_headline(verdict.get("hacking")),
        summary=str(verdict.get("summary") or "No verdict was recorded."),
        tone=view.tone(verdict),
        facts=_facts(facts),
        notes=[
            *lab.notes,
            *(note for run in lab.runs for note in view.cautions(run)),
            *view.mismatches(lab.runs),
        ],
        sections=_sections(parts),
        labels=labels,
        entries=entries,
        colours=view.colours(len(labels)),
        has_ended=ended_shares(entries),
        skipped=[str(item) for item in skipped] if isinstance(skipped, list) else [],
        **parts,
    )


def _parts(lab: Lab, labels: list[str]) -> dict[str, Any]:
    """The sections of the page; an empty one is left out of it."""
    facts = lab.facts
    series = [charts.Series(run.label, run.metrics) for run in lab.runs]
    sweep = charts.sweep_chart(view.records(facts.get("sweep")))
    drift = [*charts.path_charts(series), sweep, charts.frontier_chart(lab.entries)]
    columns = [Column(run.label, final_rows(run.samples), index) for index, run in enumerate(lab.runs)]
    return {
        "statements": view.statements(mapping(facts.get("verdict"))),
        "columns": measured_columns(lab.entries),
        "intervals": charts.interval_charts(lab.entries, labels),
        "checkpoints": view.checkpoints(facts.get("checkpoints")),
        "curves": charts.curve_charts(series, labels),
        "drift": [chart for chart in drift if chart is not None],
        "samples": side_by_side(columns),
        "setup": _setup(facts),
        "conventions": dict(mapping(facts.get("conventions"))),
        "checks": view.checks(facts.get("checks")),
    }


def _headline(hacking: Any) -> str:
    if hacking is True:
        return "Without the KL leash, the policy hacked its reward"
    if hacking is False:
        return "Without the KL leash, no reward hacking was found"
    return "Reward hacking was not established"


def _facts(facts: Mapping[str, Any]) -> list[str]:
    shown = [f"{key} {format_value(facts[key])}" for key in ("model", "preset", "seed") if key in facts]
    results = [item.passed for item in view.checkpoints(facts.get("checkpoints"))]
    if results:
        judged = [passed for passed in results if passed is not None]
        skipped = len(results) - len(judged)
        shown.append(
            f"{sum(judged)} of {len(judged)} checkpoints passed" + (f", {skipped} skipped" if skipped else "")
        )
    if finite(facts.get("seconds_total")) is not None:
        shown.append(f"{format_seconds(facts['seconds_total'])} in all")
    return shown


def _sections(parts: dict[str, Any]) -> list[tuple[str, str]]:
    shown = {
        "statements": ("verdict", "Verdict"),
        "columns": ("table", "Final table"),
        "checkpoints": ("checkpoints", "Checkpoints"),
        "curves": ("curves", "Training"),
        "drift": ("drift", "Proxy and gold"),
        "samples": ("samples", "Samples"),
        "setup": ("setup", "How it was made"),
        "conventions": ("conventions", "Conventions"),
        "checks": ("checks", "Checks"),
    }
    return [shown[key] for key in shown if (parts[key].groups if key == "samples" else parts[key])]


def _setup(facts: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    names = {
        "rule": "The hidden rule",
        "pairs": "Preference pairs",
        "reward_model": "Reward model",
        "machine": "Machine",
    }
    words = {
        "positive": "positive words",
        "negative": "negative words",
        "cap_share": "share reaching the cap",
        "crowding_share": "share penalised for crowding",
        "mean": "mean on the reference",
        "held_out": "held-out pairs",
        "train": "training pairs",
        "sampled": "pairs sampled",
        "ties": "ties dropped",
        "accuracy": "held-out accuracy",
        "identity": "trained on text of",
    }
    groups = []
    for key, name in names.items():
        items = mapping(facts.get(key))
        if items:
            groups.append((name, {words.get(str(item), str(item)): value for item, value in items.items()}))
    return groups
