"""Faults reported against other libraries, as tests of the right value. Numbers are the survey's rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kleash.functional import (
    adaptive_beta,
    aggregate,
    bradley_terry_loss,
    clip_shares,
    clipped_surrogate,
    dpo_loss,
    gae,
    group_advantages,
    importance_ratio,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_loss,
    leave_one_out_advantages,
    masked_moments,
    maxrl_advantages,
    missing_end_penalty,
    optimal_policy,
    overlong_penalty,
    reduce,
    reinforce_loss,
    returns_to_go,
    sequence_logprob,
    token_logprobs,
    token_rewards,
    truncated_importance_weight,
    value_loss,
    whiten,
)


def near(want, tolerance=1e-6):
    return pytest.approx(want, abs=tolerance)


def mask_of(*lengths: int) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def test_report_05_sigmoid_loss_at_margin_six():
    zero = torch.zeros(1)
    assert dpo_loss(torch.tensor([6.0]), zero, zero, zero, beta=0.1)[0].item() == near(0.437488)


def test_report_32_centring_squares_the_sum():
    three, one = torch.tensor([3.0]), torch.tensor([1.0])
    assert bradley_terry_loss(three, one).item() == near(0.126928)
    assert bradley_terry_loss(three, one, center=0.01).item() == near(0.286928)


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.5])
def test_report_33_one_temperature_on_both_sides(temperature):
    logits, token = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[1]])
    sampled = torch.distributions.Categorical(logits=logits / temperature).log_prob(token)
    trained = token_logprobs(logits / temperature, token)
    assert (trained - sampled).exp().item() == near(1.0)
    if temperature == 0.5:
        one_sided = token_logprobs(logits, token)
        assert (trained.item(), one_sided.item()) == (near(-0.126928), near(-0.313262))
        assert (one_sided - trained).exp().item() == near(0.829997)


def test_report_34_one_support_on_both_sides():
    """Top-p 0.8 of (.5, .3, .15, .05) keeps two tokens; taking the others out of the softmax renormalises."""
    logits, token = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log(), torch.tensor([[0]])
    full = token_logprobs(logits, token)
    kept = token_logprobs(logits.index_fill(2, torch.tensor([2, 3]), -torch.inf), token)
    assert (full.item(), kept.item()) == (near(-0.693147), near(-0.470004))
    assert (full - kept).exp().item() == near(0.8)


def test_report_35_sequence_ratio_summed_or_averaged_by_name():
    gaps = torch.full((1, 100), 0.012)
    assert sequence_logprob(gaps).exp().item() == near(3.320, 5e-4)
    assert sequence_logprob(gaps, reduction="mean").exp().item() == near(1.012, 5e-4)


def test_report_35_weights_by_name_raw_and_capped():
    """The same 100 tokens: by sum 3.320, by mean 1.012, by token 1.012; the cap is on whichever was asked."""
    trainer, sampler = torch.full((1, 100), -0.988), torch.full((1, 100), -1.0)
    for level, raw in (("sequence", 3.320), ("sequence-mean", 1.012), ("token", 1.012)):
        weight = truncated_importance_weight(trainer, sampler, math.inf, level=level)
        assert weight.tolist() == [near([raw] * 100, 5e-4)]
        capped = truncated_importance_weight(trainer, sampler, 2.0, level=level)
        assert capped.tolist() == [near([min(raw, 2.0)] * 100, 5e-4)]
    ratio = importance_ratio(trainer, sampler, level="sequence")  # GSPO's is the mean
    assert ratio.tolist() == [near([1.012] * 100, 5e-4)]


def test_report_33_and_34_weights_see_what_the_sampler_did():
    """Temperature 1 scored against 0.5, and the full support against top-p 0.8."""
    one, half = token_logprobs(torch.tensor([[[0.0, 1.0]]]), torch.tensor([[1]])), torch.tensor([[-0.126928]])
    assert truncated_importance_weight(one, half).item() == near(0.829997)
    assert truncated_importance_weight(
        torch.tensor([[-0.693147]]), torch.tensor([[-0.470004]])
    ).item() == near(0.8)
    assert importance_ratio(one, one).item() == 1.0


def test_report_36_kl_in_the_loss_pulls_towards_the_reference():
    """d loss/d coefficient is +KL, and the larger the coefficient the smaller the KL it ends at."""
    logp, logp_ref = torch.tensor([[-1.0]]), torch.tensor([[-2.0]])
    for estimator in ("k2", "k3"):
        coefficient = torch.tensor(0.3, requires_grad=True)
        (slope,) = torch.autograd.grad((coefficient * kl_loss(logp, logp_ref, estimator)).sum(), coefficient)
        assert slope.item() == kl_loss(logp, logp_ref, estimator).item() > 0
    log_q, rewards = torch.tensor([0.8, 0.19, 0.01]).log(), torch.tensor([0.0, 1.0, 2.0])
    for estimator in ("k2", "k3"):
        ends = []
        for coefficient in (0.3, 1.0, 3.0):
            theta = log_q.clone().requires_grad_()
            for _ in range(200):
                logp = theta.log_softmax(0)
                p = logp.exp().detach()  # exact expectation over samples
                loss = p @ (coefficient * kl_loss(logp, log_q, estimator) - rewards * logp)
                (gradient,) = torch.autograd.grad(loss, theta)
                theta = (theta - 0.5 * gradient).detach().requires_grad_()
            logp = theta.log_softmax(0)
            ends.append((logp.exp() @ (logp - log_q)).item())
        assert ends[0] > 1.5 * ends[1] > 3 * ends[2] > 0


def test_report_36_controller_raises_beta_above_the_target_only():
    """Ziegler et al. 2019: error clipped to ±0.2, gain 0.1."""
    for kl, factor in ((12.0, 1.02), (6.6, 1.01), (6.0, 1.0), (5.4, 0.99), (0.0, 0.98), (-1.0, 0.98)):
        assert adaptive_beta(0.1, kl, target=6.0) == near(0.1 * factor, 1e-9)
    assert adaptive_beta(0.1, 12.0, 6.0, horizon_steps=4, clip=0.4) == near(0.11, 1e-9)


def test_report_36_controller_settles_at_the_target():
    """On the three-response toy the optimum's KL falls with β: 0.8037 nats belong to β = 0.5."""
    ref, rewards, beta = torch.tensor([0.8, 0.19, 0.01]).double(), torch.arange(3.0).double(), 2.0
    for _ in range(300):
        p, _ = optimal_policy(ref, rewards, beta)
        beta = adaptive_beta(beta, (p @ (p / ref).log()).item(), target=0.8037)
    assert beta == pytest.approx(0.5, rel=1e-3)


def test_report_37_kl_loss_does_not_cancel_in_float32():
    r = torch.tensor([1e-4, 1e-6])
    got = kl_loss(torch.zeros(2), r, "k3")
    assert got.tolist() == pytest.approx([5.0002e-9, 5.0000e-13], rel=2e-5)


def test_report_36_penalty_pulls_towards_the_reference():
    """One token, logp -1, reference -2: more beta, less reward; and the loss's slope in beta is +KL."""
    logp, logp_ref, score = torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.zeros(1)
    assert kl_k1(logp, logp_ref).item() == 1.0
    assert [token_rewards(score, logp, logp_ref, beta).item() for beta in (0.0, 0.1, 0.5)] == near(
        [0, -0.1, -0.5]
    )


def test_report_37_k3_does_not_cancel_in_float32():
    r = torch.tensor([1e-4, 1e-6, -1e-4, -1e-6, 1e-12, 0.0])
    got = kl_k3(torch.zeros(6), r)
    want = [5.0002e-9, 5.0000e-13, 4.9998e-9, 5.0000e-13, 5e-25, 0.0]
    assert got.tolist() == pytest.approx(want, rel=2e-5, abs=1e-30)
    naive = r.exp() - 1 - r
    assert abs(naive[1].item() - want[1]) > want[1]  # what the report saw


def test_report_37_k3_is_accurate_everywhere_and_never_negative():
    d = torch.cat(
        [torch.linspace(-1, 1, 4001), torch.tensor([-80.0, -5.0, 5.0, 30.0]), 10.0 ** -torch.arange(15.0)]
    )

    def truth(x: float) -> float:
        return math.expm1(x) - x if abs(x) > 1e-2 else x**2 / 2 + x**3 / 6 + x**4 / 24 + x**5 / 120

    exact = torch.tensor([truth(x) for x in d.double().tolist()])
    got = kl_k3(torch.zeros_like(d), d)
    assert (got >= 0).all()
    torch.testing.assert_close(got, exact, rtol=3e-6, atol=0.0)


@pytest.mark.parametrize("gap", [100.0, -100.0, 1000.0])
@pytest.mark.parametrize("estimator", [kl_k1, kl_k2, kl_k3])
def test_report_38_huge_log_ratio_stays_finite(estimator, gap):
    logp = torch.full((4,), -1.0 - gap, requires_grad=True)
    value = estimator(logp, torch.full((4,), -1.0))
    value.sum().backward()
    assert value.isfinite().all() and value.square().sum().isfinite()
    assert logp.grad is not None and logp.grad.isfinite().all()


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e4])
def test_report_38_ratios_of_huge_gaps_stay_finite(gap):
    logp, logp_old = torch.full((1, 2), -1.0 + gap, requires_grad=True), torch.full((1, 2), -1.0)
    for level in ("token", "sequence"):
        ratio = importance_ratio(logp, logp_old, level=level)
        (gradient,) = torch.autograd.grad(ratio.sum(), logp)
        assert ratio.isfinite().all() and ratio.square().sum().isfinite() and gradient.isfinite().all()
        assert ratio[0, 0].item() == pytest.approx(math.exp(min(gap, 20.0)), rel=1e-5)
        assert not gradient.any() or gap < 0  # constant above the limit
    for level in ("token", "sequence", "sequence-mean"):
        assert truncated_importance_weight(logp, logp_old, 2.0, level=level).max() <= 2.0
        assert truncated_importance_weight(logp, logp_old, math.inf, level=level).isfinite().all()


def test_report_38_one_wild_token_leaves_the_others_their_gradient():
    logp = torch.tensor([[-1.0, 99.0]], requires_grad=True)
    importance_ratio(logp, torch.tensor([[-1.0, -1.0]])).sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [[1.0, 0.0]]


def test_report_39_k1_as_a_loss_is_refused_and_the_others_are_what_they_claim():
    """p = softmax(0, 1, 2) against the uniform reference, by enumeration."""
    theta = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    logp, log_q = theta.log_softmax(0), torch.full((3,), 1 / 3, dtype=torch.float64).log()
    reverse, forward = logp.exp() @ (logp - log_q), log_q.exp() @ (log_q - logp)
    for estimator, divergence in (("k2", reverse), ("k3", forward)):
        sampled = logp.exp().detach() @ kl_loss(logp, log_q, estimator)
        (got,) = torch.autograd.grad(sampled, theta, retain_graph=True)
        (want,) = torch.autograd.grad(divergence, theta, retain_graph=True)
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
        assert want.norm() > 0.1
    with pytest.raises(ValueError, match="put it into the reward"):
        kl_loss(logp, log_q, "k1")


def test_report_40_kl_terms_are_never_negative_in_half_precision():
    generator = torch.Generator().manual_seed(0)
    logp, logp_ref = (-5 * torch.rand(2, 1000, generator=generator)).bfloat16()
    for estimator in ("k2", "k3"):
        terms = kl_loss(logp, logp_ref, estimator)
        assert terms.dtype == torch.float32 and (terms >= 0).all()
        torch.testing.assert_close(terms, kl_loss(logp.float(), logp_ref.float(), estimator))


def test_report_41_which_token_blew_up():
    """One token with gap 6 among 200: the terms are by token, so the token and its share can be named."""
    logp = torch.full((1, 200), -1.0)
    logp[0, 137] = -7.0
    for estimator, value in (("k2", 18.0), ("k3", math.exp(6) - 7)):
        terms = kl_loss(logp, torch.full((1, 200), -1.0), estimator)
        assert terms.argmax().item() == 137
        assert terms.max().item() == pytest.approx(value, rel=1e-6)
        assert (terms.max() / terms.sum()).item() == 1.0


def test_report_39_expected_gradient_of_each_estimator_as_a_loss():
    """On three outcomes: k1 gives nothing, k2 the gradient of KL, k3 that of KL(reference‖policy)."""
    theta = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    logp, log_q = theta.log_softmax(0), torch.full((3,), 1 / 3, dtype=torch.float64).log()
    p = logp.exp()

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(x, theta, retain_graph=True)[0]

    forward, backward = (p * (logp - log_q)).sum(), (log_q.exp() * (log_q - logp)).sum()
    sampled = {k: gradient(p.detach() @ k(logp, log_q)) for k in (kl_k1, kl_k2, kl_k3)}
    torch.testing.assert_close(sampled[kl_k1], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(sampled[kl_k2], gradient(forward))
    torch.testing.assert_close(sampled[kl_k3], gradient(backward))
    in_reward = (-kl_k1(logp, log_q)).detach()  # "KL in the reward": an advantage of the policy gradient
    torch.testing.assert_close(gradient(-(p.detach() * in_reward * logp).sum()), gradient(forward))


def test_report_42_equal_rewards_and_group_of_one():
    advantages = group_advantages(torch.full((4,), 3.0), 4)
    assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert maxrl_advantages(torch.full((4,), 3.0), 4).tolist() == [0.0, 0.0, 0.0, 0.0]
    assert maxrl_advantages(torch.zeros(4), 4).tolist() == [0.0, 0.0, 0.0, 0.0]
    for function in (group_advantages, leave_one_out_advantages, maxrl_advantages):
        with pytest.raises(ValueError, match="group_size must be at least 2"):
            function(torch.tensor([1.0]), 1)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 2, 0]])
def test_report_43_groups_in_any_layout(order):
    """Group A (1, 0) and group B (10, 10), members side by side or interleaved."""
    rewards, groups = torch.tensor([1.0, 0.0, 10.0, 10.0])[order], torch.tensor([7, 7, 3, 3])[order]
    for scale, a in (("std", 1.0), ("sample_std", 0.707107)):
        got = group_advantages(rewards, 2, scale=scale, groups=groups)
        assert got.tolist() == near(torch.tensor([a, -a, 0.0, 0.0])[order].tolist())
    got = leave_one_out_advantages(rewards, 2, groups=groups)
    assert got.tolist() == near(torch.tensor([1.0, -1.0, 0.0, 0.0])[order].tolist())
    got = maxrl_advantages(rewards, 2, groups=groups)
    assert got.tolist() == near(torch.tensor([1.0, -1.0, 0.0, 0.0])[order].tolist())


def test_report_44_group_and_batch_scaling_differ():
    rewards = torch.tensor([1.0, 0.0, 10.0, 10.0])
    everything = math.sqrt(sum((x - 5.25) ** 2 for x in (1, 0, 10, 10)) / 4)
    assert group_advantages(rewards, 2, scale="std").tolist() == near([1, -1, 0, 0])
    assert group_advantages(rewards, 2, scale="batch_std").tolist() == near(
        [0.5 / everything, -0.5 / everything, 0, 0]
    )


def test_report_45_each_reduction_by_its_name():
    """Lengths 2 and 8, token losses 1 and 0."""
    values = torch.tensor([[1.0] * 8, [0.0] * 8])
    mask = mask_of(2, 8)
    assert reduce(values, mask, "token-mean").item() == near(0.2)
    assert reduce(values, mask, "sequence-token-mean").item() == near(0.5)
    assert reduce(values, mask, "constant", length=8).item() == near(0.125)
    assert reduce(values, mask, "sequence-mean").item() == near(1.0)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_report_47_missing_score_leaves_the_group_statistics(scale):
    rewards = torch.tensor([1.0, torch.nan, 0.0, 1.0, torch.nan, torch.nan, torch.nan, 2.0])
    got = group_advantages(rewards, 4, scale=scale)
    s = math.sqrt(2) / 3 if scale == "std" else 1.0
    assert got[:4].tolist() == near([1 / 3 / s, 0.0, -2 / 3 / s, 1 / 3 / s])
    assert got[4:].tolist() == [0.0] * 4  # nobody to compare with
    assert leave_one_out_advantages(rewards, 4)[:4].tolist() == near([0.5, 0.0, -1.0, 0.5])
    assert maxrl_advantages(rewards, 4).tolist() == near([0.5, 0.0, -1.0, 0.5, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("pads", [0, 3])
def test_report_49_gae_with_and_without_padding(pads):
    rewards = torch.tensor([[0.0, 0.0, 1.0] + [5.0] * pads])
    values = torch.tensor([[0.2, 0.4, 0.6] + [0.9] * pads])
    mask = torch.tensor([[True] * 3 + [False] * pads])
    advantages, returns = gae(rewards, values, gamma=1.0, lam=0.95, mask=mask)
    assert advantages[0, :3].tolist() == near([0.751, 0.58, 0.40])
    assert returns[0, :3].tolist() == near([0.951, 0.98, 1.0])
    assert not advantages[0, 3:].any() and not returns[0, 3:].any()


def test_report_50_padding_does_not_flow_back():
    got = returns_to_go(
        torch.tensor([[1.5, 1.0, 2.0, 2.0]]), mask_of(2).new_tensor([[True, True, False, False]])
    )
    assert got.tolist() == [[2.5, 1.0, 0.0, 0.0]]


def test_report_51_score_on_the_last_real_token():
    """[t, t, EOS, pad, pad] and [t, t, t, t, t]: each row's own last token, exactly once."""
    zero = torch.zeros(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]], dtype=torch.bool)
    got = token_rewards(torch.tensor([2.0, -1.0, 5.0]), zero, zero, 0.1, mask)
    assert got.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 0, -1], [0, 0, 0, 5, 0]]


def test_report_51_missing_end_is_taken_off_exactly_once():
    """[t, t, EOS, pad, pad] and [t, t, t, t, t]: the penalty lands with the score, on the last real token."""
    ended = torch.tensor([True, False])
    score = missing_end_penalty(torch.tensor([2.0, 2.0]), ended, penalty=1.5)
    rewards = token_rewards(score, torch.zeros(2, 5), torch.zeros(2, 5), 0.1, mask_of(3, 5))
    assert rewards.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 0, 0.5]]
    assert missing_end_penalty(torch.tensor([torch.nan]), torch.tensor([False]), 1.0).isnan().all()


def test_report_51_overlong_penalty_is_added_once_a_response():
    """DAPO's example: at most 20,480 tokens, 4,096 of them the buffer."""
    lengths = torch.tensor([1, 16_384, 18_432, 20_480, 30_000])
    assert overlong_penalty(lengths, 20_480, 4_096).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_report_52_length_balanced_micro_batches_change_nothing(order):
    """Rows of 1, 9, 2 and 5 tokens, split in two and permuted: sums and counts are those of the one batch."""
    mask = mask_of(1, 9, 2, 5)
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 4, 9, generator=generator)
    whole = value_loss(values, old, returns, 0.2, mask)
    items, count = 0.0, 0
    for rows in (order[:1], order[1:]):
        loss = value_loss(values[rows], old[rows], returns[rows], 0.2, mask[rows], "none")
        part = aggregate(loss, mask[rows])
        items, count = items + part[0].sum().item(), count + part[1].item()
    assert items / count == near(whole.item())


def test_report_53_whitening_over_two_processes():
    """Values 1 and 2 here, 3 there, with padding: the moments add up, each process holds its share."""
    here, there = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[3.0, torch.nan, torch.nan]])
    moments = masked_moments(here, torch.tensor([[True, True, False]]))
    moments = moments + masked_moments(there, torch.tensor([[True, False, False]]))
    assert moments.tolist() == [3.0, 6.0, 14.0]
    assert whiten(here, torch.tensor([[True, True, False]]), moments=moments).tolist() == [[-1.0, 0.0, 0.0]]
    assert whiten(there, torch.tensor([[True, False, False]]), moments=moments).tolist() == [[1.0, 0.0, 0.0]]


def test_report_53_whitening_leaves_padding_alone():
    mask = torch.tensor([[True, True, True, False, False, False]])
    for pad in (0.0, 7.0, torch.nan):
        values = torch.tensor([[1.0, 2.0, 3.0, pad, pad, pad]])
        assert whiten(values, mask).tolist() == [[-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]]
    over_all_rows = whiten(
        torch.tensor([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0]]),
        mask_of(1, 1, 1).expand(3, 1) & torch.tensor([True, False]),
    )
    assert over_all_rows[:, 0].tolist() == [-1.0, 0.0, 1.0]


def test_report_54_policy_side_of_the_clip():
    """As losses, that is negated: ratio 1.5, epsilon 0.2: -1.2 for A = +1, +1.5 for A = -1."""
    losses = -clipped_surrogate(torch.tensor([1.5, 1.5]), torch.tensor([1.0, -1.0]), 0.2)
    assert losses.tolist() == near([-1.2, 1.5])


def test_report_54_value_loss_has_its_half():
    """Old value 0, new 1, return 1, clip 0.2: the clipped value misses by 0.8, half its square is 0.32."""
    old, new, target = torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1)
    assert value_loss(new, old, target, clip=0.2).item() == near(0.32)
    assert value_loss(new, old, target, clip=None).item() == 0.0
    assert value_loss(new, None, torch.full((1, 1), 3.0), clip=None).item() == near(2.0)


def test_report_54_clip_shares_compare_the_right_pair():
    """A token in each of the four quadrants outside the clip, one inside, one without advantage, one pad."""
    ratio = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.1, 9.0, 9.0]])
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0, 0.0, 1.0]])
    mask = torch.tensor([[True] * 6 + [False]])
    assert clip_shares(ratio, advantages, mask, 0.2) == {
        "above_dead": 1, "below_dead": 1, "above_alive": 1, "below_alive": 1, "tokens": 6
    }  # fmt: skip


def test_report_57_clip_counts_of_unequal_micro_batches_add_up():
    """All of 1 token clipped and none of 9: 0.1 of the tokens, not 0.5."""
    parts = [clip_shares(torch.full((n,), r), torch.ones(n)) for n, r in ((1, 1.5), (9, 1.0))]
    dead, tokens = (sum(part[name] for part in parts) for name in ("above_dead", "tokens"))
    assert dead / tokens == 0.1


def test_report_55_micro_batches_add_up_to_the_big_batch():
    """One token of loss 4 and three of loss 0: 1.0 whichever way the rows are split, not 2.0."""
    values, mask = torch.tensor([[4.0, 0, 0], [0, 0, 0]]), mask_of(1, 3)
    parts = [aggregate(values[i : i + 1], mask[i : i + 1], "token-mean") for i in range(2)]
    assert sum(items.sum() for items, _ in parts) / sum(count for _, count in parts) == 1.0
    assert reduce(values, mask, "token-mean") == 1.0


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sequence-token-mean", "constant"])
def test_report_59_rows_without_tokens(reduction):
    length = 4 if reduction == "constant" else None
    logp = torch.tensor([[-1.0, -2.0], [-3.0, torch.nan]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0], [torch.nan, torch.inf]])
    some = mask_of(2, 0)
    with_empty_row = reinforce_loss(logp, advantages, some, reduction, length)
    alone = reinforce_loss(logp[:1], advantages[:1], None, reduction, length)
    assert with_empty_row.item() == alone.item() > 0
    (gradient,) = torch.autograd.grad(with_empty_row, logp)
    assert gradient.isfinite().all() and not gradient[1].any()
    nothing = reinforce_loss(logp, advantages, torch.zeros_like(some), reduction, length)
    (gradient,) = torch.autograd.grad(nothing, logp)
    assert nothing.item() == 0.0 and not gradient.any()


def test_report_61_token_logprobs_make_no_copy_of_the_logits():
    """Largest tensor made forward is a chunk; backward makes the gradient and nothing else that large."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.large = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            # A result that shares storage with an argument (view, in-place) takes no memory.
            known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
            fresh = isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in known
            self.large += fresh and out.numel() >= total // 2
            return out

    logits = torch.randn(1, 128, 32_000, requires_grad=True)
    tokens, total = torch.randint(32_000, (1, 128)), logits.numel()
    with Sizes() as forward:
        logp = token_logprobs(logits, tokens)
    with Sizes() as backward:
        (gradient,) = torch.autograd.grad(logp.sum(), logits)
    assert forward.large == 0
    assert backward.large == 1
    plain = logits.log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(logp, plain, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), logits)[0], atol=1e-6, rtol=1e-5)
