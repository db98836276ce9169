"""Metrics whose course means something a newcomer would not see: said once, in words, while the run goes
on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 5  # rows in a row before a sign is taken for more than noise
NEGATIVE_KL = -0.05  # nats; a KL is not negative, and its sampled estimate not for long
FALLING = -0.05  # implicit reward of the chosen responses, nats times beta; above it is noise


@dataclass(frozen=True)
class Sign:
    """A condition on one metric, and what it means when it holds for PATIENCE rows."""

    metric: str
    holds: Callable[[float], bool]
    meaning: str


SIGNS = (
    Sign(
        "kl/k1",
        lambda value: value < NEGATIVE_KL,
        "the sampled KL stays below 0, which a KL cannot. Usual causes: the samples do not come from the "
        "policy's own distribution (top-k, top-p or a forced minimum length), the two passes differ "
        "(dropout, an adapter left on, another precision), or padding is counted.",
    ),
    Sign(
        "dpo/reward_chosen",
        lambda value: value < FALLING,
        "the chosen responses have become less likely than under the reference, although the margin grows: "
        "the probability goes to responses outside the pairs. Look at samples, raise beta, or train fewer "
        "steps.",
    ),
    Sign(
        "reward/missing",
        lambda value: value == 1.0,
        "no response has a score, so nothing is learnt. The reward returns None for all of them, or does not "
        "return within reward_timeout.",
    ),
    Sign(
        "reward/no_spread",
        lambda value: value == 1.0,
        "all responses to a prompt score alike, for every prompt, so nothing can be learnt from comparing "
        "them. Raise the temperature or samples_per_prompt, or choose a reward that grades more finely.",
    ),
)


@dataclass
class Watch:
    """Looks at every row of training metrics; `warnings` collects what was said."""

    warnings: list[str] = field(default_factory=list)
    lasting: dict[str, int] = field(default_factory=dict)

    def see(self, row: dict[str, Any]) -> list[str]:
        """New warnings after this row; each is given once a run."""
        new = []
        for sign in SIGNS:
            value = row.get(sign.metric)
            if value is None:
                continue
            self.lasting[sign.metric] = self.lasting.get(sign.metric, 0) + 1 if sign.holds(value) else 0
            if self.lasting[sign.metric] == PATIENCE:
                text = f"step {row['step']}: {sign.metric} = {value:.3g}: {sign.meaning}"
                if not any(f": {sign.metric} = " in said for said in self.warnings):
                    new.append(text)
                    self.warnings.append(text)
        return new
