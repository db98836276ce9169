"""REINFORCE with a per-token KL penalty: the policy samples, is scored, and takes one step per batch (seed
Eq. 5, 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kleash.config import option, redefault
from kleash.data.batches import Batch, plan_epoch
from kleash.data.items import PromptIds
from kleash.data.tokenise import tokenise_prompts
from kleash.errors import UsageError
from kleash.functional import kl_k3, position_baseline, reinforce_loss, returns_to_go, token_rewards
from kleash.measure.evaluation import Sample
from kleash.methods.base import Collected, Context, LossOutput, Method, Models, Sums, total
from kleash.methods.options import TrainConfig
from kleash.models import PositionStats, batch_kl, batch_logprobs
from kleash.rewards import Scores, call_reward
from kleash.sampling import Rollouts, sample


@dataclass(kw_only=True)
class Config(TrainConfig):
    """Options of REINFORCE."""

    learning_rate: float = redefault(TrainConfig, "learning_rate", 2e-6)
    batch_size: int = redefault(TrainConfig, "batch_size", 64)
    beta: float = option(
        0.1, "KL coefficient: each token is charged beta times its log-ratio to the reference", minimum=0.0
    )
    baseline: Literal["none", "position", "prompt", "leave-one-out"] = option(
        "position",
        "what is subtracted from the returns: nothing; the batch's mean return at each position; the mean "
        "total return of "
        "the responses to the same prompt; or that of the others among them, which leaves the gradient "
        "unbiased",
    )
    samples_per_prompt: int = option(1, "responses sampled to each prompt in a step", minimum=1)
    unfinished: Literal["keep", "drop"] = option(
        "keep",
        "responses cut off at max_new_tokens: trained like the others, or left out of the step and counted",
    )
    samples_every: int = option(10, "steps between entries of samples.jsonl", minimum=1)
    samples_kept: int = option(8, "responses written each time", minimum=0)
    log_exact_kl_every: int = option(
        10, "steps between exact KL rows; the sampled estimates are logged at every step", minimum=1
    )

    def check(self) -> None:
        """See TrainConfig.check."""
        super().check()
        if self.reward is None:
            raise UsageError(
                "reward is missing: reinforce needs something to raise. Give reward=file.py:function or a "
                "reward model."
            )
        if self.batch_size % self.samples_per_prompt:
            raise UsageError(
                f"batch_size={self.batch_size} responses cannot be made of whole groups of "
                f"samples_per_prompt={self.samples_per_prompt}: choose a multiple."
            )
        if self.baseline in ("prompt", "leave-one-out") and self.samples_per_prompt == 1:
            raise UsageError(
                f"baseline={self.baseline} with samples_per_prompt=1 leaves no signal: a response has no "
                "other to be compared "
                "with. Choose samples_per_prompt=2 or more, or baseline=position."
            )
        if self.micro_batch_size is not None and self.micro_batch_size < self.samples_per_prompt:
            raise UsageError(
                f"micro_batch_size={self.micro_batch_size} is smaller than "
                f"samples_per_prompt={self.samples_per_prompt}: the "
                "responses to a prompt stay together, so a micro-batch must hold at least one such group."
            )
        if self.max_length <= self.max_new_tokens:
            raise UsageError(
                f"max_length={self.max_length} leaves no room for a prompt beside "
                f"max_new_tokens={self.max_new_tokens}: raise it."
            )


@dataclass
class PolicyBatch:
    """Sampled responses with their advantages and log-probs as sampled, both (N, L) aligned with the trained
    tokens.
    """

    batch: Batch
    advantages: Tensor
    logp: Tensor
    temperature: float
    forbidden: tuple[int, ...]

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return self.batch.real_tokens

    @property
    def trained_tokens(self) -> int:
        """Tokens that are targets."""
        return self.batch.trained_tokens

    def to(self, device: torch.device | str) -> PolicyBatch:
        """The same batch with every tensor on `device`."""
        return replace(
            self,
            batch=self.batch.to(device),
            advantages=self.advantages.to(device),
            logp=self.logp.to(device),
        )


def loss(models: Models, batch: PolicyBatch, config: Config) -> LossOutput:
    """−Σ_t A_t·log π(y_t | x, y_<t), one item a response: the loss is a mean over sequences (Eq. 6)."""
    logp, mask = batch_logprobs(
        models.policy, batch.batch, temperature=batch.temperature, forbidden=batch.forbidden
    )
    gap = (logp.detach() - batch.logp).abs() * mask
    per_token = reinforce_loss(logp, batch.advantages, mask, reduction="none")
    return LossOutput(per_token.sum(1), {"policy/sampler_gap": total(gap, float(mask.sum()))})


@dataclass
class Scored:
    """Rollouts with what judges and reference say: log π_ref (N, L), which rows count, and their
    micro-batches' row numbers.
    """

    rollouts: Rollouts
    parts: list[list[int]]
    logp_ref: Tensor
    scores: Scores
    gold: Scores | None
    used: Tensor


def collect(models: Models, prompts: Sequence[PromptIds], config: Config, context: Context) -> Collected:
    """Sample responses, score them, and turn scores and log-ratios into advantages (Eq. 5, then returns to
    go).
    """
    scored = score(models, prompts, config, context)
    rollouts, mask = scored.rollouts, scored.rollouts.response_mask
    values = torch.nan_to_num(scored.scores.values)
    returns = returns_to_go(token_rewards(values, rollouts.logp, scored.logp_ref, config.beta, mask), mask)
    advantages = advantages_of(returns, mask, scored.used, config, context)
    batches = [_policy_batch(rollouts, advantages, rows).to(_device(models)) for rows in scored.parts]
    samples = _samples(models, scored, config) if context.keep_samples else []
    return Collected(batches, _metrics(models, scored, config, context), samples)


def probe(models: Models, prompts: Sequence[PromptIds], config: Config, context: Context) -> Collected:
    """The metrics of `collect` on prompts that are not trained on."""
    return Collected([], _metrics(models, score(models, prompts, config, context), config, context))


def score(models: Models, prompts: Sequence[PromptIds], config: Config, context: Context) -> Scored:
    """Sample responses and ask reference, reward and gold about them."""
    assert models.reward is not None
    rollouts = sample_prompts(models, prompts, config, context.generator)
    parts = micro_batches(rollouts, config)
    scores = call_reward(models.reward, rollouts, timeout=config.reward_timeout)
    gold = None if models.gold is None else call_reward(models.gold, rollouts, timeout=config.reward_timeout)
    used = scores.present if config.unfinished == "keep" else scores.present & rollouts.ended
    return Scored(rollouts, parts, _reference_logprobs(models, rollouts, parts), scores, gold, used)


def sample_prompts(
    models: Models,
    prompts: Sequence[PromptIds],
    config: Config,
    generator: torch.Generator,
    n: int | None = None,
) -> Rollouts:
    """`samples_per_prompt` (or `n`) responses to each prompt from the policy, dropout off."""
    rollouts = sample(
        models.policy,
        models.tokenizer,
        [prompt.prompt_ids for prompt in prompts],
        n=n or config.samples_per_prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        fixed_length=config.fixed_length,
        generator=generator,
        batch_rows=config.sampling_rows,
        columns={name: [p.columns.get(name) for p in prompts] for name in _column_names(prompts)},
    )
    return replace(rollouts, prompts=[prompts[g].text for g in rollouts.group.tolist()])


def _column_names(prompts: Sequence[PromptIds]) -> list[str]:
    return list(dict.fromkeys(name for prompt in prompts for name in prompt.columns))


def micro_batches(rollouts: Rollouts, config: Config) -> list[list[int]]:
    """Row numbers of each micro-batch: whole groups of one prompt, longest first, within the micro-batch
    limits.
    """
    size = _group_size(rollouts)
    lengths = (rollouts.prompt_mask.sum(1) + rollouts.response_mask.sum(1)).view(-1, size).amax(1).tolist()
    per_batch = None if config.micro_batch_size is None else max(1, config.micro_batch_size // size)
    plan = plan_epoch(
        lengths,
        batch_size=len(lengths),
        micro_batch_size=per_batch,
        token_budget=config.micro_batch_tokens,
        rows_per_item=size,
        seed=0,
        epoch=0,
    )
    return [[group * size + i for group in groups for i in range(size)] for groups in plan[0]]


def _group_size(rollouts: Rollouts) -> int:
    return len(rollouts) // int(rollouts.group.max() + 1)


def _reference_logprobs(models: Models, rollouts: Rollouts, parts: list[list[int]]) -> Tensor:
    """log π_ref of every sampled token, (N, L), under the temperature and support it was sampled with."""
    assert models.reference is not None
    out = torch.zeros_like(rollouts.logp)
    for rows in parts:
        part = rollouts.take(rows)
        with torch.no_grad():
            logp, _ = batch_logprobs(
                models.reference,
                part.to_batch().to(_device(models)),
                temperature=part.temperature,
                forbidden=part.forbidden,
            )
        out[rows, : logp.shape[1]] = logp.float().to(out.device)
    return out


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


def _policy_batch(rollouts: Rollouts, advantages: Tensor, rows: list[int]) -> PolicyBatch:
    part = rollouts.take(rows)
    width = int(part.response_mask.sum(1).max())
    return PolicyBatch(
        part.to_batch(), advantages[rows, :width], part.logp[:, :width], part.temperature, part.forbidden
    )


def _metrics(models: Models, scored: Scored, config: Config, context: Context) -> Sums:
    rollouts, mask = scored.rollouts, scored.rollouts.response_mask
    metrics = {
        "kl/k1": total(((rollouts.logp - scored.logp_ref) * mask).sum(1)),
        "kl/k3": total((kl_k3(rollouts.logp, scored.logp_ref) * mask).sum(1)),
        "length/mean": total(mask.sum(1)),
        "ended/share": total(rollouts.ended),
        "responses/unused": total(~scored.used),
        **_score_metrics("reward", scored.scores, config.samples_per_prompt),
    }
    if scored.gold is not None:
        metrics |= _score_metrics("gold", scored.gold, 1)
    if context.exact_kl:
        stats = [_exact(models, rollouts, rows) for rows in scored.parts]
        metrics["kl/exact"] = (sum(float(s.kl.double().sum()) for s in stats), float(len(rollouts)))
    return metrics


def _score_metrics(name: str, scores: Scores, group: int) -> Sums:
    """Mean over the scored responses, share missing, each part by name, share of prompts whose responses all
    score alike.
    """
    metrics = {
        f"{name}/mean": total(scores.values[scores.present]),
        f"{name}/missing": total(~scores.present),
    }
    if len(scores.parts) > 1:
        metrics |= {
            f"{name}/{part}": total(values[values.isfinite()]) for part, values in scores.parts.items()
        }
    if group > 1:
        groups = scores.values.view(-1, group)
        metrics[f"{name}/no_spread"] = total((groups == groups[:, :1]).all(1))
    return metrics


def _exact(models: Models, rollouts: Rollouts, rows: list[int]) -> PositionStats:
    """Exact KL(policy‖reference) at every position of some responses (Eq. 4), under the support they were
    sampled with.
    """
    assert models.reference is not None
    batch = rollouts.take(rows).to_batch().to(_device(models))
    return batch_kl(
        models.policy, models.reference, batch, temperature=rollouts.temperature, forbidden=rollouts.forbidden
    )


def _samples(models: Models, scored: Scored, config: Config) -> list[dict[str, Any]]:
    """The first few responses as rows of samples.jsonl."""
    rollouts, kept = scored.rollouts, list(range(min(config.samples_kept, len(scored.rollouts))))
    stats = _exact(models, rollouts, kept) if kept else None
    rows = []
    for i in kept:
        length = int(rollouts.response_mask[i].sum())
        ids = rollouts.response_ids[i, :length].tolist()
        assert stats is not None
        row = Sample(
            prompt=rollouts.prompts[i],
            response=rollouts.responses[i],
            tokens=[models.tokenizer.decode([token]) for token in ids],
            ids=ids,
            logp=_rounded(rollouts.logp[i, :length]),
            logp_ref=_rounded(scored.logp_ref[i, :length]),
            kl=_rounded(stats.kl[i, :length]),
            reward=_number(scored.scores, i),
            gold=None if scored.gold is None else _number(scored.gold, i),
            ended=bool(rollouts.ended[i]),
            group=int(rollouts.group[i]),
        )
        rows.append(row.to_json())
    return rows


def _rounded(values: Tensor) -> list[float]:
    return [round(x, 5) for x in values.tolist()]


def _number(scores: Scores, row: int) -> float | None:
    return float(scores.values[row]) if bool(scores.present[row]) else None


def _device(models: Models) -> torch.device:
    return next(models.policy.parameters()).device


def _tokenise(rows: Any, tokenizer: Any, config: Config) -> Any:
    return tokenise_prompts(
        rows,
        tokenizer,
        max_length=config.max_length - config.max_new_tokens,
        truncation=config.truncation,
        chat=config.chat,
    )


def _conventions(config: Config) -> dict[str, str]:
    return {
        "loss": "sum over a response's tokens, mean over the responses of the optimizer step "
        "(sequence-mean, Eq. 6)",
        "kl": f"in the reward, per token, on the sampled token, beta={config.beta:g} (Eq. 5); kl/k1 and "
        "kl/k3 are sampled "
        "estimates in nats per response, kl/exact sums over the vocabulary",
        "returns": "undiscounted, to go",
        "baseline": config.baseline,
        "score": "placed on each response's own last real token",
        "eos": "removed before the softmax of policy and reference"
        if config.fixed_length
        else "part of the vocabulary",
        "unfinished responses": config.unfinished,
        "advantages": "not scaled by a deviation",
    }


METHOD = Method(
    name="reinforce",
    summary="REINFORCE with a KL penalty in the reward",
    config=Config,
    kind="prompts",
    tokenise=_tokenise,
    loss=loss,
    count=lambda batch: len(batch.batch),
    collect=collect,
    probe=probe,
    conventions=_conventions,
    uses_reference=True,
)
