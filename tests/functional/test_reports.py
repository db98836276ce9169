"""Faults reported against other libraries, as tests of the right value. Numbers are the survey's rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kleash.functional import (
    aggregate,
    bradley_terry_loss,
    clipped_surrogate,
    dpo_loss,
    gae,
    group_advantages,
    kl_k1,
    kl_k2,
    kl_k3,
    leave_one_out_advantages,
    reduce,
    reinforce_loss,
    returns_to_go,
    sequence_logprob,
    token_logprobs,
    token_rewards,
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
    for function in (group_advantages, leave_one_out_advantages):
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
