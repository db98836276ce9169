"""What must hold on the first pass over fresh rollouts, to the bit where the same forward gives both sides;
and on the second, when the policy has moved.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import FAMILY, GROUP, bench

from kleash.models.value import token_outputs

SEVERAL = [name for name in FAMILY if name != "rloo"]  # rloo's objective allows one update
PLAIN_PPO = {"whiten": False, "lam": 1.0, "gamma": 1.0, "reduction": "sequence-mean"}


@pytest.mark.parametrize("name", SEVERAL)
def test_004_34_the_first_ratio_is_exactly_1_and_nothing_is_clipped(name: str, tiny: Any) -> None:
    it = bench(name, tiny, rollout_epochs=2, minibatches=1)
    step = it.collect()
    for batch in step.updates[0].micro_batches:
        metrics = it.loss(batch).metrics
        ratios, tokens = metrics["ratio/mean"]
        assert ratios == tokens > 0
        assert metrics["ratio/0.95_to_1.05"] == (tokens, tokens)
        assert all(metrics[key][0] == 0.0 for key in metrics if key.startswith("clip/"))
        assert name == "sapo" or "clip/above_dead" in metrics
        assert metrics["policy/sampler_gap"][0] / tokens < 1e-5


@pytest.mark.parametrize("name", GROUP)
def test_advantages_of_a_group_add_up_to_0(name: str, tiny: Any) -> None:
    it = bench(name, tiny, micro_batch_size=4)
    batches = it.collect().updates[0].micro_batches
    assert len(batches) == 2
    for batch in batches:
        advantages = batch.advantages[:, 0]
        assert float(advantages.abs().max()) > 0.2
        assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-5)
        assert torch.equal(batch.advantages, advantages[:, None] * (batch.advantages != 0))


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_the_first_gradient_of_ppo_is_that_of_reinforce(beta: float, tiny: Any) -> None:
    """No values yet, λ = γ = 1, nothing whitened, the same mean: per-token advantages are returns to go."""
    ppo = bench("ppo", tiny, beta=beta, rollout_epochs=1, minibatches=1, **PLAIN_PPO)
    reinforce = bench("reinforce", tiny, beta=beta, baseline="none")
    a, b = (it.gradient(it.collect().updates[0]) for it in (ppo, reinforce))
    assert a.norm() > 0.1
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_first_loss_of_grpo_is_0(tiny: Any) -> None:
    """−ρA with ρ = 1, averaged: minus the mean advantage; without KL nothing else."""
    it = bench("grpo", tiny, beta=0.0)
    update = it.collect().updates[0]
    assert abs(float(it.mean_loss(update).detach())) < 1e-6
    assert it.gradient(update).norm() > 0.1


@pytest.mark.parametrize("name", SEVERAL)
def test_the_second_pass_compares_with_the_policy_that_sampled(name: str, tiny: Any) -> None:
    it = bench(name, tiny, rollout_epochs=2, minibatches=1)
    first, second = it.collect().updates
    assert all(a is b for a, b in zip(first.micro_batches, second.micro_batches, strict=True))
    it.learn(first, rate=0.3)
    old = [batch.logp_old.clone() for batch in second.micro_batches]
    for batch, before in zip(second.micro_batches, old, strict=True):
        metrics = it.loss(batch).metrics
        assert abs(metrics["ratio/mean"][0] / metrics["ratio/mean"][1] - 1) > 1e-5
        assert torch.equal(batch.logp_old, before)
        torch.testing.assert_close(batch.logp_old, batch.logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SEVERAL)
def test_the_second_minibatch_compares_with_the_policy_that_sampled(name: str, tiny: Any) -> None:
    """And not with the one that the first minibatch has updated."""
    it = bench(name, tiny, minibatches=2, rollout_epochs=1, batch_size=16)
    first, second = it.collect().updates
    before = [_logp(it, batch) for batch in second.micro_batches]
    it.learn(first, rate=0.3)
    for batch, logp in zip(second.micro_batches, before, strict=True):
        ratios, tokens = it.loss(batch).metrics["ratio/mean"]
        assert abs(ratios / tokens - 1) > 1e-5
        torch.testing.assert_close(batch.logp_old, logp, rtol=0, atol=2e-6)
        assert float((_logp(it, batch) - logp).abs().max()) > 1e-3


@pytest.mark.parametrize("name", SEVERAL)
def test_report_1_the_policy_that_sampled_had_no_dropout(name: str, tiny: Any) -> None:
    """Nor has its side of the ratio, in any minibatch, when training has."""
    it = bench(name, tiny, minibatches=2, rollout_epochs=2, dropout=True)
    it.models.policy = tiny.model(1, dropout=0.3)
    step = it.collect()
    batches = [batch for update in step.updates[:2] for batch in update.micro_batches]
    want = [_logp(it, batch) for batch in batches]
    it.models.policy.train()
    for batch, logp in zip(batches, want, strict=True):
        it.loss(batch)
        torch.testing.assert_close(batch.logp_old, logp, rtol=0, atol=2e-6)
        assert float((_logp(it, batch) - logp).abs().max()) > 1e-4


def _logp(it: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return token_outputs(it.models.policy, batch.batch).logp
