"""Held-out numbers: the method's own loss and metrics while training, and the measurement of samples at the
end.
"""

from __future__ import annotations

from typing import Any

import torch

from kleash.measure import Evaluation, measure
from kleash.methods.base import Sums, total
from kleash.models import autocast
from kleash.sampling import Progress
from kleash.training.feed import step_seed
from kleash.training.processes import add_sums
from kleash.training.setup import Job


@torch.no_grad()
def evaluate_held_out(job: Job) -> Sums:
    """Metrics over every held-out item, dropout off, added up over the processes; empty where nothing is held
    out.
    """
    policy = job.models.policy.eval()
    with autocast(job.config.dtype, job.processes.device.type):
        work = job.feed.held_out()
        sums = dict(work.metrics)
        for batch in (batch for update in work.updates for batch in update.micro_batches):
            output = job.method.loss(job.models, batch, job.config)
            add_sums(sums, {"loss": total(output.per_item), **output.metrics})
    policy.train(job.config.dropout)
    return job.processes.merge(sums)


def measure_policy(job: Job, progress: Progress) -> Evaluation:
    """Drift, reward, gold and variety of the policy's samples on the run's prompts (main process only)."""
    config, models = job.config, job.models
    models.policy.eval()
    return measure(
        (models.policy, models.tokenizer),
        reference=models.reference or job.load_reference(),
        prompts=job.prompts,
        reward=models.reward,
        gold=models.gold,
        n=config.eval_samples,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        fixed_length=config.fixed_length,
        seed=step_seed(config.seed, 0) % 2**31,
        batch_rows=config.sampling_rows,
        timeout=config.reward_timeout,
        reward_workers=config.reward_workers,
        sampling_dtype=config.dtype,
        progress=progress,
    )


def finish_model(job: Job) -> dict[str, Any]:
    """What the method keeps with its model, from held-out batches (a reward model: its scores' scale)."""
    assert job.method.finish is not None
    policy = job.models.policy.eval()
    with torch.no_grad(), autocast(job.config.dtype, job.processes.device.type):
        batches = [batch for update in job.feed.held_out().updates for batch in update.micro_batches]
        return job.method.finish(policy, batches, job.config)
