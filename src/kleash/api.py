"""`kleash.sample`: responses of a model to prompts as users have them."""

from __future__ import annotations

import logging
from typing import Any, Literal

from kleash import sampling
from kleash.measure.policy import prompt_items, with_columns
from kleash.models import autocast, load_model
from kleash.sampling import Rollouts

log = logging.getLogger("kleash")


def sample(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int = 64,
    chat: Literal["auto", "template", "plain"] = "auto",
    dtype: str = "auto",
    **options: Any,
) -> Rollouts:
    """Sample responses, with the log-probabilities they were sampled with and the prompts' other columns.

    `model` is what `load_model` takes; `prompts` a text file of rows, a hub name, a list of texts or of
    dicts. `chat` says when the chat template is used, `dtype` the precision ("auto": bfloat16 where the
    machine is fast at it). The other options are those of `kleash.sampling.sample`: n, temperature, top_p,
    top_k, fixed_length, seed, batch_rows, progress. A prompt that does not fit the model's window is
    dropped and logged.
    """
    policy, tokenizer = load_model(model)
    items, notes = prompt_items(prompts, policy, tokenizer, chat=chat, max_new_tokens=max_new_tokens)
    for note in notes:
        log.warning(note)
    ids = [item.prompt_ids for item in items]
    with autocast(dtype, next(policy.parameters()).device.type):  # type: ignore[arg-type]
        rollouts = sampling.sample(policy, tokenizer, ids, max_new_tokens=max_new_tokens, **options)
    return with_columns(rollouts, items)


def rollout_rows(rollouts: Rollouts, tokenizer: Any) -> list[dict[str, Any]]:
    """Rollouts as rows of a JSONL file: prompt, response, tokens, ids, logp, ended, group, and the prompts'
    columns.
    """
    rows: list[dict[str, Any]] = []
    for i, length in enumerate(rollouts.response_mask.sum(-1).tolist()):
        ids = rollouts.response_ids[i, :length].tolist()
        row = {name: values[i] for name, values in rollouts.columns.items()}
        row |= {"prompt": rollouts.prompts[i], "response": rollouts.responses[i]}
        row |= {"tokens": [tokenizer.decode([token]) for token in ids], "ids": ids}
        row |= {"logp": [round(value, 5) for value in rollouts.logp[i, :length].tolist()]}
        row |= {"ended": bool(rollouts.ended[i]), "group": int(rollouts.group[i])}
        rows.append(row)
    return rows
