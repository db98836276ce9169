"""One batch through TRL's trainers and through ours: the same loss, before and after a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl", reason="compares with TRL (extra `peers`)")
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer  # noqa: E402

import kleash  # noqa: E402
from kleash.data import read_rows, tokenise_demonstrations  # noqa: E402
from kleash.lab.tiny import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
STEPS, PAIRS, RATE = 3, 4, 1e-2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("peers") / "model"))


@pytest.fixture(scope="module")
def pairs(model: str) -> list[dict[str, Any]]:
    """One batch of pairs of unequal lengths, as ids, so that both sides train on the same ones."""
    generator = torch.Generator().manual_seed(0)
    size = len(AutoTokenizer.from_pretrained(model))
    rows = []
    for prompt, chosen, rejected in ((3, 5, 2), (6, 2, 7), (1, 4, 4), (4, 6, 3)):
        draw = lambda n: torch.randint(3, size, (n,), generator=generator).tolist()  # noqa: E731
        rows.append({"prompt_ids": draw(prompt), "chosen_ids": draw(chosen), "rejected_ids": draw(rejected)})
    return rows


def recorded(kind: Any, losses: list[float]) -> Any:
    class Recorded(kind):
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    return Recorded


def theirs(
    kind: Any, config: Any, model: Any, rows: list[dict[str, Any]], name: str, out: Path, **extra: Any
) -> list[float]:
    losses: list[float] = []
    arguments = config(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=PAIRS, learning_rate=RATE,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to="none", logging_strategy="no", save_strategy="no",
        disable_tqdm=True, **extra,
    )  # fmt: skip
    trainer = recorded(kind, losses)(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(name),
    )
    trainer.train()
    return losses


def ours(method: str, model: str, pairs: list[dict[str, Any]], out: Path, **options: Any) -> list[float]:
    texts = [{"prompt": "a", "chosen": f"b{i}", "rejected": f"c{i}", **row} for i, row in enumerate(pairs)]
    run = kleash.train(
        method, model=model, data=texts, out=str(out), steps=STEPS, batch_size=PAIRS, learning_rate=RATE,
        dtype="float32", measure=False, quiet=True, chat="plain", **options,
    )  # fmt: skip
    return [row["loss"] for row in run.metrics if row["split"] == "train"]


def test_dpo_follows_trl_for_three_steps(model: str, pairs: list[dict[str, Any]], tmp_path: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = theirs(trl.DPOTrainer, trl.DPOConfig, policy, pairs, model, tmp_path / "trl", beta=0.1)
    found = ours("dpo", model, pairs, tmp_path / "ours", beta=0.1, eval_fraction=0.0)
    assert found == pytest.approx(expected, abs=2e-4)
    assert found[0] == pytest.approx(0.693147, abs=1e-6)
    assert found[-1] < found[0]


def test_a_reward_model_follows_trl_for_three_steps(
    model: str, pairs: list[dict[str, Any]], tmp_path: Path
) -> None:
    head = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(head.score.weight)
    rows = [
        {
            "chosen_ids": row["prompt_ids"] + row["chosen_ids"],
            "rejected_ids": row["prompt_ids"] + row["rejected_ids"],
        }
        for row in pairs
    ]
    expected = theirs(trl.RewardTrainer, trl.RewardConfig, head, rows, model, tmp_path / "trl")
    held_out = [{"prompt": "b", "chosen": "c", "rejected": "d", **row} for row in pairs[:2]]
    found = ours("reward", model, pairs, tmp_path / "ours", eval_data=held_out)
    assert found == pytest.approx(expected, abs=2e-4)


def test_the_loss_of_demonstrations_is_transformers_own(
    model: str, pairs: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Token mean over the batch, prompts excluded."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    file = tmp_path / "rows.jsonl"
    texts = [("On Sunday morning we", " went to the city"), ("The soup", " was good"), ("We", " were happy")]
    file.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in texts))
    run = kleash.train(
        "sft", model=model, data=str(file), out=str(tmp_path / "sft"), steps=1, batch_size=3, dtype="float32",
        measure=False, quiet=True, eval_fraction=0.0, chat="plain",
    )  # fmt: skip
    items = tokenise_demonstrations(
        read_rows(str(file), "demonstrations"), tokenizer, max_length=64, chat="plain"
    )
    width = max(item.length for item in items.items)
    ids = torch.full((3, width), tokenizer.pad_token_id)
    labels = torch.full((3, width), -100)
    for row, item in enumerate(items.items):
        whole = item.prompt_ids + item.response_ids
        ids[row, : len(whole)] = torch.tensor(whole)
        labels[row, len(item.prompt_ids) : len(whole)] = torch.tensor(item.response_ids)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(items.items):
        mask[row, : item.length] = 1
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(
            input_ids=ids, attention_mask=mask, labels=labels
        ).loss
    assert run.metrics[0]["loss"] == pytest.approx(float(expected), abs=1e-5)
