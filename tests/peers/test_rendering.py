"""Conversations as ids: those of transformers' chat template, trained where its assistant mask says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kleash.data import read_rows, tokenise_demonstrations, tokenise_preferences
from kleash.lab.tiny import write_tiny_model

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

# The words of the tiny vocabulary serve as marks of roles. `generation` tells transformers what is trained.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %} we:"
    "{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %} you: {{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} we:{% endif %}"
)
TALK = [
    {"role": "user", "content": "the soup was good"},
    {"role": "assistant", "content": "we were happy"},
    {"role": "user", "content": "the morning"},
    {"role": "assistant", "content": "in the city"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = AutoTokenizer.from_pretrained(write_tiny_model(tmp_path_factory.mktemp("rendering") / "model"))
    found.chat_template = TEMPLATE
    return found


def template(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> Any:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)


def test_a_conversation_has_the_ids_of_the_chat_template(tokenizer: Any) -> None:
    rows = read_rows([{"messages": TALK}], "demonstrations")
    example = tokenise_demonstrations(rows, tokenizer, max_length=None).items[0]
    expected = template(tokenizer, TALK, return_assistant_tokens_mask=True)
    assert example.prompt_ids + example.response_ids == expected["input_ids"]
    trained = [False] * len(example.prompt_ids) + example.trained
    assert [int(flag) for flag in trained] == expected["assistant_masks"]
    assert 0 < sum(trained) < len(trained)


def test_a_pair_has_the_ids_of_the_chat_template(tokenizer: Any) -> None:
    prompt, chosen = TALK[:3], TALK[3:]
    rejected = [{"role": "assistant", "content": "we were in the soup"}]
    rows = read_rows([{"prompt": prompt, "chosen": chosen, "rejected": rejected}], "preferences")
    pair = tokenise_preferences(rows, tokenizer, max_length=None).items[0]
    assert pair.prompt_ids == template(tokenizer, prompt, add_generation_prompt=True)["input_ids"]
    assert pair.prompt_ids + pair.chosen_ids == template(tokenizer, prompt + chosen)["input_ids"]
    assert pair.prompt_ids + pair.rejected_ids == template(tokenizer, prompt + rejected)["input_ids"]


def test_plain_text_has_the_ids_that_trl_makes_of_it(tokenizer: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="compares with TRL (extra `peers`)")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tokenizer.name_or_path, dtype=torch.float32)
    texts = [{"prompt": "the soup", "chosen": " was good", "rejected": " was in the city"}]
    config = trl.DPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False
    )
    trainer = trl.DPOTrainer(
        model=model, args=config, train_dataset=Dataset.from_list(texts), processing_class=tokenizer
    )
    theirs = trainer.train_dataset[0]
    ours = tokenise_preferences(read_rows(texts, "preferences"), tokenizer, max_length=None).items[0]
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert getattr(ours, name) == theirs[name]
