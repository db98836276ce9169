"""Options: what a recipe, an override and Python may say, and what they are told when it is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from kleash.config import build, option, options, parse_overrides, read_recipe, resolved
from kleash.errors import UsageError
from kleash.methods import METHODS


@dataclass(kw_only=True)
class Example:
    size: int = option(4, "a size", minimum=1, maximum=10)
    rate: float = option(0.5, "a rate", above=0.0)
    flag: bool = option(False, "a flag")
    shape: Literal["round", "square"] = option("round", "a shape")
    limit: int | None = option(None, "a limit", minimum=1)
    weights: list[float] = option([], "weights")
    source: Any = option(None, "anything")


def test_text_is_read_by_the_annotation() -> None:
    text = parse_overrides(
        ["size=3", "rate=1e-5", "flag=yes", "shape=square", "limit=none", "weights=1,2.5,3"]
    )
    made = build(Example, text)
    assert made == Example(size=3, rate=1e-5, flag=True, shape="square", limit=None, weights=[1.0, 2.5, 3.0])


def test_yaml_one_point_numbers_are_numbers() -> None:
    """YAML 1.1 reads 1e-5 as text."""
    assert build(Example, yaml.safe_load("rate: 1e-5\nsize: 8.0")) == Example(rate=1e-5, size=8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"szie": 3}, "there is no option szie: did you mean size?"),
        ({"size": "many"}, "size=many is not a whole number"),
        ({"size": 2.5}, "size=2.5 is not a whole number"),
        ({"size": True}, "size=True is not a whole number"),
        ({"size": 11}, "size=11 is outside its limits: at least 1 and at most 10"),
        ({"rate": 0}, "rate=0.0 is outside its limits: above 0"),
        ({"rate": float("nan")}, "rate=nan is not a finite number"),
        ({"flag": "maybe"}, "flag=maybe is not true or false"),
        ({"shape": "sqare"}, "shape=sqare is not one of round, square. Did you mean square?"),
        ({"limit": 0}, "limit=0 is outside its limits"),
        ({"weights": "1,x"}, "weights=x is not a finite number"),
    ],
)
def test_report_65_a_wrong_option_names_key_value_and_what_was_expected(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        build(Example, values, where="recipe.yaml")
    assert str(raised.value).startswith("recipe.yaml: ") and message in str(raised.value)


def test_overrides_need_an_equals_sign_and_one_value() -> None:
    with pytest.raises(UsageError, match="write key=value"):
        parse_overrides(["beta"])
    with pytest.raises(UsageError, match="given twice"):
        parse_overrides(["beta=1", "beta=2"])
    assert parse_overrides(["--learning-rate=1", "reward=a.py:f=g"]) == {
        "learning_rate": "1",
        "reward": "a.py:f=g",
    }


def test_recipe_is_a_flat_mapping_with_a_method(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("\ufeffmethod: dpo\nbeta: 0.1\n", encoding="utf-8")
    assert read_recipe(path) == ("dpo", {"beta": 0.1})
    for text, message in [
        ("beta: 1", "does not say which method"),
        ("- a", "must hold lines"),
        ("a: [", "is not YAML"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_recipe(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_recipe(tmp_path / "absent.yaml")


def test_a_key_twice_in_a_recipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("method: dpo\nbeta: 0.1\nbeta: 0.2\n", encoding="utf-8")
    with pytest.raises(UsageError, match="twice.yaml is not YAML: found 'beta' twice"):
        read_recipe(path)


@pytest.mark.parametrize("method", METHODS)
def test_every_option_of_every_method_is_documented_and_survives_yaml(method: str) -> None:
    kind = METHODS[method].config
    assert all(o.help and not o.help.endswith(".") for o in options(kind))
    required = {"data": "rows.jsonl", "reward": "length:20"}
    made = build(kind, required)
    again = build(kind, yaml.safe_load(yaml.safe_dump(resolved(made))))
    assert again == made


def test_objects_are_named_in_the_resolved_copy() -> None:
    assert resolved(Example(source=print))["source"] == "<print>"
    assert resolved(Example(source={"a": 1.0}))["source"] == {"a": 1.0}


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("dpo", {}, "option data is missing"),
        ("dpo", {"data": "x", "beta": -1}, "beta=-1.0 is outside"),
        ("dpo", {"data": "x", "resume": True}, "resume=true needs out"),
        ("sft", {"data": "x", "lora_alpha": 8}, "no effect without lora_rank"),
        ("reinforce", {"data": "x"}, "reward is missing"),
        (
            "reinforce",
            {"data": "x", "reward": "length:3", "batch_size": 7, "samples_per_prompt": 2},
            "whole groups",
        ),
        (
            "reinforce",
            {"data": "x", "reward": "length:3", "max_length": 8, "max_new_tokens": 8},
            "no room for a prompt",
        ),
    ],
)
def test_options_that_contradict_one_another(method: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(METHODS[method].config, values)
