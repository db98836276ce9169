"""The options that every training method shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kleash.config import REQUIRED, option
from kleash.errors import UsageError


@dataclass(kw_only=True)
class TrainConfig:
    """Options common to all methods; each method's Config adds its own. The same keys serve recipes,
    overrides and Python.
    """

    # what is trained, on what
    model: Any = option(
        "smollm2-135m", "the model to start from: hub id, folder, run, smollm2-135m, or (model, tokenizer)"
    )
    reference: Any = option(
        None, "the model that drift is measured from; by default the model before training"
    )
    data: Any = option(
        REQUIRED, "training rows: a file, a hub name, gym:TASK, a datasets.Dataset or a list of dicts"
    )
    data_split: str = option("train", "which split of a hub data set to read")
    prompt_column: str = option("prompt", "the column that holds the prompt, where it is called otherwise")
    limit: int | None = option(None, "read at most this many training rows", minimum=1)
    bad_rows: Literal["error", "drop", "strict"] = option(
        "error",
        "malformed rows: an error, or dropped and counted; strict: rows nothing can be learnt from are "
        "errors too",
    )
    eval_data: Any = option(None, "held-out rows; by default eval_fraction of the training rows")
    eval_fraction: float = option(
        0.1, "share of the prompts held out when eval_data is not given", minimum=0.0, maximum=0.9
    )
    eval_limit: int = option(256, "at most this many held-out rows are used", minimum=1)
    out: str | None = option(None, "the run folder to write; by default a new one under runs/")
    resume: bool = option(False, "go on from the newest checkpoint in out")
    seed: int = option(
        0, "decides data order, split and sampling; a step's randomness depends on it and on the step alone"
    )

    # how rows become tokens
    max_length: int = option(1024, "longest row in tokens, prompt and response together", minimum=2)
    truncation: Literal["drop", "prompt-left", "response-right"] = option(
        "drop",
        "what happens to a longer row: dropped and counted, prompt cut from the left, or response cut on "
        "the right",
    )
    chat: Literal["auto", "template", "plain"] = option(
        "auto", "use of the chat template: for messages only, for plain text too, or never"
    )

    # how long, how fast
    steps: int | None = option(
        None,
        "steps, each on one batch of rows or of sampled responses; by default as many as epochs need",
        minimum=1,
    )
    epochs: float = option(1.0, "passes over the data, when steps is not given", above=0.0)
    batch_size: int = option(
        8, "items per optimizer step, over all processes: rows, pairs or responses", minimum=1
    )
    micro_batch_size: int | None = option(
        None, "most items in one forward pass; by default the whole step's", minimum=1
    )
    micro_batch_tokens: int | None = option(
        None, "most tokens in one forward pass, each row counted as long as the longest", minimum=1
    )
    learning_rate: float = option(1e-5, "peak learning rate of AdamW", minimum=0.0)
    schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "course of the learning rate after the warm-up"
    )
    warmup_steps: int = option(0, "steps over which the learning rate rises from 0", minimum=0)
    weight_decay: float = option(0.0, "decoupled weight decay of AdamW, on matrices", minimum=0.0)
    adam_beta1: float = option(0.9, "AdamW's decay of the mean gradient", minimum=0.0, maximum=0.9999)
    adam_beta2: float = option(0.999, "AdamW's decay of the squared gradient", minimum=0.0, maximum=0.99999)
    max_grad_norm: float = option(1.0, "gradients longer than this are scaled down to it", above=0.0)
    dropout: bool = option(False, "leave the model's dropout on while training")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "precision of matrix products over float32 weights; auto is bfloat16 where the machine is fast at it",
    )
    lora_rank: int = option(
        0, "train low-rank adapters of this rank on all linear layers; 0 trains every weight", minimum=0
    )
    lora_alpha: float | None = option(
        None, "scale of the adapters, alpha/rank; by default twice the rank", above=0.0
    )

    # what is logged, measured and kept
    log_every: int = option(1, "steps between rows of metrics.jsonl", minimum=1)
    eval_every: int | None = option(
        None, "steps between evaluations on held-out rows; there is always one at the end", minimum=1
    )
    eval_at_start: bool = option(False, "evaluate before step 1 too, to have both ends of the course")
    save_every: int | None = option(None, "steps between checkpoints", minimum=1)
    keep_checkpoints: int = option(1, "how many checkpoints are kept", minimum=1)
    tracker: str | None = option(
        None, "also log to a tracker Accelerate knows: tensorboard, wandb, mlflow, …"
    )
    quiet: bool = option(False, "show no progress")
    preflight: bool = option(True, "check the start before step 1 and refuse a broken one")
    start_at_reference: bool = option(
        True,
        "the policy starts as the reference, so their log-ratio must be 0; false when it starts elsewhere "
        "on purpose",
    )

    # the measurement at the end
    measure: bool = option(True, "measure drift, reward and diversity on sampled responses at the end")
    eval_prompts: Any = option(None, "prompts to measure on; by default those of the held-out rows")
    eval_prompt_count: int = option(64, "at most this many of them", minimum=1)
    eval_samples: int = option(1, "responses sampled for each of them", minimum=1)
    max_new_tokens: int = option(64, "longest sampled response in tokens", minimum=1)
    temperature: float = option(1.0, "sampling temperature; training uses the same", above=0.0)
    fixed_length: bool = option(
        False, "remove end tokens before the softmax: every response has max_new_tokens tokens"
    )
    sampling_rows: int = option(64, "responses decoded at once", minimum=1)
    reward: Any = option(
        None,
        "scores responses: file.py:function, reward model folder, rule (math:answer, …), callable, or "
        "name: weight mapping",
    )
    gold: Any = option(
        None, "an independent judge, logged beside the reward and never optimised; same forms as reward"
    )
    reward_timeout: float = option(
        60.0, "seconds a call of a reward function may take before its scores count as missing", above=0.0
    )
    reward_workers: int = option(
        0,
        "threads that call a reward function with one response at a time, each with reward_timeout of its "
        "own; 0: one call with all",
        minimum=0,
    )
    standardise_reward: bool = option(
        True, "give a reward model's scores in units of its recorded deviation from its recorded mean"
    )
    foreign_reward: bool = option(False, "accept a reward model fitted on another model's text")

    def check(self) -> None:
        """Options that constrain one another; methods extend it."""
        if self.lora_alpha is not None and not self.lora_rank:
            raise UsageError(f"lora_alpha={self.lora_alpha:g} has no effect without lora_rank.")
        if self.eval_data is not None and self.eval_data is self.data:
            raise UsageError("eval_data is the training data itself: nothing would be held out.")
        if self.resume and self.out is None:
            raise UsageError("resume=true needs out=…, the run folder to go on with.")

    @property
    def lora_scale(self) -> float:
        """alpha, twice the rank by default."""
        return self.lora_alpha if self.lora_alpha is not None else 2.0 * self.lora_rank
