"""The mathematics: pure functions of tensors, named after what they compute, that know nothing of trainers.

Natural logarithms and nats throughout; float32 or better inside; a mask is bool and True at real tokens;
wrong shapes raise ValueError at the top. Losses are to be minimised, objectives say so.
"""

from .advantages import (
    gae,
    group_advantages,
    leave_one_out_advantages,
    maxrl_advantages,
    position_baseline,
)
from .calibration import brier_score, expected_calibration_error
from .chunked import linear_kl, linear_logprobs
from .distill import distillation_advantages
from .kl import exact_kl, kl_k1, kl_k2, kl_k3, kl_loss
from .kl_control import adaptive_beta, lagrangian_beta
from .logprobs import sequence_logprob, token_logprobs
from .optimal import implicit_reward, optimal_policy
from .overoptimization import OveroptimizationFit, fit_overoptimization
from .policy_gradient import cispo_objective, clipped_surrogate, reinforce_loss, sapo_objective
from .preference import bradley_terry_loss, dpo_loss
from .ratio import clip_shares, importance_ratio, truncated_importance_weight
from .reduce import aggregate, reduce
from .rewards import missing_end_penalty, overlong_penalty, returns_to_go, token_rewards
from .value import value_loss
from .whitening import masked_moments, whiten

__all__ = [
    "OveroptimizationFit",
    "adaptive_beta",
    "aggregate",
    "bradley_terry_loss",
    "brier_score",
    "cispo_objective",
    "clip_shares",
    "clipped_surrogate",
    "distillation_advantages",
    "dpo_loss",
    "exact_kl",
    "expected_calibration_error",
    "fit_overoptimization",
    "gae",
    "group_advantages",
    "implicit_reward",
    "importance_ratio",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_loss",
    "lagrangian_beta",
    "leave_one_out_advantages",
    "linear_kl",
    "linear_logprobs",
    "masked_moments",
    "maxrl_advantages",
    "missing_end_penalty",
    "optimal_policy",
    "overlong_penalty",
    "position_baseline",
    "reduce",
    "reinforce_loss",
    "returns_to_go",
    "sapo_objective",
    "sequence_logprob",
    "token_logprobs",
    "token_rewards",
    "truncated_importance_weight",
    "value_loss",
    "whiten",
]
