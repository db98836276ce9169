"""A trained reward model as a reward: it scores the sampled ids, alone as in a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kleash.data.batches import Batch
from kleash.errors import UsageError
from kleash.models import RewardModel
from kleash.rewards import ModelReward, load_reward, score_texts
from kleash.rewards.trained import row_batches

PROMPT_IDS = [[1, 5], [1, 5], [1, 6, 7, 8], [1, 6, 7, 8]]
RESPONSE_IDS = [[9, 10], [11], [12, 13, 14], [9, 2]]
TEXTS = ["text"] * 4


def tokenizer(size: int = 20) -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, size)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture
def reward_model() -> RewardModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=20, max_position_embeddings=64, **sizes))
    model = RewardModel.from_policy(policy, tokenizer())
    torch.nn.init.normal_(model.score.weight)
    model.meta |= {"mean": 2.0, "std": 4.0}
    return model.eval()


def scores(reward: ModelReward, rows: slice = slice(None)) -> torch.Tensor:
    columns = {"prompt_ids": PROMPT_IDS[rows], "response_ids": RESPONSE_IDS[rows]}
    return score_texts(reward, TEXTS[rows], TEXTS[rows], columns).values


def test_report_27_a_score_does_not_depend_on_the_batch(reward_model: RewardModel) -> None:
    together = scores(ModelReward(reward_model, dtype="float32"))
    assert together.unique().numel() == 4
    for i in range(4):
        torch.testing.assert_close(
            scores(ModelReward(reward_model, dtype="float32"), slice(i, i + 1)), together[i : i + 1]
        )
    for rows in (1, 2, 3):
        torch.testing.assert_close(scores(ModelReward(reward_model, dtype="float32", rows=rows)), together)


def test_report_25_ids_are_scored_as_sampled_and_texts_are_not_read(reward_model: RewardModel) -> None:
    tokens = torch.tensor([PROMPT_IDS[2] + RESPONSE_IDS[2]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        expected = reward_model.scores(Batch(tokens, mask, mask))
    torch.testing.assert_close(scores(ModelReward(reward_model, dtype="float32"))[2:3], expected)


def test_standardised_by_the_stored_mean_and_deviation(reward_model: RewardModel) -> None:
    raw = scores(ModelReward(reward_model, dtype="float32"))
    standard = scores(ModelReward(reward_model, dtype="float32", standardise=True))
    torch.testing.assert_close(standard, (raw - 2.0) / 4.0)
    reward_model.meta.pop("std")
    with pytest.raises(
        UsageError, match="cannot be standardised, because its record holds mean=2.0 and std=None"
    ):
        load_reward(reward_model, standardise=True)


def test_a_saved_model_scores_alike_and_is_named_after_its_folder(
    reward_model: RewardModel, tmp_path: Path
) -> None:
    reward_model.save(tmp_path / "helpful")
    reward = load_reward(str(tmp_path / "helpful"), dtype="float32")
    assert isinstance(reward, ModelReward) and reward.name == "helpful"
    torch.testing.assert_close(scores(reward), scores(ModelReward(reward_model, dtype="float32")))


def test_another_tokenizer_is_refused(reward_model: RewardModel) -> None:
    reward = ModelReward(reward_model)
    reward.check_tokenizer(tokenizer())
    with pytest.raises(UsageError, match=r"vocabulary \(20 tokens\) is not the policy's \(21"):
        reward.check_tokenizer(tokenizer(21))


def test_without_ids_it_says_what_it_needs(reward_model: RewardModel) -> None:
    with pytest.raises(UsageError, match="needs prompt_ids, response_ids"):
        score_texts(ModelReward(reward_model), ["p"], ["r"])


def test_prompts_of_equal_groups_are_shared_and_others_are_not() -> None:
    batches = row_batches(PROMPT_IDS, RESPONSE_IDS, rows=3)
    assert [(len(b), b.group_size, b.shared_prefix.tolist()) for b in batches] == [(2, 2, [2]), (2, 2, [4])]  # type: ignore[union-attr]
    batches = row_batches(PROMPT_IDS[1:], RESPONSE_IDS[1:], rows=2)
    assert [(len(b), b.group_size, b.shared_prefix) for b in batches] == [(2, 1, None), (1, 1, None)]
    assert row_batches([], [], rows=2) == []
