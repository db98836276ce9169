"""Parts of files -> what the templates show: verdicts, checks, settings; tolerant of odd entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kleash.report.charts import series_colour
from kleash.report.folder import RunFolder, mapping
from kleash.report.html import asset, chart_library
from kleash.report.samples import final_rows
from kleash.report.text import Figure, figure, finite, format_number, format_value, nonnegative


@dataclass(frozen=True)
class Statement:
    """One sentence of a verdict: established True, False, or None when it was not measured."""

    name: str
    established: bool | None
    text: str
    figure: str


@dataclass(frozen=True)
class Check:
    """One invariant that was checked: passed True, False, or None when it was not checked."""

    name: str
    passed: bool | None
    figure: str


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of the lab, with what was measured, what was asked, and where the seeds ask it."""

    name: str
    passed: bool | None
    measured: str
    threshold: str
    seed_reference: str


def records(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; anything else yields none."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, (list, tuple)) else []


def _truth(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _words(value: Any) -> str:
    """Text as it is, a number formatted, nothing for None."""
    if finite(value) is not None:
        return format_number(value)
    return "" if value is None else str(value)


def statements(verdict: Mapping[str, Any]) -> list[Statement]:
    """The statements of a verdict as evaluation.json and lab.json hold them."""
    return [
        Statement(
            _words(item.get("name")),
            _truth(item.get("established")),
            _words(item.get("text")),
            _words(_figure(item)),
        )
        for item in records(verdict.get("statements"))
    ]


def _figure(statement: Mapping[str, Any]) -> Any:
    value = statement.get("figure")
    number = finite(value)
    return nonnegative(number) if number is not None and statement.get("name") == "drift" else value


def checks(value: Any) -> list[Check]:
    """Checks as a list of {"name", "passed", "figure"}, or as a mapping of name -> passed."""
    if isinstance(value, Mapping):
        return [
            Check(str(name), _truth(passed), "" if isinstance(passed, bool) else _words(passed))
            for name, passed in value.items()
        ]
    return [
        Check(_words(item.get("name")), _truth(item.get("passed")), _words(item.get("figure")))
        for item in records(value)
    ]


def checkpoints(value: Any) -> list[Checkpoint]:
    """The checkpoint table of lab.json."""
    return [
        Checkpoint(
            _words(item.get("name")),
            _truth(item.get("passed")),
            *(_words(item.get(key)) for key in ("measured", "threshold", "seed_reference")),
        )
        for item in records(value)
    ]


def tone(verdict: Mapping[str, Any]) -> str:
    """How the verdict box is coloured: bad where hacking is established, good where it was looked for."""
    return {True: "bad", False: "good", None: "open"}[_truth(verdict.get("hacking"))]


def colours(count: int) -> list[str]:
    """Theme colours of the first `count` series."""
    return [series_colour(index) for index in range(count)]


def scripts(*charts: Sequence[Any]) -> list[str]:
    """The scripts a page needs: the chart library only when there is a chart."""
    return ([chart_library()] if any(charts) else []) + [asset("page.js")]


MEASUREMENT = {
    "prompts": "prompts",
    "samples_per_prompt": "samples per prompt",
    "max_new_tokens": "longest response, tokens",
    "temperature": "temperature",
    "fixed_length": "fixed length",
    "seed": "seed",
    "seconds": "seconds of measuring",
    "sampler_gap": "sampled against recomputed log-prob, mean gap",
}


def measurement(run: RunFolder) -> dict[str, Any]:
    """How a run was measured, in words."""
    return {
        name: run.evaluation[key] for key, name in MEASUREMENT.items() if run.evaluation.get(key) is not None
    }


def cautions(run: RunFolder) -> list[str]:
    """What the measurement itself warns of: its warnings, and responses without a reward."""
    warnings = run.evaluation.get("warnings")
    found = [f"{run.label}: {warning}" for warning in warnings] if isinstance(warnings, list) else []
    for name, count in mapping(run.evaluation.get("missing")).items():
        if finite(count):
            found.append(
                f"{run.label}: {format_number(count)} responses have no {name}; its mean is over the others."
            )
    return found


def reward_parts(runs: Sequence[RunFolder]) -> list[tuple[str, list[Figure | None]]]:
    """Each part of a combined reward, with its mean in every run."""
    parts = [mapping(run.evaluation.get("reward_parts")) for run in runs]
    names = dict.fromkeys(name for part in parts for name in part)
    return [(str(name), [figure(part.get(name)) for part in parts]) for name in names]


def mismatches(runs: Sequence[RunFolder]) -> list[str]:
    """Why the runs' numbers should not be set side by side: other prompts, or other settings."""
    found = []
    for key in (
        "prompts",
        "prompts_hash",
        "samples_per_prompt",
        "max_new_tokens",
        "temperature",
        "fixed_length",
    ):
        values = {run.label: run.evaluation[key] for run in runs if key in run.evaluation}
        if len({str(value) for value in values.values()}) < 2:
            continue
        if key == "prompts_hash":
            found.append("The runs were measured on different prompts; compare their numbers with care.")
            continue
        said = ", ".join(f"{label} {format_value(value)}" for label, value in values.items())
        found.append(
            f"The runs were measured with different settings, {MEASUREMENT[key]}: {said}; compare with care."
        )
    sampled = [final_rows(run.samples) for run in runs if run.samples]
    prompts = [frozenset(str(row.get("prompt")) for row in rows) for rows in sampled]
    if len(set(prompts)) > 1:
        found.append("The sampled prompts differ between the runs; only shared prompts stand side by side.")
    return found


def without(items: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A copy of the mapping without some keys, keys as text."""
    return {str(key): value for key, value in mapping(items).items() if key not in names}
