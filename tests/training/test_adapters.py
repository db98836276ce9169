"""Low-rank adapters: one copy of the weights, merged on saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kleash.data import Batch
from kleash.errors import UsageError
from kleash.models import RewardModel, batch_logprobs, identity, load_model
from kleash.training import train
from kleash.training.adapters import AdaptersOff, _check_rank, merged


def adapted(tiny: Any, method: str, **changes: Any) -> Any:
    """A policy with rank-2 adapters of non-zero weight, and its reference."""
    from kleash.config import build
    from kleash.methods import METHODS
    from kleash.training.adapters import add_adapters

    config = build(METHODS[method].config, {"data": [], "lora_rank": 2, **changes})
    policy = add_adapters(tiny.model(), config)
    torch.manual_seed(3)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return policy.eval()


@pytest.mark.parametrize("method", ["sft", "reward"])
def test_a_rank_that_no_matrix_has_is_refused_before_adapters_are_made(
    method: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden size 32, keys and values 16 wide: no matrix has a rank above 32."""
    monkeypatch.setattr("kleash.training.adapters.get_peft_model", lambda *_: pytest.fail("made"))
    for rank in (32, 99999):
        with pytest.raises(
            UsageError, match=f"lora_rank={rank}: no matrix of this model has a rank above 32"
        ):
            train(method, **tiny.options(method, tmp_path / str(rank), lora_rank=rank))


def test_a_rank_that_some_matrices_have_not_is_said(tiny: Any) -> None:
    """Of the 7 matrices of each layer, the keys' and the values' are 16 wide."""
    _check_rank(tiny.model(), 15)
    with pytest.warns(RuntimeWarning, match="lora_rank=16 restricts nothing in 4 of the 14 matrices"):
        _check_rank(tiny.model(), 16)


def batch() -> Batch:
    tokens = torch.tensor([[3, 4, 5, 9, 8], [3, 4, 5, 7, 2]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, mask, mask & (torch.arange(5) > 2), group_size=2, shared_prefix=torch.tensor([3]))


@torch.no_grad()
def test_switched_off_the_adapter_is_the_reference(tiny: Any) -> None:
    policy = adapted(tiny, "sft")
    reference = AdaptersOff(policy)
    plain, _ = batch_logprobs(tiny.model(), batch())
    torch.testing.assert_close(batch_logprobs(reference, batch())[0], plain, rtol=0, atol=1e-6)
    assert not torch.allclose(batch_logprobs(policy, batch())[0], plain, atol=1e-2)
    assert list(reference.parameters()) == [], "no second copy"


@torch.no_grad()
def test_report_69_base_and_adapter_equal_the_merged_model_reloaded(tiny: Any, tmp_path: Path) -> None:
    """With tied embeddings; and the merge is not the base."""
    from kleash.training.save import save_model

    policy = adapted(tiny, "sft")
    save_model(policy, tiny.tokenizer(), tmp_path / "model")
    reloaded, _ = load_model(tmp_path / "model")
    tokens = batch().tokens
    torch.testing.assert_close(reloaded(tokens).logits, policy(tokens).logits, rtol=0, atol=1e-5)
    assert not torch.allclose(reloaded(tokens).logits, tiny.model()(tokens).logits, atol=1e-2)
    assert "lora" not in " ".join(reloaded.state_dict())


@pytest.mark.parametrize("method", ["sft", "dpo", "reinforce"])
def test_every_method_trains_adapters_alone(method: str, tiny: Any, tmp_path: Path) -> None:
    options = {"lora_rank": 2, "measure": True, "eval_prompts": ["the dog ran"], "eval_samples": 3}
    run = train(method, **tiny.options(method, tmp_path / "run", **options))
    counts = run.manifest["parameters"]
    assert 0 < counts["trained"] < 0.5 * counts["total"]
    assert run.evaluation["drift"]["mean"] > 0
    saved = load_model(run.path)[0]
    assert identity(saved) != identity(tiny.model())
    if method == "dpo":
        assert run.metrics[0]["dpo/margin"] == 0.0


def test_dpo_with_a_live_adapter_reference_equals_the_cached_one(tiny: Any, tmp_path: Path) -> None:
    live, cached = (
        train("dpo", **tiny.options("dpo", tmp_path / str(flag), lora_rank=2, cache_reference=flag))
        for flag in (False, True)
    )
    assert [r["loss"] for r in live.metrics] == pytest.approx([r["loss"] for r in cached.metrics], abs=1e-6)


def test_report_30_a_reward_model_with_adapters_keeps_its_head(tiny: Any, tmp_path: Path) -> None:
    run = train("reward", **tiny.options("reward", tmp_path / "run", lora_rank=2, steps=6))
    reloaded = RewardModel.load(run.path)
    assert float(reloaded.score.weight.detach().abs().sum()) > 0
    scores = reloaded.scores(batch()).detach()
    assert abs(float(scores[0] - scores[1])) > 1e-6
    assert reloaded.meta["std"] == run.evaluation["std"]


def test_resume_with_adapters_is_bit_identical(tiny: Any, tmp_path: Path) -> None:
    options = {"lora_rank": 2, "steps": 6}
    whole = train("dpo", **tiny.options("dpo", tmp_path / "whole", **options))
    train("dpo", **tiny.options("dpo", tmp_path / "run", **{**options, "steps": 3}, save_every=3))
    resumed = train("dpo", **tiny.options("dpo", tmp_path / "run", **options, save_every=3, resume=True))
    assert identity(load_model(whole.path)[0]) == identity(load_model(resumed.path)[0])


def test_merging_leaves_a_plain_model_alone(tiny: Any) -> None:
    model = tiny.model()
    assert merged(model) is model
