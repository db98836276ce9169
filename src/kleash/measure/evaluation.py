"""What a measurement holds: estimates over held-out prompts, the conventions behind them, every sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from kleash.measure.diversity import distinct_share
from kleash.measure.estimate import Estimate

METRICS = ("drift", "kl_k1", "kl_k2", "kl_k3", "reward", "gold", "distinct_bigrams", "length", "entropy")
"""The estimates of an Evaluation, in the order of a table."""


@dataclass
class Sample:
    """One response with what was measured on it, token by token.

    ids are what was sampled and tokens their texts; logp and logp_ref are the log-probabilities of those
    tokens under policy and reference, kl the exact KL of the two next-token distributions there (nats).
    reward and gold are None where missing; group is the number of the prompt.
    """

    prompt: str
    response: str
    tokens: list[str]
    ids: list[int]
    logp: list[float]
    logp_ref: list[float]
    kl: list[float]
    reward: float | None
    gold: float | None
    ended: bool
    group: int

    def to_json(self) -> dict[str, Any]:
        """A dict for one line of samples.jsonl."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Sample:
        """Back from `to_json`; other keys of the line (step, policy) are left aside."""
        return cls(**{f.name: value[f.name] for f in fields(cls)})


@dataclass
class Evaluation:
    """A policy measured on held-out prompts.

    prompts × samples_per_prompt responses. drift: exact KL(policy‖reference) of a response, summed over its
    positions, nats; kl_k1, kl_k2, kl_k3: sampled estimates of it on the same responses; reward and gold:
    their scores; reward_parts: each part of a combined reward; distinct_bigrams: share, a prompt's samples
    pooled; length: tokens, end token included; entropy: of the policy, nats a token. ended: share of
    responses that stopped by themselves, None where they could not. missing: how many responses have no
    reward, no gold. sampler_gap: mean |log-prob as sampled − recomputed| per token. warnings: what the reader
    must know before believing a number. `prompts_hash` tells whether two evaluations share prompts.
    """

    prompts: int
    samples_per_prompt: int
    max_new_tokens: int
    temperature: float
    fixed_length: bool
    seed: int
    seconds: float
    drift: Estimate | None = None
    kl_k1: Estimate | None = None
    kl_k2: Estimate | None = None
    kl_k3: Estimate | None = None
    reward: Estimate | None = None
    gold: Estimate | None = None
    distinct_bigrams: Estimate | None = None
    length: Estimate | None = None
    entropy: Estimate | None = None
    ended: float | None = None
    missing: dict[str, int] = field(default_factory=dict)
    reward_parts: dict[str, Estimate | None] = field(default_factory=dict)
    sampler_gap: float | None = None
    prompts_hash: str = ""
    conventions: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def to_json(self, samples: bool = True) -> dict[str, Any]:
        """A dict that json.dump writes as it is; without samples it is what evaluation.json holds."""
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "samples"}
        for name in METRICS:
            out[name] = None if out[name] is None else out[name].to_json()
        out["reward_parts"] = {k: None if e is None else e.to_json() for k, e in self.reward_parts.items()}
        if samples:
            out["samples"] = [sample.to_json() for sample in self.samples]
        return out

    @classmethod
    def from_json(cls, value: dict[str, Any], samples: Iterable[dict[str, Any]] | None = None) -> Evaluation:
        """Back from `to_json`; `samples` (lines of samples.jsonl) take the place of those left out. Other
        keys are left aside.
        """
        known = {f.name: value[f.name] for f in fields(cls) if f.name in value and f.name != "samples"}
        known |= {name: Estimate.from_json(known[name]) for name in METRICS if name in known}
        known["reward_parts"] = {k: Estimate.from_json(e) for k, e in known.get("reward_parts", {}).items()}
        rows = value.get("samples", []) if samples is None else samples
        return cls(**known, samples=[Sample.from_json(row) for row in rows])

    def by_prompt(self, metric: str) -> dict[int, float]:
        """The metric's mean over each prompt's samples, by prompt number; prompts with every value missing
        are absent.

        Needs `samples`. Entropy is not kept by sample and raises KeyError.
        """
        if metric == "distinct_bigrams":
            pools: dict[int, list[list[int]]] = {}
            for sample in self.samples:
                pools.setdefault(sample.group, []).append(sample.ids)
            shares = {group: distinct_share(pool) for group, pool in pools.items()}
            return {group: share for group, share in shares.items() if share is not None}
        values: dict[int, list[float]] = {}
        for sample in self.samples:
            value = sample_value(sample, metric)
            if value is not None:
                values.setdefault(sample.group, []).append(value)
        return {group: sum(found) / len(found) for group, found in values.items()}


def sample_value(sample: Sample, metric: str) -> float | None:
    """One sample's drift, kl_k1, reward, gold or length; None where missing, KeyError for another metric."""
    if metric == "drift":
        return sum(sample.kl)
    if metric == "kl_k1":
        return sum(sample.logp) - sum(sample.logp_ref)
    if metric == "length":
        return float(len(sample.ids))
    return {"reward": sample.reward, "gold": sample.gold}[metric]


def optional(values: Tensor) -> list[float | None]:
    """A float tensor (N,) as a list with None for nan."""
    return [
        None if missing else value
        for value, missing in zip(values.tolist(), torch.isnan(values).tolist(), strict=True)
    ]
