"""What PPO, GRPO and their kin share: the surrogate objectives, the KL, several updates a rollout, one loss.

A member of the family is a choice from each of four lists: how advantages are estimated, which ratio, which
surrogate, which mean. `group.py` holds the table of the group-relative members, `ppo.py` the one with a value
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kleash.config import option, redefault
from kleash.errors import UsageError
from kleash.functional import (
    adaptive_beta,
    cispo_objective,
    clip_shares,
    clipped_surrogate,
    importance_ratio,
    kl_loss,
    lagrangian_beta,
    missing_end_penalty,
    overlong_penalty,
    sapo_objective,
    truncated_importance_weight,
    value_loss,
)
from kleash.functional.reduce import aggregate
from kleash.methods.base import Context, LossOutput, Models, Sums, Update, total
from kleash.methods.online import OnlineConfig, Scored
from kleash.methods.options import TrainConfig
from kleash.methods.policy_batch import PolicyBatch
from kleash.models.value import TokenOutputs, token_outputs

ADAPTIVE_CLIP = 0.2  # the relative error of the KL that moves beta fastest (Ziegler et al. 2019)


@dataclass(kw_only=True)
class PolicyConfig(OnlineConfig):
    """Options of the methods with a surrogate objective."""

    learning_rate: float = redefault(TrainConfig, "learning_rate", 2e-6)

    # the objective
    ratio: Literal["token", "sequence"] = option(
        "token",
        "probability under the policy over that under the policy that sampled: of each token, or one of the "
        "response, the geometric mean of its tokens' (GSPO)",
    )
    objective: Literal["clip", "cispo", "sapo", "policy-gradient"] = option(
        "clip",
        "what is raised: PPO's clipped minimum; CISPO's log-prob, weighted by the clipped ratio; SAPO's soft "
        "gate; or advantage times log-prob, without a ratio",
    )
    epsilon: float = option(0.2, "clip, cispo: lower edge of the clip, 1 - epsilon", minimum=0.0, maximum=1.0)
    epsilon_high: float | None = option(
        None, "clip, cispo: upper edge of the clip, 1 + epsilon_high; by default epsilon", minimum=0.0
    )
    sapo_positive: float = option(
        1.0, "sapo: steepness of the gate where the advantage is above 0", above=0.0
    )
    sapo_negative: float = option(1.05, "sapo: the same elsewhere; more closes it sooner", above=0.0)
    reduction: Literal["token-mean", "sequence-mean", "sequence-token-mean", "constant"] = option(
        "token-mean",
        "mean of the loss: over all tokens; over responses, their tokens summed; over responses, their "
        "tokens averaged; or summed over tokens and divided by max_new_tokens times the responses",
    )

    # the leash
    beta: float = option(
        0.0, "KL coefficient: what a nat of drift costs; drift is measured at 0 too", minimum=0.0
    )
    kl_in: Literal["reward", "loss"] = option(
        "reward", "where the KL is charged: taken off the reward, or added to the loss"
    )
    kl_estimator: Literal["k1", "k2", "k3", "exact"] = option(
        "k1",
        "k1, the log-ratio of the sampled token, in the reward; in the loss k2 or exact (over the "
        "vocabulary), whose gradients are those of KL(policy‖reference) at the visited states, or k3, whose "
        "gradient is that of KL(reference‖policy) (GRPO's paper)",
    )
    kl_control: Literal["fixed", "adaptive", "constraint"] = option(
        "fixed",
        "fixed: beta stays. adaptive: it follows kl_target in proportion to the error. constraint: it is the "
        "Lagrange multiplier of KL ≤ kl_target",
    )
    kl_target: float | None = option(None, "the KL that kl_control aims at, nats a response", above=0.0)
    kl_rate: float = option(
        0.01,
        "how fast beta follows. adaptive: the share of beta that a step may change it by; constraint: the "
        "change of beta for every nat that the KL is off",
        above=0.0,
    )

    # several updates on the same rollouts
    rollout_epochs: int = option(1, "passes over the rollouts of a step", minimum=1)
    minibatches: int = option(1, "gradient steps in each pass, each on its share of the prompts", minimum=1)
    importance: Literal["none", "token", "sequence", "sequence-mean"] = option(
        "none",
        "correct for a sampler that differs from the trainer, by the trainer's probability over the "
        "sampler's: of the token, of the response (product over its tokens), or the geometric mean of that",
    )
    importance_cap: float = option(
        2.0, "importance: the largest weight; what is above it is cut off", above=0.0
    )
    top_p: float = option(1.0, "must be 1: otherwise the sampler leaves out tokens that the trainer counts")
    top_k: int = option(0, "must be 0, for the same reason")

    # shaping and bookkeeping of scores
    missing_end_penalty: float = option(
        0.0, "taken off the score of a response that was cut off at max_new_tokens", minimum=0.0
    )
    overlong_buffer: int = option(
        0,
        "so many last tokens before max_new_tokens over which a score falls by up to 1 (DAPO); 0: none",
        minimum=0,
    )
    pass_score: float = option(
        1.0, "a response with at least this score counts as right, for pass/mean and the curriculum"
    )
    curriculum: Literal["off", "edge"] = option(
        "off", "which prompts are drawn: all in turn, or those most that are right about half the time"
    )
    retire_after: int = option(
        3, "edge: a prompt rests after so many visits in a row with every response right", minimum=1
    )
    revisit_every: int = option(50, "edge: a resting prompt comes back once after so many steps", minimum=1)

    def check(self) -> None:
        """See TrainConfig.check."""
        super().check()
        self._check_kl()
        if self.top_p != 1.0 or self.top_k:
            raise UsageError(
                f"top_p={self.top_p:g}, top_k={self.top_k}: a truncated sampler renormalises over the tokens "
                "it kept while the training forward uses the whole vocabulary, so every ratio would be off "
                "by the kept mass. Training samples from the full distribution; leave both out, or lower "
                "temperature, which acts on both sides."
            )
        updates = self.rollout_epochs * self.minibatches
        if updates > 1 and self.objective == "policy-gradient":
            raise UsageError(
                f"objective=policy-gradient with {updates} updates on the same rollouts: after the first "
                "they are another policy's, and this objective has no ratio to correct for it. Choose "
                "objective=clip, or rollout_epochs=1 and minibatches=1."
            )
        groups = self.batch_size // self.samples_per_prompt
        if self.minibatches > groups:
            raise UsageError(
                f"minibatches={self.minibatches} of {groups} prompts: a minibatch holds whole groups, so "
                "there can be at most as many as prompts in a step."
            )
        if self.overlong_buffer > self.max_new_tokens:
            raise UsageError(
                f"overlong_buffer={self.overlong_buffer} is longer than max_new_tokens={self.max_new_tokens}."
            )

    def _check_kl(self) -> None:
        charged = self.controls_kl
        if charged and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise UsageError(
                "kl_estimator=k1 in the loss pulls nowhere: the expectation of its gradient is 0. Charge it "
                "in the reward (kl_in=reward), or choose kl_estimator=exact, k2 or k3 for the loss."
            )
        if charged and self.kl_in == "reward" and self.kl_estimator != "k1":
            raise UsageError(
                f"kl_estimator={self.kl_estimator} in the reward: only k1's expected policy gradient is that "
                "of KL(policy‖reference). Choose kl_estimator=k1, or kl_in=loss for exact, k2 or k3."
            )
        if (self.kl_target is None) == (self.kl_control != "fixed"):
            raise UsageError(
                f"kl_control={self.kl_control} with kl_target={self.kl_target}: a target belongs to adaptive "
                "and constraint, and only to them."
            )
        if self.kl_control == "adaptive" and self.beta == 0.0:
            raise UsageError("kl_control=adaptive multiplies beta, and beta=0 stays 0: start above it.")
        if self.kl_control == "adaptive" and self.kl_rate > ADAPTIVE_CLIP:
            raise UsageError(
                f"kl_rate={self.kl_rate:g} with kl_control=adaptive: at most {ADAPTIVE_CLIP:g} of beta a "
                "step, or it swings instead of following."
            )

    @property
    def controls_kl(self) -> bool:
        """Whether the KL is charged anywhere."""
        return self.beta > 0.0 or self.kl_control != "fixed"

    @property
    def updates(self) -> int:
        """Gradient steps on each step's rollouts."""
        return self.rollout_epochs * self.minibatches

    @property
    def length(self) -> int | None:
        """The constant that `reduction=constant` divides by."""
        return self.max_new_tokens if self.reduction == "constant" else None

    @property
    def high(self) -> float:
        """epsilon_high, epsilon by default."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, Tensor, Any], Tensor]] = {
    "clip": lambda logp, ratio, a, c: clipped_surrogate(ratio, a, c.epsilon, c.high),
    "cispo": lambda logp, ratio, a, c: cispo_objective(logp, ratio, a, c.epsilon, c.high),
    "sapo": lambda logp, ratio, a, c: sapo_objective(ratio, a, c.sapo_positive, c.sapo_negative),
    "policy-gradient": lambda logp, ratio, a, c: a * logp,
}
"""Per token, to be maximised: (logp, ratio, advantages, config) -> (N, L)."""


def policy_loss(
    models: Models,
    batch: PolicyBatch,
    config: PolicyConfig,
    value_coef: float = 0.0,
    value_clip: float | None = None,
) -> LossOutput:
    """−surrogate + β·KL (where it is in the loss) + value_coef·value loss (with a value model), reduced as
    the options say; one item a response.

    The ratio is to the policy that sampled, as the training forward gives it: on the first pass before any
    update that is this very forward, detached, so every ratio is exactly 1.
    """
    in_loss = batch.beta > 0.0 and config.kl_in == "loss"
    out = token_outputs(
        models.policy,
        batch.batch,
        value=models.value,
        reference=models.reference if in_loss and config.kl_estimator == "exact" else None,
        temperature=batch.temperature,
        forbidden=batch.forbidden,
    )
    if batch.logp_old is None:
        batch.logp_old = out.logp.detach()
    counted = out.mask & batch.used[:, None]
    ratio = importance_ratio(out.logp, batch.logp_old, counted, config.ratio)
    surrogate = OBJECTIVES[config.objective](out.logp, ratio, batch.advantages, config)
    metrics = _ratio_metrics(out, ratio, batch, counted, config)
    if config.importance != "none":
        weight = truncated_importance_weight(
            batch.logp_old, batch.logp, config.importance_cap, counted, config.importance
        )
        surrogate = surrogate * weight
        raw = truncated_importance_weight(batch.logp_old, batch.logp, torch.inf, counted, config.importance)
        metrics["policy/importance"] = total(weight[counted])
        metrics["policy/importance/raw"] = total(raw[counted])
    loss = -surrogate
    if in_loss:
        kl = _kl_terms(out, batch, config)
        loss = loss + batch.beta * kl
        metrics["loss/kl"] = (float((kl.detach() * counted).double().sum()), float(counted.any(1).sum()))
    if out.values is not None:
        assert batch.values_old is not None and batch.returns is not None
        error = value_loss(out.values, batch.values_old, batch.returns, value_clip, counted, reduction="none")
        metrics["value/loss"] = total(error[counted])
        loss = loss + value_coef * error
    items, _ = aggregate(loss, counted, config.reduction, config.length)
    return LossOutput(items, metrics)


def _kl_terms(out: TokenOutputs, batch: PolicyBatch, config: PolicyConfig) -> Tensor:
    if config.kl_estimator == "exact":
        assert out.kl is not None
        return out.kl
    assert batch.logp_ref is not None and batch.logp_old is not None
    assert config.kl_estimator != "k1"  # refused in check
    terms = kl_loss(out.logp, batch.logp_ref, config.kl_estimator, out.mask)
    # After the first update the tokens are an older policy's: weighing them keeps the gradient's meaning.
    return terms * importance_ratio(out.logp.detach(), batch.logp_old, out.mask)


RATIO_EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)


@torch.no_grad()
def _ratio_metrics(
    out: TokenOutputs, ratio: Tensor, batch: PolicyBatch, counted: Tensor, config: PolicyConfig
) -> Sums:
    """The gap between sampler and trainer, entropy, and what the ratio has come to, all over counted
    tokens.
    """
    tokens = float(counted.sum())
    assert batch.logp_old is not None
    gap = (batch.logp_old - batch.logp)[counted]
    metrics = {
        "policy/sampler_gap": total(gap.abs()),
        "policy/sampler_kl": total(-gap),
        "policy/sampler_gap/max": (float(gap.abs().max()) if len(gap) else 0.0, 1.0),
        "policy/entropy": total(out.entropy[counted]),
    }
    if config.updates == 1:
        return metrics  # every ratio is 1
    values = ratio[counted].float()
    metrics["ratio/mean"] = total(values)
    shares = torch.histc(torch.bucketize(values, values.new_tensor(RATIO_EDGES)).float(), 7, 0, 6).tolist()
    names = [f"below_{RATIO_EDGES[0]:g}"]
    names += [f"{low:g}_to_{high:g}" for low, high in zip(RATIO_EDGES, RATIO_EDGES[1:], strict=False)]
    names.append(f"above_{RATIO_EDGES[-1]:g}")
    metrics |= {f"ratio/{name}": (count, tokens) for name, count in zip(names, shares, strict=True)}
    if config.objective in ("clip", "cispo"):
        branches = clip_shares(ratio, batch.advantages, counted, config.epsilon, config.high)
        metrics |= {
            f"clip/{name}": (float(count), tokens) for name, count in branches.items() if name != "tokens"
        }
    return metrics


def shaped(scored: Scored, config: PolicyConfig) -> Tensor:
    """Scores (N,) as they are optimised, nan where a response does not count: end and length penalties taken
    off.
    """
    rollouts = scored.rollouts
    values = scored.scores.values.masked_fill(~scored.used, torch.nan)
    if config.missing_end_penalty:
        values = missing_end_penalty(values, rollouts.ended, config.missing_end_penalty)
    if config.overlong_buffer:
        lengths = rollouts.response_mask.sum(1)
        values = values + overlong_penalty(lengths, config.max_new_tokens, config.overlong_buffer)
    return values


@torch.no_grad()
def fill_old(models: Models, updates: list[Update], config: PolicyConfig) -> None:
    """Give every minibatch but the first its log π_old: by its first pass the policy has moved on. With
    dropout in the first pass that one too: what sampled had none.
    """
    for update in updates[0 if config.dropout else 1 : config.minibatches]:
        for batch in update.micro_batches:
            batch.logp_old = token_outputs(
                models.policy, batch.batch, temperature=batch.temperature, forbidden=batch.forbidden
            ).logp


def beta_now(models: Models, config: PolicyConfig) -> float:
    """The KL coefficient of this step."""
    return config.beta if models.memory.beta is None else models.memory.beta


def control_beta(models: Models, scored: Scored, config: PolicyConfig, context: Context) -> None:
    """Set the KL coefficient of the next step from this step's sampled KL, over all processes."""
    if config.kl_control == "fixed":
        return
    rollouts = scored.rollouts
    assert scored.logp_ref is not None and config.kl_target is not None
    sums = ((rollouts.logp - scored.logp_ref) * rollouts.response_mask).sum(1)
    both = context.gather(torch.tensor([[float(sums.sum()), float(len(sums))]])).sum(0)
    kl, beta = float(both[0] / both[1]), beta_now(models, config)
    if config.kl_control == "adaptive":
        models.memory.beta = adaptive_beta(
            beta, kl, config.kl_target, ADAPTIVE_CLIP / config.kl_rate, ADAPTIVE_CLIP
        )
    else:
        models.memory.beta = lagrangian_beta(beta, kl, config.kl_target, config.kl_rate)


def conventions(config: PolicyConfig) -> dict[str, str]:
    """The conventions that the family shares, in words."""
    eos = "removed before the softmax of both models" if config.fixed_length else "part of the vocabulary"
    reductions = {
        "token-mean": "mean over all counted tokens of the step",
        "sequence-mean": "summed over a response's tokens, mean over responses",
        "sequence-token-mean": "mean over a response's tokens, then over responses",
        "constant": f"summed over tokens, divided by {config.max_new_tokens} (max_new_tokens) and the "
        "number of responses",
    }
    objectives = {
        "clip": f"min(ρA, clip(ρ, {1 - config.epsilon:g}, {1 + config.high:g})A)",
        "cispo": f"sg(clip(ρ, {1 - config.epsilon:g}, {1 + config.high:g}))·A·log π",
        "sapo": f"4σ(τ(ρ−1))/τ·A, τ = {config.sapo_positive:g} (A > 0) or {config.sapo_negative:g}",
        "policy-gradient": "A·log π",
    }
    kl = "none (beta=0); drift is measured all the same"
    if config.controls_kl:
        meaning = {
            "k1": "per response, sampled: the log-ratio summed over its tokens",
            "k2": "gradient of KL(policy‖reference) at the visited states, sampled token",
            "k3": "gradient of KL(reference‖policy) at the visited states, sampled token",
            "exact": "gradient of KL(policy‖reference) at the visited states, over the vocabulary",
        }[config.kl_estimator]
        kl = f"in the {config.kl_in}, {config.kl_estimator}, beta={config.beta:g} "
        kl += f"({config.kl_control}): {meaning}"
    return {
        "objective": objectives[config.objective],
        "loss": reductions[config.reduction],
        "ratio": f"{config.ratio}, to the sampling policy as the training forward gives it",
        "kl": kl,
        "kl metrics": "nats a response; kl/k1 and kl/k3 are sampled, kl/exact sums over the vocabulary",
        "updates": f"{config.rollout_epochs} passes × {config.minibatches} minibatches on each rollout",
        "importance": "not corrected" if config.importance == "none"
        else f"{config.importance}, cut off at {config.importance_cap:g}",
        "eos": eos,
        "unfinished responses": config.unfinished,
    }  # fmt: skip
