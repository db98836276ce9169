"""The group-relative methods: several responses to a prompt, compared with one another. One table tells them
apart.
"""

from __future__ import annotations

import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kleash.config import option, redefault
from kleash.data.items import PromptIds
from kleash.errors import UsageError
from kleash.functional import (
    group_advantages,
    leave_one_out_advantages,
    masked_moments,
    maxrl_advantages,
)
from kleash.methods.base import Context, Method, Models, Step, Sums, total
from kleash.methods.curriculum import has_spread, visit
from kleash.methods.online import (
    OnlineConfig,
    Scored,
    device_of,
    join_scored,
    metrics_of,
    probe,
    sample_rows,
    score,
    tokenise,
    with_reference,
)
from kleash.methods.policy_batch import PolicyBatch, make_updates
from kleash.methods.policy_gradient import (
    PolicyConfig,
    beta_now,
    control_beta,
    conventions,
    fill_old,
    policy_loss,
    shaped,
)


@dataclass(kw_only=True)
class GroupConfig(PolicyConfig):
    """Options of the group-relative methods."""

    samples_per_prompt: int = redefault(OnlineConfig, "samples_per_prompt", 8)
    advantage: Literal["group", "leave-one-out", "maxrl"] = option(
        "group",
        "what a score is compared with: its group's mean, the difference divided as scale says; the mean of "
        "the others; or its group's mean, the difference divided by that mean (MaxRL; scores from 0 up)",
    )
    scale: Literal["std", "sample_std", "batch_std", "none"] = option(
        "std",
        "advantage=group, what the difference is divided by: the group's population deviation, its sample "
        "deviation, the whole step's population deviation, or nothing",
    )
    no_spread: Literal["keep", "drop", "resample"] = option(
        "keep",
        "groups whose responses all score alike, and so teach nothing: counted in the mean with gradient 0, "
        "left out of it, or replaced by groups of further prompts",
    )
    resample_rounds: int = option(
        4, "no_spread=resample: at most so many rounds of sampling a step", minimum=1
    )

    def check(self) -> None:
        """See TrainConfig.check."""
        super().check()
        if self.samples_per_prompt == 1:
            raise UsageError(
                "samples_per_prompt=1: a response is compared with the others to its prompt, and there would "
                "be none. Choose 2 or more (4 to 16 are usual)."
            )
        scaled = self.advantage == "group" and self.scale != "none"
        if scaled and self.kl_in == "reward" and self.controls_kl:
            raise UsageError(
                f"kl_in=reward with scale={self.scale}: a group whose answers are equally good would differ "
                "in its KL alone, and dividing by that deviation makes noise as large as a right answer. "
                "Charge the KL in the loss (kl_in=loss kl_estimator=k2), or choose scale=none or "
                "advantage=leave-one-out."
            )
        lowered = [
            name
            for name, on in (
                ("beta in the reward", self.kl_in == "reward" and self.controls_kl),
                ("missing_end_penalty", self.missing_end_penalty > 0.0),
                ("overlong_buffer", self.overlong_buffer > 0),
            )
            if on
        ]
        if self.advantage == "maxrl" and lowered:
            raise UsageError(
                f"advantage=maxrl with {lowered[0]}: MaxRL divides by the group's mean score, which must be "
                "0 or above, and this takes something off the scores. Leave it out, or put the KL into the "
                "loss (kl_in=loss)."
            )


@dataclass(frozen=True)
class Row:
    """What sets a method apart: the defaults of the options that others set otherwise."""

    summary: str
    advantage: str
    scale: str
    ratio: str
    objective: str
    epsilon: float
    epsilon_high: float | None
    reduction: str
    more: tuple[tuple[str, Any], ...] = ()


LEASH = (("kl_in", "loss"), ("kl_estimator", "k2"))  # where beta is raised: scores are divided by a deviation

# fmt: off
TABLE: dict[str, Row] = {
    #        advantage        scale   ratio       objective          ε     ε high  mean of the loss
    "rloo": Row("REINFORCE with a leave-one-out baseline (arXiv 2402.14740)",
             "leave-one-out", "none", "token",    "policy-gradient", 0.2,  None,   "sequence-mean",
             (("beta", 0.05),)),
    "grpo": Row("group-relative policy optimisation (arXiv 2402.03300)",
             "group",         "std",  "token",    "clip",            0.2,  None,   "sequence-token-mean",
             (("beta", 0.04), ("kl_in", "loss"), ("kl_estimator", "k3"))),
    "dr-grpo": Row("GRPO without its two biases: no deviation, constant length (arXiv 2503.20783)",
             "group",         "none", "token",    "clip",            0.2,  None,   "constant"),
    "dapo": Row("asymmetric clip, token mean, groups without spread sampled again (arXiv 2503.14476)",
             "group",         "std",  "token",    "clip",            0.2,  0.28,   "token-mean",
             (*LEASH, ("no_spread", "resample"))),
    "gspo": Row("ratio of whole responses (arXiv 2507.18071)",
             "group",         "std",  "sequence", "clip",            3e-4, 4e-4,   "sequence-token-mean",
             LEASH),
    "cispo": Row("clipped weights, every token keeps its gradient (arXiv 2506.13585)",
             "group",         "std",  "token",    "cispo",           0.2,  0.4,    "token-mean",
             LEASH),
    "sapo": Row("a soft gate in place of the clip (arXiv 2511.20347)",
             "group",         "std",  "token",    "sapo",            0.2,  None,   "sequence-token-mean",
             LEASH),
    "maxrl": Row("advantage over the group's mean: nearer to maximum likelihood (arXiv 2602.02710)",
             "maxrl",         "none", "token",    "clip",            0.2,  None,   "sequence-mean"),
}
# fmt: on


def collect(models: Models, prompts: Sequence[PromptIds], config: GroupConfig, context: Context) -> Step:
    """Sample, score, and turn scores into advantages within each group.

    What describes the policy (scores, length, KL, and the beta that follows it) is over all that was sampled;
    the gradient is over the groups kept.
    """
    sampled, kept, metrics = gather_groups(models, prompts, config, context)
    beta = beta_now(models, config)
    charged = config.controls_kl
    if charged or context.exact_kl:
        sampled = with_reference(models, sampled, config)
    metrics |= metrics_of(models, sampled, config, context)
    if config.missing_end_penalty or config.overlong_buffer:
        metrics["reward/shaped"] = total(shaped(sampled, config)[sampled.used])
    if charged:
        control_beta(models, sampled, config, context)
        metrics["kl/beta"] = (beta, 1.0)
    scored = sampled.take(kept)
    rewards = shaped(scored, config)
    if charged and config.kl_in == "reward":
        rewards = rewards - beta * log_ratios(scored)
    advantages = advantages_of(rewards, config, context)
    used = scored.used & ~rewards.isnan()
    mask = scored.rollouts.response_mask
    tokens = {"advantages": advantages[:, None] * (mask & used[:, None])}
    in_loss = charged and config.kl_in == "loss"
    if in_loss and scored.logp_ref is not None:
        tokens["logp_ref"] = scored.logp_ref
    device = device_of(models)
    updates = make_updates(
        scored.rollouts,
        lambda rows: PolicyBatch.of(scored.rollouts, rows, used, tokens, beta).to(device),
        used=used,
        live=used if in_loss else used & (advantages != 0.0),
        size=config.samples_per_prompt,
        reduction=config.reduction,
        minibatches=config.minibatches,
        passes=config.rollout_epochs,
        limits=(config.micro_batch_size, config.micro_batch_tokens),
        generator=context.generator,
    )
    fill_old(models, updates, config)
    samples = sample_rows(models, sampled, config) if context.keep_samples else []
    return Step(updates, metrics, samples)


def gather_groups(
    models: Models, prompts: Sequence[PromptIds], config: GroupConfig, context: Context
) -> tuple[Scored, list[int], Sums]:
    """All groups that were sampled, the rows of those to train on, and metrics of the former.

    Groups without spread teach nothing: with no_spread=drop they are left out, with resample groups of
    further prompts take their places, a few rounds at most. Where no group has spread the first round is
    kept, so that a step always has its KL term, where there is one.
    """
    wanted, rounds = len(prompts), config.resample_rounds if config.no_spread == "resample" else 1
    size = config.samples_per_prompt
    sampled: list[Scored] = []
    kept: list[int] = []  # groups, counted over all rounds
    wasted = 0.0
    while prompts:
        started = time.perf_counter()
        scored = score(models, prompts, config, context)
        spread = has_spread(scored, size)
        wasted += (time.perf_counter() - started) * float((~spread).double().mean())
        before = sum(len(part.numbers) for part in sampled) // size
        kept += [before + group for group in spread.nonzero()[:, 0].tolist()][: wanted - len(kept)]
        sampled.append(scored)
        prompts = context.more(wanted - len(kept)) if len(kept) < wanted and len(sampled) < rounds else []
    everything = join_scored(sampled)
    metrics = visit(models.memory, everything, config, context, wanted * rounds)
    metrics["time/wasted"] = (wasted, 1.0)
    if config.no_spread == "keep" or not kept:
        kept = list(range(len(sampled[0].numbers) // size))
    return everything, [group * size + i for group in kept for i in range(size)], metrics


def log_ratios(scored: Scored) -> Tensor:
    """(N,) log π(y|x) − log π_ref(y|x) of each response, as sampled: k1, summed over its tokens."""
    rollouts = scored.rollouts
    assert scored.logp_ref is not None
    return ((rollouts.logp - scored.logp_ref) * rollouts.response_mask).sum(1)


def advantages_of(rewards: Tensor, config: GroupConfig, context: Context) -> Tensor:
    """(N,) advantages of rewards (N,), nan where missing, within each group; 0 where there is no signal."""
    size = config.samples_per_prompt
    if config.advantage == "leave-one-out":
        return leave_one_out_advantages(rewards, size)
    if config.advantage == "maxrl":
        _refuse_negative(rewards)
        return maxrl_advantages(rewards, size)
    if config.scale != "batch_std":
        return group_advantages(rewards, size, config.scale)
    known = ~rewards.isnan()  # the deviation is that of the step's rewards on every process
    count, sums, squares = context.gather(masked_moments(rewards.nan_to_num(), known)[None]).sum(0)
    deviation = (squares / count.clamp(min=1) - (sums / count.clamp(min=1)) ** 2).clamp(min=0).sqrt()
    centred = group_advantages(rewards, size, "none")
    return centred / deviation.to(centred) if deviation > 0 else torch.zeros_like(centred)


def _refuse_negative(rewards: Tensor) -> None:
    lowest = float(rewards.nan_to_num(0.0).min()) if len(rewards) else 0.0
    if lowest < 0.0:
        raise UsageError(
            f"reward: a score of {lowest:g}, and advantage=maxrl divides by the mean score of a group, which "
            "must be 0 or above. Give scores from 0 up (1 for right, 0 for wrong), or choose "
            "advantage=leave-one-out."
        )


def _conventions(config: GroupConfig) -> dict[str, str]:
    scales = {
        "std": "divided by the group's population deviation",
        "sample_std": "divided by the group's sample deviation",
        "batch_std": "divided by the population deviation of the step's rewards",
        "none": "not divided",
    }
    kinds = {
        "group": f"score minus its group's mean, {scales[config.scale]}",
        "leave-one-out": "score minus the mean of the others in its group",
        "maxrl": "score minus its group's mean, divided by that mean",
    }
    return {
        **conventions(config),
        "advantages": f"{kinds[config.advantage]}; a group without spread is exactly 0",
        "groups": f"{config.samples_per_prompt} responses; without spread: {config.no_spread}",
    }


def _config(name: str, row: Row) -> type[GroupConfig]:
    """The options of one method: those of all, with the row's defaults."""
    changes = {
        "advantage": row.advantage, "scale": row.scale, "ratio": row.ratio, "objective": row.objective,
        "epsilon": row.epsilon, "epsilon_high": row.epsilon_high, "reduction": row.reduction,
        **dict(row.more),
    }  # fmt: skip
    hints = typing.get_type_hints(GroupConfig)
    namespace: dict[str, Any] = {key: redefault(GroupConfig, key, value) for key, value in changes.items()}
    namespace["__annotations__"] = {key: hints[key] for key in changes}
    namespace["__doc__"] = f"Options of {name}."
    namespace["__module__"] = __name__
    return dataclass(kw_only=True)(
        type(f"{name.replace('-', ' ').title().replace(' ', '')}Config", (GroupConfig,), namespace)
    )


METHODS: tuple[Method, ...] = tuple(
    Method(
        name=name,
        summary=row.summary,
        config=_config(name, row),
        kind="prompts",
        tokenise=tokenise,
        loss=policy_loss,
        collect=collect,
        probe=probe,
        conventions=_conventions,
        uses_reference=True,
    )
    for name, row in TABLE.items()
)
