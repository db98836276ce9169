"""Means with honest errors: responses to one prompt are not independent, so prompts are the unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` responses and its standard error; None where fewer than two prompts leave it
    unknown.
    """

    mean: float
    stderr: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3g}" if self.stderr is None else f"{self.mean:.3g} ± {self.stderr:.2g}"

    def to_json(self) -> dict[str, Any]:
        """A dict of plain numbers."""
        return {"mean": self.mean, "stderr": self.stderr, "count": self.count}

    @classmethod
    def from_json(cls, value: dict[str, Any] | None) -> Estimate | None:
        """Back from `to_json`; None stays None."""
        return None if value is None else cls(value["mean"], value["stderr"], value["count"])


def clustered(values: Tensor, group: Tensor) -> Estimate | None:
    """Mean of values (N,) with a standard error clustered by group (N,).

    se² = G/(G−1) · Σ_g (Σ_{i∈g} (x_i − x̄))² / N². With equally many responses a prompt this is the standard
    error of the prompt means, sd/√G. nan values are missing: left out of N. None where nothing is left.
    """
    kept = ~values.isnan()
    values, group = values[kept].double(), group[kept]
    if not len(values):
        return None
    mean = values.mean()
    _, member = torch.unique(group, return_inverse=True)
    clusters = int(member.max()) + 1
    if clusters < 2:
        return Estimate(float(mean), None, len(values))
    totals = torch.zeros(clusters, dtype=torch.float64).index_add(0, member, values - mean)
    variance = clusters / (clusters - 1) * totals.square().sum() / len(values) ** 2
    return Estimate(float(mean), float(variance.sqrt()), len(values))


@dataclass(frozen=True)
class Interval:
    """A mean difference and its confidence interval [low, high]; `units` prompts are behind it."""

    mean: float
    low: float
    high: float
    units: int

    def __str__(self) -> str:
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's t interval of the mean of independent values; one value alone has an infinite interval."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Interval(mean, -math.inf, math.inf, count)
    stderr = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1) / count)
    half = t_quantile(0.5 + confidence / 2, count - 1) * stderr
    return Interval(mean, mean - half, mean + half, count)


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else Fisher's expansion around the
    normal quantile (Abramowitz & Stegun 26.7.5), within 0.2 % for 3 degrees of freedom at 97.5 % and closer
    for more.
    """
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
