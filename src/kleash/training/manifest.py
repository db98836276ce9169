"""What a run was made of: versions, machine, seed, data and models by hash, conventions, the runs it builds
on.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from kleash.models import compute_dtype
from kleash.training.optimizer import trainable
from kleash.training.setup import Job, reward_models

PACKAGES = (
    "kleash",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
)


def manifest(job: Job) -> dict[str, Any]:
    """The manifest of a run, as plain data."""
    config, processes = job.config, job.processes
    parameters = trainable(job.models.learner)
    return {
        "method": job.method.name,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "hardware": hardware(str(processes.device)),
        "processes": processes.world,
        "seed": config.seed,
        "steps": job.total_steps,
        "dtype": {"weights": "float32", "products": str(compute_dtype(config.dtype)).removeprefix("torch.")},
        "parameters": {
            "total": sum(p.numel() for p in job.models.learner.parameters()),
            "trained": sum(p.numel() for p in parameters.values()),
        },
        "models": job.identities,
        "reward_model": getattr(job.models.policy, "meta", None),
        "reward_models": {
            name: [part.model.meta for part in reward_models(judge)]
            for name, judge in (("reward", job.models.reward), ("gold", job.models.gold))
            if judge is not None
        },
        "data": {
            "train": job.data.record(),
            "eval": None if job.held_out is None else job.held_out.record(),
            "measured_prompts": len(job.prompts),
        },
        "conventions": conventions(job),
        "parents": parents(config),
        "checks": job.checks,
        "notes": job.notes,
    }


def conventions(job: Job) -> dict[str, str]:
    """The choices behind the numbers: those of the method and those all methods share."""
    config = job.config
    shared = {
        "logarithms": "natural; KL in nats, KL(policy‖reference)",
        "normalisation": "item losses are summed over all micro-batches and processes and divided once by "
        "their count",
        "dropout": "on while training" if config.dropout else "off",
        "optimizer": f"AdamW, betas {config.adam_beta1:g} and {config.adam_beta2:g}, gradient clipped at "
        f"{config.max_grad_norm:g}, weight decay {config.weight_decay:g} on matrices",
        "adapters": f"rank {config.lora_rank}, alpha {config.lora_scale:g}" if config.lora_rank else "none",
    }
    if job.models.reward is not None:
        scaled = config.standardise_reward and reward_models(job.models.reward)
        shared["reward scale"] = (
            "(score − mean)/std of the reward model's held-out scores" if scaled else "as given"
        )
    return {**shared, **job.method.conventions(config)}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def hardware(device: str) -> dict[str, Any]:
    """The machine, as far as numbers and speed depend on it."""
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "processor": platform.processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def parents(config: Any) -> list[dict[str, str]]:
    """Runs whose folders the options point into."""
    found = []
    for name in ("model", "reference", "reward", "gold", "data"):
        value = getattr(config, name)
        if not isinstance(value, str | Path):
            continue
        for folder in (Path(value), Path(value).parent):
            if (folder / "manifest.json").exists():
                found.append({"option": name, "run": str(folder)})
                break
    return found
