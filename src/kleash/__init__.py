"""KLeash: post-training on a KL leash.

    import kleash

    run = kleash.train("dpo", model="smollm2-135m", data="pairs.jsonl", beta=0.1, out="runs/dpo")
    print(run.evaluation["drift"])

The names below are imported on first use, so that `import kleash` and `kleash --help` do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kleash.errors import KLeashError, RunError, UsageError

if TYPE_CHECKING:
    from kleash.api import sample as sample
    from kleash.measure import Evaluation as Evaluation
    from kleash.measure import measure as measure
    from kleash.models import RewardModel as RewardModel
    from kleash.models import load_model as load_model
    from kleash.models import response_logprobs as response_logprobs
    from kleash.models.bundled import fetch as fetch
    from kleash.run import Run as Run
    from kleash.run import open_run as open_run
    from kleash.training import check as check
    from kleash.training import train as train

__version__ = "0.1.0"

_HOMES = {
    "check": "kleash.training",
    "fetch": "kleash.models.bundled",
    "load_model": "kleash.models",
    "open_run": "kleash.run",
    "response_logprobs": "kleash.models",
    "sample": "kleash.api",
    "train": "kleash.training",
    "Evaluation": "kleash.measure",
    "RewardModel": "kleash.models",
    "Run": "kleash.run",
}

__all__ = ["KLeashError", "RunError", "UsageError", "measure", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "measure":  # the package of that name can itself be called
        return import_module("kleash.measure")
    if name not in _HOMES:
        raise AttributeError(f"module 'kleash' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
