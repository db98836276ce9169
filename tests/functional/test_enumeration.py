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
    cispo_objective,
    clipped_surrogate,
    distillation_advantages,
    dpo_loss,
    exact_kl,
    gae,
    group_advantages,
    importance_ratio,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_loss,
    leave_one_out_advantages,
    maxrl_advantages,
    optimal_policy,
    position_baseline,
    reinforce_loss,
    returns_to_go,
    sapo_objective,
    sequence_logprob,
    token_logprobs,
    token_rewards,
    truncated_importance_weight,
    value_loss,
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


def test_value_loss_is_smallest_at_the_expected_returns(world):
    """One value a prefix: the expected loss is flat where V(prefix) is the mean of what follows."""
    returns, p = frozen_returns(world), world.probs.detach().unsqueeze(1)
    rows = prefix_rows()
    mass, total = (torch.zeros(PREFIXES, dtype=torch.float64) for _ in range(2))
    mass.index_put_((rows,), p.expand(rows.shape), accumulate=True)
    total.index_put_((rows,), p * returns, accumulate=True)
    for shift in (0.0, 0.1):
        values = (total / mass + shift).requires_grad_()
        loss = (p * value_loss(values[rows], None, returns, clip=None, reduction="none")).sum()
        (slope,) = torch.autograd.grad(loss, values)
        torch.testing.assert_close(slope, shift * mass)


SURROGATES = {
    "ppo": lambda logp, ratio, a: clipped_surrogate(ratio, a),
    "cispo": lambda logp, ratio, a: cispo_objective(logp, ratio, a, 0.2, 0.4),
    "sapo": lambda logp, ratio, a: sapo_objective(ratio, a),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_004_34_on_policy_every_surrogate_has_the_exact_gradient(world, name):
    """With ρ = 1 the clip, the clipped weight and the soft gate all let REINFORCE's gradient through."""
    ratio = importance_ratio(world.logp, world.logp.detach())
    objective = SURROGATES[name](world.logp, ratio, frozen_returns(world)).sum(1)
    torch.testing.assert_close(
        world.gradient(world.probs.detach() @ objective), world.gradient(world.objective)
    )


def test_gspo_on_policy_has_the_exact_gradient_over_the_length(world):
    """The sequence ratio is the length-th root: its gradient is 1/3 of ∇ log π(y)."""
    totals = (world.score - BETA * world.log_ratio).detach().unsqueeze(1).expand(-1, STEPS)
    ratio = importance_ratio(world.logp, world.logp.detach(), level="sequence")
    objective = clipped_surrogate(ratio, totals).mean(1)
    got = world.gradient(world.probs.detach() @ objective)
    torch.testing.assert_close(got, world.gradient(world.objective) / STEPS)


def test_unclipped_token_ratio_off_policy_is_exact_for_one_step_only(world):
    """Samples of the reference, one reward at the first token: Σ_y π_ref(y)·∇ρ_0·r is ∇E[r]."""
    p_old, first = sequence_logprob(world.logp_ref).exp(), SEQUENCES[:, 0].double()
    ratio = importance_ratio(world.logp, world.logp_ref)
    got = world.gradient((p_old * ratio[:, 0] * first).sum())
    torch.testing.assert_close(got, world.gradient((world.probs * first).sum()))


def test_report_35_sequence_weight_is_exact_and_the_others_are_not(world):
    """The reference's samples, weighted into expectations under the policy: by the product alone."""
    p_old, want = sequence_logprob(world.logp_ref).exp(), (world.probs @ world.score).item()

    def estimate(level: str, cap: float = math.inf) -> float:
        weight = truncated_importance_weight(world.logp, world.logp_ref, cap=cap, level=level)
        return (p_old @ (weight[:, -1] * world.score)).item()

    assert estimate("sequence") == pytest.approx(want, abs=1e-12)
    for other in (estimate("token"), estimate("sequence-mean"), estimate("sequence", cap=2.0)):
        assert abs(other - want) > 0.01


def test_report_39_kl_losses_at_every_visited_state(world):
    """k2 has the gradient of KL(π‖π_ref) summed over the states visited, k3 that of KL(π_ref‖π) there."""
    p = world.probs.detach()
    for estimator, divergence in (
        ("k2", exact_kl(world.logits, world.logits_ref)),
        ("k3", exact_kl(world.logits_ref, world.logits)),
    ):
        got = world.gradient(p @ kl_loss(world.logp, world.logp_ref, estimator).sum(1))
        torch.testing.assert_close(got, world.gradient(p @ divergence))
        # The states' own probabilities are not moved by it: the gradient of the sequence KL is another.
        whole = world.gradient((world.probs * world.log_ratio).sum())
        assert (got - whole).norm() > 0.05 * whole.norm()


def test_report_39_kl_losses_off_policy_want_the_ratio(world):
    """Next tokens of the reference, states of the reference: the detached ratio restores the expectation."""
    p_old = sequence_logprob(world.logp_ref).exp()
    ratio = importance_ratio(world.logp, world.logp_ref).detach()
    for estimator, divergence in (
        ("k2", exact_kl(world.logits, world.logits_ref)),
        ("k3", exact_kl(world.logits_ref, world.logits)),
    ):
        terms, want = kl_loss(world.logp, world.logp_ref, estimator), world.gradient(p_old @ divergence)
        torch.testing.assert_close(world.gradient(p_old @ (ratio * terms).sum(1)), want)
        assert (world.gradient(p_old @ terms.sum(1)) - want).norm() > 0.05 * want.norm()


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_maxrl_climbs_the_first_terms_of_log_p(n):
    """Two of four outcomes succeed, all 4^n groups: Σ_{k=1}^{n-1} (1-p)^(k-1)·∇p, in the limit ∇ log p."""
    theta = torch.tensor([0.3, -0.2, 0.9, 1.4], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    logp = theta.log_softmax(0)
    p = logp.exp() @ rewards
    (slope,) = torch.autograd.grad(p, theta, retain_graph=True)
    draws = torch.tensor(list(itertools.product(range(4), repeat=n)))
    weights = logp.detach()[draws].sum(1, keepdim=True).exp()
    loss = reinforce_loss(
        logp[draws.flatten()].unsqueeze(1), (weights * maxrl_advantages(rewards[draws], n)).flatten()
    )
    (gradient,) = torch.autograd.grad(-loss * len(draws), theta, retain_graph=True)
    fail = 1 - p.item()
    torch.testing.assert_close(gradient, sum(fail**k for k in range(n - 1)) * slope)
    assert sum(fail**k for k in range(300)) == pytest.approx(1 / p.item())


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
