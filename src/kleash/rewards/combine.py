"""Several rewards as one: a weighted sum, with each part kept beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CombinedReward:
    """Σ_k w_k·r_k(x, y) over named rewards.

    A response that lacks one of the parts has no sum, since taking the part as zero would change what is
    optimised; a part of weight 0 is scored and logged, and its absence costs nothing.
    """

    rewards: dict[str, Callable[..., Sequence[float | None]]]
    weights: dict[str, float]

    @property
    def name(self) -> str:
        """'0.7*grade + 0.3*length'."""
        return " + ".join(f"{weight:g}*{name}" for name, weight in self.weights.items())

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum (N,) of the parts' values (N,); nan, for missing, where a weighted part is nan."""
        weighted = [weight * parts[name] for name, weight in self.weights.items() if weight != 0.0]
        return torch.stack(weighted).sum(0) if weighted else torch.zeros_like(next(iter(parts.values())))

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Any
    ) -> list[float | None]:
        """The weighted sums as a list: a combined reward is a reward like any other."""
        from kleash.rewards.call import (
            score_texts,
        )  # the caller's checks; imported here because they know this class

        values = score_texts(self, prompts, responses, columns).values
        return [None if value != value else value for value in values.tolist()]
