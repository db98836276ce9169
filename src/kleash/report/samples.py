"""Samples side by side: rows of samples.jsonl -> one compact structure that the page's script draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kleash.report.text import finite, visible

MOST_SAMPLES = 4  # of one policy for one prompt
MOST_PROMPTS = 400

Row = Mapping[str, Any]


@dataclass
class Column:
    """The samples of one policy (or of one policy at one step)."""

    label: str
    rows: Sequence[Row]
    colour: int = 0


@dataclass
class SideBySide:
    """What the page's script draws: columns, and for each prompt a list of samples in each column."""

    columns: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    most: int  # samples in the fullest cell
    notes: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """The structure as JSON-ready values; every text in it is already made visible and encodable."""
        return {"columns": self.columns, "groups": self.groups, "most": self.most}


def side_by_side(columns: Sequence[Column]) -> SideBySide:
    """Group the rows by prompt, in order of first appearance, and say what was left out."""
    cells: dict[str, list[list[dict[str, Any]]]] = {}
    cut = broken = plain = 0
    for index, column in enumerate(columns):
        for row in column.rows:
            prompt, sample = row.get("prompt"), _sample(row)
            if not isinstance(prompt, str) or sample is None:
                broken += 1
                continue
            cell = cells.setdefault(visible(prompt), [[] for _ in columns])[index]
            if len(cell) == MOST_SAMPLES:
                cut += 1
                continue
            plain += "tokens" not in sample
            cell.append(sample)
    shown = dict(list(cells.items())[:MOST_PROMPTS])
    everything = [sample for row in shown.values() for cell in row for sample in cell]
    if not any(sample.get("ended") for sample in everything):
        for sample in everything:  # a fixed length: "did not end" would say nothing
            sample.pop("ended", None)
    groups: list[dict[str, Any]] = [{"prompt": prompt, "cells": row} for prompt, row in shown.items()]
    most = max((len(cell) for row in shown.values() for cell in row), default=0)
    heads = [{"label": visible(column.label), "colour": column.colour} for column in columns]
    return SideBySide(heads, groups, most, _left_out(cut, len(cells), broken, plain))


def _left_out(cut: int, prompts: int, broken: int, plain: int) -> list[str]:
    """What the page does not show, in sentences."""
    notes = []
    if cut:
        notes.append(
            f"The first {MOST_SAMPLES} samples of a policy are shown for each prompt; "
            f"{cut} more are in the run folders."
        )
    if prompts > MOST_PROMPTS:
        notes.append(f"The first {MOST_PROMPTS} of {prompts} prompts are shown.")
    if broken:
        notes.append(f"{broken} sample row(s) without a text prompt and response are left out.")
    if plain:
        notes.append(f"{plain} sample(s) carry no usable log-probabilities and are shown without colour.")
    return notes


def _sample(row: Row) -> dict[str, Any] | None:
    """One response for the page; tokens as [text, logp, logp_ref, kl] where all lists agree in length."""
    response = row.get("response")
    if not isinstance(response, str):
        return None
    sample: dict[str, Any] = {"text": visible(response)}
    for key in ("reward", "gold"):
        if (value := finite(row.get(key))) is not None:
            sample[key] = round(value, 4)
    if isinstance(row.get("ended"), bool):
        sample["ended"] = row["ended"]
    tokens = _tokens(row)
    if tokens:
        sample["tokens"] = tokens
    return sample


def _tokens(row: Row) -> list[list[Any]]:
    texts, logp, logp_ref, kl = (row.get(key) for key in ("tokens", "logp", "logp_ref", "kl"))
    if not isinstance(texts, list) or not isinstance(logp, list) or not isinstance(logp_ref, list):
        return []
    if not len(texts) == len(logp) == len(logp_ref) or not all(isinstance(text, str) for text in texts):
        return []
    exact = kl if isinstance(kl, list) and len(kl) == len(texts) else [None] * len(texts)
    return [
        [
            visible(text),
            *(None if (number := finite(value)) is None else round(number, 3) for value in numbers),
        ]
        for text, *numbers in zip(texts, logp, logp_ref, exact, strict=True)
    ]


def final_rows(rows: Sequence[Row], reference: bool = False) -> list[Row]:
    """The rows of the last step; of the policy itself, or of the rows named "reference" when asked.

    Where the end of a run was measured, those rows alone: others of that step are training samples.
    """
    rows = [row for row in rows if row.get("measured")] or rows
    chosen = [row for row in rows if (row.get("policy") == "reference") == reference]
    if not chosen and not reference:
        chosen = list(rows)  # a folder that holds the reference alone
    last = max((finite(row.get("step")) or 0.0 for row in chosen), default=0.0)
    return [row for row in chosen if (finite(row.get("step")) or 0.0) == last]


def columns_over_time(rows: Sequence[Row], most: int = 4) -> list[Column]:
    """Columns for one run: the reference if sampled, then the policy at some steps, first and last too."""
    columns = []
    before = final_rows(rows, reference=True)
    policy = [row for row in rows if row.get("policy") != "reference"]
    if before:
        columns.append(Column("reference", before, colour=0))
    steps = sorted({finite(row.get("step")) or 0.0 for row in policy})
    room = most - len(columns)
    if len(steps) > room:
        steps = [steps[round(index * (len(steps) - 1) / (room - 1))] for index in range(room)]
    for step in steps:
        at_step = [row for row in policy if (finite(row.get("step")) or 0.0) == step]
        columns.append(Column(f"step {step:g}" if len(steps) > 1 else "policy", at_step, colour=1))
    return columns
