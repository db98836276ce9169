"""What must be true before step 1. A check that fails stops the run, because training would hide it.

Each check is a small function from a job to a Finding (or None where it does not concern the method).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kleash.data.items import Example, Pair, PromptIds
from kleash.data.render import render_tokens
from kleash.models import autocast, batch_logprobs, compute_dtype, identity, verify_forward
from kleash.sampling import sample
from kleash.training.adapters import AdaptersOff
from kleash.training.cost import estimate_cost
from kleash.training.feed import OfflineFeed
from kleash.training.setup import Job, reward_models

ROWS_SHOWN = 3
FIRST_BATCHES = 2  # micro-batches the start is checked on
LOSS_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3}  # between the first loss and its known value
SAMPLER_TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 0.05,
}  # mean gap a token between sampler and trainer, nats


@dataclass(frozen=True)
class Finding:
    """One check: `passed` is None where it only informs; `figure` is what was measured, `message` says what
    it means.
    """

    name: str
    passed: bool | None
    figure: float | str | None
    message: str


@dataclass(frozen=True)
class RenderedRow:
    """A row as it is trained: which it is ("row 3, chosen"), and its text in pieces of (text, trained?)."""

    name: str
    pieces: list[tuple[str, bool]]


@dataclass
class CheckReport:
    """All findings, and a few rows."""

    findings: list[Finding]
    rows: list[RenderedRow] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """No check failed."""
        return all(finding.passed is not False for finding in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)


def preflight(job: Job, full: bool = False) -> CheckReport:
    """Run every check that concerns the job's method; `full` adds counts, rendered rows, memory and time
    estimates.
    """
    checks: list[Callable[[Job], Finding | None]] = [
        _forward, _dropout, _trained_tokens, _prompt_untrained,
        _initial_loss, _log_ratio, _reward_model, _sampler,
    ]  # fmt: skip
    if full:
        checks = [_rows, _lengths, *checks, _cost]
    job.models.policy.eval()
    findings = [finding for check in checks if (finding := check(job)) is not None]
    job.models.policy.train(job.config.dropout)
    return CheckReport(findings, _rendered(job) if full else [])


def _rows(job: Job) -> Finding:
    train = job.data.record()
    held = job.held_out.record() if job.held_out else {"kept": 0}
    dropped = ", ".join(f"{count} {reason}" for reason, count in train["dropped"].items()) or "none"
    text = f"{train['kept']} rows to train on, {held['kept']} held out; dropped: {dropped}"
    text += f"; truncated: {train['truncated']}"
    return Finding("rows", None, float(train["kept"]), text)


def _lengths(job: Job) -> Finding:
    items = job.data.tokenised.items
    lengths = sorted(len(prompt) + len(ids) for item in items for _, prompt, ids, _ in _parts(item))
    unit, note, limit = "row", "", f"max_length={job.config.max_length}"
    if isinstance(items[0], Pair):
        unit, note = "response with its prompt", ", the prompt counted with chosen and with rejected"
    elif isinstance(items[0], PromptIds):
        unit, limit = (
            "prompt",
            f"{limit}, of which max_new_tokens={job.config.max_new_tokens} are the response's",
        )
    text = (
        f"{sum(lengths)} tokens in {len(items)} rows{note}; a {unit} has {lengths[len(lengths) // 2]} in the "
        f"median and {lengths[-1]} at most, of {limit}"
    )
    return Finding("tokens", None, float(sum(lengths)), text)


def _forward(job: Job) -> Finding | None:
    if not job.method.generates:
        return None
    gap = verify_forward(job.models.policy)
    return Finding(
        "forward pass", True, gap, f"log-probs from hidden states are the model's own (gap {gap:.1g} nats)"
    )


def _dropout(job: Job) -> Finding:
    """Dropout would make two passes over equal weights differ; it acts in modules in training mode."""
    if job.config.dropout:
        return Finding(
            "dropout", None, None, "on while training, as asked; off in the reference and when measuring"
        )
    models = [job.models.policy.train(False), *filter(None, [job.models.reference])]
    alive = [name for model in models for name, module in model.named_modules() if module.training]
    message = (
        "off in every pass"
        if not alive
        else f"{alive[0]} and {len(alive) - 1} more modules are in training mode."
    )
    return Finding("dropout", not alive, float(len(alive)), message)


def _trained_tokens(job: Job) -> Finding | None:
    if job.method.online:
        return None
    empty, trained, tokens = [], 0, 0
    for item in job.data.tokenised.items:
        for _, prompt, response, flags in _parts(item):
            trained, tokens = trained + sum(flags), tokens + len(prompt) + len(response)
            if not any(flags):
                empty.append(item.number)
    share = trained / max(1, tokens)
    if empty:
        return Finding(
            "trained tokens",
            False,
            share,
            f"row {empty[0]} (and {len(empty) - 1} more) has no trained token.",
        )
    return Finding(
        "trained tokens",
        True,
        share,
        f"{trained} of {tokens} tokens are trained ({share:.0%}), some in every row",
    )


def _parts(item: Any) -> list[tuple[str, list[int], list[int], list[bool]]]:
    """Each row of an item: which it is, prompt ids, response ids and the response's trained flags."""
    if isinstance(item, Example):
        return [("", item.prompt_ids, item.response_ids, item.trained)]
    if isinstance(item, Pair):
        answers = (("chosen", item.chosen_ids), ("rejected", item.rejected_ids))
        return [(name, item.prompt_ids, ids, [True] * len(ids)) for name, ids in answers]
    return [("prompt", item.prompt_ids, [], [])]


def _first_batches(job: Job) -> list[Any]:
    assert isinstance(job.feed, OfflineFeed)
    return job.feed.step(1).updates[0].micro_batches[:FIRST_BATCHES]


def _prompt_untrained(job: Job) -> Finding | None:
    """No prompt token is a target, and every trained id of an item is one, in the batches as they are
    trained.
    """
    if job.method.online:
        return None
    assert isinstance(job.feed, OfflineFeed)
    for batch in _first_batches(job):
        rows = [part for i in batch.index.tolist() for part in _parts(job.feed.items[i])]
        for row, (_, prompt, response, flags) in enumerate(rows):
            expected = [False] * len(prompt) + list(flags)
            got = batch.response_mask[row, : len(expected)].tolist()
            ids = batch.tokens[row, : len(expected)].tolist()
            if (
                got != expected
                or ids != prompt + response
                or bool(batch.response_mask[row, len(expected) :].any())
            ):
                return Finding(
                    "prompt untrained",
                    False,
                    float(row),
                    f"row {row} of a batch trains other tokens than its item.",
                )
    return Finding("prompt untrained", True, 0.0, "no prompt token and no padding is trained")


@torch.no_grad()
def _initial_loss(job: Job) -> Finding | None:
    if job.method.initial_loss is None or not job.config.start_at_reference:
        return None
    expected = job.method.initial_loss(job.config)
    losses: list[Tensor] = []
    for batch in _first_batches(job):
        with autocast(job.config.dtype, job.processes.device.type):
            losses.append(job.method.loss(job.models, batch, job.config).per_item.double())
    if not losses:
        return None
    loss = float(torch.cat(losses).mean())
    tolerance = LOSS_TOLERANCE[compute_dtype(job.config.dtype)]
    good = abs(loss - expected) <= tolerance
    message = f"{loss:.6f}, the known value is {expected:.6f}"
    if not good:
        message += (
            f" (±{tolerance:g}): policy and reference do not start equal. If the policy starts elsewhere on "
            "purpose, say start_at_reference=false."
        )
    return Finding("initial loss", good, loss, message)


@torch.no_grad()
def _log_ratio(job: Job) -> Finding | None:
    """Policy and reference are one model at the start: their log-ratio is exactly 0, not merely small."""
    if not job.method.uses_reference or not job.config.start_at_reference:
        return None
    with autocast(job.config.dtype, job.processes.device.type):
        gaps = _prompt_gaps(job) if job.method.online else _cached_gaps(job)
    if not gaps:
        return None
    gap = float(torch.cat([g.abs().reshape(-1) for g in gaps]).max())
    message = "policy and reference give every token the same log-prob"
    if gap:
        message = (
            f"log-probs of policy and reference differ by up to {gap:.3g} nats before step 1. Give as "
            "reference the model that is trained, or say start_at_reference=false if the policy starts "
            "elsewhere on purpose."
        )
    return Finding("log-ratio", gap == 0.0, gap, message)


def _cached_gaps(job: Job) -> list[Tensor]:
    models, method = job.models, job.method
    assert method.sums is not None
    gaps = []
    for batch in _first_batches(job):
        cached = models.reference_logps
        reference = cached[batch.index] if cached is not None else method.sums(models.reference, batch)
        gaps.append(method.sums(models.policy, batch) - reference)
    return gaps


def _prompt_gaps(job: Job) -> list[Tensor]:
    """Log-ratios of the prompts' own tokens after the first, taken as if they were responses."""
    assert job.models.reference is not None
    batch = _few_rollouts(job).to_batch().to(job.processes.device)
    logp, _ = batch_logprobs(job.models.policy, batch)
    return [logp - batch_logprobs(job.models.reference, batch)[0]]


def _few_rollouts(job: Job) -> Any:
    prompts: list[PromptIds] = job.data.tokenised.items[:4]
    with autocast(job.config.dtype, job.processes.device.type):
        return sample(
            job.models.policy,
            job.models.tokenizer,
            [prompt.prompt_ids for prompt in prompts],
            max_new_tokens=min(8, job.config.max_new_tokens),
            temperature=job.config.temperature,
            fixed_length=job.config.fixed_length,
            seed=0,
        )


@torch.no_grad()
def _sampler(job: Job) -> Finding | None:
    """The trainer gives the sampled tokens the log-probs they were sampled with."""
    if not job.method.online:
        return None
    rollouts = _few_rollouts(job)
    with autocast(job.config.dtype, job.processes.device.type):
        logp, mask = batch_logprobs(
            job.models.policy,
            rollouts.to_batch().to(job.processes.device),
            temperature=rollouts.temperature,
            forbidden=rollouts.forbidden,
        )
    gap = float((logp.cpu() - rollouts.logp).abs()[mask.cpu()].mean())
    tolerance = SAMPLER_TOLERANCE[compute_dtype(job.config.dtype)]
    message = f"sampler and trainer agree on log-probs (mean gap {gap:.2g} nats a token"
    message += (
        ")"
        if gap <= tolerance
        else f"; at most {tolerance:g} is accepted): they do not compute the same distribution."
    )
    return Finding("sampler", gap <= tolerance, gap, message)


def _reward_model(job: Job) -> Finding | None:
    """A reward model can be trusted near the text it was fitted on: that of this reference."""
    judges = reward_models(job.models.reward) if job.method.online and job.models.reward is not None else []
    if not judges:
        return None
    ours = job.identities.get("reference") or _reference_identity(job)
    for judge in judges:
        theirs = judge.model.meta.get("text_model")
        if theirs != ours:
            whose = theirs or "an unknown model"
            message = f"{judge.name} was fitted on text from {whose}, and the reference is {ours}"
            if job.config.foreign_reward:
                return Finding("reward model", None, theirs, f"{message}; accepted by foreign_reward=true")
            return Finding(
                "reward model", False, theirs, f"{message}. Its scores on this policy's text would be "
                "extrapolation: train a reward model on the reference's own responses, or accept it with "
                "foreign_reward=true."
            )  # fmt: skip
    return Finding("reward model", True, ours, "fitted on text from this reference")


def _reference_identity(job: Job) -> str:
    if job.config.reference is None or isinstance(job.models.reference, AdaptersOff):
        return job.identities["model"]
    assert job.models.reference is not None
    job.identities["reference"] = identity(job.models.reference)
    return job.identities["reference"]


def _cost(job: Job) -> Finding:
    cost = estimate_cost(job)
    parts = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in cost.parts.items() if size)
    minutes = cost.seconds * job.total_steps / 60
    text = f"about {cost.total / 2**20:,.1f} MiB ({parts}); about {cost.seconds:.2f} s a step, "
    return Finding("cost", None, cost.total / 2**20, f"{text}{minutes:.1f} min for {job.total_steps} steps")


def _rendered(job: Job) -> list[RenderedRow]:
    """The first few rows of the data, each under its number there."""
    return [
        RenderedRow(
            f"row {item.number}, {name}" if name else f"row {item.number}",
            render_tokens(prompt + ids, [False] * len(prompt) + list(flags), job.models.tokenizer),
        )
        for item in job.data.tokenised.items[:ROWS_SHOWN]
        for name, prompt, ids, flags in _parts(item)
    ]
