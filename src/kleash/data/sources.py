"""Where rows come from: read a source as one kind of row, split it by prompt, turn rankings into pairs."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

from kleash.data.files import read_records
from kleash.data.rows import (
    EXAMPLES,
    Demonstration,
    Kind,
    Malformed,
    Preference,
    Prompt,
    Ranked,
    Row,
    Stepwise,
    Text,
    Unpaired,
    Useless,
    parse_row,
)
from kleash.errors import UsageError

__all__ = [
    "BadRows",
    "Demonstration",
    "Kind",
    "Preference",
    "Prompt",
    "Ranked",
    "Row",
    "Rows",
    "Stepwise",
    "Text",
    "Unpaired",
    "pairs_from_ranked",
    "read_rows",
    "split_rows",
]

BadRows = Literal["error", "drop", "strict"]


@dataclass
class Rows:
    """Rows of one kind: what was kept, what was dropped (reason -> count), the source and its SHA-256."""

    kind: Kind
    rows: list[Any]  # of the kind's row class; Any so that a caller that knows the kind need not cast
    source: str
    sha256: str
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        """Rows kept."""
        return len(self.rows)


def read_rows(
    source: Any,
    kind: Kind,
    *,
    split: str = "train",
    limit: int | None = None,
    bad_rows: BadRows = "error",
    advise: bool = True,
    prompt_column: str = "prompt",
) -> Rows:
    """Rows of one kind, at most `limit`, from a path, a hub name, a `datasets.Dataset` or a list of dicts.

    Rows from which nothing can be learnt (an empty answer, equal answers) are dropped and counted; malformed
    rows are an error. `bad_rows="drop"` drops and counts both, `"strict"` makes both an error. Ranked rows
    stay ranked: see `pairs_from_ranked`. `advise` has the error name bad_rows=drop. `prompt_column` names the
    column that holds the prompt, where it is called otherwise (`question`). Raises UsageError naming source,
    row, what was found and a right row, and when none is left.
    """
    if kind not in EXAMPLES:
        raise UsageError(f"Unknown kind of rows '{kind}'; expected one of {', '.join(EXAMPLES)}.")
    if bad_rows not in ("error", "drop", "strict"):
        raise UsageError(f"bad_rows='{bad_rows}' must be error, drop or strict.")
    records = read_records(source, split=split)
    dropped: Counter[str] = Counter()
    rows: list[Row] = []
    for number, record in records.numbered:
        if limit is not None and len(rows) >= limit:
            break
        try:
            rows.append(parse_row(_named(record, prompt_column), number, kind))
        except (Malformed, Useless) as fault:
            if bad_rows == "strict" or (bad_rows == "error" and isinstance(fault, Malformed)):
                advice = " (bad_rows=drop leaves such rows out and counts them.)"
                way_out = advice if advise and bad_rows == "error" else ""
                raise UsageError(f"{records.name}, row {number}: {fault}{way_out}") from fault
            dropped[fault.reason] += 1
    _check_some_left(rows, dropped, records.name, kind)
    return Rows(kind, rows, records.name, records.sha256, dict(dropped), _notes(records.numbered, kind))


def _named(record: dict[str, Any], prompt_column: str) -> dict[str, Any]:
    """The record with its prompt under `prompt`."""
    if prompt_column == "prompt":
        return record
    if prompt_column not in record:
        found = ", ".join(f"'{name}'" for name in record)
        raise Malformed("no prompt", f"no column '{prompt_column}' (prompt_column); found {found}.")
    if "prompt" in record:
        raise Malformed(
            "two prompts", f"both a column 'prompt' and '{prompt_column}' (prompt_column): which is meant?"
        )
    return {("prompt" if name == prompt_column else name): value for name, value in record.items()}


def _check_some_left(rows: list[Row], dropped: Counter[str], name: str, kind: Kind) -> None:
    if not rows:
        why = (
            "; ".join(f"{count} dropped: {reason}" for reason, count in dropped.most_common())
            or "it is empty"
        )
        raise UsageError(f"{name} holds no usable row ({why}). Expected rows like {EXAMPLES[kind]}.")


def _notes(numbered: list[tuple[int, dict[str, Any]]], kind: Kind) -> list[str]:
    """What a reader of the run should know about how the rows were understood."""
    columns = set().union(*(record for _, record in numbered))
    if kind == "demonstrations" and not columns & {"completion", "messages"}:
        return ["demonstrations are the 'chosen' answers of preference rows"]
    if kind == "prompts" and not columns & {"prompt", "messages"}:
        return ["prompts are what 'chosen' and 'rejected' share"]
    return []


def split_rows(
    rows: Rows, eval_fraction: float | None = None, eval_count: int | None = None, seed: int = 0
) -> tuple[Rows, Rows]:
    """Train and held-out rows, divided by prompt: no prompt is on both sides.

    Prompts are visited in the order of a hash of seed and prompt, so neither the order of the file nor rows
    added to it move a prompt relative to another; whole prompts are held out until there are at least
    `eval_count` rows (or `eval_fraction` of all). Both sides keep the file's order. Raises UsageError when a
    side would be empty.
    """
    if (eval_fraction is None) == (eval_count is None):
        raise UsageError("Give eval_fraction or eval_count, one of the two.")
    if eval_fraction is not None and not 0 < eval_fraction < 1:
        raise UsageError(f"eval_fraction={eval_fraction} must lie between 0 and 1.")
    wanted = eval_count if eval_count is not None else max(1, round((eval_fraction or 0) * len(rows)))
    keys = [_prompt_key(row, seed) for row in rows.rows]
    sizes = Counter(keys)
    held: set[str] = set()
    count = 0
    for key in sorted(sizes):
        if count >= wanted:
            break
        held.add(key)
        count += sizes[key]
    if not held or len(held) == len(sizes):
        asked = f"eval_count={eval_count}" if eval_fraction is None else f"eval_fraction={eval_fraction:g}"
        raise UsageError(
            f"{rows.source}: {_counted(len(rows), 'row')} with {_counted(len(sizes), 'different prompt')} "
            f"cannot be split into training rows and {_counted(wanted, 'held-out row')} ({asked}), because "
            "no prompt may be on both sides. Give rows with more prompts or hold out fewer; "
            "eval_fraction=0 holds out nothing."
        )
    train = [row for row, key in zip(rows.rows, keys, strict=True) if key not in held]
    held_out = [row for row, key in zip(rows.rows, keys, strict=True) if key in held]
    return replace(rows, rows=train), replace(rows, rows=held_out, dropped={})


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _prompt_key(row: Row, seed: int) -> str:
    prompt = json.dumps(row.prompt, sort_keys=True, default=str)
    return hashlib.sha256(f"{seed}/{prompt}".encode()).hexdigest()


def pairs_from_ranked(rows: Rows) -> Rows:
    """Every pair of differently ranked responses as a preference: K responses give up to K(K-1)/2 pairs.

    Rank 1 is the best. Ties and equal texts are dropped and counted; a pair keeps the number of its ranked
    row.
    """
    dropped: Counter[str] = Counter(rows.dropped)
    pairs: list[Preference] = []
    for row in rows.rows:
        for (a, rank_a), (b, rank_b) in combinations(zip(row.responses, row.ranks, strict=True), 2):
            if rank_a == rank_b or a == b:
                dropped["tied ranks" if rank_a == rank_b else "chosen and rejected are the same"] += 1
                continue
            chosen, rejected = (a, b) if rank_a < rank_b else (b, a)
            pairs.append(
                Preference(
                    prompt=row.prompt,
                    chosen=chosen,
                    rejected=rejected,
                    number=row.number,
                    columns=row.columns,
                )
            )
    if not pairs:
        raise UsageError(f"{rows.source}: the rankings hold no pair of differently ranked responses.")
    return Rows("preferences", pairs, rows.source, rows.sha256, dict(dropped), list(rows.notes))
