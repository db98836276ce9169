"""Steps 0 and 1 of the lab: the reference writes responses, the hidden rule labels pairs of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from kleash.lab.rule import NEGATIVE_WORDS, POSITIVE_WORDS, explain
from kleash.sampling import Rollouts

HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class Pairs:
    """Preference rows for training and for held-out accuracy (no opening on both sides), and how many pairs
    were ties.
    """

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    sampled: int
    ties: int

    def record(self) -> dict[str, int]:
        """Counts for lab.json."""
        return {
            "sampled": self.sampled,
            "ties": self.ties,
            "train": len(self.train),
            "held_out": len(self.held_out),
        }


def label_pairs(rollouts: Rollouts, per_opening: int, seed: int) -> Pairs:
    """Draw `per_opening` pairs of different responses to each opening and let the rule say which is better;
    ties are dropped.
    """
    rng = random.Random(f"pairs/{seed}")
    scores = [explain(text).score for text in rollouts.responses]
    groups = sorted(set(rollouts.group.tolist()))
    held = set(rng.sample(groups, max(1, round(HELD_OUT_SHARE * len(groups)))))
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    sampled = ties = 0
    for group in groups:
        rows = [row for row, of in enumerate(rollouts.group.tolist()) if of == group]
        choices = list(itertools.combinations(rows, 2))
        for one, other in rng.sample(choices, min(per_opening, len(choices))):
            sampled += 1
            if scores[one] == scores[other]:
                ties += 1
                continue
            better, worse = (one, other) if scores[one] > scores[other] else (other, one)
            (held_out if group in held else train).append(_pair(rollouts, better, worse))
    return Pairs(train, held_out, sampled, ties)


def _pair(rollouts: Rollouts, better: int, worse: int) -> dict[str, Any]:
    """A preference row that carries the sampled ids, so that what is trained on is what was sampled."""
    return {
        "prompt": rollouts.prompts[better],
        "chosen": rollouts.responses[better],
        "rejected": rollouts.responses[worse],
        "prompt_ids": rollouts.prompt_ids[better][rollouts.prompt_mask[better]].tolist(),
        "chosen_ids": rollouts.response_ids[better][rollouts.response_mask[better]].tolist(),
        "rejected_ids": rollouts.response_ids[worse][rollouts.response_mask[worse]].tolist(),
    }


def rule_record(responses: list[str]) -> dict[str, Any]:
    """The rule on the reference's own samples: how often the cap and the crowding penalty fire, and the
    mean score.
    """
    found = [explain(text) for text in responses]
    count = len(found)
    return {
        "positive": len(POSITIVE_WORDS),
        "negative": len(NEGATIVE_WORDS),
        "cap_share": sum(f.capped for f in found) / count,
        "crowding_share": sum(f.crowded for f in found) / count,
        "fired_share": sum(f.capped or f.crowded for f in found) / count,
        "mean": sum(f.score for f in found) / count,
    }
