"""TRL's side: its trainers at their best setting on a CPU, on the same ids in the same order.

Gradient checkpointing is off, AdamW is fused, weights are float32 under bfloat16 autocast as on our side. The
rows come tokenised, so that both sides train on the same ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from benchmarks.job import Answer, Job
from benchmarks.rows import GROUP, MICRO_BATCHES, planned_steps, read_lines, vowels
from kleash.data.items import Example, Pair


class StepClock(TrainerCallback):
    """Seconds of each optimizer step: forward, backward, clipping, update. Collating and logging are not in
    them.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first: float | None = None
        self._begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()
        self.first = self.first or self._begun

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begun)


def recorded(kind: Any) -> Any:
    """A trainer that takes its rows as they are and keeps each step's loss in full precision."""

    class Recorded(kind):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.losses: list[float] = []
            super().__init__(*args, **kwargs)

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.losses.append(float(loss))
            return loss

    return Recorded


def train(job: Job) -> Answer:
    """Times and losses of every step of the trainer."""
    if job.online:
        return train_online(job)
    started = time.perf_counter()
    steps = planned_steps(job.rows, job.method, job.model, job.max_length, job.batch_size).take(job.steps)
    clock = StepClock()
    trainer = make_trainer(job, [item for step in steps.items for item in step])
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(Path(job.out) / "model"))
    assert clock.first is not None
    return Answer(clock.seconds, steps.tokens, trainer.losses, start_seconds=clock.first - started)


def train_online(job: Job) -> Answer:
    """Times and losses of every step of GRPO or RLOO: sampling, scoring, backward, update."""
    started = time.perf_counter()
    clock = StepClock()
    questions = [row["prompt"] for row in read_lines(job.rows)]
    common = {
        **arguments(job),
        "per_device_train_batch_size": job.batch_size // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "num_generations": GROUP,
        "max_completion_length": job.new_tokens,
        "generation_kwargs": {"min_new_tokens": job.new_tokens},
        "temperature": 1.0,
        "beta": 0.0,
        "shuffle_dataset": False,
    }
    for name in ("max_length", "train_sampling_strategy"):
        del common[name]
    kind, config = (GRPOTrainer, GRPOConfig) if job.task == "grpo" else (RLOOTrainer, RLOOConfig)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    trainer = recorded(kind)(
        model=model,
        reward_funcs=vowels,
        args=config(**common),
        train_dataset=Dataset.from_list([{"prompt": text} for text in questions]),
        processing_class=AutoTokenizer.from_pretrained(job.model, padding_side="left"),
    )
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(Path(job.out) / "model"))
    assert clock.first is not None
    tokens = [job.batch_size * job.new_tokens] * job.steps
    losses = [sum(trainer.losses[i * MICRO_BATCHES : (i + 1) * MICRO_BATCHES]) for i in range(job.steps)]
    return Answer(clock.seconds, tokens, losses, start_seconds=clock.first - started)


def make_trainer(job: Job, items: list[Any]) -> Any:
    """TRL's trainer for the job's method, over items in order."""
    makers: dict[str, Callable[[Job, list[Any]], Any]] = {"sft": _sft, "reward": _reward, "dpo": _dpo}
    return makers[job.method](job, items)


def arguments(job: Job) -> dict[str, Any]:
    """The training arguments that all three share."""
    return {
        "output_dir": str(Path(job.out) / "trainer"),
        "max_steps": job.steps,
        "per_device_train_batch_size": job.batch_size,
        "gradient_accumulation_steps": 1,
        "train_sampling_strategy": "sequential",
        "max_length": job.max_length,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": job.dtype == "bfloat16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def _sft(job: Job, items: list[Example]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    rows = [{"input_ids": item.prompt_ids + item.response_ids, "labels": labels(item)} for item in items]
    return recorded(SFTTrainer)(
        model=model,
        args=SFTConfig(**arguments(job)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job.model),
    )


def labels(item: Example) -> list[int]:
    """The ids to be learnt, −100 elsewhere: transformers' convention."""
    kept = [i if t else -100 for i, t in zip(item.response_ids, item.trained, strict=True)]
    return [-100] * len(item.prompt_ids) + kept


def _reward(job: Job, items: list[Pair]) -> Any:
    model = AutoModelForSequenceClassification.from_pretrained(job.model, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)  # where our head starts, so that both sides compute the same
    rows = [
        {"chosen_ids": item.prompt_ids + item.chosen_ids, "rejected_ids": item.prompt_ids + item.rejected_ids}
        for item in items
    ]
    return recorded(RewardTrainer)(
        model=model,
        args=RewardConfig(**arguments(job)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job.model),
    )


def _dpo(job: Job, items: list[Pair]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    rows = [
        {"prompt_ids": item.prompt_ids, "chosen_ids": item.chosen_ids, "rejected_ids": item.rejected_ids}
        for item in items
    ]
    cached = job.task == "dpo-cached"
    return recorded(DPOTrainer)(
        model=model,
        args=DPOConfig(**arguments(job), beta=0.1, precompute_ref_log_probs=cached),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job.model),
    )
