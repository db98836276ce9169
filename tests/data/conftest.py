"""Tiny tokenizers, chat templates of the kinds that have caused trouble, and real data where present."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FORGETS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "inst": INST,
    "no-end": NO_END,
    "forgets-reasoning": FORGETS_REASONING,
    "opens-thinking": OPENS_THINKING,
}


def _bytes_model(merges: list[tuple[str, str]]) -> Tokenizer:
    """Byte-level BPE: any text, one token a byte but for the merges."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_model(words: list[str]) -> Tokenizer:
    """Whole words between spaces; the rest is [UNK]."""
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["[UNK]", *words])}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _metaspace_model() -> Tokenizer:
    """Like SentencePiece: a text's beginning gets a space of its own, written ▁."""
    letters = ["▁", "\n", *"abcdefghijklmnopqrstuvwxyz.:?"]
    merges = [("▁", letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocab = {token: i for i, token in enumerate(letters + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """make_tokenizer("bytes"|"words"|"metaspace", template=…, adds_bos=…, merges=…, …) -> a tokenizer."""

    def make(
        kind: str = "bytes",
        *,
        template: str | None = None,
        adds_bos: bool = False,
        merges: list[tuple[str, str]] | None = None,
        words: str = "",
        bos: str | None = "<s>",
        eos: str | None = "</s>",
        pad: str | None = None,
    ) -> Any:
        model = {
            "bytes": lambda: _bytes_model(merges or []),
            "words": lambda: _word_model(words.split()),
            "metaspace": _metaspace_model,
        }[kind]()
        specials = [token for token in (bos, eos, pad, "<|im_start|>", "<|im_end|>") if token]
        model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
        if adds_bos:
            opening = [(bos, model.token_to_id(bos))]
            model.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=opening)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=model,
            bos_token=bos,
            eos_token=eos,
            pad_token=pad,
            unk_token="[UNK]" if kind == "words" else None,
        )
        tokenizer.chat_template = TEMPLATES[template] if template else None
        return tokenizer

    return make


def _shared_data(name: str) -> Path:
    folder = os.environ.get("KLEASH_SHARED") or Path(__file__).parents[3] / "shared"
    path = Path(folder) / "data" / name
    if not path.exists():
        pytest.skip(f"needs {path} (its folder is set by KLEASH_SHARED)")
    return path


@pytest.fixture
def hh() -> Path:
    """1500 pairs of HH transcripts."""
    return _shared_data("hh-rlhf-harmless-test.jsonl.gz")


@pytest.fixture
def gsm8k() -> Path:
    """Grade-school problems with the columns question and answer."""
    return _shared_data("gsm8k-test.jsonl")
