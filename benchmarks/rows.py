"""The rows both sides train on, in the order both visit them, and the prompts both sample from."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kleash.data import plan_epoch, read_rows, tokenise_demonstrations, tokenise_preferences
from kleash.data.items import Example, Pair
from kleash.errors import UsageError
from kleash.models.load import load_tokenizer

GROUP = 8  # responses to a prompt
MICRO_BATCHES = 4  # of a step that trains on its own samples, on both sides
HELD_OUT_PAIRS = 2  # a reward model ends by scoring held-out pairs; as few as it accepts


def write_rows(source: Path, folder: Path, model: str, max_length: int, pairs: int) -> None:
    """The first `pairs` preference pairs whose rows fit in max_length tokens: pairs.jsonl, held-out.jsonl,
    and the chosen answers alone as demonstrations.jsonl. UsageError where the source holds too few.
    """
    rows = read_rows(source, "preferences")
    fitting = tokenise_preferences(rows, load_tokenizer(model), max_length=max_length, truncation="drop")
    kept = {pair.number for pair in fitting.items[: pairs + HELD_OUT_PAIRS]}
    if len(kept) < pairs + HELD_OUT_PAIRS:
        raise UsageError(
            f"{source} has {len(kept)} pairs of at most {max_length} tokens; {pairs + HELD_OUT_PAIRS} are "
            "needed. Take fewer steps or another file."
        )
    texts = [
        {"prompt": row.prompt, "chosen": row.chosen, "rejected": row.rejected}
        for row in rows.rows
        if row.number in kept
    ]
    write_lines(folder / "pairs.jsonl", texts[:pairs])
    write_lines(folder / "held-out.jsonl", texts[pairs:])
    demonstrations = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in texts[:pairs]]
    write_lines(folder / "demonstrations.jsonl", demonstrations)


def write_prompts(source: Path, folder: Path, model: str, max_length: int, count: int) -> None:
    """The ids of the first `count` distinct prompts of at most max_length tokens, one list a line."""
    tokenizer = load_tokenizer(model)
    pairs = tokenise_preferences(read_rows(source, "preferences"), tokenizer, max_length=None).items
    fitting = [pair.prompt_ids for pair in pairs if len(pair.prompt_ids) <= max_length]
    distinct = list({tuple(ids): ids for ids in fitting}.values())
    if len(distinct) < count:
        raise UsageError(f"{source} has {len(distinct)} prompts of at most {max_length} tokens, not {count}.")
    write_lines(folder / "prompts.jsonl", distinct[:count])


def write_questions(source: Path, folder: Path, count: int) -> None:
    """The first `count` grade-school problems as prompts. UsageError where there are fewer."""
    rows = read_rows(source, "prompts", prompt_column="question").rows
    if len(rows) < count:
        raise UsageError(f"{source} has {len(rows)} problems, not {count}: take fewer steps.")
    write_lines(folder / "questions.jsonl", [{"prompt": row.prompt} for row in rows[:count]])


def vowels(completions: list[str], **columns: Any) -> list[float]:
    """A reward that costs nothing and tells any two responses apart: the share of vowels."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


@dataclass(frozen=True)
class Steps:
    """What a training run visits: one micro-batch of items a step, and the real tokens in each."""

    items: list[list[Any]]
    tokens: list[int]

    def take(self, count: int) -> Steps:
        """The first `count` steps."""
        return replace(self, items=self.items[:count], tokens=self.tokens[:count])


def planned_steps(file: Path, task: str, model: str, max_length: int, batch_size: int) -> Steps:
    """Items of a rows file in the order in which a KLeash run of seed 0 visits them, step by step."""
    tokenizer = load_tokenizer(model)
    rows = read_rows(file, "demonstrations" if task == "sft" else "preferences")
    tokenise: Any = tokenise_demonstrations if task == "sft" else tokenise_preferences
    items = tokenise(rows, tokenizer, max_length=max_length).items
    plan = plan_epoch(
        [item.length for item in items],
        batch_size=batch_size,
        seed=0,
        epoch=0,
        rows_per_item=1 if task == "sft" else 2,
    )
    steps = [[items[position] for batch in step for position in batch] for step in plan]
    return Steps(steps, [sum(map(real_tokens, step)) for step in steps])


def real_tokens(item: Example | Pair) -> int:
    """Tokens of an item's rows without padding; a pair's prompt counts in both of its rows."""
    if isinstance(item, Example):
        return len(item.prompt_ids) + len(item.response_ids)
    return 2 * len(item.prompt_ids) + len(item.chosen_ids) + len(item.rejected_ids)


def write_lines(file: Path, rows: list[Any]) -> None:
    """Rows as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_lines(file: Path) -> list[Any]:
    """Rows of a JSONL file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
