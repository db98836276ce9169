"""PPO for language models: a value model, GAE, the KL in the reward of each token, several clipped updates;
with ptx_data the likelihood of demonstrations is mixed in (PPO-ptx).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kleash.config import option, redefault
from kleash.data.batches import Batch, collate_examples
from kleash.data.items import PromptIds
from kleash.data.sources import read_rows
from kleash.data.tokenise import pad_id, tokenise_demonstrations
from kleash.errors import UsageError
from kleash.functional import gae, masked_moments, token_rewards, whiten
from kleash.methods.base import Context, LossOutput, Method, Models, Step, Update, total
from kleash.methods.curriculum import visit
from kleash.methods.online import (
    OnlineConfig,
    Scored,
    device_of,
    metrics_of,
    probe,
    sample_rows,
    score,
    tokenise,
    with_reference,
)
from kleash.methods.policy_batch import PolicyBatch, make_updates, micro_batches
from kleash.methods.policy_gradient import (
    PolicyConfig,
    beta_now,
    control_beta,
    conventions,
    policy_loss,
    shaped,
)
from kleash.models import batch_logprobs
from kleash.models.value import ValueModel, token_outputs


@dataclass(kw_only=True)
class Config(PolicyConfig):
    """Options of PPO."""

    beta: float = redefault(PolicyConfig, "beta", 0.05)
    samples_per_prompt: int = redefault(OnlineConfig, "samples_per_prompt", 4)
    rollout_epochs: int = redefault(PolicyConfig, "rollout_epochs", 2)
    minibatches: int = redefault(PolicyConfig, "minibatches", 2)
    value: Literal["trunk", "separate"] = option(
        "trunk",
        "the value model: a head on the policy's own states, or a transformer of its own, as much memory "
        "again",
    )
    value_coef: float = option(0.1, "weight of the value loss beside the policy's", minimum=0.0)
    value_clip: float | None = option(
        0.2, "how far a value may move from its old one before its loss is clipped; none: no clip", above=0.0
    )
    gamma: float = option(1.0, "discount of a reward for every token later", minimum=0.0, maximum=1.0)
    lam: float = option(0.95, "GAE's lambda: 1 is the return minus the value, 0 the TD error", minimum=0.0,
                        maximum=1.0)  # fmt: skip
    whiten: bool = option(True, "give advantages mean 0 and deviation 1 over the step's real tokens")
    ptx_data: Any = option(
        None, "PPO-ptx: demonstrations whose likelihood is raised too, in any form sft reads"
    )
    ptx_coef: float = option(0.0, "weight of their mean negative log-likelihood a token", minimum=0.0)
    ptx_batch_size: int = option(8, "demonstrations in each gradient step", minimum=1)

    def check(self) -> None:
        """See TrainConfig.check."""
        super().check()
        if (self.ptx_data is None) != (self.ptx_coef == 0.0):
            raise UsageError(
                f"ptx_coef={self.ptx_coef:g} with ptx_data={self.ptx_data}: the likelihood term needs both, "
                "its data and a weight above 0."
            )


@dataclass
class MixedBatch:
    """Demonstrations mixed into an update; `scale` turns their summed negative log-likelihood into
    coef × mean per token × items of the update.
    """

    batch: Batch
    scale: float

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return self.batch.real_tokens

    @property
    def trained_tokens(self) -> int:
        """Tokens that are targets."""
        return self.batch.trained_tokens


def prepare(models: Models, config: Config) -> None:
    """The value model, and the demonstrations to mix in."""
    make = ValueModel.on_trunk if config.value == "trunk" else ValueModel.separate
    models.value = make(models.policy)
    if config.ptx_data is not None:
        rows = read_rows(config.ptx_data, "demonstrations", bad_rows=config.bad_rows)
        models.mixed = tokenise_demonstrations(
            rows, models.tokenizer, max_length=config.max_length, truncation=config.truncation,
            chat=config.chat,
        ).items  # fmt: skip


def loss(models: Models, batch: PolicyBatch | MixedBatch, config: Config) -> LossOutput:
    """The clipped surrogate and value_coef times the value loss, one item a response; or the ptx term."""
    if isinstance(batch, MixedBatch):
        logp, mask = batch_logprobs(models.policy, batch.batch)
        nll = -(logp * mask).sum(1)
        return LossOutput(nll * batch.scale, {"ptx/loss": total(nll, float(mask.sum()))})
    return policy_loss(models, batch, config, config.value_coef, config.value_clip)


def collect(models: Models, prompts: Sequence[PromptIds], config: Config, context: Context) -> Step:
    """Sample, score, look up values and references, estimate advantages token by token."""
    scored = with_reference(models, score(models, prompts, config, context), config)
    rollouts, size = scored.rollouts, config.samples_per_prompt
    beta = beta_now(models, config)
    metrics = metrics_of(models, scored, config, context)
    rewards = shaped(scored, config)
    metrics |= visit(models.memory, scored, config, context, len(prompts))
    if config.missing_end_penalty or config.overlong_buffer:
        metrics["reward/shaped"] = total(rewards[scored.used])
    control_beta(models, scored, config, context)
    metrics["kl/beta"] = (beta, 1.0)
    old, values = outputs_before(models, scored, config)
    used = scored.used & ~rewards.isnan()
    mask = rollouts.response_mask & used[:, None]
    advantages, returns = estimate(scored, rewards, values, mask, beta, config)
    metrics["value/explained"] = _explained(values, returns, mask)
    metrics["value/mean"], metrics["return/mean"] = total(values[mask]), total(returns[mask])
    if config.whiten:
        moments = context.gather(masked_moments(advantages, mask)[None]).sum(0)
        advantages = whiten(advantages, mask, moments=moments)
    tokens = {
        "advantages": advantages, "logp_old": old, "values_old": values, "returns": returns,
    }  # fmt: skip
    if config.kl_in == "loss" and scored.logp_ref is not None:
        tokens["logp_ref"] = scored.logp_ref
    device = device_of(models)
    updates = make_updates(
        rollouts,
        lambda rows: PolicyBatch.of(rollouts, rows, used, tokens, beta).to(device),
        used=used,
        live=used,
        size=size,
        reduction=config.reduction,
        minibatches=config.minibatches,
        passes=config.rollout_epochs,
        limits=(config.micro_batch_size, config.micro_batch_tokens),
        generator=context.generator,
    )
    if models.mixed:
        updates = [_mix(models, update, config, context) for update in updates]
    return Step(updates, metrics, sample_rows(models, scored, config) if context.keep_samples else [])


@torch.no_grad()
def outputs_before(models: Models, scored: Scored, config: Config) -> tuple[Tensor, Tensor]:
    """log π_old and V of every sampled token before any update, (N, L), in the micro-batches of training."""
    rollouts = scored.rollouts
    old, values = torch.zeros_like(rollouts.logp), torch.zeros_like(rollouts.logp)
    size = config.samples_per_prompt
    limits = (config.micro_batch_size, config.micro_batch_tokens)
    for rows in micro_batches(rollouts, range(len(rollouts) // size), size, *limits):
        out = token_outputs(
            models.policy, rollouts.take(rows).to_batch().to(device_of(models)), value=models.value,
            temperature=rollouts.temperature, forbidden=rollouts.forbidden,
        )  # fmt: skip
        width = out.logp.shape[1]
        assert out.values is not None
        old[rows, :width], values[rows, :width] = out.logp.to(old), out.values.to(values)
    return old, values


def estimate(
    scored: Scored, rewards: Tensor, values: Tensor, mask: Tensor, beta: float, config: Config
) -> tuple[Tensor, Tensor]:
    """GAE advantages and returns (N, L) of scores (N,); the KL is charged to each token where it is in the
    reward (Eq. 5).
    """
    assert scored.logp_ref is not None
    charge = beta if config.kl_in == "reward" else 0.0
    per_token = token_rewards(
        rewards.nan_to_num(), scored.rollouts.logp, scored.logp_ref, charge, scored.rollouts.response_mask
    )
    return gae(per_token, values, config.gamma, config.lam, mask)


def _explained(values: Tensor, returns: Tensor, mask: Tensor) -> tuple[float, float]:
    """1 − Var(return − value)/Var(return) over counted tokens: 0 is no better than a constant."""
    if int(mask.sum()) < 2:
        return 0.0, 0.0
    variance = float(returns[mask].double().var())
    return (1 - float((returns - values)[mask].double().var()) / variance, 1.0) if variance else (0.0, 0.0)


def _mix(models: Models, update: Update, config: Config, context: Context) -> Update:
    """The update with demonstrations drawn at random beside its rollouts."""
    places = torch.randint(len(models.mixed), (config.ptx_batch_size,), generator=context.generator).tolist()
    batch = collate_examples([models.mixed[i] for i in places], pad_id(models.tokenizer))
    sums = context.gather(torch.tensor([[update.items, float(batch.trained_tokens)]])).sum(0).tolist()
    items = max(sums[0], 1.0)  # as the loop divides: without any score the likelihood is still raised
    mixed = MixedBatch(batch.to(device_of(models)), config.ptx_coef * items / sums[1])
    return replace(update, micro_batches=[*update.micro_batches, mixed])


def _conventions(config: Config) -> dict[str, str]:
    ptx = "none"
    if config.ptx_data is not None:
        ptx = f"{config.ptx_coef:g} × mean negative log-likelihood a token of {config.ptx_batch_size} "
        ptx += "demonstrations"
    return {
        **conventions(config),
        "advantages": f"GAE, gamma={config.gamma:g}, lambda={config.lam:g}"
        + (", whitened over the step's real tokens (sample deviation)" if config.whiten else ""),
        "value": f"{config.value}; loss ½(V−R)², clip {config.value_clip}, weight {config.value_coef:g}",
        "score": "placed on each response's own last real token",
        "ptx": ptx,
    }


METHOD = Method(
    name="ppo",
    summary="PPO with a value model, GAE and the KL in the reward (arXiv 1707.06347, 2203.02155)",
    config=Config,
    kind="prompts",
    tokenise=tokenise,
    loss=loss,
    collect=collect,
    probe=probe,
    prepare=prepare,
    conventions=_conventions,
    uses_reference=True,
)
