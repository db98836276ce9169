"""Reward modelling: a score for a response, learnt from preferences (Bradley–Terry)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kleash.config import option, redefault
from kleash.data.batches import Batch, collate_pairs
from kleash.data.tokenise import tokenise_preferences
from kleash.errors import UsageError
from kleash.functional import bradley_terry_loss
from kleash.methods.base import LossOutput, Method, Models, total
from kleash.methods.options import TrainConfig
from kleash.models import RewardModel, identity, load_model


@dataclass(kw_only=True)
class Config(TrainConfig):
    """Options of reward modelling."""

    learning_rate: float = redefault(TrainConfig, "learning_rate", 2e-5)
    center: float = option(
        0.0, "weight of the squared sum of a pair's scores, which keeps scores near 0", minimum=0.0
    )
    text_model: Any = option(
        None,
        "the model that wrote the responses, or unknown; by default the starting model. Its identity is kept",
    )


def loss(models: Models, batch: Batch, config: Config) -> LossOutput:
    """−log σ(r(x, chosen) − r(x, rejected)), one item a pair."""
    scores = models.policy.scores(batch).view(-1, 2)  # type: ignore[operator]
    chosen, rejected = scores[:, 0], scores[:, 1]
    margin = (chosen - rejected).detach()
    metrics = {
        "reward/chosen": total(chosen),
        "reward/rejected": total(rejected),
        "reward/margin": total(margin),
        "reward/accuracy": total((margin > 0).double() + 0.5 * (margin == 0)),  # a tie is half right
    }
    return LossOutput(bradley_terry_loss(chosen, rejected, center=config.center, reduction="none"), metrics)


def build(model: Any, tokenizer: Any, config: Config) -> RewardModel:
    """A reward model on a copy of the starting model's transformer, which remembers whose text it is fitted
    on.
    """
    reward_model = RewardModel.from_policy(model, tokenizer)
    reward_model.meta["text_model"] = _text_identity(model, config.text_model)
    return reward_model


def _text_identity(start: Any, text_model: Any) -> str | None:
    if text_model is None:
        return identity(start)
    return None if text_model == "unknown" else identity(load_model(text_model)[0])


@torch.no_grad()
def finish(policy: Any, batches: Iterable[Batch], config: Config) -> dict[str, Any]:
    """Mean and deviation of held-out responses' scores: the scale a policy's reward is later given in."""
    parts = [policy.scores(batch).double().cpu() for batch in batches]
    scores = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    if len(scores) < 2:
        raise UsageError(
            f"eval_fraction={config.eval_fraction:g} leaves no held-out pair to scale the reward model's "
            "scores on: raise eval_fraction or give eval_data."
        )
    return {
        "mean": float(scores.mean()),
        "std": float(scores.std(correction=0)),
        "scored_responses": len(scores),
    }


def _initial_loss(config: Config) -> float:
    return math.log(2.0)  # the head starts at 0, so both scores do


def _tokenise(rows: Any, tokenizer: Any, config: Config) -> Any:
    return tokenise_preferences(
        rows, tokenizer, max_length=config.max_length, truncation=config.truncation, chat=config.chat
    )


def _conventions(config: Config) -> dict[str, str]:
    return {
        "loss": "Bradley–Terry, mean over the pairs of the optimizer step",
        "score": "read at each response's last real token",
        "std": "population deviation of the scores of held-out responses, chosen and rejected alike",
        "accuracy": "share of pairs whose chosen response scores higher; a tie counts one half",
    }


def _notes(config: Config) -> list[str]:
    if config.text_model is not None:
        return []
    return [
        "the responses are taken to be the starting model's own text, where its scores will be trusted; if "
        "others wrote them, say text_model=unknown"
    ]


METHOD = Method(
    name="reward",
    summary="a reward model on preference pairs",
    config=Config,
    kind="preferences",
    tokenise=_tokenise,
    loss=loss,
    count=lambda batch: len(batch) // 2,
    collate=collate_pairs,
    rows_per_item=2,
    conventions=_conventions,
    initial_loss=_initial_loss,
    notes=_notes,
    build=build,
    finish=finish,
)
