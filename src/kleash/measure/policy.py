"""Measure a policy: sample from it, score the samples, take its exact drift from the reference on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from kleash.data import read_rows, tokenise_prompts
from kleash.data.items import PromptIds
from kleash.data.sources import Rows
from kleash.data.tokenise import ChatMode
from kleash.errors import UsageError
from kleash.measure.evaluation import Evaluation
from kleash.measure.judges import Judges, load_judge
from kleash.measure.rollouts import evaluate_rollouts
from kleash.models import autocast, load_model
from kleash.models.attention import use_grouped_attention
from kleash.models.forward import Dtype, vocabulary_head
from kleash.models.states import causal_model
from kleash.rewards.call import TIMEOUT
from kleash.sampling import Progress, Rollouts, sample


def measure(
    model: Any,
    *,
    reference: Any,
    prompts: Any,
    reward: Any = None,
    gold: Any = None,
    n: int = 4,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    fixed_length: bool = False,
    score_unfinished: bool = True,
    standardise_reward: bool = True,
    seed: int = 0,
    batch_rows: int = 64,
    chat: ChatMode = "auto",
    timeout: float | None = TIMEOUT,
    reward_workers: int = 0,
    dtype: Dtype = "float32",
    sampling_dtype: Dtype = "auto",
    progress: Progress | None = None,
) -> Evaluation:
    """Sample `n` responses a prompt from the policy and measure drift, reward, gold and variety on them.

    `model` is what `load_model` takes; `reference` too, or a bare transformers model with the same
    vocabulary. `prompts`: texts, a file or hub name, Rows, a list of dicts, or PromptIds. `reward`, `gold`:
    what `load_reward` takes; a reward model's scores are in units of its recorded deviation from its
    recorded mean, as in training, unless `standardise_reward=False`. With `score_unfinished=False`
    responses that did not end by themselves have no reward and no gold (their drift counts). Responses are
    sampled under `sampling_dtype` and their drift is computed under `dtype`, a few rows at a time.
    UsageError: a greedy temperature (its KL is infinite), no reference, vocabularies that differ, nothing
    to sample from.
    """
    started = time.perf_counter()
    _check_sampling(temperature, fixed_length, score_unfinished)
    policy, tokenizer = load_model(model)
    reference = reference_model(reference, policy)
    proxy, judge = (
        load_judge(spec, tokenizer, standardise=standardise_reward, option=option)
        for option, spec in (("reward", reward), ("gold", gold))
    )
    judges = Judges(proxy, judge, timeout, score_unfinished, reward_workers)
    items, notes = prompt_items(prompts, policy, tokenizer, chat=chat, max_new_tokens=max_new_tokens)
    judges.check_columns(items)
    with autocast(sampling_dtype, next(policy.parameters()).device.type):
        rollouts = sample(
            policy,
            tokenizer,
            [item.prompt_ids for item in items],
            n=n,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            fixed_length=fixed_length,
            seed=seed,
            batch_rows=batch_rows,
            progress=progress,
        )
    rollouts = with_columns(rollouts, items)
    evaluation = evaluate_rollouts(
        policy, reference, tokenizer, rollouts, judges, dtype=dtype, batch_rows=batch_rows, progress=progress
    )
    evaluation.conventions["sampling_dtype"] = sampling_dtype
    return replace(
        evaluation,
        max_new_tokens=max_new_tokens,
        seed=seed,
        warnings=notes + evaluation.warnings,
        seconds=time.perf_counter() - started,
    )


def _check_sampling(temperature: float, fixed_length: bool, score_unfinished: bool) -> None:
    """UsageError where the samples would give nothing to score, or no drift."""
    if fixed_length and not score_unfinished:
        raise UsageError(
            "score_unfinished=false with fixed_length=true leaves nothing to score: no response can end by "
            "itself."
        )
    if not temperature > 0:
        raise UsageError(
            f"temperature={temperature}: drift is measured on samples, and the KL of a policy that always "
            "takes the likeliest token is infinite or meaningless. Give a temperature above 0; 1 is the "
            "policy as trained."
        )


def reference_model(source: Any, policy: nn.Module) -> nn.Module:
    """The reference behind `source`; UsageError where there is none or its vocabulary is not the policy's."""
    if source is None:
        raise UsageError(
            "reference: drift needs a model to be measured from. Give the model the training started from, "
            "for example reference=smollm2-135m."
        )
    # The same attention kernel on both sides, or equal models would differ by rounding.
    reference = use_grouped_attention(source) if isinstance(source, nn.Module) else load_model(source)[0]
    sizes = [vocabulary_head(model).weight.shape[0] for model in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"reference: it has {sizes[1]} tokens and the policy {sizes[0]}; the KL between them is defined "
            "on one vocabulary only. Give the model the policy was trained from."
        )
    return reference


def prompt_items(
    prompts: Any,
    policy: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: ChatMode = "auto",
    max_new_tokens: int = 64,
) -> tuple[list[PromptIds], list[str]]:
    """Prompts as ids with their columns, and a note on each kind of row that was dropped."""
    if isinstance(prompts, Sequence) and prompts and all(isinstance(prompt, PromptIds) for prompt in prompts):
        return list(prompts), []
    rows = _rows(prompts)
    window = getattr(causal_model(policy).config.get_text_config(), "max_position_embeddings", None)
    if window is not None and window - max_new_tokens < 2:
        raise UsageError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the model's window of {window} "
            "tokens."
        )
    tokenised = tokenise_prompts(
        rows, tokenizer, max_length=window, max_new_tokens=max_new_tokens, truncation="drop", chat=chat
    )
    dropped = Counter(rows.dropped) + Counter(tokenised.dropped)
    return tokenised.items, [f"{count} prompts dropped: {reason}" for reason, count in dropped.items()]


def _rows(prompts: Any) -> Rows:
    """Rows from texts, or from anything that `read_rows` reads."""
    if isinstance(prompts, Rows):
        return prompts
    if isinstance(prompts, Sequence) and not isinstance(prompts, str):
        prompts = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    return read_rows(prompts, "prompts")


def with_columns(rollouts: Rollouts, items: Sequence[PromptIds]) -> Rollouts:
    """The rollouts with the prompts' own texts (not decoded ids) and their columns, None where a row lacks
    one.
    """
    groups = rollouts.group.tolist()
    names = sorted({name for item in items for name in item.columns})
    columns = {name: [items[g].columns.get(name) for g in groups] for name in names}
    return replace(rollouts, prompts=[items[g].text for g in groups], columns=rollouts.columns | columns)
