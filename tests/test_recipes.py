"""Recipes and examples: every recipe parses, the tiny ones and the examples run on a tiny model."""

from __future__ import annotations

import importlib.util
import math
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kleash
from kleash.config import build, read_recipe
from kleash.data import read_rows
from kleash.lab.openings import EVALUATION_OPENINGS, TRAINING_OPENINGS
from kleash.methods import METHODS

ROOT = Path(__file__).parents[1]
RECIPES = sorted(Path(str(resources.files("kleash") / "recipes")).glob("*.yaml"))
FULL = [path for path in RECIPES if not path.stem.endswith("-tiny")]
TINY = [path for path in RECIPES if path.stem.endswith("-tiny")]
PAIRS = ROOT / "examples" / "pairs.jsonl"


def stem(path: Path) -> str:
    return path.stem


def example(name: str) -> ModuleType:
    """A file of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_method_has_a_recipe_for_own_data_and_a_tiny_one() -> None:
    assert set(METHODS) <= {path.stem for path in FULL}
    assert {path.stem for path in TINY} == {f"{method}-tiny" for method in METHODS}


@pytest.mark.parametrize("path", RECIPES, ids=stem)
def test_recipe_parses_into_its_config(path: Path) -> None:
    method, values = read_recipe(path)
    config = build(METHODS[method].config, values, str(path))
    named = path.stem.removesuffix("-tiny")
    assert named == method or named not in METHODS  # a recipe with another name is a task's, not a method's
    assert config.model == "smollm2-135m"


@pytest.mark.parametrize("path", RECIPES, ids=stem)
def test_recipe_says_how_it_is_run(path: Path) -> None:
    comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(f"kleash train {path.name}" in line for line in comments)


@pytest.mark.parametrize("path", FULL, ids=stem)
def test_long_recipes_save_checkpoints(path: Path) -> None:
    assert read_recipe(path)[1]["save_every"] <= 50


def absolute(value: Any) -> Any:
    """A path of the repository as a recipe names it, wherever the test runs."""
    return str(ROOT / value) if isinstance(value, str) and value.startswith("examples/") else value


@pytest.mark.parametrize("path", TINY, ids=stem)
def test_tiny_recipe_runs_to_its_measurement(path: Path, tiny_folder: Path, tmp_path: Path) -> None:
    method, values = read_recipe(path)
    values = {key: absolute(value) for key, value in values.items()}
    run = kleash.train(
        method, **{**values, "model": tiny_folder, "out": str(tmp_path / "run"), "quiet": True}
    )
    assert [row["step"] for row in run.metrics if row["split"] == "train"] == list(
        range(1, values["steps"] + 1)
    )
    assert (run.model / "config.json").exists()
    if METHODS[method].generates:
        drift = run.evaluation["drift"]
        assert drift["mean"] > 0.0 and drift["count"] == values["eval_prompt_count"] * values["eval_samples"]
    else:
        assert run.evaluation["std"] > 0.0
    if METHODS[method].initial_loss is not None:
        assert run.metrics[0]["loss"] == pytest.approx(math.log(2.0), abs=1e-3)


def test_example_pairs_are_all_kept_by_every_kind_that_recipes_read_them_as() -> None:
    for kind in ("preferences", "demonstrations", "prompts"):
        rows = read_rows(PAIRS, kind, bad_rows="strict")  # type: ignore[arg-type]
        assert len(rows) == 24 and not rows.dropped
    prompts = [row.prompt for row in rows.rows]
    assert len(set(prompts)) == 24
    assert not set(prompts) & {*TRAINING_OPENINGS, *EVALUATION_OPENINGS}


def test_own_reward_is_fooled_by_repetition_and_its_judge_is_not() -> None:
    own = example("own_reward")
    honest, repeated = "It was good and warm.", "good good good good good"
    prompts = ["How was it?"] * 3
    cheerful = own.cheerful(prompts, [honest, repeated, " "])
    varied = own.varied(prompts, [honest, repeated, " "])
    assert cheerful == [2.0, 5.0, None]
    assert varied[0] == 2.0 and varied[1] == pytest.approx(1 - 4 / 5) and varied[2] is None


def test_own_reward_prefers_the_chosen_answers() -> None:
    own = example("own_reward")
    rows = read_rows(PAIRS, "preferences").rows
    chosen, rejected = (own.cheerful([], [getattr(r, side) for r in rows]) for side in ("chosen", "rejected"))
    assert sum(chosen) >= 24 and sum(rejected) <= 2


def test_dpo_in_python_trains_measures_and_concludes(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = example("dpo_in_python").main(model=str(tiny_folder), out=str(tmp_path / "run"), steps=2)
    printed = capsys.readouterr().out
    assert "hacking" in summary and summary in printed
    assert (
        "first loss 0.693" in printed and "before: drift 0 ± 0 nats" in printed and "after: drift" in printed
    )
