"""Numbers of rollouts: everything that is measured on a policy's own samples once they are there."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from kleash.errors import RunError, UsageError
from kleash.measure.conventions import conventions
from kleash.measure.diversity import distinct_shares
from kleash.measure.drift import response_sums, rollout_kl
from kleash.measure.estimate import clustered
from kleash.measure.evaluation import Evaluation, Sample, optional
from kleash.measure.judges import Judges
from kleash.models import PositionStats
from kleash.models.forward import Dtype
from kleash.rewards import Scores
from kleash.sampling import Progress, Rollouts

SAMPLER_TOLERANCE = 0.1
"""Mean difference, nats a token, allowed between log-probs as sampled and the policy's (bfloat16: about
0.02).
"""


def evaluate_rollouts(
    policy: nn.Module,
    reference: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rollouts: Rollouts,
    judges: Judges | None = None,
    *,
    dtype: Dtype = "float32",
    batch_rows: int = 64,
    progress: Progress | None = None,
) -> Evaluation:
    """What `measure` measures, on rollouts that were sampled from this policy already.

    Rollouts from another policy, or cut by top-p or top-k, are refused with UsageError: the mean of Eq. 4
    over them is not KL(policy‖reference). Non-finite numbers from a model raise RunError.
    """
    started, judges = time.perf_counter(), judges or Judges()
    with evaluating(policy, reference):
        stats = rollout_kl(policy, reference, rollouts, dtype=dtype, batch_rows=batch_rows, progress=progress)
    gap = _sampler_gap(stats, rollouts)
    sums = response_sums(stats)
    _require_finite(sums["drift"], rollouts)
    scores = {"reward": judges.scores("reward", rollouts), "gold": judges.scores("gold", rollouts)}
    evaluation = Evaluation(
        prompts=len(rollouts.group.unique()),
        samples_per_prompt=len(rollouts) // len(rollouts.group.unique()),
        max_new_tokens=rollouts.response_ids.shape[1],
        temperature=rollouts.temperature,
        fixed_length=bool(rollouts.forbidden),
        seed=0,
        seconds=0.0,
        ended=None if rollouts.forbidden else float(rollouts.ended.double().mean()),
        sampler_gap=gap,
        prompts_hash=_prompts_hash(rollouts),
        conventions=conventions(rollouts, judges, reference, dtype),
        **_estimates(rollouts, stats, sums, scores),
    )
    evaluation.samples = _samples(tokenizer, rollouts, stats, scores)
    evaluation.missing = {name: found.missing for name, found in scores.items() if found is not None}
    evaluation.warnings = _warnings(sums, rollouts, scores)
    evaluation.seconds = time.perf_counter() - started
    return evaluation


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Dropout off inside, since with it a policy drifts from itself; each model's mode put back after."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


def _estimates(
    rollouts: Rollouts, stats: PositionStats, sums: dict[str, Tensor], scores: dict[str, Scores | None]
) -> dict[str, Any]:
    """The Evaluation's estimates by field name."""
    group, lengths = rollouts.group, stats.mask.sum(-1).double()
    found: dict[str, Any] = {name: clustered(values, group) for name, values in sums.items()}
    for name, score in scores.items():
        found[name] = None if score is None else clustered(score.values, group)
    reward = scores["reward"]
    found["reward_parts"] = (
        {k: clustered(v, group) for k, v in reward.parts.items()} if reward and len(reward.parts) > 1 else {}
    )
    shares = distinct_shares(_ids(rollouts), group)
    found["distinct_bigrams"] = clustered(shares, torch.arange(len(shares)))
    found["length"] = clustered(lengths, group)
    found["entropy"] = clustered(
        torch.where(stats.mask, stats.entropy.double(), 0.0).sum(-1) / lengths, group
    )
    return found


def _samples(
    tokenizer: PreTrainedTokenizerBase,
    rollouts: Rollouts,
    stats: PositionStats,
    scores: dict[str, Scores | None],
) -> list[Sample]:
    ids = _ids(rollouts)
    texts = {i: tokenizer.decode([i]) for i in {i for row in ids for i in row}}
    nothing: list[float | None] = [None] * len(ids)
    reward, gold = (nothing if s is None else optional(s.values) for s in (scores["reward"], scores["gold"]))
    return [
        Sample(
            prompt=rollouts.prompts[i],
            response=rollouts.responses[i],
            tokens=[texts[token] for token in row],
            ids=row,
            logp=_rounded(stats.logp[i], len(row)),
            logp_ref=_rounded(stats.logp_ref[i], len(row)),
            kl=_rounded(stats.kl[i], len(row)),
            reward=reward[i],
            gold=gold[i],
            ended=bool(rollouts.ended[i]),
            group=int(rollouts.group[i]),
        )
        for i, row in enumerate(ids)
    ]


def _rounded(values: Tensor, length: int) -> list[float]:
    return [
        round(value, 5) for value in values[:length].tolist()
    ]  # files half the size; far below the sampling error


def _ids(rollouts: Rollouts) -> list[list[int]]:
    lengths = rollouts.response_mask.sum(-1).tolist()
    return [row[:length] for row, length in zip(rollouts.response_ids.tolist(), lengths, strict=True)]


def _sampler_gap(stats: PositionStats, rollouts: Rollouts) -> float:
    """Mean |log-prob as sampled − the policy's| per token; UsageError where the samples cannot be the
    policy's.
    """
    width = stats.mask.shape[1]
    gap = float((stats.logp - rollouts.logp[:, :width].cpu()).abs()[stats.mask].double().mean())
    if gap > SAMPLER_TOLERANCE:
        raise UsageError(
            f"rollouts: their log-probabilities as sampled differ from this policy's by {gap:.3g} nats a "
            f"token on average (at most {SAMPLER_TOLERANCE} is accepted), so they were drawn from another "
            "policy or cut by top-p or top-k. KL(policy‖reference) can only be measured on the policy's own "
            "samples: sample again from it."
        )
    return gap


def _require_finite(drift: Tensor, rollouts: Rollouts) -> None:
    bad = (~drift.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        raise RunError(
            f"the drift of response {bad[0] + 1} of {len(drift)} (prompt {rollouts.prompts[bad[0]]!r}) is "
            f"{float(drift[bad[0]])}: policy or reference gives log-probabilities that are not finite. Check "
            "that the training did not diverge."
        )


def _warnings(sums: dict[str, Tensor], rollouts: Rollouts, scores: dict[str, Scores | None]) -> list[str]:
    """What a reader must know: k1 at odds with the exact drift, judges that did not judge."""
    found = []
    surplus = clustered(sums["kl_k1"] - sums["drift"], rollouts.group)
    if surplus and surplus.stderr is not None and abs(surplus.mean) > max(4 * surplus.stderr, 0.05):
        found.append(
            f"the sampled estimate k1 and the exact drift differ by {surplus.mean:+.3g} nats, more than four "
            f"standard errors ({surplus.stderr:.2g}): the samples may not follow the policy's distribution"
        )
    for name, score in scores.items():
        if score is not None and score.missing:
            hung = f", {score.hung} of them because a call ran out of time" if score.hung else ""
            found.append(
                f"{score.missing} of {len(score.values)} responses have no {name}{hung}; they are left out "
                "of its mean"
            )
    return found


def _prompts_hash(rollouts: Rollouts) -> str:
    """Of the prompts' ids in order, once each: evaluations with equal hashes can be paired."""
    ids = [
        row[keep].tolist() for row, keep in zip(rollouts.prompt_ids, rollouts.prompt_mask.bool(), strict=True)
    ]
    seen = {group: row for group, row in zip(rollouts.group.tolist(), ids, strict=True)}
    return "sha256:" + hashlib.sha256(json.dumps(list(seen.values())).encode()).hexdigest()[:32]
