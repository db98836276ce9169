"""Tiny random models with a vocabulary small enough to list every response."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from families import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))  # for `handmade`, which several tests of this folder share

WORDS = ("<s>", "</s>", "sun", "moon", "star")


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """A model from a seed; <s> is id 0, the end token </s> id 1, the window 64 tokens."""
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    return functools.partial(tiny, "llama", vocab_size=len(WORDS), max_position_embeddings=64, **ids)


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """A word-level tokenizer whose ids are the places in `words`."""

    def make(words: tuple[str, ...] = WORDS) -> PreTrainedTokenizerFast:
        inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="sun"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "sun"}
        return PreTrainedTokenizerFast(tokenizer_object=inner, **names)

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def policy(make_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_model(1)


@pytest.fixture
def reference(make_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_model(2)
