"""From options to everything a run works with: rows, tokens, models, judges, prompts to measure on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from kleash.data.items import PromptIds
from kleash.data.sources import Prompt, Rows, read_rows, split_rows
from kleash.data.tokenise import Tokenised, pad_id, tokenise_prompts
from kleash.errors import UsageError
from kleash.measure import Judges
from kleash.methods.base import Method, Models
from kleash.methods.options import TrainConfig
from kleash.models import identity, load_model
from kleash.rewards import CombinedReward, ModelReward, load_reward
from kleash.training.adapters import add_adapters
from kleash.training.feed import Feed, OfflineFeed, OnlineFeed
from kleash.training.processes import Processes
from kleash.training.reference import reference_sums


@dataclass
class Data:
    """Rows of one part of a run and the items they became."""

    rows: Rows
    tokenised: Tokenised[Any]

    def record(self) -> dict[str, Any]:
        """What the manifest says about it."""
        dropped = dict(self.rows.dropped)
        for reason, count in self.tokenised.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
        return {
            "source": self.rows.source,
            "sha256": self.rows.sha256,
            "kept": len(self.tokenised.items),
            "dropped": dropped,
            "truncated": self.tokenised.truncated,
            "notes": list(self.rows.notes),
        }


@dataclass
class Job:
    """Everything a run works with. `load_reference` gives the reference where it is not in memory already."""

    method: Method
    config: Any
    processes: Processes
    models: Models
    load_reference: Callable[[], nn.Module]
    feed: Feed
    data: Data
    held_out: Data | None
    prompts: list[PromptIds]
    identities: dict[str, str]
    notes: list[str] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(
        default_factory=list
    )  # what was checked before step 1, and its figures

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        wanted = self.config.steps or self.config.epochs * self.feed.steps_per_epoch
        return max(1, -int(-wanted // 1))  # a started step is a step


def prepare(method: Method, config: Any, processes: Processes) -> Job:
    """Read the data, load the models, compute the reference's log-probs if they are cached. UsageError names
    what is wrong.
    """
    rows, held_rows = _read(method, config)
    start, tokenizer = load_model(config.model)
    data = Data(rows, method.tokenise(rows, tokenizer, config))
    held_out = None if held_rows is None else _limited(held_rows, method, tokenizer, config)
    if method.finish is not None and held_out is None:
        raise UsageError(
            f"{method.name} needs held-out rows at the end, and eval_fraction={config.eval_fraction:g} "
            "leaves none: raise it, or give eval_data."
        )
    identities = {"model": identity(start)}
    policy = _policy(method, start, tokenizer, config)
    policy.to(processes.device)
    processes.equalise(policy.parameters())
    load_reference = _reference_loader(config, start, policy, tokenizer, processes)
    models = Models(policy, tokenizer, reward=_judge("reward", config, tokenizer, processes))
    models.gold = _judge("gold", config, tokenizer, processes)
    if method.prepare is not None:
        method.prepare(models, config)
        models.learner.to(processes.device)
        processes.equalise(models.learner.parameters())
    feed = _feed(method, models, data, held_out, config, processes)
    job = Job(method, config, processes, models, load_reference, feed, data, held_out, [], identities)
    job.notes += method.notes(config)
    judges = Judges(models.reward, models.gold)
    if method.online:
        judges.check_columns(data.tokenised.items)
    if method.generates and config.measure:
        job.prompts = _prompts(config, held_out or data, tokenizer, job.notes)
        judges.check_columns(job.prompts)
    _bring_reference(job)
    return job


def _read(method: Method, config: TrainConfig) -> tuple[Rows, Rows | None]:
    """Training rows and held-out rows (None where none are wanted)."""
    options: dict[str, Any] = {"bad_rows": config.bad_rows, "prompt_column": config.prompt_column}
    rows = read_rows(_texts(config.data), method.kind, split=config.data_split, limit=config.limit, **options)
    if config.eval_data is not None:
        return rows, read_rows(_texts(config.eval_data), method.kind, split=config.data_split, **options)
    if config.eval_fraction == 0.0:
        return rows, None
    return split_rows(rows, eval_fraction=config.eval_fraction, seed=config.seed)


def _texts(source: Any) -> Any:
    """A list of plain prompts as rows; anything else as it is."""
    if isinstance(source, list) and source and all(isinstance(text, str) for text in source):
        return [{"prompt": text} for text in source]
    return source


def _limited(rows: Rows, method: Method, tokenizer: Any, config: TrainConfig) -> Data:
    rows = replace(rows, rows=rows.rows[: config.eval_limit])
    return Data(rows, method.tokenise(rows, tokenizer, config))


def _policy(method: Method, start: nn.Module, tokenizer: Any, config: TrainConfig) -> nn.Module:
    """What is trained. A model given as an object is never changed: a copy of it learns."""
    if method.build is not None:
        policy = method.build(start, tokenizer, config)
    else:
        policy = copy.deepcopy(start) if isinstance(config.model, tuple) else start
    if config.lora_rank:
        policy = add_adapters(policy, config)
    else:
        for parameter in policy.parameters():
            parameter.requires_grad_(True)
    return policy.train(config.dropout)


def _reference_loader(
    config: TrainConfig, start: nn.Module, policy: nn.Module, tokenizer: Any, processes: Processes
) -> Callable[[], nn.Module]:
    """How to get the reference: the adapter switched off, the object given, or the model read again. Never a
    copy too many.
    """
    off = getattr(policy, "without_adapters", None)
    if config.reference is None and off is not None:
        return off
    source = config.model if config.reference is None else config.reference
    given = start if config.reference is None and isinstance(source, tuple) else None

    def load() -> nn.Module:
        reference, its_tokenizer = (given, tokenizer) if given is not None else load_model(source)
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise UsageError(
                f"reference={source}: its vocabulary is not that of the model, so their log-probabilities "
                "cannot be compared."
            )
        return reference.to(processes.device).eval().requires_grad_(False)

    return load


def _judge(name: str, config: TrainConfig, tokenizer: Any, processes: Processes) -> Callable[..., Any] | None:
    """The reward or gold of the options; a reward model is put on the device and its vocabulary checked."""
    spec = getattr(config, name)
    if spec is None:
        return None
    judge = load_reward(spec, standardise=config.standardise_reward, dtype=config.dtype, option=name)
    for part in reward_models(judge):
        part.check_tokenizer(tokenizer)
        part.model.to(processes.device)
    return judge


def reward_models(judge: Any) -> list[ModelReward]:
    """The trained reward models in a reward, alone or combined."""
    parts = judge.rewards.values() if isinstance(judge, CombinedReward) else [judge]
    return [part for part in parts if isinstance(part, ModelReward)]


def _feed(
    method: Method,
    models: Models,
    data: Data,
    held_out: Data | None,
    config: TrainConfig,
    processes: Processes,
) -> Feed:
    items, held = data.tokenised.items, held_out.tokenised.items if held_out else []
    if method.online:
        return OnlineFeed(method, models, items, held, config, processes)
    return OfflineFeed(method, items, held, config, pad_id(models.tokenizer), processes)


def _bring_reference(job: Job) -> None:
    """Put the reference where the loss looks for it: its log-probs in a cache, or the model beside the
    policy.
    """
    method, config = job.method, job.config
    if not method.uses_reference:
        return
    if method.sums is None or not config.cache_reference:
        job.models.reference = job.load_reference()
        return
    if config.reference is None:
        model, name = job.models.policy, job.identities["model"]  # before step 1 the policy is the reference
        model.eval()
    else:
        model = job.load_reference()
        name = job.identities["reference"] = identity(model)
    assert isinstance(job.feed, OfflineFeed)
    job.models.reference_logps, note = reference_sums(method, model, name, job.feed, config, job.processes)
    job.notes.append(f"reference log-probs {note}")
    job.models.policy.train(config.dropout)


def _prompts(config: TrainConfig, data: Data, tokenizer: Any, notes: list[str]) -> list[PromptIds]:
    """Distinct prompts for the measurement at the end: eval_prompts, or those of the given rows."""
    if config.eval_prompts is not None:
        rows = read_rows(_texts(config.eval_prompts), "prompts", split=config.data_split)
    else:
        prompts = [
            Prompt(prompt=row.prompt, columns=row.columns, number=row.number) for row in data.rows.rows
        ]
        rows = Rows("prompts", prompts, data.rows.source, data.rows.sha256)
    tokenised = tokenise_prompts(
        rows, tokenizer, max_length=config.max_length, truncation="prompt-left", chat=config.chat
    )
    distinct = list({tuple(item.prompt_ids): item for item in tokenised.items}.values())
    if len(distinct) > config.eval_prompt_count:
        notes.append(f"measured on the first {config.eval_prompt_count} of {len(distinct)} held-out prompts")
    return distinct[: config.eval_prompt_count]
