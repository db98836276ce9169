"""The one loop: accumulate, clip, step, log, evaluate, save. It knows no method by name.

A step's loss is the sum of item losses over every micro-batch of every process, divided once by the count of
them all. The count is therefore known before the first backward pass, and eight micro-batches, one, or two
processes of four give the same gradient. Anything random in a step is seeded by the run's seed and the step's
number, and the data of a step depend on its number alone, so a resumed run repeats what an uninterrupted one
would have done, bit for bit.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

import numpy
import torch

from kleash.errors import RunError
from kleash.methods.base import Sums, Update, total
from kleash.models import autocast
from kleash.run import Run
from kleash.training.checkpoint import save_checkpoint
from kleash.training.console import Bar, Console
from kleash.training.evaluate import evaluate_held_out
from kleash.training.feed import step_seed
from kleash.training.interrupt import Interrupt, Interrupted
from kleash.training.optimizer import clip_gradient, learning_rate, make_optimizer, trainable
from kleash.training.processes import add_sums, means
from kleash.training.setup import Job
from kleash.training.watch import Watch


class Loop:
    """One run's optimizer steps. `done`, `seconds` and `tokens` count what is behind, earlier sessions
    included.
    """

    def __init__(self, job: Job, run: Run, console: Console) -> None:
        self.job, self.run, self.console = job, run, console
        self.optimizer = make_optimizer(job.models.learner, job.config)
        self.parameters = list(trainable(job.models.learner).values())
        self.done, self.seconds, self.tokens = 0, 0.0, 0
        self.held_out: dict[str, float] = {}  # the latest evaluation
        self.watch = Watch()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's counters (its tensors are in place already)."""
        self.done, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        self.job.models.memory.restore(state["memory"])

    def train(self) -> None:
        """All remaining steps. Raises Interrupted after a Ctrl-C, with the step finished and saved."""
        total_steps = self.job.total_steps
        with (
            self.console.steps(self.job.method.name, total_steps, self.done) as bar,
            Interrupt(self._announce_stop) as ctrl_c,
        ):
            if self.job.config.eval_at_start and self.done == 0:
                self._evaluate(bar)
            while self.done < total_steps:
                row = self._step(self.done + 1, total_steps)
                last = self.done == total_steps
                self._log(row, bar, always=last)
                if self._due(self.job.config.eval_every) or last:
                    self._evaluate(bar)
                stop = self.job.processes.any(ctrl_c.asked)
                if self._due(self.job.config.save_every) or (stop and not last):
                    self.save()
                if stop and not last:
                    raise Interrupted(
                        f"Stopped after step {self.done} of {total_steps}; everything is saved in "
                        f"{self.run.path}. To go on: {resume_hint(self.run)}"
                    )

    def _step(self, number: int, total_steps: int) -> dict[str, Any]:
        """One step: all updates on one batch of rows, or of rollouts; returns its row of metrics."""
        job, started = self.job, time.perf_counter()
        seed_everything(step_seed(job.config.seed, number, job.processes.rank))
        with autocast(job.config.dtype, job.processes.device.type):
            step = job.feed.step(number)
        collected = time.perf_counter()
        job.models.learner.train(job.config.dropout)
        rate = learning_rate(number, total_steps, job.config)
        sums, trained, real = dict(step.metrics), 0, 0
        for update in step.updates:
            more, tokens = self._accumulate(update)
            trained, real = trained + tokens[0], real + tokens[1]
            self._take(number, rate, more)
            add_sums(sums, more)
        sums = job.processes.merge(sums)
        trained, real = int(job.processes.sum(trained)), int(job.processes.sum(real))
        elapsed = time.perf_counter() - started
        self.done, self.seconds, self.tokens = number, self.seconds + elapsed, self.tokens + trained
        if job.processes.main and step.samples:
            self.run.append(
                "samples.jsonl", ({"step": number, "policy": self.run.path.name, **s} for s in step.samples)
            )
        values = means(sums)
        return {
            "step": number,
            "split": "train",
            "seconds": self.seconds,
            "epoch": number / job.feed.steps_per_epoch,
            "loss": values.pop("loss", 0.0),
            **values,
            "optim/learning_rate": rate,
            "time/step": elapsed,
            **({"time/collect": collected - started} if job.method.online else {}),
            "tokens/trained": self.tokens,
            "tokens/per_second": real / elapsed,
        }

    def _accumulate(self, update: Update) -> tuple[Sums, tuple[int, int]]:
        """The gradient of an update's loss; this process's metrics, and its trained and real tokens."""
        job = self.job
        items = job.processes.sum(update.items)
        sums: Sums = {"loss": (0.0, float(update.items))}
        trained, real = 0, 0
        for batch in update.micro_batches:
            with autocast(job.config.dtype, job.processes.device.type):
                output = job.method.loss(job.models, batch, job.config)
            (output.per_item.float().sum() / max(items, 1.0)).backward()
            add_sums(sums, {"loss": (total(output.per_item)[0], 0.0), **output.metrics})
            trained, real = trained + batch.trained_tokens, real + batch.real_tokens
        job.processes.sum_gradients(self.parameters)
        return sums, (trained, real)

    def _take(self, number: int, rate: float, sums: Sums) -> None:
        """Clip, step, forget the gradient; its length joins the metrics. A gradient that is not finite stops
        the run untouched.
        """
        norm = float(clip_gradient(self.parameters, self.job.config.max_grad_norm))
        # The same on every process, so it is counted once for all.
        sums["optim/grad_norm"] = (norm, 1.0) if self.job.processes.main else (0.0, 0.0)
        if not math.isfinite(norm):
            raise RunError(
                f"step {number}: the gradient is not finite (length {norm}, loss {means(sums).get('loss')}), "
                "so the step was not taken and the weights are those of the step before. Usual causes: a "
                f"learning rate too high (learning_rate={self.job.config.learning_rate:g}), or a reward or "
                f"log-probability that is not finite. Checkpoints so far are in {self.run.checkpoints}."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _log(self, row: dict[str, Any], bar: Bar, always: bool) -> None:
        bar.update(self.done, row)
        for warning in self.watch.see(row):
            self.console.note(warning)
        if not (always or self.done == 1 or self._due(self.job.config.log_every)):
            return
        if self.job.processes.main:
            self.run.append("metrics.jsonl", [finite(row)])
        self.job.processes.track({k: v for k, v in row.items() if k != "split"}, self.done)

    def _evaluate(self, bar: Bar) -> None:
        started = time.perf_counter()
        values = self.held_out = means(evaluate_held_out(self.job))
        self.seconds += time.perf_counter() - started
        if not values:
            return
        row = {"step": self.done, "split": "eval", "seconds": self.seconds, **values}
        if self.job.processes.main:
            self.run.append("metrics.jsonl", [finite(row)])
        self.job.processes.track({f"eval/{k}": v for k, v in values.items()}, self.done)

    def save(self) -> None:
        """Write a checkpoint; the others wait for the main process."""
        if self.job.processes.main:
            state = {
                "seconds": self.seconds,
                "tokens": self.tokens,
                "total_steps": self.job.total_steps,
                "memory": self.job.models.memory.to_json(),
            }
            save_checkpoint(
                self.run.checkpoints,
                self.done,
                self.job.models.learner,
                self.optimizer,
                state,
                self.job.config.keep_checkpoints,
            )
        self.job.processes.wait()

    def _due(self, every: int | None) -> bool:
        return every is not None and self.done % every == 0

    def _announce_stop(self) -> None:
        self.console.note(
            "Ctrl-C: finishing this step and saving a checkpoint. Press Ctrl-C again to quit at once."
        )


def resume_hint(run: Run) -> str:
    """The command that goes on with a run."""
    return f"kleash train {run.path / 'config.yaml'} resume=true"


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python, which a user's own reward function may draw from."""
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with numbers that JSON cannot hold as None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
