"""Direct preference optimisation: the policy as its own reward model (seed Eq. 10, 11)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kleash.config import option, redefault
from kleash.data.batches import Batch, collate_pairs
from kleash.data.tokenise import tokenise_preferences
from kleash.errors import UsageError
from kleash.functional import dpo_loss, sequence_logprob
from kleash.methods.base import LossOutput, Method, Models, total
from kleash.methods.options import TrainConfig
from kleash.models import batch_logprobs


@dataclass(kw_only=True)
class Config(TrainConfig):
    """Options of DPO."""

    learning_rate: float = redefault(TrainConfig, "learning_rate", 1e-6)
    beta: float = option(
        0.1, "KL coefficient: the implicit reward is beta times the log-ratio to the reference", above=0.0
    )
    label_smoothing: float = option(
        0.0, "assumed share of wrongly labelled pairs (conservative DPO)", minimum=0.0, maximum=0.5
    )
    cache_reference: bool = option(
        True,
        "compute the reference's log-probs once, before step 1, and keep them by content hash for later runs",
    )

    def check(self) -> None:
        """See TrainConfig.check."""
        super().check()
        if self.label_smoothing >= 0.5:
            raise UsageError(
                f"label_smoothing={self.label_smoothing:g}: with half of the labels wrong there is nothing "
                "to learn from them. Give a share below 0.5."
            )


def pair_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """log π(y|x), summed over response tokens, of both responses of each pair: (pairs, 2), chosen first."""
    logp, mask = batch_logprobs(model, batch)
    return sequence_logprob(logp, mask, reduction="sum").view(-1, 2)


def loss(models: Models, batch: Batch, config: Config) -> LossOutput:
    """−log σ(beta·(log-ratio of the chosen − log-ratio of the rejected)), one item a pair (Eq. 10)."""
    logps = pair_logprobs(models.policy, batch)
    reference = reference_logprobs(models, batch)
    per_pair, reward_w, reward_l = dpo_loss(
        logps[:, 0],
        logps[:, 1],
        reference[:, 0],
        reference[:, 1],
        config.beta,
        label_smoothing=config.label_smoothing,
        reduction="none",
    )
    margin = (reward_w - reward_l).detach()
    weight = torch.sigmoid(-margin)
    metrics = {
        "dpo/logp_chosen": total(logps[:, 0]),
        "dpo/logp_rejected": total(logps[:, 1]),
        "dpo/reward_chosen": total(reward_w),
        "dpo/reward_rejected": total(reward_l),
        "dpo/margin": total(margin),
        "dpo/accuracy": total((margin > 0).double() + 0.5 * (margin == 0)),  # a tie is half right
        "dpo/weight": total(weight),
        "dpo/weight_times_beta": total(config.beta * weight),
    }
    return LossOutput(per_pair, metrics)


def reference_logprobs(models: Models, batch: Batch) -> Tensor:
    """The reference's log π_ref(y|x) of each pair (pairs, 2): from the cache by data-set position, or
    computed now.
    """
    if models.reference_logps is not None:
        assert batch.index is not None
        return models.reference_logps[batch.index]
    assert models.reference is not None
    with torch.no_grad():
        return pair_logprobs(models.reference, batch)


def _initial_loss(config: Config) -> float:
    return math.log(2.0)  # every margin is 0, whatever beta and the label smoothing


def _tokenise(rows: Any, tokenizer: Any, config: Config) -> Any:
    return tokenise_preferences(
        rows, tokenizer, max_length=config.max_length, truncation=config.truncation, chat=config.chat
    )


def _conventions(config: Config) -> dict[str, str]:
    return {
        "loss": "mean over the pairs of the optimizer step",
        "sequence log-prob": "sum over response tokens, end token included",
        "kl": "implicit in the loss (Eq. 10); drift of the policy's own samples is measured at the end",
        "accuracy": "share of pairs with a positive margin; a margin of exactly 0 counts one half",
    }


METHOD = Method(
    name="dpo",
    summary="direct preference optimisation on preference pairs",
    config=Config,
    kind="preferences",
    tokenise=_tokenise,
    loss=loss,
    count=lambda batch: len(batch) // 2,
    collate=collate_pairs,
    rows_per_item=2,
    conventions=_conventions,
    initial_loss=_initial_loss,
    uses_reference=True,
    sums=pair_logprobs,
)
