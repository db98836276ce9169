"""Derivatives: finite differences for every loss, the pieces of the clip, and gradients at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from kleash.functional import (
    bradley_terry_loss,
    brier_score,
    cispo_objective,
    clip_shares,
    clipped_surrogate,
    dpo_loss,
    exact_kl,
    implicit_reward,
    importance_ratio,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_loss,
    optimal_policy,
    reduce,
    reinforce_loss,
    sapo_objective,
    sequence_logprob,
    token_logprobs,
    truncated_importance_weight,
    value_loss,
    whiten,
)

MASK = torch.tensor([[True, True, False], [False, True, True]])


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


ADVANTAGES = random(2, 3, seed=9).detach()
CASES = {
    "token_logprobs": (lambda x: token_logprobs(x, torch.tensor([[0, 3, 2], [1, 1, 0]])), (random(2, 3, 4),)),
    "sequence_logprob": (lambda x: sequence_logprob(x, MASK), (random(2, 3),)),
    "sequence_logprob mean": (lambda x: sequence_logprob(x, MASK, "mean"), (random(2, 3),)),
    "exact_kl": (lambda x, y: exact_kl(x, y, MASK), (random(2, 3, 4), random(2, 3, 4, seed=1))),
    "kl_k1": (kl_k1, (random(2, 3), random(2, 3, seed=1))),
    "kl_k2": (kl_k2, (random(2, 3), random(2, 3, seed=1))),
    "kl_k3": (kl_k3, (random(2, 3), random(2, 3, seed=1))),
    "kl_k3 near 0": (lambda x: 1e6 * kl_k3(torch.zeros(2, 3).double(), 1e-3 * x), (random(2, 3),)),
    "reduce token-mean": (lambda x: reduce(x, MASK, "token-mean"), (random(2, 3),)),
    "reduce constant": (lambda x: reduce(x, MASK, "constant", length=7), (random(2, 3),)),
    "reinforce_loss": (lambda x: reinforce_loss(x, ADVANTAGES, MASK), (random(2, 3),)),
    "reinforce_loss token-mean": (
        lambda x: reinforce_loss(x, ADVANTAGES, MASK, "token-mean"),
        (random(2, 3),),
    ),
    "importance_ratio": (lambda x: importance_ratio(x, ADVANTAGES, MASK), (random(2, 3),)),
    "importance_ratio sequence": (
        lambda x: importance_ratio(x, ADVANTAGES, MASK, level="sequence"),
        (random(2, 3),),
    ),
    "cispo_objective": (  # in log π alone: the ratio is a constant of it
        lambda x: cispo_objective(x, ADVANTAGES.exp(), ADVANTAGES, 0.2, 0.4),
        (random(2, 3),),
    ),
    "sapo_objective": (lambda x: sapo_objective(x.exp(), ADVANTAGES, 1.3, 0.7), (random(2, 3),)),
    "value_loss": (
        lambda x: value_loss(x, 0.3 * ADVANTAGES, ADVANTAGES, 0.2, MASK),
        (random(2, 3),),
    ),
    "value_loss unclipped": (
        lambda x: value_loss(x, None, ADVANTAGES, None, MASK, "sequence-token-mean"),
        (random(2, 3),),
    ),
    "kl_loss k2": (lambda x: kl_loss(x, ADVANTAGES, "k2", MASK), (random(2, 3),)),
    "kl_loss k3": (lambda x: kl_loss(x, ADVANTAGES, "k3", MASK), (random(2, 3),)),
    "clipped_surrogate": (lambda x: clipped_surrogate((0.4 * x).exp(), ADVANTAGES), (random(2, 3),)),
    "bradley_terry_loss": (bradley_terry_loss, (random(5), random(5, seed=1), random(5, seed=2))),
    "bradley_terry_loss centred": (
        lambda x, y: bradley_terry_loss(x, y, center=0.1),
        (random(5), random(5, seed=1)),
    ),
    "dpo_loss": (lambda *x: dpo_loss(*x, beta=0.7)[0], tuple(random(5, seed=i) for i in range(4))),
    "dpo_loss smoothed": (
        lambda *x: dpo_loss(*x, beta=0.7, label_smoothing=0.2, reduction="sum")[0],
        tuple(random(5, seed=i) for i in range(4)),
    ),
    "implicit_reward": (lambda x, y: implicit_reward(x, y, 0.1), (random(5), random(5, seed=1))),
    "optimal_policy": (lambda r: optimal_policy(torch.full((2, 4), 0.25).double(), r, 0.3), (random(2, 4),)),
    "brier_score": (lambda x: brier_score(x.sigmoid(), torch.tensor([1, 0, 1])), (random(3),)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    function, inputs = CASES[name]
    assert gradcheck(function, inputs)


@pytest.mark.parametrize(("epsilon", "high"), [(0.2, None), (0.2, 0.28), (0.1, 0.5)])
@pytest.mark.parametrize("advantage", [2.0, -1.0])
def test_000_29_piecewise_gradient_of_the_clip(epsilon, high, advantage):
    """d/dρ is A where the branch is alive and 0 where it is not: 401 ratios, both boundaries among them."""
    top = epsilon if high is None else high
    inside = torch.tensor([1 - epsilon, 1 + top])
    ratio = torch.cat([torch.linspace(0, 2, 399), inside]).requires_grad_()
    clipped_surrogate(ratio, torch.full((401,), advantage), epsilon, high).sum().backward()
    dead = (ratio > 1 + top) if advantage > 0 else (ratio < 1 - epsilon)
    want = torch.where(dead, 0.0, advantage)
    assert ratio.grad is not None
    assert torch.equal(ratio.grad, want)
    assert dead.any() and not dead[-2:].any()


@pytest.mark.parametrize("advantage", [2.0, -1.0, 0.0])
def test_000_30_boundary_is_alive_and_the_first_float_beyond_is_not(advantage):
    for edge, outward in ((0.8, 0.0), (1.2, 2.0)):
        at = torch.tensor(edge)
        beyond = torch.nextafter(at, torch.tensor(outward))
        ratio = torch.stack([at, beyond]).requires_grad_()
        clipped_surrogate(ratio, torch.full((2,), advantage)).sum().backward()
        assert ratio.grad is not None
        pessimistic = advantage * (1 if edge > 1 else -1) > 0
        assert ratio.grad.tolist() == [advantage, 0.0 if pessimistic else advantage]


@pytest.mark.parametrize(("epsilon", "high"), [(0.2, None), (0.2, 0.28), (0.0, 0.0)])
def test_clip_shares_count_the_tokens_whose_gradient_is_gone(epsilon, high):
    generator = torch.Generator().manual_seed(4)
    ratio = torch.cat([2 * torch.rand(500, generator=generator), torch.tensor([1 - epsilon, 1.0])])
    advantages = torch.randn(502, generator=generator)
    advantages[::10] = 0.0
    ratio.requires_grad_()
    clipped_surrogate(ratio, advantages, epsilon, high).sum().backward()
    assert ratio.grad is not None
    gone = int(((ratio.grad == 0) & (advantages != 0)).sum())
    counts = clip_shares(ratio, advantages, None, epsilon, high)
    assert counts["above_dead"] + counts["below_dead"] == gone > 50
    outside = ((ratio > 1 + (epsilon if high is None else high)) | (ratio < 1 - epsilon)) & (advantages != 0)
    assert sum(counts.values()) == int(outside.sum()) + 502
    assert min(counts.values()) > 50


@pytest.mark.parametrize("advantage", [2.0, -1.0])
def test_cispo_never_stops_a_gradient(advantage):
    """d/d log π is clip(ρ)·A at every ratio, also through a ratio computed from the same log π."""
    logp = torch.linspace(0.01, 3, 200).log().requires_grad_()
    cispo_objective(logp, logp.exp(), torch.full((200,), advantage), 0.2, 0.4).sum().backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, logp.detach().exp().clamp(0.8, 1.4) * advantage)
    assert logp.grad.abs().min() > 0


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-1.0, 1.05), (3.0, 5.0)])
def test_sapo_is_reinforce_at_ratio_one_and_fades_on_both_sides(advantage, tau):
    """In d/dρ: A at ρ = 1, symmetric around it, falling; a zero advantage has none."""
    ratio = torch.linspace(0, 2, 201, dtype=torch.float64).requires_grad_()
    sapo_objective(ratio, torch.full_like(ratio, advantage).detach(), tau, tau).sum().backward()
    slope = ratio.grad
    assert slope is not None and slope[100].item() == pytest.approx(advantage)
    torch.testing.assert_close(slope, slope.flip(0))
    assert (slope.abs()[100:].diff() < 0).all()
    by_sign = sapo_objective(torch.full((2,), 1.5), torch.tensor([1.0, -1.0]), tau, 2 * tau)
    alone = [
        sapo_objective(torch.tensor([1.5]), torch.tensor([a]), x, x).item()
        for a, x in ((1.0, tau), (-1.0, 2 * tau))
    ]
    assert by_sign.tolist() == pytest.approx(alone)
    assert sapo_objective(torch.tensor([1.5]), torch.zeros(1)).item() == 0.0


def test_value_loss_is_dead_only_where_the_value_overshot_towards_the_return():
    """V_old = 0, clip 0.2: the slope is V - R on every side but beyond the interval on the return's."""
    values = torch.linspace(-1, 1, 201, dtype=torch.float64)[None].requires_grad_()
    for target in (0.5, -0.5, 0.1):
        values.grad = None
        returns = torch.full_like(values, target).detach()
        value_loss(values, torch.zeros_like(returns), returns, 0.2, reduction="none").sum().backward()
        v = values.detach()
        nearer = (v - target).abs() < (v.clamp(-0.2, 0.2) - target).abs() - 1e-12
        assert values.grad is not None
        torch.testing.assert_close(values.grad, torch.where(nearer, 0.0, v - target))
        assert bool(nearer.any()) == (abs(target) > 0.2)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratio_at_equal_policies_has_the_gradient_of_log_pi(level):
    """ρ = 1 exactly; summed over a row both levels have d/d log π_t = 1."""
    logp = random(2, 3)
    ratio = importance_ratio(logp, logp.detach(), MASK, level=level)
    assert torch.equal(ratio, torch.ones_like(ratio))
    (slope,) = torch.autograd.grad(ratio.sum(), logp)
    torch.testing.assert_close(slope, MASK.double())


def test_ratio_and_weights_carry_only_the_gradient_they_should():
    alive = random(2, 3)
    assert not truncated_importance_weight(alive, ADVANTAGES).requires_grad
    assert not whiten(alive).requires_grad
    for call in (
        lambda: importance_ratio(ADVANTAGES, alive),
        lambda: kl_loss(ADVANTAGES, alive),
        lambda: value_loss(ADVANTAGES, alive, ADVANTAGES),
        lambda: value_loss(ADVANTAGES, ADVANTAGES, alive),
        lambda: cispo_objective(ADVANTAGES, ADVANTAGES, alive),
        lambda: sapo_objective(ADVANTAGES, alive),
    ):
        with pytest.raises(ValueError, match="must not require grad"):
            call()


def test_004_34_one_step_of_ppo_is_reinforce_up_to_the_normaliser():
    logp = random(2, 3)
    ratio = (logp - logp.detach()).exp()
    surrogate = reduce(-clipped_surrogate(ratio, ADVANTAGES), MASK, "sequence-mean")
    (ppo,) = torch.autograd.grad(surrogate, logp)
    (reinforce,) = torch.autograd.grad(reinforce_loss(logp, ADVANTAGES, MASK), logp)
    torch.testing.assert_close(ppo, reinforce)
    (per_token,) = torch.autograd.grad(reinforce_loss(logp, ADVANTAGES, MASK, "token-mean"), logp)
    torch.testing.assert_close(per_token * 4, reinforce * 2)  # 4 tokens, 2 sequences


def test_dpo_slope_is_minus_half_beta_where_policy_equals_reference():
    logp = torch.zeros(1, requires_grad=True)
    loss, reward_w, _ = dpo_loss(logp, torch.zeros(1), torch.zeros(1), torch.zeros(1), beta=0.3)
    loss.backward()
    assert logp.grad is not None and logp.grad.item() == pytest.approx(-0.15)
    assert not reward_w.requires_grad


def test_losses_at_huge_margins_have_finite_gradients():
    x = torch.tensor([1e4, -1e4], requires_grad=True)
    dpo_loss(x, -x, torch.zeros(2), torch.zeros(2), 1.0, 0.1)[0].backward()
    assert x.grad is not None and x.grad.isfinite().all()
    bradley_terry_loss(x, -x).backward()
    assert x.grad.isfinite().all()


def test_gradients_are_finite_where_logits_are_minus_infinity():
    """A token outside the support of both models: no value, no gradient, no nan."""
    logits = torch.tensor([[[0.0, 1.0, -torch.inf]]], requires_grad=True)
    logits_ref = torch.tensor([[[1.0, 0.0, -torch.inf]]], requires_grad=True)
    kl = exact_kl(logits, logits_ref)
    kl.sum().backward()
    p = math.exp(1) / (1 + math.exp(1))
    assert kl.item() == pytest.approx(2 * p - 1, abs=1e-6)
    for x in (logits, logits_ref):
        assert x.grad is not None and x.grad.isfinite().all() and x.grad[0, 0, 2] == 0
    logits.grad = None
    token_logprobs(logits, torch.tensor([[0]])).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].tolist() == pytest.approx([p, -p, 0.0])


def test_exact_kl_is_infinite_where_only_the_reference_excludes_a_token():
    assert exact_kl(torch.zeros(1, 1, 2), torch.tensor([[[0.0, -torch.inf]]])).item() == math.inf


def test_000_25_advantages_with_a_gradient_are_refused():
    alive = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(ValueError, match="advantages must not require grad"):
        reinforce_loss(torch.zeros(1, 2), alive)
    with pytest.raises(ValueError, match="advantages must not require grad"):
        clipped_surrogate(torch.ones(1, 2), alive)
