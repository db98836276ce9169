"""The benchmarks' own arithmetic, and that both sides visit the same rows in the same order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kleash.data.tokenise import pad_id
from kleash.lab.tiny import write_tiny_model
from kleash.methods import METHODS
from kleash.training.processes import Processes
from kleash.training.setup import prepare

pytestmark = pytest.mark.peers
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def pairs() -> list[dict[str, Any]]:
    ends = ("good", "happy", "in the city", "bad", "the soup was good", "sad")
    answers = [(f" {ends[i % 6]}", f" {ends[(i + 1) % 6]}") for i in range(12)]
    return [
        {"prompt": "the soup" + " was" * (i % 3), "chosen": chosen, "rejected": rejected}
        for i, (chosen, rejected) in enumerate(answers)
    ]


@pytest.mark.parametrize(("method", "size"), [("sft", 4), ("dpo", 2)])
def test_the_planned_steps_are_those_of_a_run(method: str, size: int, tmp_path: Path) -> None:
    from benchmarks.rows import planned_steps, write_lines

    model = str(write_tiny_model(tmp_path / "model"))
    rows = pairs()
    if method == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    file = tmp_path / "rows.jsonl"
    write_lines(file, rows)
    planned = planned_steps(file, method, model, 64, size)
    found = METHODS[method]
    options = {"model": model, "data": str(file), "batch_size": size, "max_length": 64, "eval_fraction": 0.0}
    extra = {"cache_reference": False} if method == "dpo" else {}
    job = prepare(found, found.config(**options, **extra), Processes())
    assert found.collate is not None
    for number, (items, tokens) in enumerate(zip(planned.items, planned.tokens, strict=True), 1):
        (batch,) = job.feed.step(number).updates[0].micro_batches
        assert batch.real_tokens == tokens
        expected = found.collate(items, pad_id(job.models.tokenizer))
        assert batch.tokens.tolist() == expected.tokens.tolist()


def test_ratios_leave_the_warm_up_out_and_take_the_largest_peak() -> None:
    from benchmarks.job import Answer
    from benchmarks.summary import Comparison, best, figures, speed_table

    ours = [
        Answer([9.0, 1.0, 2.0], [7, 10, 20], peak_bytes=3),
        Answer([9.0, 3.0, 2.0], [7, 10, 20], peak_bytes=4),
    ]
    theirs = [Answer([9.0, 4.0, 4.0], [7, 10, 20], peak_bytes=8)]
    comparison = Comparison("sft", figures("kleash", ours, 1), figures("trl", theirs, 1))
    assert comparison.ours.median_seconds == 2.0
    assert comparison.ours.tokens_per_second == pytest.approx(60 / 8)
    assert (comparison.speed, comparison.speed_of_least, comparison.memory) == (2.0, 4.0, 0.5)
    assert "2.00 (≥ 1.8: met)" in speed_table([comparison])
    assert best([comparison.theirs, comparison.ours]).side == "kleash"


def test_accuracy_shows_the_worst_batch() -> None:
    from benchmarks.job import Answer
    from benchmarks.summary import accuracy, accuracy_table

    def losses(*values: float) -> Answer:
        return Answer([], [], losses=list(values))

    found = accuracy(
        "kleash", losses(2.001, 2.0), losses(2.0, 2.004), losses(math.log(2), 0.6912), losses(math.log(2))
    )
    assert found.sft_gap == pytest.approx(0.004)
    assert found.sft_bias == pytest.approx(-0.0015)
    assert found.dpo == 0.6912
    table = accuracy_table([found])
    assert "0.00400 (missed)" in table and "0.691200 (missed)" in table and "0.693147 (kept)" in table
