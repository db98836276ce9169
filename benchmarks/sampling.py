"""Sampling: 64 responses of a fixed length, by `kleash.sampling.sample` and by transformers' `generate`.

Grouped: 8 prompts, 8 responses to each. Distinct: 64 prompts, one response to each. Both sides draw from the
whole softmax at temperature 1 with the end token ruled out, so that every response has its full length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.job import Answer, Job
from benchmarks.rows import GROUP, read_lines
from kleash.data.tokenise import pad_id
from kleash.errors import RunError
from kleash.models import autocast, load_model
from kleash.sampling import left_pad, sample

RESPONSES = 64


def request(job: Job) -> tuple[list[list[int]], int]:
    """Prompts and responses per prompt."""
    prompts = read_lines(Path(job.folder) / "prompts.jsonl")
    n = GROUP if job.task == "sampling-grouped" else 1
    return prompts[: RESPONSES // n], n


def ours(job: Job) -> Answer:
    """KLeash's sampler under bfloat16 autocast; it returns log-probs as well."""
    started = time.perf_counter()
    model, tokenizer = load_model(job.model)
    prompts, n = request(job)

    def draw(seed: int, length: int) -> int:
        with autocast("bfloat16"):
            rollouts = sample(
                model, tokenizer, prompts, n=n, max_new_tokens=length, fixed_length=True, seed=seed
            )
        return int(rollouts.response_mask.sum())

    return timed(draw, job, started)


def theirs(job: Job) -> Answer:
    """`generate`, under autocast over float32 weights or with weights in bfloat16, as the job's side says."""
    started = time.perf_counter()
    whole = job.side == "generate-bfloat16"
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.bfloat16 if whole else torch.float32
    ).eval()
    prompts, n = request(job)
    tokens, mask = left_pad(prompts)
    padding = pad_id(AutoTokenizer.from_pretrained(job.model))

    def draw(seed: int, length: int) -> int:
        torch.manual_seed(seed)
        context = nullcontext() if whole else torch.autocast("cpu", dtype=torch.bfloat16)
        with torch.inference_mode(), context:
            ids = model.generate(
                input_ids=tokens,
                attention_mask=mask.long(),
                do_sample=True,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                min_new_tokens=length,
                max_new_tokens=length,
                num_return_sequences=n,
                pad_token_id=padding,
            )
        return ids[:, tokens.shape[1] :].numel()

    return timed(draw, job, started)


def timed(draw: Callable[[int, int], int], job: Job, started: float) -> Answer:
    """A short call to warm up, then the repetitions; RunError where a response came out short."""
    draw(0, 4)
    begun = time.perf_counter()
    seconds = []
    for repeat in range(job.repeats):
        before = time.perf_counter()
        count = draw(repeat, job.new_tokens)
        seconds.append(time.perf_counter() - before)
        if count != RESPONSES * job.new_tokens:
            raise RunError(f"{job.side} drew {count} tokens, not {RESPONSES} x {job.new_tokens}")
    return Answer(seconds, [RESPONSES * job.new_tokens] * job.repeats, start_seconds=begun - started)
