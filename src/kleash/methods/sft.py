"""Supervised fine-tuning: make demonstrations likelier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kleash.config import option, redefault
from kleash.data.batches import Batch, collate_examples
from kleash.data.tokenise import tokenise_demonstrations
from kleash.methods.base import LossOutput, Method, Models
from kleash.methods.options import TrainConfig
from kleash.models import batch_logprobs


@dataclass(kw_only=True)
class Config(TrainConfig):
    """Options of supervised fine-tuning."""

    learning_rate: float = redefault(TrainConfig, "learning_rate", 2e-5)
    train_on: Literal["last", "assistant"] = option(
        "assistant", "which turns of a conversation are trained: the last answer, or every assistant turn"
    )


def loss(models: Models, batch: Batch, config: Config) -> LossOutput:
    """−log π(y_t | x, y_<t) of every trained token: one item a token, so the step's loss is a mean over
    tokens.
    """
    logp, mask = batch_logprobs(models.policy, batch)
    return LossOutput(-logp[mask])


def _tokenise(rows: Any, tokenizer: Any, config: Config) -> Any:
    return tokenise_demonstrations(
        rows,
        tokenizer,
        max_length=config.max_length,
        truncation=config.truncation,
        train_on=config.train_on,
        chat=config.chat,
    )


def _conventions(config: Config) -> dict[str, str]:
    return {
        "loss": "negative log-likelihood, mean over all trained tokens of the optimizer step (token-mean)"
    }


METHOD = Method(
    name="sft",
    summary="supervised fine-tuning on demonstrations",
    config=Config,
    kind="demonstrations",
    tokenise=_tokenise,
    loss=loss,
    count=lambda batch: batch.trained_tokens,
    collate=collate_examples,
    conventions=_conventions,
)
