"""What every method that trains on its own samples shares: sampling, scoring, metrics, rows of
samples.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kleash.config import option
from kleash.data.items import PromptIds
from kleash.data.tokenise import tokenise_prompts
from kleash.errors import UsageError
from kleash.functional import kl_k3
from kleash.measure.evaluation import Sample
from kleash.methods.base import Context, Models, Step, Sums, total
from kleash.methods.options import TrainConfig
from kleash.methods.policy_batch import micro_batches
from kleash.models import PositionStats, batch_kl, batch_logprobs
from kleash.rewards import Scores, call_reward
from kleash.sampling import Rollouts, join, sample


@dataclass(kw_only=True)
class OnlineConfig(TrainConfig):
    """Options of methods that train on text they sample themselves."""

    batch_size: int = option(64, "responses sampled in each step, over all processes", minimum=1)
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
class Scored:
    """Rollouts with what judges and reference say, a row each.

    scores, and gold where there is one; used (N,): the rows that count; numbers: the prompts' row numbers;
    logp_ref (N, L): log π_ref of the sampled tokens, where it was asked for.
    """

    rollouts: Rollouts
    scores: Scores
    gold: Scores | None
    used: Tensor
    numbers: list[int]
    logp_ref: Tensor | None = None

    def take(self, rows: list[int]) -> Scored:
        """The given rows, in that order."""
        return Scored(
            self.rollouts.take(rows),
            self.scores.take(rows),
            None if self.gold is None else self.gold.take(rows),
            self.used[rows],
            [self.numbers[row] for row in rows],
            None if self.logp_ref is None else self.logp_ref[rows],
        )


def join_scored(parts: Sequence[Scored]) -> Scored:
    """Several sets of rollouts as one, before the reference has seen them."""
    golds = [part.gold for part in parts if part.gold is not None]
    return Scored(
        join([part.rollouts for part in parts]),
        Scores.join([part.scores for part in parts]),
        Scores.join(golds) if golds else None,
        torch.cat([part.used for part in parts]),
        [number for part in parts for number in part.numbers],
    )


def probe(models: Models, prompts: Sequence[PromptIds], config: OnlineConfig, context: Context) -> Step:
    """The metrics of `collect` on prompts that are not trained on."""
    scored = with_reference(models, score(models, prompts, config, context), config)
    return Step([], metrics_of(models, scored, config, context))


def score(models: Models, prompts: Sequence[PromptIds], config: OnlineConfig, context: Context) -> Scored:
    """Sample responses and ask reward and gold about them."""
    assert models.reward is not None
    rollouts = sample_prompts(models, prompts, config, context.generator)
    how: Any = {"timeout": config.reward_timeout, "workers": config.reward_workers, "step": context.step}
    scores = call_reward(models.reward, rollouts, **how)
    gold = None if models.gold is None else call_reward(models.gold, rollouts, **how, option="gold")
    used = scores.present if config.unfinished == "keep" else scores.present & rollouts.ended
    return Scored(rollouts, scores, gold, used, [prompts[g].number for g in rollouts.group.tolist()])


def with_reference(models: Models, scored: Scored, config: OnlineConfig) -> Scored:
    """The same with log π_ref of every sampled token, under the temperature and support it was sampled
    with.
    """
    assert models.reference is not None
    out = torch.zeros_like(scored.rollouts.logp)
    for rows in all_micro_batches(scored.rollouts, config):
        part = scored.rollouts.take(rows)
        with torch.no_grad():
            logp, _ = batch_logprobs(
                models.reference,
                part.to_batch().to(device_of(models)),
                temperature=part.temperature,
                forbidden=part.forbidden,
            )
        out[rows, : logp.shape[1]] = logp.to(out)
    return replace(scored, logp_ref=out)


def all_micro_batches(rollouts: Rollouts, config: OnlineConfig) -> list[list[int]]:
    """Row numbers of each micro-batch over all rollouts."""
    size = config.samples_per_prompt
    groups = range(len(rollouts) // size)
    return micro_batches(rollouts, groups, size, config.micro_batch_size, config.micro_batch_tokens)


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


def metrics_of(models: Models, scored: Scored, config: OnlineConfig, context: Context) -> Sums:
    """Scores, drift and length of a step's rollouts; exact KL where the context asks for it."""
    rollouts, mask = scored.rollouts, scored.rollouts.response_mask
    metrics = {
        "length/mean": total(mask.sum(1)),
        "ended/share": total(rollouts.ended),
        "responses/unused": total(~scored.used),
        **_score_metrics("reward", scored.scores, config.samples_per_prompt),
    }
    if scored.gold is not None:
        metrics |= _score_metrics("gold", scored.gold, 1)
    if scored.logp_ref is not None:
        k3 = kl_k3(rollouts.logp, scored.logp_ref) * mask
        metrics["kl/k1"] = total(((rollouts.logp - scored.logp_ref) * mask).sum(1))
        metrics["kl/k3"], metrics["kl/token/max"] = total(k3.sum(1)), (float(k3.max()), 1.0)
    if context.exact_kl:
        stats = [_exact(models, rollouts, rows) for rows in all_micro_batches(rollouts, config)]
        metrics["kl/exact"] = (sum(float(s.kl.double().sum()) for s in stats), float(len(rollouts)))
    return metrics


def _score_metrics(name: str, scores: Scores, group: int) -> Sums:
    """Mean over the scored responses, share missing, each part by name, share of prompts whose responses all
    score alike.
    """
    metrics = {
        f"{name}/mean": total(scores.values[scores.present]),
        f"{name}/missing": total(~scores.present),
        f"{name}/hung": (float(scores.hung), float(len(scores.values))),
        **{f"{name}/log/{key}": said for key, said in scores.logged.items()},
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
            logp_ref=_rounded(stats.logp_ref[i, :length]),
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
        max_length=config.max_length,
        max_new_tokens=config.max_new_tokens,
        truncation=config.truncation,
        chat=config.chat,
    )
