"""Two policies on the same held-out prompts: the difference of each metric, prompt by prompt, with its
interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kleash.errors import UsageError
from kleash.measure.estimate import Estimate, Interval, t_interval, t_quantile
from kleash.measure.evaluation import Evaluation

COMPARED = ("reward", "gold", "drift", "distinct_bigrams", "length")


@dataclass(frozen=True)
class Difference:
    """run − baseline of one metric; paired by prompt, or from the two means, which is wider."""

    metric: str
    interval: Interval
    paired: bool
    confidence: float = 0.95

    @property
    def mean(self) -> float:
        """The mean difference."""
        return self.interval.mean

    @property
    def lower(self) -> bool:
        """The whole interval is below 0."""
        return self.interval.high < 0

    @property
    def higher(self) -> bool:
        """The whole interval is above 0."""
        return self.interval.low > 0

    def __str__(self) -> str:
        how = "paired by prompt" if self.paired else "unpaired"
        return f"{self.interval} ({self.confidence:.0%} interval, {how})"


def compare(
    run: Evaluation, baseline: Evaluation, metrics: tuple[str, ...] = COMPARED, confidence: float = 0.95
) -> dict[str, Difference]:
    """run − baseline for every metric that both measured; UsageError where the two cannot be compared."""
    require_comparable(run, baseline)
    found = {metric: difference(run, baseline, metric, confidence) for metric in metrics}
    return {metric: value for metric, value in found.items() if value is not None}


def require_comparable(run: Evaluation, baseline: Evaluation) -> None:
    """UsageError unless both were measured on the same prompts, from the same reference, in the same way."""
    for what, one, other in (
        ("prompts", run.prompts_hash, baseline.prompts_hash),
        ("reference", run.conventions.get("reference"), baseline.conventions.get("reference")),
        ("temperature", run.temperature, baseline.temperature),
        ("fixed_length", run.fixed_length, baseline.fixed_length),
        ("max_new_tokens", run.max_new_tokens, baseline.max_new_tokens),
        ("samples_per_prompt", run.samples_per_prompt, baseline.samples_per_prompt),
    ):
        if one != other:
            raise UsageError(
                f"the two evaluations cannot be compared: their {what} differ ({one} against {other}). "
                "Measure both with the same prompts, reference and sampling options."
            )


def difference(
    run: Evaluation, baseline: Evaluation, metric: str, confidence: float = 0.95
) -> Difference | None:
    """run − baseline of one metric, None where either lacks it.

    Paired: per prompt, the mean over its samples in one minus that in the other, and Student's t over
    prompts; prompts where either has no value are left out. Without samples, from the two estimates, as if
    they were independent.
    """
    first, second = getattr(run, metric), getattr(baseline, metric)
    if first is None or second is None:
        return None
    if not run.samples or not baseline.samples:
        return Difference(
            metric,
            _unpaired(first, second, min(run.prompts, baseline.prompts), confidence),
            False,
            confidence,
        )
    one, other = run.by_prompt(metric), baseline.by_prompt(metric)
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return None
    return Difference(metric, t_interval([one[g] - other[g] for g in shared], confidence), True, confidence)


def _unpaired(first: Estimate, second: Estimate, prompts: int, confidence: float) -> Interval:
    mean = first.mean - second.mean
    if first.stderr is None or second.stderr is None:
        return Interval(mean, -math.inf, math.inf, prompts)
    half = t_quantile(0.5 + confidence / 2, max(1, prompts - 1)) * math.hypot(first.stderr, second.stderr)
    return Interval(mean, mean - half, mean + half, prompts)
