"""REINFORCE with a per-token KL penalty: sample, score, take one step per batch (seed Eq. 5, 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kleash.config import option, redefault
from kleash.data.items import PromptIds
from kleash.errors import UsageError
from kleash.functional import position_baseline, reinforce_loss, returns_to_go, token_rewards
from kleash.methods.base import Context, LossOutput, Method, Models, Step, Update, total
from kleash.methods.online import (
    OnlineConfig,
    all_micro_batches,
    device_of,
    metrics_of,
    probe,
    sample_rows,
    score,
    tokenise,
    with_reference,
)
from kleash.methods.options import TrainConfig
from kleash.methods.policy_batch import PolicyBatch
from kleash.models import batch_logprobs


@dataclass(kw_only=True)
class Config(OnlineConfig):
    """Options of REINFORCE."""

    learning_rate: float = redefault(TrainConfig, "learning_rate", 2e-6)
    beta: float = option(
        0.1, "KL coefficient: each token is charged beta times its log-ratio to the reference", minimum=0.0
    )
    baseline: Literal["none", "position", "prompt", "leave-one-out"] = option(
        "position",
        "what is subtracted from the returns: nothing; the batch's mean return at each position; the mean "
        "total return of the responses to the same prompt; or that of the others among them, which is "
        "unbiased",
    )

    def check(self) -> None:
        """See TrainConfig.check."""
        super().check()
        if self.baseline in ("prompt", "leave-one-out") and self.samples_per_prompt == 1:
            raise UsageError(
                f"baseline={self.baseline} with samples_per_prompt=1 leaves no signal: a response has no "
                "other to be compared with. Choose samples_per_prompt=2 or more, or baseline=position."
            )


def loss(models: Models, batch: PolicyBatch, config: Config) -> LossOutput:
    """−Σ_t A_t·log π(y_t | x, y_<t), one item a response: the loss is a mean over sequences (Eq. 6)."""
    logp, mask = batch_logprobs(
        models.policy, batch.batch, temperature=batch.temperature, forbidden=batch.forbidden
    )
    gap = (logp.detach() - batch.logp).abs() * mask
    per_token = reinforce_loss(logp, batch.advantages, mask, reduction="none")
    return LossOutput(per_token.sum(1), {"policy/sampler_gap": total(gap, float(mask.sum()))})


def collect(models: Models, prompts: Sequence[PromptIds], config: Config, context: Context) -> Step:
    """Sample, score, and turn scores and log-ratios into advantages (Eq. 5, then returns to go)."""
    scored = with_reference(models, score(models, prompts, config, context), config)
    rollouts, mask = scored.rollouts, scored.rollouts.response_mask
    assert scored.logp_ref is not None
    values = torch.nan_to_num(scored.scores.values)  # a missing score counts nowhere: see advantages_of
    returns = returns_to_go(token_rewards(values, rollouts.logp, scored.logp_ref, config.beta, mask), mask)
    advantages = advantages_of(returns, mask, scored.used, config, context)
    batches = [
        PolicyBatch.of(rollouts, rows, scored.used, {"advantages": advantages}).to(device_of(models))
        for rows in all_micro_batches(rollouts, config)
    ]
    rows = sample_rows(models, scored, config) if context.keep_samples else []
    return Step([Update(batches, len(rollouts))], metrics_of(models, scored, config, context), rows)


def advantages_of(returns: Tensor, mask: Tensor, used: Tensor, config: Config, context: Context) -> Tensor:
    """Returns (N, L) minus the baseline; a response without a score (`used` False) counts nowhere."""
    counted = mask & used[:, None]
    if config.baseline == "position":
        width = config.max_new_tokens - returns.shape[1]  # equal shapes on every process
        joined = context.gather(torch.nn.functional.pad(returns, (0, width)))
        joined_mask = context.gather(torch.nn.functional.pad(counted, (0, width)))
        baseline = position_baseline(joined, joined_mask)[: returns.shape[1]]
    elif config.baseline == "none":
        baseline = torch.zeros(())
    else:
        baseline, used = _group_baseline(returns[:, 0], used, config)
    return torch.where(mask & used[:, None], returns - baseline, torch.zeros(()))


def _group_baseline(totals: Tensor, used: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Mean total return of a prompt's (other) scored responses (N, 1), and which rows have a signal."""
    totals = torch.where(used, totals, torch.zeros(())).view(-1, config.samples_per_prompt)
    counted = used.view_as(totals).float()
    sums, counts = totals.sum(1, keepdim=True), counted.sum(1, keepdim=True)
    if config.baseline == "leave-one-out":
        sums, counts = sums - totals, counts - counted
        used = used & (counts > 0).expand_as(totals).reshape(-1)  # nobody to compare with: no signal
    return (sums / counts.clamp_min(1)).expand_as(totals).reshape(-1, 1), used


def _conventions(config: Config) -> dict[str, str]:
    eos = "removed before the softmax of both models" if config.fixed_length else "part of the vocabulary"
    return {
        "loss": "summed over a response's tokens, mean over the step's responses (sequence-mean, Eq. 6)",
        "kl": f"in the reward, per token, on the sampled token, beta={config.beta:g} (Eq. 5)",
        "kl metrics": "nats a response; kl/k1 and kl/k3 are sampled, kl/exact sums over the vocabulary",
        "returns": "undiscounted, to go",
        "baseline": config.baseline,
        "score": "placed on each response's own last real token",
        "eos": eos,
        "unfinished responses": config.unfinished,
        "advantages": "not scaled by a deviation",
    }


METHOD = Method(
    name="reinforce",
    summary="REINFORCE with a KL penalty in the reward",
    config=Config,
    kind="prompts",
    tokenise=tokenise,
    loss=loss,
    collect=collect,
    probe=probe,
    conventions=_conventions,
    uses_reference=True,
)
