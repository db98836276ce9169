"""Loading, copying and naming models: an id, a folder, a run, or the objects themselves."""

from __future__ import annotations

import copy
import hashlib
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from huggingface_hub import constants, is_offline_mode, try_to_load_from_cache
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from kleash.errors import UsageError
from kleash.models.attention import use_grouped_attention
from kleash.models.bundled import BUNDLED, fetch

TOKENIZER_FILE = re.compile(r"^(tokenizer|vocab)|(bpe|piece|tiktoken|tekken).*|\.(model|tiktoken|spm)$")
HUB_PATIENCE = 5.0  # seconds
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
        _check_pair(model, tokenizer, "the pair (model, tokenizer)")
        return use_grouped_attention(model), tokenizer
    if not isinstance(source, str | Path):
        raise UsageError(
            f"model: a {type(source).__name__} alone is not enough: give the pair (model, tokenizer), a "
            "folder, a hub id or a bundled model's name."
        )
    where = check_source(source)
    model = load_weights(AutoModelForCausalLM, where)
    tokenizer = load_tokenizer(where)
    _check_pair(model, tokenizer, where)
    return use_grouped_attention(model), tokenizer


def check_source(source: str | Path) -> str:
    """Folder or hub id behind a language model's name, its config read and no weights; UsageError where that
    shows that it cannot be loaded as one.
    """
    where = resolve_source(source)
    config = _from_pretrained(AutoConfigOrDict, where)
    if any("SequenceClassification" in name for name in config.get("architectures") or []):
        raise UsageError(
            f"model: {source} is a reward model ({config['architectures'][0]}), not a language model. "
            "Give it as reward=…, and a language model as model=…."
        )
    return where


def load_weights(kind: Any, where: str) -> PreTrainedModel:
    """A model in float32 by one of the auto classes, dropout off; UsageError where a weight is not in the
    files, which transformers would fill with random numbers.
    """
    model, found = _from_pretrained(
        kind, where, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    missing = sorted(found["missing_keys"])
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"model: {where} lacks {missing[0]}{others}, of the {len(model.state_dict())} weights of a "
            f"{type(model).__name__}; they would be random. Save the whole model there with save_pretrained, "
            "a language model with its head (AutoModelForCausalLM)."
        )
    return model.eval()


def _check_pair(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
    """UsageError where the model looks ahead, as an encoder does, or has no row for some of the tokenizer's
    ids.
    """
    if {getattr(module, "is_causal", None) for module in model.modules()} - {None} == {False}:
        raise UsageError(
            f"model: {name} is a {type(model).__name__}, whose attention looks ahead: an encoder, not a "
            "causal language model. Give one that writes from left to right, such as Llama, Qwen or GPT-2."
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise UsageError(
            f"model: {name}: the tokenizer has {tokenizer.vocab_size} ids and the model embeddings for "
            f"{rows}; they do not belong together. Give the tokenizer that the model was trained with."
        )


def load_tokenizer(where: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id; UsageError where there is none."""
    files = [file.name for file in Path(where).iterdir()] if Path(where).is_dir() else None
    if files is not None and not any(TOKENIZER_FILE.search(name) for name in files):
        raise UsageError(
            f"model: {where} holds no tokenizer (it holds {_listing(Path(where))}). Save the model's own "
            "there: tokenizer.save_pretrained(folder)."
        )
    return _from_pretrained(AutoTokenizer, where)


class AutoConfigOrDict:
    """The raw config of a folder or hub id, read without building the model's config class."""

    @staticmethod
    def from_pretrained(where: str, **options: Any) -> dict[str, Any]:
        from transformers import PreTrainedConfig

        return PreTrainedConfig.get_config_dict(where, **options)[0]


def _from_pretrained(kind: Any, where: str, **options: Any) -> Any:
    """`kind.from_pretrained` with the library's errors turned into one paragraph for the user."""
    try:
        if hub_is_silent(where):
            options["local_files_only"] = True
        with quiet_transformers():
            return kind.from_pretrained(where, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        nowhere = "" if Path(where).exists() else f"there is no such folder (looked from {Path.cwd()}), and "
        raise UsageError(
            f"model: cannot load {where!r}: {nowhere}{reason} Expected a folder written by save_pretrained "
            f"(config.json, "
            "*.safetensors and tokenizer files), or a hub id reachable from here, or a bundled model: "
            + ", ".join(BUNDLED)
            + "."
        ) from error


def hub_is_silent(where: str) -> bool:
    """Whether a hub id that was not fetched before is asked for in vain: the hub does not answer one request,
    which its own client would repeat for 24 seconds. Anything but a failed connection counts as an answer.
    """
    fetched = Path(where).exists() or isinstance(try_to_load_from_cache(where, "config.json"), str)
    if fetched or is_offline_mode():
        return False
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_PATIENCE).close()
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        return isinstance(reason, socket.gaierror | ConnectionError | TimeoutError)
    return False


@contextmanager
def quiet_transformers() -> Iterator[None]:
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
