"""The reference's log-probs of fixed data: computed once, before step 1, and kept by content hash for later
runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kleash.methods.base import Method
from kleash.methods.options import TrainConfig
from kleash.models import autocast, compute_dtype
from kleash.models.bundled import cache_folder
from kleash.training.feed import OfflineFeed
from kleash.training.processes import Processes


def reference_sums(
    method: Method,
    model: nn.Module,
    identity: str,
    feed: OfflineFeed,
    config: TrainConfig,
    processes: Processes,
) -> tuple[Tensor, str]:
    """What `method.sums` gives for every item under the reference, (items, responses) by position, and where
    it came from.

    Computed in the very micro-batches of the first epoch: in bfloat16 a row's log-prob depends a little on
    its neighbours, and so the first step starts at a log-ratio of exactly 0, as it would with the reference
    computed beside the policy.
    """
    file = cache_folder() / "reference" / f"{_key(method, identity, feed, config, processes)}.safetensors"
    found = _read(file)
    everywhere = not processes.any(found is None)
    if found is not None and everywhere:
        return found.to(processes.device), f"read from {file}"
    values = processes.sum_tensor(_compute(method, model, feed, config, processes.device))
    return values, _write(values.cpu(), file) if processes.main else "computed"


@torch.no_grad()
def _compute(
    method: Method, model: nn.Module, feed: OfflineFeed, config: TrainConfig, device: torch.device
) -> Tensor:
    """This process's share of the values, zeros elsewhere."""
    assert method.sums is not None
    values = torch.zeros(len(feed.items), method.rows_per_item, device=device)
    plans = [feed.plan(feed.train, config.seed, 0), feed.plan(feed.eval, 0, 0) if feed.eval else []]
    for step in (step for plan in plans for step in plan):
        for batch in feed.batches(step):
            with autocast(config.dtype, device.type):
                values[batch.index] = method.sums(model, batch).float()
    return values


def _key(method: Method, identity: str, feed: OfflineFeed, config: TrainConfig, processes: Processes) -> str:
    """A hash of everything the values depend on: model, ids, precision, the cut into micro-batches, library
    versions.
    """
    digest = hashlib.sha256()
    facts: list[Any] = [
        "v2", method.name, identity, str(compute_dtype(config.dtype)), processes.device.type,
        torch.__version__, transformers.__version__, config.seed, config.batch_size,
        config.micro_batch_size, config.micro_batch_tokens, processes.world, len(feed.train),
    ]  # fmt: skip
    digest.update(json.dumps(facts).encode())
    for item in feed.items:
        digest.update(repr([v for v in vars(item).values() if isinstance(v, list)]).encode())
    return digest.hexdigest()[:40]


def _read(file: Path) -> Tensor | None:
    if not file.exists():
        return None
    try:
        return load_file(file)["sums"]
    except (SafetensorError, KeyError):
        return None  # damaged: it is computed again and replaced


def _write(values: Tensor, file: Path) -> str:
    """Keep the values for later runs; a cache that cannot be written costs time only: the note says so."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"sums": values.contiguous()}, temporary)
        os.replace(temporary, file)
    except (OSError, SafetensorError) as error:
        return f"computed for this run alone ({file.parent} could not be written: {error})"
    return f"computed and kept in {file}"
