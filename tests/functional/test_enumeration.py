"""Every sequence of 3 tokens over a vocabulary of 4 can be listed: expectations are sums, nothing is sampled.

The policy is a table of logits for every prefix. Estimators are the library's own, summed over all sequences
(or over all batches of two) with their exact probabilities, and compared with the derivative of the exact
quantity.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kleash.functional import (
    distillation_advantages,
    dpo_loss,
    exact_kl,
    gae,
    group_advantages,
    kl_k1,
    kl_k2,
    kl_k3,
    leave_one_out_advantages,
    optimal_policy,
    position_baseline,
    reinforce_loss,
    returns_to_go,
    sequence_logprob,
    token_logprobs,
    token_rewards,
)

VOCABULARY, STEPS, BETA = 4, 3, 0.3
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=STEPS)))  # (64, 3)
PREFIXES = sum(VOCABULARY**t for t in range(STEPS))


def prefix_rows() -> Tensor:
    """(64, 3): the row of the logit table that predicts each token of each sequence."""
    rows = torch.zeros_like(SEQUENCES)
    start = 0
    for t in range(STEPS):
        digits = VOCABULARY ** torch.arange(t - 1, -1, -1)
        rows[:, t] = start + SEQUENCES[:, :t] @ digits
        start += VOCABULARY**t
    return rows


@dataclass
class World:
    table: Tensor  # (21, 4) policy logits, requires grad
    logits: Tensor  # (64, 3, 4)
    logits_ref: Tensor
    logp: Tensor  # (64, 3)
    logp_ref: Tensor
    score: Tensor  # (64,)

    @property
    def probs(self) -> Tensor:
        return sequence_logprob(self.logp).exp()

    @property
    def log_ratio(self) -> Tensor:
        return sequence_logprob(self.logp) - sequence_logprob(self.logp_ref)

    @property
    def objective(self) -> Tensor:
        """E[score] - β·KL, exactly."""
        return (self.probs * (self.score - BETA * self.log_ratio)).sum()

    def gradient(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(x, self.table, retain_graph=True)[0]


@pytest.fixture
def world() -> World:
    generator = torch.Generator().manual_seed(3)
    tables = torch.randn(2, PREFIXES, VOCABULARY, generator=generator, dtype=torch.float64)
    table = tables[0].requires_grad_()
    rows = prefix_rows()
    logits, logits_ref = table[rows], tables[1].detach()[rows]
    logp, logp_ref = token_logprobs(logits, SEQUENCES), token_logprobs(logits_ref, SEQUENCES)
    score = torch.randn(len(SEQUENCES), generator=generator, dtype=torch.float64) * 2
    return World(table, logits, logits_ref, logp, logp_ref, score)


def test_probabilities_sum_to_one(world):
    assert prefix_rows().unique().numel() == PREFIXES
    torch.testing.assert_close(world.probs.sum(), torch.ones((), dtype=torch.float64))


def test_004_24_mean_of_exact_kl_k1_and_k3_is_the_sequence_kl(world):
    p = world.probs
    kl = (p * world.log_ratio).sum()
    torch.testing.assert_close(p @ exact_kl(world.logits, world.logits_ref), kl)
    torch.testing.assert_close(p @ kl_k1(world.logp, world.logp_ref).sum(1), kl)
    torch.testing.assert_close(p @ kl_k3(world.logp, world.logp_ref).sum(1), kl)
    assert abs(p @ kl_k2(world.logp, world.logp_ref).sum(1) - kl) > 0.1
    assert kl > 0.5


def test_exact_kl_has_less_spread_than_the_estimators(world):
    p = world.probs

    def variance(x: Tensor) -> Tensor:
        return p @ (x - p @ x).square()

    exact = variance(exact_kl(world.logits, world.logits_ref))
    assert exact < variance(kl_k3(world.logp, world.logp_ref).sum(1))
    assert exact < variance(kl_k1(world.logp, world.logp_ref).sum(1))


def frozen_returns(world: World) -> Tensor:
    return returns_to_go(token_rewards(world.score, world.logp, world.logp_ref, BETA))


def expected_gradient(world: World, advantages: Tensor) -> Tensor:
    """Σ_y π(y)·(-∇ reinforce_loss of y alone): one term a sequence, weighted through its advantages."""
    weighted = world.probs.detach().unsqueeze(1) * advantages
    return -world.gradient(len(SEQUENCES) * reinforce_loss(world.logp, weighted))


def test_004_28_reinforce_without_baseline_is_the_exact_gradient(world):
    """Eq. 5 and 6 together; the frozen penalty drops -β·E[∇ log π], which is zero (004-29)."""
    torch.testing.assert_close(
        expected_gradient(world, frozen_returns(world)), world.gradient(world.objective)
    )
    score_function = world.gradient((world.probs.detach() * sequence_logprob(world.logp)).sum())
    torch.testing.assert_close(score_function, torch.zeros_like(score_function))


def test_a_constant_baseline_changes_no_expectation(world):
    for baseline in (7.0, torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)):
        got = expected_gradient(world, frozen_returns(world) - baseline)
        torch.testing.assert_close(got, world.gradient(world.objective))


def test_whole_sequence_penalty_has_the_same_expectation_and_more_variance(world):
    """004-30: rewards to go leave out what the token could not change."""
    whole = (world.score - BETA * world.log_ratio).detach().unsqueeze(1).expand(-1, STEPS)
    to_go = frozen_returns(world)
    torch.testing.assert_close(expected_gradient(world, whole), expected_gradient(world, to_go))

    def spread(advantages: Tensor) -> float:
        total, mean = 0.0, expected_gradient(world, advantages)
        for i, p in enumerate(world.probs.tolist()):
            one = world.gradient((advantages[i] * world.logp[i]).sum())
            total += p * (one - mean).square().sum().item()
        return total

    drift_only = World(
        world.table, world.logits, world.logits_ref, world.logp, world.logp_ref, 0 * world.score
    )
    to_go = frozen_returns(drift_only)
    whole = -BETA * world.log_ratio.detach().unsqueeze(1).expand(-1, STEPS)
    assert spread(to_go) < spread(whole)


def over_batches_of_two(world: World, advantages_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Expected REINFORCE gradient over all 4,096 batches of two independent samples.

    `advantages_of` gets the indices of all batches, (4096, 2), and returns (4096, 2, 3) or (4096, 2).
    """
    p = world.probs.detach()
    pairs = torch.cartesian_prod(torch.arange(len(p)), torch.arange(len(p)))
    advantages = advantages_of(pairs)
    weights = (p[pairs[:, 0]] * p[pairs[:, 1]]).view(-1, *[1] * (advantages.ndim - 1))
    loss = reinforce_loss(world.logp[pairs.flatten()], (weights * advantages).flatten(0, 1))
    return -world.gradient(len(pairs) * loss)


def test_position_baseline_shrinks_the_gradient_by_n_minus_1_over_n(world):
    """Eq. 6's batch mean contains the sample itself: with N = 2 the expectation is half the gradient."""
    returns = frozen_returns(world)
    got = over_batches_of_two(
        world, lambda pairs: torch.stack([batch - position_baseline(batch) for batch in returns[pairs]])
    )
    torch.testing.assert_close(got, world.gradient(world.objective) / 2)


def test_group_mean_shrinks_the_gradient_by_n_minus_1_over_n(world):
    totals = (world.score - BETA * world.log_ratio).detach()
    got = over_batches_of_two(world, lambda pairs: group_advantages(totals[pairs], 2, scale="none"))
    torch.testing.assert_close(got, world.gradient(world.objective) / 2)


def test_leave_one_out_is_the_exact_gradient(world):
    totals = (world.score - BETA * world.log_ratio).detach()
    got = over_batches_of_two(world, lambda pairs: leave_one_out_advantages(totals[pairs], 2))
    torch.testing.assert_close(got, world.gradient(world.objective))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_shrinkage_by_group_size(n):
    """One step, three outcomes, all 3^n groups: mean baseline (n-1)/n, leave-one-out 1."""
    theta = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    logp = theta.log_softmax(0)
    (exact,) = torch.autograd.grad(logp.exp() @ rewards, theta, retain_graph=True)
    draws = torch.tensor(list(itertools.product(range(3), repeat=n)))
    weights = logp.detach()[draws].sum(1, keepdim=True).exp()
    for advantages, share in (
        (group_advantages(rewards[draws], n, scale="none"), (n - 1) / n),
        (leave_one_out_advantages(rewards[draws], n), 1.0),
    ):
        loss = reinforce_loss(logp[draws.flatten()].unsqueeze(1), (weights * advantages).flatten())
        (gradient,) = torch.autograd.grad(-loss * len(draws), theta, retain_graph=True)
        torch.testing.assert_close(gradient, share * exact)


def test_exact_values_as_critic_leave_the_gradient_unbiased(world):
    """GAE with the true value function, at any λ: V(prefix) is the expected return from there."""
    rewards = token_rewards(world.score, world.logp, world.logp_ref, BETA)
    returns, p = returns_to_go(rewards), world.probs.detach()
    rows = prefix_rows()
    mass = torch.zeros(PREFIXES, dtype=torch.float64)
    total = torch.zeros(PREFIXES, dtype=torch.float64)
    for t in range(STEPS):
        mass.index_add_(0, rows[:, t], p)
        total.index_add_(0, rows[:, t], p * returns[:, t])
    values = (total / mass)[rows]
    for lam in (0.0, 0.5, 1.0):
        advantages, _ = gae(rewards, values, lam=lam)
        torch.testing.assert_close(expected_gradient(world, advantages), world.gradient(world.objective))


def test_000_02_distillation_advantages_follow_the_reverse_kl(world):
    """Reference as teacher: the advantages average to -KL(student‖teacher), and so does their gradient."""
    advantages = distillation_advantages(world.logp_ref, world.logp)
    kl = (world.probs * world.log_ratio).sum()
    torch.testing.assert_close(world.probs @ advantages.sum(1), -kl)
    to_go = returns_to_go(advantages)
    torch.testing.assert_close(expected_gradient(world, to_go), -world.gradient(kl))


def test_anchors_gradient_of_whole_sequence_k2_is_that_of_kl_and_per_token_k2_is_not(world):
    p = world.probs.detach()
    kl_gradient = world.gradient((world.probs * world.log_ratio).sum())
    whole = kl_k2(sequence_logprob(world.logp), sequence_logprob(world.logp_ref))
    torch.testing.assert_close(world.gradient(p @ whole), kl_gradient)
    per_token = world.gradient(p @ kl_k2(world.logp, world.logp_ref).sum(1))
    assert (per_token - kl_gradient).norm() > 0.05 * kl_gradient.norm()


def test_004_37_optimal_policy_maximises_the_objective(world):
    ref = sequence_logprob(world.logp_ref).exp()
    best, log_z = optimal_policy(ref, world.score, BETA)

    def objective(p: Tensor) -> Tensor:
        return (p * (world.score - BETA * (p / ref).log())).sum()

    torch.testing.assert_close(objective(best), BETA * log_z)
    torch.testing.assert_close(best.sum(), torch.ones((), dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    for step in (1e-3, 0.1, 1.0):
        for _ in range(50):
            noise = torch.randn(len(best), generator=generator, dtype=torch.float64)
            other = (best.log() + step * noise).softmax(0)
            assert objective(other) < objective(best)
    assert world.objective < objective(best)


def test_objective_is_stationary_and_policy_gradient_zero_at_the_optimum(world):
    """At the autoregressive table that realises π*, and without any baseline."""
    best, _ = optimal_policy(sequence_logprob(world.logp_ref).exp(), world.score, BETA)
    table = torch.zeros(PREFIXES, VOCABULARY, dtype=torch.float64)
    rows = prefix_rows()
    for t in range(STEPS):
        table.index_put_((rows[:, t], SEQUENCES[:, t]), best, accumulate=True)
    table = table.log().requires_grad_()
    logits = table[rows]
    at_best = World(
        table, logits, world.logits_ref, token_logprobs(logits, SEQUENCES), world.logp_ref, world.score
    )
    torch.testing.assert_close(at_best.probs, best)
    for gradient in (
        at_best.gradient(at_best.objective),
        expected_gradient(at_best, frozen_returns(at_best)),
    ):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-10, rtol=0)


def test_003_22_dpo_at_the_optimum_returns_the_bradley_terry_probabilities(world):
    """Z cancels between two responses to one prompt: the margin is the reward gap, whatever β."""
    log_ref = sequence_logprob(world.logp_ref)
    for beta in (0.05, 1.0):
        best, _ = optimal_policy(log_ref.exp(), world.score, beta)
        w, losers = torch.arange(0, 32), torch.arange(32, 64)
        logp_w, logp_l = best[w].log(), best[losers].log()
        loss, _, _ = dpo_loss(logp_w, logp_l, log_ref[w], log_ref[losers], beta, reduction="none")
        gaps = world.score[w] - world.score[losers]
        torch.testing.assert_close((-loss).exp(), gaps.sigmoid())


def test_dpo_on_preferences_of_every_pair_has_its_optimum_at_the_optimal_policy(world):
    """Labels drawn from Bradley–Terry, all pairs, exact expectation: the gradient vanishes at π*."""
    log_ref = sequence_logprob(world.logp_ref).detach()
    best, _ = optimal_policy(log_ref.exp(), world.score, 0.5)
    free = best.log().detach().requires_grad_()
    logp = free.log_softmax(0)
    i, j = torch.cartesian_prod(torch.arange(64), torch.arange(64)).T
    keep = i != j
    i, j = i[keep], j[keep]
    loss, _, _ = dpo_loss(logp[i], logp[j], log_ref[i], log_ref[j], 0.5, reduction="none")
    weight = (world.score[i] - world.score[j]).sigmoid()
    (gradient,) = torch.autograd.grad((weight * loss).sum(), free)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-10, rtol=0)


def test_log_of_the_vocabulary_bounds_the_toy():
    """The enumeration itself: a uniform policy against a uniform reference has KL 0 and entropy 3·ln 4."""
    logits = torch.zeros(64, STEPS, VOCABULARY)
    logp = token_logprobs(logits, SEQUENCES)
    assert not exact_kl(logits, logits).any()
    assert -sequence_logprob(logp).mean().item() == pytest.approx(3 * math.log(4), abs=1e-6)
