"""A reasoning-gym task as two files of prompts that share no question.

    python examples/gym_split.py "gym:chain_sum?size=2000&min_terms=2&max_terms=2&max_digits=2" runs/sums 200

writes runs/sums/train.jsonl and runs/sums/held-out.jsonl (200 questions); train with data=, eval_data= and
reward=gym. A task with few different questions repeats them, so another seed alone would not hold any out.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from kleash.data.gym import gym_rows


def main(source: str, folder: str, held_out: int) -> tuple[Path, Path]:
    """Write the two files; returns their paths."""
    rows = list({row["prompt"]: row for row in gym_rows(source)}.values())
    if not 0 < held_out < len(rows):
        raise SystemExit(f"{source} has {len(rows)} different questions; {held_out} cannot be held out.")
    random.Random(0).shuffle(rows)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    parts = {"train": rows[held_out:], "held-out": rows[:held_out]}
    for name, part in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (target / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"{len(parts['train'])} to train on, {held_out} held out: {target}")
    return target / "train.jsonl", target / "held-out.jsonl"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
