"""The lab's checkpoints: what must hold on the evaluation openings, with thresholds set from five seeds.

Each threshold is set from the smallest gap over seeds 0 to 4 of the standard preset (the protocol of seed
004); the five runs are in docs/results/lab.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kleash.measure import Evaluation
from kleash.report.text import format_number
from kleash.run import Run

# Half of the smallest gap over the five seeds, or one and a half times the largest drift, rounded. That the
# reward is at least as high and that DPO ranks 60 % of the pairs are asked as they stand.
REWARD_RISE = 0.75  # RLHF's reward over the reference's, in the reward model's standard deviations
DRIFT_BOUND = 18.0  # RLHF's drift, nats a response
DRIFT_RATIO = 2.5  # drift without the penalty over drift with it
GOLD_GAP = 0.25  # gold with the penalty minus gold without it
BIGRAM_GAP = 0.1  # distinct-bigram share with the penalty minus without it
DPO_ACCURACY = 0.6  # held-out accuracy of DPO's implicit reward
LOSS_TOLERANCE = 1e-3  # DPO's first loss against ln 2; bfloat16 products, float32 gives 1e-6


@dataclass(frozen=True)
class Checkpoint:
    """One thing that must hold; `passed` is None where the preset does not judge it."""

    name: str
    passed: bool | None
    measured: str
    threshold: str
    seed_reference: str


Row = tuple[str, bool, str, str, str]  # name, passed, measured, threshold, exercise of seed 004


def judge(found: dict[str, Evaluation], reward: Run, dpo: Run, *, judged: bool) -> list[Checkpoint]:
    """All checkpoints on a lab's evaluations, in the order of the exercises."""
    rows = [
        *_with_penalty(found["rlhf"], found["reference"]),
        *_without_penalty(found["rlhf-no-kl"], found["rlhf"]),
        *_preferences(reward, dpo),
    ]
    return [Checkpoint(name, passed if judged else None, *rest) for name, passed, *rest in rows]


def _with_penalty(rlhf: Evaluation, reference: Evaluation) -> list[Row]:
    rise, drift = _mean(rlhf, "reward") - _mean(reference, "reward"), _mean(rlhf, "drift")
    bound = f"at most {DRIFT_BOUND:g} nats"
    return [
        (
            "RLHF raises the reward",
            rise >= REWARD_RISE,
            f"{rise:+.2f}",
            f"at least +{REWARD_RISE:g}",
            "exercise 3",
        ),
        (
            "RLHF's drift stays bounded",
            drift <= DRIFT_BOUND,
            f"{format_number(drift, 2)} nats",
            bound,
            "exercise 3",
        ),
    ]


def _without_penalty(free: Evaluation, rlhf: Evaluation) -> list[Row]:
    """The four measurements of reward hacking, each against the run with the penalty."""
    gap, gold, bigrams = (
        _mean(free, name) - _mean(rlhf, name) for name in ("reward", "gold", "distinct_bigrams")
    )
    drift, drift_free = _mean(rlhf, "drift"), _mean(free, "drift")
    larger = drift_free >= DRIFT_RATIO * drift
    ratio = f"{drift_free / drift:.1f} times" if drift > 0 else "no drift to compare with"
    lower, fewer = f"lower by more than {GOLD_GAP:g}", f"at most −{BIGRAM_GAP:g}"
    times = f"at least {DRIFT_RATIO:g} times"
    return [
        ("no penalty: reward at least as high", gap >= 0, f"{gap:+.2f}", "at least 0", "exercise 4"),
        ("no penalty: drift several times larger", larger, ratio, times, "exercise 4"),
        ("no penalty: gold lower", gold < -GOLD_GAP, f"{gold:+.2f}", lower, "exercise 4"),
        (
            "no penalty: fewer distinct bigrams",
            bigrams <= -BIGRAM_GAP,
            f"{bigrams:+.3f}",
            fewer,
            "exercise 4",
        ),
    ]


def _preferences(reward: Run, dpo: Run) -> list[Row]:
    first = next((row["loss"] for row in dpo.metrics if row.get("split") == "train"), math.nan)
    accuracy = dpo.evaluation["held_out"]["dpo/accuracy"]
    theirs = reward.evaluation["held_out"]["reward/accuracy"]
    exact = abs(first - math.log(2)) <= LOSS_TOLERANCE
    figure = f"{accuracy:.3f} (reward model {theirs:.3f})"
    share = f"at least {DPO_ACCURACY:g}"
    return [
        ("DPO starts at ln 2", exact, f"{first:.6f}", f"0.693147 ± {LOSS_TOLERANCE:g}", "exercise 5"),
        ("DPO ranks held-out pairs", accuracy >= DPO_ACCURACY, figure, share, "exercise 5"),
    ]


def _mean(evaluation: Evaluation, name: str) -> float:
    value = getattr(evaluation, name)
    return math.nan if value is None else float(value.mean)
