"""Several policies measured on the same prompts, from the same reference: a table, a page, verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kleash.errors import UsageError
from kleash.measure import Evaluation, measure, verdict
from kleash.models.load import check_source
from kleash.report import Entry, write_report
from kleash.run import Run, create_run

REFERENCE = "reference"


@dataclass(frozen=True)
class Comparison:
    """What was measured: an entry a policy for the table, the verdicts on them, and the page."""

    entries: list[Entry]
    verdicts: dict[str, str]
    page: Path


def compare_models(
    models: Sequence[str], *, prompts: Any, out: str | Path, reference: str | None = None, **options: Any
) -> Comparison:
    """Measure the reference and every model on `prompts` into folders of `out`, then write `out`/report.html.

    `models` are run folders or what `load_model` takes by name. Without `reference` the model that the runs
    among them were trained from is taken. `options` (reward, gold, n, …) are those of `measure`. UsageError
    for models trained from different ones, or an `out` in use.
    """
    origin = reference or common_origin(models)
    names = _folder_names(models)
    for model in (origin, *models):
        check_source(model)  # a name that is wrong costs no measurement of the others
    create_run(out)
    shared = {"reference": origin, "prompts": prompts, **options}
    base = measure_into(Path(out) / REFERENCE, origin, **shared)
    entries, verdicts, folders = [Entry(REFERENCE, base)], {}, [Path(out) / REFERENCE]
    for model, name in zip(models, names, strict=True):
        folders.append(Path(out) / name)
        entries.append(Entry(name, measure_into(folders[-1], model, baseline=base, **shared)))
        verdicts[name] = Run(folders[-1]).evaluation["verdict"]["summary"]
    return Comparison(entries, verdicts, write_report(folders, Path(out) / "report.html"))


def measure_into(
    folder: Path,
    model: str,
    *,
    reward: Any = None,
    gold: Any = None,
    baseline: Evaluation | None = None,
    **options: Any,
) -> Evaluation:
    """Measure one model into a folder: evaluation.json (with a verdict against `baseline`), samples.jsonl."""
    run = create_run(folder)
    found = measure(model, reward=reward, gold=gold, **options)
    record = found.to_json(samples=False)
    if baseline is not None:
        # A judge is independent if it is not what was optimised; the same given twice is no second judge.
        independent = gold is not None and gold != reward
        said = verdict(found, baseline, reward_name="the reward", gold_independent=independent)
        record["verdict"] = said.to_json()
    mark = {"step": 0, "policy": folder.name, "measured": True}
    run.append("samples.jsonl", ({**mark, **sample.to_json()} for sample in found.samples))
    run.write_json("evaluation.json", record)
    return found


def common_origin(models: Sequence[str]) -> str:
    """The model that all run folders among `models` were trained from; UsageError where there is none, or
    more than one.
    """
    origins = {origin_of(model) for model in models} - {None}
    if not origins:
        raise UsageError(
            "reference: none of these is a run folder that says which model it was trained from. Give the "
            "model that drift is measured from, for example --reference smollm2-135m."
        )
    if len(origins) > 1:
        raise UsageError(
            f"reference: these were trained from different models ({', '.join(sorted(map(str, origins)))}), "
            "so their drifts cannot be compared. Give the model to measure all of them from with --reference."
        )
    return str(origins.pop())


def origin_of(model: str | Path) -> str | None:
    """The reference recorded in a run folder's config.yaml; None for anything else, or where it was an
    object in memory.
    """
    config = Run(model).config if Path(model).is_dir() else {}
    origin = config.get("reference") or config.get("model")
    return None if origin is None or str(origin).startswith("<") else str(origin)


def _folder_names(models: Sequence[str]) -> list[str]:
    """A folder name for each model: the last part of its path or id, numbered where it comes again."""
    names: list[str] = []
    for model in models:
        name = stem = Path(model).resolve().name if Path(model).exists() else model.replace("/", "--")
        number = 1
        while name in names or name == REFERENCE:
            number += 1
            name = f"{stem}-{number}"
        names.append(name)
    return names
