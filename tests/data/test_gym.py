"""Prompts of reasoning-gym by name."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from typing import Any

import pytest

from kleash.data import read_rows
from kleash.data.gym import parse_task
from kleash.errors import UsageError
from kleash.verifiers import pool

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra verifiers")


def rows(source: str) -> list[Any]:
    return read_rows(source, "prompts").rows


def test_a_row_holds_prompt_answer_task_and_entry() -> None:
    found = read_rows("gym:letter_counting?size=3&min_words=5&max_words=6", "prompts")
    assert len(found) == 3 and found.source == "gym:letter_counting?size=3&min_words=5&max_words=6"
    for row in found.rows:
        entry = ast.literal_eval(row.columns["gym_entry"])
        assert row.columns["gym_task"] == "letter_counting?min_words=5&max_words=6"
        assert (row.prompt, row.columns["answer"]) == (entry["question"], entry["answer"])
        assert 5 <= len(entry["metadata"]["span"]) <= 6


def test_the_same_source_gives_the_same_rows_and_hash() -> None:
    one, other = (read_rows("gym:chain_sum?size=5&seed=3", "prompts") for _ in range(2))
    assert one.rows == other.rows and one.sha256 == other.sha256
    assert read_rows("gym:chain_sum?size=5&seed=4", "prompts").sha256 != one.sha256


@pytest.mark.parametrize("task", ["letter_counting", "chain_sum", "family_relationships"])
def test_another_seed_shares_no_entry(task: str) -> None:
    """With the package's own numbering seeds 0 and 1 share 199 of these 200 entries."""
    train, held_out = ({row.prompt for row in rows(f"gym:{task}?size=200&seed={seed}")} for seed in (0, 1))
    assert len(train) > 190 and not train & held_out


def test_tasks_that_accept_many_answers_have_none_in_the_column() -> None:
    (row,) = rows("gym:graph_color?size=1")
    assert row.columns["answer"] is None


def test_lists_are_parameters_too() -> None:
    (row,) = rows('gym:basic_arithmetic?size=1&operators=["+"]&min_terms=2&max_terms=2')
    assert row.columns["gym_task"] == 'basic_arithmetic?operators=["+"]&min_terms=2&max_terms=2'
    assert parse_task(row.columns["gym_task"])[1] == {"operators": ["+"], "min_terms": 2, "max_terms": 2}


def test_a_limit_and_other_kinds_of_rows() -> None:
    assert len(read_rows("gym:chain_sum?size=5", "prompts", limit=2)) == 2
    with pytest.raises(UsageError, match="row 1: no column 'completion'"):
        read_rows("gym:chain_sum?size=5", "demonstrations")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gym:leter_counting", "has no task 'leter_counting'; did you mean gym:letter_counting?"),
        ("gym:zzzzzz", "no task 'zzzzzz'; there are ab, acre,"),
        ("gym:", "names no task; write gym:letter_counting"),
        ("gym:letter_counting?minwords=1", "no parameter 'minwords'; did you mean min_words?"),
        (
            "gym:letter_counting?min_words=9&max_words=1",
            "refuses these parameters: AssertionError: max_words",
        ),
        ("gym:letter_counting?min_words=few", "refuses these parameters: "),
        ("gym:letter_counting?size=0", "size=0 must lie between 1 and 1000000"),
        ("gym:letter_counting?size=many", "size=many must be a whole number"),
        ("gym:letter_counting?seed=-1", "seed=-1 must lie between 0 and 4000"),
        ("gym:letter_counting?size", "'size' is not key=value"),
        ("gym:letter_counting?size=1&size=2", "'size=2' is not key=value, or is there twice"),
        ("gym:letter_counting?size=1&", "'' is not key=value"),
    ],
)
def test_what_is_wrong_with_a_source_is_said(source: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        rows(source)
    assert message in str(error.value)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pool.PACKAGES, "gym", ("no_such_module", "reasoning-gym"))
    with pytest.raises(UsageError, match=r"^data=gym:chain_sum needs the package reasoning-gym.*kleash\[ver"):
        rows("gym:chain_sum")


@pytest.mark.slow
def test_every_task_makes_rows_and_scores_its_own_answers() -> None:
    from kleash.rewards import Gym

    with pytest.raises(UsageError) as error:
        rows("gym:zzzzzz")
    tasks = str(error.value).partition("there are ")[2].rstrip(".").split(", ")
    assert len(tasks) > 100
    wrong = {}
    for task in tasks:
        if task == "composite":  # made of others, which its parameters list
            continue
        made = rows(f"gym:{task}?size=2")
        columns = {name: [row.columns[name] for row in made] for name in made[0].columns}
        answers = [f"<answer>{answer}</answer>" for answer in columns["answer"]]
        scores = Gym()(responses=answers, **columns)
        if columns["answer"][0] is not None and scores != [1.0, 1.0]:
            wrong[task] = scores
    assert not wrong
