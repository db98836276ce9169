"""Reward models: where the score is read, and that the head survives a trip to disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from kleash.data.batches import Batch
from kleash.errors import UsageError
from kleash.lab.tiny import write_tiny_model
from kleash.models import RewardModel, load_model


@pytest.fixture
def reward(tmp_path: Path) -> RewardModel:
    model, tokenizer = load_model(write_tiny_model(tmp_path / "base"))
    found = RewardModel.from_policy(model, tokenizer)
    torch.manual_seed(0)
    torch.nn.init.normal_(found.score.weight)
    return found.eval()


def rows(*rows_: list[int], left: int = 0, right: int = 0) -> Batch:
    width = max(map(len, rows_)) + left + right
    tokens, mask = torch.full((len(rows_), width), 1), torch.zeros(len(rows_), width, dtype=torch.bool)
    for i, ids in enumerate(rows_):
        tokens[i, left : left + len(ids)] = torch.tensor(ids)
        mask[i, left : left + len(ids)] = True
    return Batch(tokens, mask, torch.zeros_like(mask))


SHORT, LONG = [5, 6, 7], [9, 8, 7, 6, 5, 4, 9, 8, 7, 6, 5]


def scores(reward: RewardModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return reward.scores(batch)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 4), (4, 0)])
def test_report_27_29_a_score_does_not_depend_on_the_batch(
    reward: RewardModel, left: int, right: int
) -> None:
    alone = torch.cat([scores(reward, rows(SHORT)), scores(reward, rows(LONG))])
    together = scores(reward, rows(SHORT, LONG, left=left, right=right))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_report_28_the_end_is_a_position_and_not_an_id(reward: RewardModel) -> None:
    """The padding id (1, the end token) also stands inside the rows: two answers still score apart."""
    one, other = scores(reward, rows([5, 1, 6, 7], [5, 1, 8, 9]))
    assert abs(float(one - other)) > 1e-3
    torch.testing.assert_close(scores(reward, rows([5, 1, 6, 7], right=3)), one[None], atol=1e-5, rtol=1e-5)


def test_pairs_that_share_a_prompt_score_as_whole_rows(reward: RewardModel) -> None:
    whole = rows([5, 6, 7, 8, 9], [5, 6, 7, 4])
    shared = Batch(whole.tokens, whole.attention_mask, whole.response_mask, 2, torch.tensor([3]))
    torch.testing.assert_close(scores(reward, shared), scores(reward, whole), atol=1e-5, rtol=1e-5)


def test_a_fresh_head_is_zero_so_the_first_loss_is_ln_2(tmp_path: Path) -> None:
    model, tokenizer = load_model(write_tiny_model(tmp_path / "base"))
    assert not scores(RewardModel.from_policy(model, tokenizer), rows(SHORT, LONG)).any()


def test_report_30_saved_and_loaded_in_a_new_process_scores_alike(
    reward: RewardModel, tmp_path: Path
) -> None:
    reward.meta["text_model"] = "sha256:abc"
    reward.save(tmp_path / "reward")
    expected = scores(reward, rows(SHORT, LONG)).tolist()
    code = (
        "import torch; from kleash.models import RewardModel; from kleash.data.batches import Batch\n"
        f"r = RewardModel.load({str(tmp_path / 'reward')!r})\n"
        "out = []\n"
        f"for ids in ({SHORT}, {LONG}):\n"
        "    t = torch.tensor([ids]); m = torch.ones_like(t, dtype=torch.bool)\n"
        "    out.append(float(r.scores(Batch(t, m, m & False))))\n"
        "print(out, r.meta['text_model'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    numbers, _, name = done.stdout.strip().rpartition(" ")
    assert name == "sha256:abc"
    assert [float(x) for x in numbers.strip("[]").split(",")] == pytest.approx(expected, abs=1e-6)


def test_transformers_own_class_loads_it_and_scores_alike(reward: RewardModel, tmp_path: Path) -> None:
    reward.save(tmp_path / "reward")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([LONG])).logits
    torch.testing.assert_close(logits[:, 0], scores(reward, rows(LONG)), atol=1e-5, rtol=1e-5)


def test_report_30_a_missing_head_is_refused(reward: RewardModel, tmp_path: Path) -> None:
    reward.save(tmp_path / "reward")
    file = tmp_path / "reward" / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(file).items() if name != "score.weight"}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match="holds no scalar head"):
        RewardModel.load(tmp_path / "reward")


def test_a_language_model_and_a_classifier_are_not_reward_models(reward: RewardModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no scalar head"):
        RewardModel.load(write_tiny_model(tmp_path / "plain"))
    reward.score = torch.nn.Linear(32, 3, bias=False)
    reward.save(tmp_path / "three")
    with pytest.raises(UsageError, match="3 labels"):
        RewardModel.load(tmp_path / "three")


@pytest.mark.parametrize("name", ["runs/nosuch", "nosuch", "frob:3"])
def test_a_reward_model_that_is_nowhere_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UsageError, match=f"there is no folder {name} .* cannot be fetched from the hub"
    ) as error:
        RewardModel.load(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_neox", "qwen3", "gemma2", "granite", "cohere", "falcon", "mixtral"]
)
def test_other_families_make_the_round_trip(family: str, reward: RewardModel, tmp_path: Path) -> None:
    found = RewardModel.from_policy(tiny(family), reward.tokenizer).eval()
    torch.nn.init.normal_(found.score.weight)
    expected = scores(found, rows(SHORT, LONG))
    found.save(tmp_path / family)
    torch.testing.assert_close(scores(RewardModel.load(tmp_path / family), rows(SHORT, LONG)), expected)
