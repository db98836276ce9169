"""Loading, copying and naming models: an id, a folder, a run, or the objects themselves."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from kleash.errors import UsageError
from kleash.models.attention import use_grouped_attention
from kleash.models.bundled import BUNDLED, fetch

ModelSource = str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase]


def resolve_source(source: str | Path) -> str:
    """Folder or hub id behind a name: a bundled model is fetched, a run folder stands for its `model/`."""
    if str(source) in BUNDLED:
        return str(fetch(str(source)))
    path = Path(source)
    if not path.exists():
        return str(source)
    if (path / "model" / "config.json").exists():
        return str(path / "model")
    if not (path / "config.json").exists():
        raise UsageError(
            f"model: {path} is not a model folder: it holds no config.json"
            + (f" (it holds {_listing(path)})" if path.is_dir() else " (it is a file)")
            + ". Give a folder written by save_pretrained, a run folder with model/ inside, a hub id, "
            "or one of the bundled models: " + ", ".join(BUNDLED) + "."
        )
    return str(path)


def load_model(source: ModelSource) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in float32 with its tokenizer, dropout off, the fast attention on.

    `source` is a hub id, a folder written by `save_pretrained`, a KLeash run folder, `smollm2-135m`, or the
    pair `(model, tokenizer)` itself, which is returned as it is. Only safetensors weights are read and no
    code of the model's repository is run. A folder that is not a model raises UsageError.
    """
    if isinstance(source, tuple):
        model, tokenizer = source
        return use_grouped_attention(model), tokenizer
    if not isinstance(source, str | Path):
        raise UsageError(
            f"model: a {type(source).__name__} alone is not enough: give the pair (model, tokenizer), a "
            "folder, a hub id or a bundled model's name."
        )
    where = resolve_source(source)
    config = _from_pretrained(AutoConfigOrDict, where)
    if any("SequenceClassification" in name for name in config.get("architectures") or []):
        raise UsageError(
            f"model: {source} is a reward model ({config['architectures'][0]}), not a language model. "
            "Give it as reward=…, and a language model as model=…."
        )
    model = _from_pretrained(AutoModelForCausalLM, where, dtype=torch.float32, use_safetensors=True)
    return use_grouped_attention(model.eval()), load_tokenizer(where)


def load_tokenizer(where: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id."""
    return _from_pretrained(AutoTokenizer, where)


class AutoConfigOrDict:
    """The raw config of a folder or hub id, read without building the model's config class."""

    @staticmethod
    def from_pretrained(where: str) -> dict[str, Any]:
        from transformers import PreTrainedConfig

        return PreTrainedConfig.get_config_dict(where)[0]


def _from_pretrained(kind: Any, where: str, **options: Any) -> Any:
    """`kind.from_pretrained` with the library's errors turned into one paragraph for the user."""
    try:
        with _quiet():
            return kind.from_pretrained(where, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"model: cannot load {where!r}: {reason} Expected a folder written by save_pretrained "
            f"(config.json, "
            "*.safetensors and tokenizer files), or a hub id reachable from here, or a bundled model: "
            + ", ".join(BUNDLED)
            + "."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars and load reports: what is wrong with a folder is our error to
    tell.
    """
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that never learns: evaluation mode, no gradients; its log-ratio to the original is exactly 0."""
    twin = copy.deepcopy(model).eval()
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    return twin


def identity(model: nn.Module) -> str:
    """Name a model by what it computes: `sha256:` of its architecture's sizes and every weight, byte for
    byte.

    The same weights give the same name whatever folder they came from; one changed weight gives another name.
    """
    digest = hashlib.sha256()
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() in seen:  # tied weights count once
            continue
        seen.add(tensor.data_ptr())
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()[:32]}"


def _listing(path: Path) -> str:
    names = sorted(child.name for child in path.iterdir())[:6]
    return ", ".join(names) if names else "nothing"
