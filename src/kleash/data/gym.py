"""Prompts from reasoning-gym by name: `gym:letter_counting?size=2000&seed=1&min_words=5`.

The entries are made in a child process, because some tasks seed global generators and one runs the code
that its data set holds.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

from kleash.errors import UsageError
from kleash.verifiers import ask_once, require

PREFIX = "gym:"
SIZE = 500
STRIDE = 10**6
"""The tasks draw entry i from the number seed + i, so neighbouring seeds of theirs share all entries but one.
Here seed s begins at s·10⁶, and no two seeds share a number."""
MOST_SEEDS = 4000  # the tasks' seeds are numbers of 32 bits
SECONDS = 600.0
"""Processor time to make the entries in: some puzzles take a third of a second, impossible ones forever."""


def is_gym(source: object) -> bool:
    """Whether a data source is a task of reasoning-gym."""
    return isinstance(source, str) and source.startswith(PREFIX)


def gym_rows(source: str) -> list[dict[str, Any]]:
    """The entries of `gym:TASK?key=value&…` as prompt rows.

    `size` (500) entries from `seed` (0) on; other keys are the task's own parameters, as JSON or else as
    text. A row holds prompt, answer (None where the task accepts many), gym_task (the task with its
    parameters) and gym_entry (the entry as a Python literal, which keeps tuples). Deterministic; another seed
    draws anew, though a task with few different questions repeats them. UsageError names an unknown task or
    parameter.
    """
    require("gym", f"data={source}")
    task, given = parse_task(source.removeprefix(PREFIX))
    size, seed = (_whole(source, given, key, default) for key, default in (("size", SIZE), ("seed", 0)))
    parameters = {key: value for key, value in given.items() if key not in ("size", "seed")}
    if not 1 <= size <= STRIDE:
        raise UsageError(f"{source}: size={size} must lie between 1 and {STRIDE}.")
    if not 0 <= seed <= MOST_SEEDS:
        raise UsageError(f"{source}: seed={seed} must lie between 0 and {MOST_SEEDS}.")
    request = {"task": task, "parameters": parameters, "size": size, "seed": seed * STRIDE}
    made = ask_once("gym", request, SECONDS)
    if made is None:
        raise UsageError(
            f"{source}: making {size} entries takes more than {SECONDS:g} seconds or a gigabyte. Give a "
            "smaller size."
        )
    if "entries" not in made:
        raise UsageError(f"{source}: {_refusal(task, made)}")
    spec = task + (
        "?" + "&".join(f"{k}={json.dumps(v)}" for k, v in parameters.items()) if parameters else ""
    )
    return [
        {"prompt": question, "answer": answer, "gym_task": spec, "gym_entry": entry}
        for question, answer, entry in made["entries"]
    ]


def parse_task(text: str) -> tuple[str, dict[str, Any]]:
    """'puzzle24?min_value=1&max_value=6' as ('puzzle24', {'min_value': 1, 'max_value': 6}); UsageError
    otherwise.
    """
    task, _, query = text.partition("?")
    if not task:
        raise UsageError(f"{PREFIX}{text} names no task; write gym:letter_counting, for example.")
    parameters: dict[str, Any] = {}
    for pair in query.split("&") if query else []:
        key, equals, value = pair.partition("=")
        if not equals or not key or key in parameters:
            raise UsageError(
                f"{PREFIX}{text}: {pair!r} is not key=value, or is there twice; write "
                f"'gym:{task}?size=100&seed=1', in quotes on a command line."
            )
        try:
            parameters[key] = json.loads(value)
        except json.JSONDecodeError:
            parameters[key] = value
    return task, parameters


def _whole(source: str, given: dict[str, Any], key: str, default: int) -> int:
    value = given.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{source}: {key}={value} must be a whole number.")
    return value


def _refusal(task: str, made: dict[str, Any]) -> str:
    """Why the child made no entries."""
    if "tasks" in made:
        near = difflib.get_close_matches(task, made["tasks"], n=1)
        hint = f"did you mean gym:{near[0]}?" if near else f"there are {', '.join(made['tasks'])}."
        return f"reasoning-gym has no task {task!r}; {hint}"
    if "unknown" in made:
        near = difflib.get_close_matches(made["unknown"], made["known"], n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(made['known'])}."
        return f"{task} has no parameter {made['unknown']!r}; {hint}"
    return f"{task} refuses these parameters: {made['refused']}"
