"""Models: load them, run them, save them. A model is always a plain transformers model and its tokenizer."""

from kleash.models.forward import (
    PositionStats,
    autocast,
    batch_kl,
    batch_logprobs,
    compute_dtype,
    last_token_states,
    response_logprobs,
    verify_forward,
)
from kleash.models.load import frozen_copy, identity, load_model
from kleash.models.reward_model import RewardModel

__all__ = [
    "PositionStats",
    "RewardModel",
    "autocast",
    "batch_kl",
    "batch_logprobs",
    "compute_dtype",
    "frozen_copy",
    "identity",
    "last_token_states",
    "load_model",
    "response_logprobs",
    "verify_forward",
]
