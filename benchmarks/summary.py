"""From measurements to figures: medians, ratios, goals met, and the tables of the results page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.job import Answer, Side, Task

# What we set out to reach: at least this many times as fast, at most this share of the memory.
SPEED_GOALS: dict[str, float] = {
    "sft": 1.8, "reward": 1.5, "dpo": 2.5, "grpo": 3.0, "rloo": 3.0,
    "sampling-grouped": 2.5, "sampling-distinct": 1.6,
}  # fmt: skip
MEMORY_GOALS: dict[str, float] = {"sft": 0.75, "reward": 1.0, "dpo": 0.75, "grpo": 0.6, "rloo": 0.6}
SFT_TOLERANCE, DPO_TOLERANCE = 0.002, 1e-3


@dataclass(frozen=True)
class Figures:
    """One side of one task: seconds of a step (or a sampling call), tokens per second, peak resident bytes,
    seconds before the first step.
    """

    side: Side
    median_seconds: float
    least_seconds: float
    tokens_per_second: float
    peak_bytes: int
    start_seconds: float
    measured: int


def figures(side: Side, answers: Sequence[Answer], warm_up: int) -> Figures:
    """Figures over every round's steps after the warm-up; the peak is the largest of any round."""
    seconds = [s for answer in answers for s in answer.seconds[warm_up:]]
    tokens = [t for answer in answers for t in answer.tokens[warm_up:]]
    return Figures(
        side,
        median(seconds),
        min(seconds),
        sum(tokens) / sum(seconds),
        max(answer.peak_bytes for answer in answers),
        median(answer.start_seconds for answer in answers),
        len(seconds),
    )


@dataclass(frozen=True)
class Comparison:
    """Our figures beside another side's; ratios above 1 mean that we are faster, below 1 that we need less
    memory.
    """

    task: Task
    ours: Figures
    theirs: Figures

    @property
    def speed(self) -> float:
        """How many times as fast, by medians."""
        return self.theirs.median_seconds / self.ours.median_seconds

    @property
    def speed_of_least(self) -> float:
        """How many times as fast, by each side's fastest step."""
        return self.theirs.least_seconds / self.ours.least_seconds

    @property
    def memory(self) -> float:
        """Our peak as a share of theirs."""
        return self.ours.peak_bytes / self.theirs.peak_bytes

    def to_json(self) -> dict[str, Any]:
        """Figures, ratios and goals."""
        ratios = {"speed": self.speed, "speed_of_least": self.speed_of_least, "memory": self.memory}
        goals = {"speed": SPEED_GOALS.get(self.task), "memory": MEMORY_GOALS.get(self.task)}
        return {**asdict(self), "ratios": ratios, "goals": goals}


def best(sides: Sequence[Figures]) -> Figures:
    """The fastest by median: another library is compared at its best setting."""
    return min(sides, key=lambda side: side.median_seconds)


def speed_table(comparisons: Sequence[Comparison]) -> str:
    """Two rows a comparison, ours with the ratios and whether they reach the goals."""
    head = (
        "| | side | s/step, median | s/step, least | tokens/s | peak memory, GB | times as fast (goal) "
        "| by least | share of memory (goal) |"
    )
    lines = [head, "|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for c in comparisons:
        speed = _against(c.speed, SPEED_GOALS.get(c.task), at_least=True)
        memory = _against(c.memory, MEMORY_GOALS.get(c.task), at_least=False)
        lines.append(f"| {c.task} | {_row(c.ours)} | {speed} | {c.speed_of_least:.2f} | {memory} |")
        lines.append(f"| | {_row(c.theirs)} | | | |")
    return "\n".join(lines)


def _row(f: Figures) -> str:
    return (
        f"{f.side} | {f.median_seconds:.2f} | {f.least_seconds:.2f} | {f.tokens_per_second:.0f} | "
        f"{f.peak_bytes / 1e9:.2f}"
    )


def _against(value: float, goal: float | None, at_least: bool) -> str:
    if goal is None:
        return f"{value:.2f}"
    met = value >= goal if at_least else value <= goal
    return f"{value:.2f} ({'≥' if at_least else '≤'} {goal:g}: {'met' if met else 'missed'})"


@dataclass(frozen=True)
class Accuracy:
    """One side's losses on the same batches with the weights held still.

    sft_gap: the largest |bfloat16 − float32| of a batch's loss; sft_bias: the mean of the signed differences,
    which more batches bring nearer to what bfloat16 adds on average. dpo, dpo_cached: the loss farthest from
    ln 2 of any batch, while policy and reference are the same model, reference computed beside the policy
    or before training.
    """

    side: Side
    batches: int
    sft_float32: float
    sft_gap: float
    sft_bias: float
    dpo: float
    dpo_cached: float


def accuracy(side: Side, sft: Answer, sft_float32: Answer, dpo: Answer, dpo_cached: Answer) -> Accuracy:
    """The worst batch of each."""
    gaps = [a - b for a, b in zip(sft.losses, sft_float32.losses, strict=True)]
    worst = [max(a.losses, key=lambda loss: abs(loss - math.log(2))) for a in (dpo, dpo_cached)]
    return Accuracy(side, len(gaps), sft_float32.losses[0], max(map(abs, gaps)), fmean(gaps), *worst)


def accuracy_table(sides: Sequence[Accuracy]) -> str:
    """A row a side, with whether it keeps the tolerance."""
    lines = [
        f"| side | SFT loss, float32, first batch | largest gap of bfloat16 to it (≤ {SFT_TOLERANCE:g}) "
        f"| mean of the gaps | DPO at step 0 (ln 2 ± {DPO_TOLERANCE:g}) | DPO at step 0, cached reference |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for a in sides:
        gap = f"{a.sft_gap:.5f} ({'kept' if a.sft_gap <= SFT_TOLERANCE else 'missed'})"
        lines.append(
            f"| {a.side} | {a.sft_float32:.5f} | {gap} | {a.sft_bias:+.5f} | "
            f"{_ln2(a.dpo)} | {_ln2(a.dpo_cached)} |"
        )
    return "\n".join(lines)


def _ln2(loss: float) -> str:
    return f"{loss:.6f} ({'kept' if abs(loss - math.log(2)) <= DPO_TOLERANCE else 'missed'})"
