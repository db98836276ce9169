"""What every test shares: few threads, no model hub, no cache of the user's, a tiny model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any library reads them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> None:
    """The same number of threads everywhere: sums of floats depend on it."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_user_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's own cache and switches play no part, unless a slow test asks for the cache."""
    monkeypatch.delenv("KLEASH_DEBUG", raising=False)
    monkeypatch.setenv("KLEASH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lab's random tiny model and its tokenizer."""
    from kleash.lab.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
