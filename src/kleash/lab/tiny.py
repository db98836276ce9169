"""A random two-layer model with a vocabulary of the lab's own words: the whole lab in seconds, for tests
and CI.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kleash.lab.openings import EVALUATION_OPENINGS, TRAINING_OPENINGS
from kleash.lab.rule import NEGATIVE_WORDS, POSITIVE_WORDS


def write_tiny_model(path: str | Path, seed: int = 0) -> Path:
    """Write the model and its tokenizer into a folder (once) and return it. The same seed gives the same
    weights.
    """
    path = Path(path)
    if (path / "config.json").exists():
        return path
    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, over the words of the openings and of the rule's lists."""
    texts = " ".join([*TRAINING_OPENINGS, *EVALUATION_OPENINGS]).replace(",", " ,").split()
    words = sorted({*texts, *POSITIVE_WORDS, *NEGATIVE_WORDS})
    vocabulary = {
        token: i for i, token in enumerate(["<|start|>", "<|end|>", "<|unknown|>", *(f"▁{w}" for w in words)])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|start|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        unk_token="<|unknown|>",
    )
