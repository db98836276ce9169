"""A random two-layer model with a vocabulary of the lab's own words: the whole lab in seconds, for tests
and CI.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
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
    texts = [
        *TRAINING_OPENINGS,
        *EVALUATION_OPENINGS,
        *(f" {word}" for word in sorted(POSITIVE_WORDS | NEGATIVE_WORDS)),
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|end|>"
    )
