"""Everything about the numbers of an evaluation that another library might do otherwise, in words."""

from __future__ import annotations

from typing import Any

from torch import nn

from kleash.measure.judges import Judges
from kleash.models import identity
from kleash.models.forward import Dtype
from kleash.rewards import reward_name
from kleash.sampling import Rollouts


def conventions(rollouts: Rollouts, judges: Judges, reference: nn.Module, dtype: Dtype) -> dict[str, Any]:
    """One entry a convention; `reference` is the reference's identity, so that evaluations can be matched."""
    left_out = "no reward and no gold, counted as missing"
    return {
        "logarithm": "natural; KL, entropy and log-probabilities in nats",
        "sampling_distribution": "policy",
        "temperature": rollouts.temperature,
        "end_token": (
            f"removed before the softmax of both models (ids {list(rollouts.forbidden)})"
            if rollouts.forbidden
            else "part of the vocabulary and of the response"
        ),
        "drift": "exact: KL(policy‖reference) over the vocabulary at every position, summed over a response",
        "kl_k1": "sampled: sum over tokens of logp − logp_ref",
        "kl_k2": "sampled: sum over tokens of (logp − logp_ref)²/2; biased",
        "kl_k3": "sampled: sum over tokens of exp(−d) − 1 + d, d = logp − logp_ref",
        "distinct_bigrams": "distinct / all token bigrams, pooled over a prompt's samples; mean over prompts",
        "length": "tokens of the response, the end token included",
        "entropy": "of the policy's next-token distribution, mean over a response's positions",
        "stderr": "clustered by prompt",
        "missing": "left out of the mean and counted",
        "unfinished": "scored like the others" if judges.score_unfinished else left_out,
        "dtype": dtype,
        "reference": identity(reference),
        "reward": None if judges.reward is None else reward_name(judges.reward),
        "gold": None if judges.gold is None else reward_name(judges.gold),
    }
