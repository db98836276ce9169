"""The mathematics: pure functions of tensors, named after what they compute, that know nothing of trainers.

Natural logarithms and nats throughout; float32 or better inside; a mask is bool and True at real tokens;
wrong shapes raise ValueError at the top. Losses are to be minimised, objectives say so.
"""

from .advantages import gae, group_advantages, leave_one_out_advantages, position_baseline
from .calibration import brier_score, expected_calibration_error
from .chunked import linear_kl, linear_logprobs
from .distill import distillation_advantages
from .kl import exact_kl, kl_k1, kl_k2, kl_k3
from .logprobs import sequence_logprob, token_logprobs
from .optimal import implicit_reward, optimal_policy
from .overoptimization import OveroptimizationFit, fit_overoptimization
from .policy_gradient import clipped_surrogate, reinforce_loss
from .preference import bradley_terry_loss, dpo_loss
from .reduce import aggregate, reduce, whiten
from .rewards import returns_to_go, token_rewards

__all__ = [
    "OveroptimizationFit",
    "aggregate",
    "bradley_terry_loss",
    "brier_score",
    "clipped_surrogate",
    "distillation_advantages",
    "dpo_loss",
    "exact_kl",
    "expected_calibration_error",
    "fit_overoptimization",
    "gae",
    "group_advantages",
    "implicit_reward",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "leave_one_out_advantages",
    "linear_kl",
    "linear_logprobs",
    "optimal_policy",
    "position_baseline",
    "reduce",
    "reinforce_loss",
    "returns_to_go",
    "sequence_logprob",
    "token_logprobs",
    "token_rewards",
    "whiten",
]
