"""Tiny models, a tokenizer of words, and small data sets for the tests of training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kleash.methods import METHODS

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
WORDS = [
    "the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "over", "mat", "road", "tree", "good",
    "bad", "nice", "poor", "great", "sad", "happy", "blue", "red", "green", "and", "then", "very", "quite",
    "day", "night", "home",
]  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word; `<eos>` ends a response, and there is no beginning token."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


def make_model(seed: int = 0, dropout: float = 0.0, hidden: int = 32) -> LlamaForCausalLM:
    """A random two-layer Llama over the words."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def pair_rows(count: int = 16) -> list[dict[str, Any]]:
    """Pairs of different lengths whose better answer is the cheerful one."""
    rows = []
    for i in range(count):
        subject, place = WORDS[2 + i % 3], WORDS[10 + i % 3]
        extra = " very" * (i % 4)
        rows.append(
            {
                "prompt": f"the {subject} sat on the {place} {WORDS[20 + i % 4]}",
                "chosen": f" and{extra} good day" if i % 2 else " and happy",
                "rejected": " then bad" if i % 2 else f" then{extra} sad poor night",
            }
        )
    return rows


def demonstration_rows(count: int = 16) -> list[dict[str, Any]]:
    """The chosen answers of the pairs."""
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pair_rows(count)]


def prompt_rows(count: int = 12) -> list[dict[str, Any]]:
    """Distinct prompts with a column for the reward."""
    subjects, places = WORDS[2:5], WORDS[10:13]
    rows = [f"the {s} {verb} on the {p}" for s in subjects for verb in ("sat", "ran") for p in places]
    return [{"prompt": text, "want": "good"} for text in rows[:count]]


def count_good(prompts: list[str], responses: list[str]) -> list[float]:
    """A countable reward: how often `good` occurs."""
    return [float(response.split().count("good")) for response in responses]


ROWS = {"sft": demonstration_rows, "dpo": pair_rows, "reward": pair_rows}
ONLINE = {"reward": count_good, "batch_size": 8, "max_new_tokens": 6, "samples_per_prompt": 4}


def options(method: str, out: Path, **changes: Any) -> dict[str, Any]:
    """Options under which every method runs in a fraction of a second."""
    base: dict[str, Any] = {
        "model": (make_model(), make_tokenizer()),
        "data": ROWS.get(method, prompt_rows)(),
        "out": str(out),
        "batch_size": 4,
        "learning_rate": 1e-2,
        "steps": 4,
        "dtype": "float32",
        "quiet": True,
        "measure": False,
        "max_new_tokens": 6,
        "eval_fraction": 0.2,
    }
    return {**base, **(ONLINE if METHODS[method].online else {}), **changes}


@pytest.fixture(autouse=True)
def one_thread_and_own_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests share a machine, and never the user's cache."""
    torch.set_num_threads(1)
    monkeypatch.setenv("KLEASH_CACHE", str(tmp_path_factory.mktemp("cache")))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def tiny() -> Any:
    """The factories above, for tests: importing from a conftest is not possible in every import mode."""
    import types

    return types.SimpleNamespace(
        tokenizer=make_tokenizer, model=make_model, pairs=pair_rows, demonstrations=demonstration_rows,
        prompts=prompt_rows, options=options, reward=count_good, jsonl=write_jsonl, words=WORDS,
    )  # fmt: skip
