"""What every method that trains on its own samples shares: sampling, scoring, metrics, rows of
samples.jsonl.
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
from kleash.functional import kl_k3
from kleash.measure.evaluation import Sample
from kleash.methods.base import Collected, Context, Models, Sums, total
from kleash.methods.options import TrainConfig
from kleash.models import PositionStats, batch_kl, batch_logprobs
from kleash.rewards import Scores, call_reward
from kleash.sampling import Rollouts, sample


@dataclass(kw_only=True)
class OnlineConfig(TrainConfig):
    """Options of methods that train on text they sample themselves."""

    batch_size: int = redefault(TrainConfig, "batch_size", 64)
    samples_per_prompt: int = option(1, "responses sampled to each prompt in a step", minimum=1)
    unfinished: Literal["keep", "drop"] = option(
        "keep", "responses cut off at max_new_tokens: trained like the others, or left out and counted"
    )
    samples_every: int = option(10, "steps between entries of samples.jsonl", minimum=1)
    samples_kept: int = option(8, "responses written each time", minimum=0)
    log_exact_kl_every: int = option(
        10, "steps between exact KL values; the sampled estimates are logged at every step", minimum=1
    )

    def check(self) -> None:
        """See TrainConfig.check."""
        super().check()
        size = self.samples_per_prompt
        if self.reward is None:
            raise UsageError(
                "reward is missing: there must be something to raise. Give reward=file.py:function, a rule "
                "such as reward=length:200, or the folder of a reward model."
            )
        if self.batch_size % size:
            raise UsageError(
                f"batch_size={self.batch_size} responses cannot be made of whole groups of "
                f"samples_per_prompt={size}: choose a multiple."
            )
        if self.micro_batch_size is not None and self.micro_batch_size < size:
            raise UsageError(
                f"micro_batch_size={self.micro_batch_size} is smaller than samples_per_prompt={size}: the "
                "responses to a prompt stay together, so a micro-batch must hold at least one such group."
            )
        if self.max_length < self.max_new_tokens + 2:
            raise UsageError(
                f"max_length={self.max_length} leaves no room for a prompt of at least 2 tokens beside "
                f"max_new_tokens={self.max_new_tokens}: raise it to {self.max_new_tokens + 2} or more."
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

    @classmethod
    def of(cls, rollouts: Rollouts, advantages: Tensor, rows: list[int]) -> PolicyBatch:
        """The given rows of rollouts with their rows of advantages (N, L), cut to the longest of them."""
        part = rollouts.take(rows)
        width = int(part.response_mask.sum(1).max())
        logp = part.logp[:, :width]
        return cls(part.to_batch(), advantages[rows, :width], logp, part.temperature, part.forbidden)


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


def probe(models: Models, prompts: Sequence[PromptIds], config: OnlineConfig, context: Context) -> Collected:
    """The metrics of `collect` on prompts that are not trained on."""
    return Collected([], metrics_of(models, score(models, prompts, config, context), config, context))


def score(models: Models, prompts: Sequence[PromptIds], config: OnlineConfig, context: Context) -> Scored:
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
    config: OnlineConfig,
    generator: torch.Generator,
) -> Rollouts:
    """`samples_per_prompt` responses to each prompt from the policy."""
    rollouts = sample(
        models.policy,
        models.tokenizer,
        [prompt.prompt_ids for prompt in prompts],
        n=config.samples_per_prompt,
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


def micro_batches(rollouts: Rollouts, config: OnlineConfig) -> list[list[int]]:
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
                part.to_batch().to(device_of(models)),
                temperature=part.temperature,
                forbidden=part.forbidden,
            )
        out[rows, : logp.shape[1]] = logp.float().to(out.device)
    return out


def metrics_of(models: Models, scored: Scored, config: OnlineConfig, context: Context) -> Sums:
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
    batch = rollouts.take(rows).to_batch().to(device_of(models))
    return batch_kl(
        models.policy, models.reference, batch, temperature=rollouts.temperature, forbidden=rollouts.forbidden
    )


def sample_rows(models: Models, scored: Scored, config: OnlineConfig) -> list[dict[str, Any]]:
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


def device_of(models: Models) -> torch.device:
    return next(models.policy.parameters()).device


def tokenise(rows: Any, tokenizer: Any, config: OnlineConfig) -> Any:
    return tokenise_prompts(
        rows,
        tokenizer,
        max_length=config.max_length - config.max_new_tokens,
        truncation=config.truncation,
        chat=config.chat,
    )
