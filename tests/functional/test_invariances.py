"""What must not matter: more padding, its side, its content, the order of rows, the dtype; and the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kleash.functional import (
    brier_score,
    cispo_objective,
    clip_shares,
    dpo_loss,
    exact_kl,
    expected_calibration_error,
    fit_overoptimization,
    gae,
    group_advantages,
    importance_ratio,
    kl_k1,
    kl_loss,
    leave_one_out_advantages,
    masked_moments,
    maxrl_advantages,
    position_baseline,
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

LENGTHS = (3, 1, 4, 2)
MASK = torch.arange(4) < torch.tensor(LENGTHS).unsqueeze(1)
GENERATOR = torch.Generator().manual_seed(0)
LOGP, LOGP_REF, VALUES = (torch.randn(4, 4, generator=GENERATOR) for _ in range(3))
LOGITS, LOGITS_REF = (torch.randn(4, 4, 6, generator=GENERATOR) for _ in range(2))
SCORE = torch.randn(4, generator=GENERATOR)

# Each takes logp, logp_ref, values, logits, logits_ref, score and mask.
FUNCTIONS = {
    "sequence_logprob": lambda a, b, v, x, y, s, m: sequence_logprob(a, m),
    "sequence_logprob mean": lambda a, b, v, x, y, s, m: sequence_logprob(a, m, "mean"),
    "exact_kl": lambda a, b, v, x, y, s, m: exact_kl(x, y, m),
    "token_rewards": lambda a, b, v, x, y, s, m: token_rewards(s, a, b, 0.3, m),
    "returns_to_go": lambda a, b, v, x, y, s, m: returns_to_go(a, m, 0.9),
    "gae": lambda a, b, v, x, y, s, m: gae(a, v, 0.9, 0.8, m)[0],
    "gae returns": lambda a, b, v, x, y, s, m: gae(a, v, 0.9, 0.8, m)[1],
    "whiten": lambda a, b, v, x, y, s, m: whiten(a, m),
    "reinforce_loss": lambda a, b, v, x, y, s, m: reinforce_loss(a, v, m),
    "reinforce_loss of rows": lambda a, b, v, x, y, s, m: reinforce_loss(a, s, m, "token-mean"),
    # Ratios and weights are 1 in masked slots: their logarithm is 0 there, like every other result.
    "importance_ratio": lambda a, b, v, x, y, s, m: importance_ratio(a, b, m).log(),
    "importance_ratio sequence": lambda a, b, v, x, y, s, m: importance_ratio(a, b, m, "sequence").log(),
    "truncated weight": lambda a, b, v, x, y, s, m: truncated_importance_weight(a, b, 2.0, m).log(),
    "truncated weight sequence": (
        lambda a, b, v, x, y, s, m: truncated_importance_weight(a, b, 2.0, m, "sequence").log()
    ),
    "kl_loss k2": lambda a, b, v, x, y, s, m: kl_loss(a, b, "k2", m),
    "kl_loss k3": lambda a, b, v, x, y, s, m: kl_loss(a, b, "k3", m),
    "value_loss": lambda a, b, v, x, y, s, m: value_loss(a, b, v, 0.2, m, "none"),
    "reduce value_loss": lambda a, b, v, x, y, s, m: value_loss(a, b, v, 0.2, m),
    "whiten shift=False": lambda a, b, v, x, y, s, m: whiten(a, m, shift=False),
    "reduce cispo": lambda a, b, v, x, y, s, m: reduce(
        cispo_objective(a, importance_ratio(a, b, m), v, 0.2, 0.4), m
    ),
    "reduce token-mean": lambda a, b, v, x, y, s, m: reduce(a, m, "token-mean"),
    "reduce sequence-mean": lambda a, b, v, x, y, s, m: reduce(a, m, "sequence-mean"),
    "reduce sequence-token-mean": lambda a, b, v, x, y, s, m: reduce(a, m, "sequence-token-mean"),
    "reduce none": lambda a, b, v, x, y, s, m: reduce(a, m, "none"),
}


def padded(x: Tensor, left: int, right: int, value: float) -> Tensor:
    """Padding along dimension 1, filled with `value`, which also replaces what the mask hides."""
    if x.ndim == 1:
        return x
    keep = MASK if x.ndim == 2 else MASK.unsqueeze(2)
    x = torch.where(keep, x, value)
    shape = list(x.shape)
    parts = [x.new_full((shape[0], n, *shape[2:]), value) for n in (left, right)]
    return torch.cat([parts[0], x, parts[1]], dim=1)


INPUTS = (LOGP, LOGP_REF, VALUES, LOGITS, LOGITS_REF, SCORE)


@pytest.mark.parametrize("value", [0.0, -50.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masked_slots_never_matter(name, value):
    plain = FUNCTIONS[name](*INPUTS, MASK)
    for left, right in ((0, 0), (0, 3), (2, 0), (2, 3)):
        mask = torch.cat([MASK.new_zeros(4, left), MASK, MASK.new_zeros(4, right)], dim=1)
        got = FUNCTIONS[name](*(padded(x, left, right, value) for x in INPUTS), mask)
        if got.ndim == 2:
            assert not got[:, :left].any() and not got[:, left + 4 :].any()
            got = got[:, left : left + 4]
        torch.testing.assert_close(got, plain)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_order_of_rows_never_matters(name):
    order = torch.tensor([2, 0, 3, 1])
    plain = FUNCTIONS[name](*INPUTS, MASK)
    got = FUNCTIONS[name](*(x[order] for x in INPUTS), MASK[order])
    torch.testing.assert_close(got, plain[order] if plain.ndim else plain)


ROWWISE = [n for n in FUNCTIONS if not n.startswith(("whiten", "reinforce", "reduce"))]


@pytest.mark.parametrize("name", [*ROWWISE, "reduce none"])
def test_one_row_at_a_time_equals_the_batch(name):
    """Per-row and per-token results; scalars and `whiten` mix rows by definition."""
    plain = FUNCTIONS[name](*INPUTS, MASK)
    alone = torch.cat([FUNCTIONS[name](*(x[i : i + 1] for x in INPUTS), MASK[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(alone, plain)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_real_gives_zero(name):
    got = FUNCTIONS[name](*INPUTS, torch.zeros_like(MASK))
    assert not got.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_masked_slots_send_no_gradient_whatever_they_hold(value):
    """Advantages are 0 in masked slots, everything else may hold anything."""
    advantages = VALUES.masked_fill(~MASK, 0.0)
    logp_old, values = (torch.where(MASK, x, value) for x in (LOGP_REF, VALUES))
    losses = (
        lambda x: cispo_objective(x, importance_ratio(x, logp_old, MASK), advantages),
        lambda x: importance_ratio(x, logp_old, MASK, "sequence") * advantages,
        lambda x: kl_loss(x, logp_old, "k2", MASK),
        lambda x: kl_loss(x, logp_old, "k3", MASK),
        lambda x: value_loss(x, logp_old, values, 0.2, MASK, "none"),
    )
    for loss in losses:
        x = torch.where(MASK, LOGP, value).requires_grad_()
        reduce(loss(x), MASK).backward()
        assert x.grad is not None and x.grad.isfinite().all()
        assert x.grad[MASK].any() and not x.grad[~MASK].any()


def test_clip_shares_ignore_padding_and_add_up_over_micro_batches():
    ratio, values = (0.5 * LOGP).exp(), VALUES
    counts = clip_shares(ratio, values, MASK)
    assert counts["tokens"] == sum(LENGTHS) and sum(counts.values()) > counts["tokens"]
    for hidden in (0.0, 1e9, math.nan):
        assert (
            clip_shares(torch.where(MASK, ratio, hidden), torch.where(MASK, values, hidden), MASK) == counts
        )
    parts = [clip_shares(ratio[i : i + 2], values[i : i + 2], MASK[i : i + 2]) for i in (0, 2)]
    assert {name: parts[0][name] + parts[1][name] for name in counts} == counts
    assert sum(clip_shares(ratio, values, torch.zeros_like(MASK)).values()) == 0


def test_whitening_over_processes_is_whitening_of_everything():
    """Moments add up, also with a process that has no real slot."""
    everything = whiten(LOGP, MASK)
    none = torch.zeros(2, 4)
    shares = [(LOGP[:1], MASK[:1]), (LOGP[1:], MASK[1:]), (none, none > 0)]
    moments = torch.stack([masked_moments(v, m) for v, m in shares]).sum(0)
    got = torch.cat([whiten(v, m, moments=moments) for v, m in shares])
    torch.testing.assert_close(got[:4], everything)
    assert not got[4:].any()
    real = everything[MASK]
    assert real.mean().item() == pytest.approx(0.0, abs=1e-6) and real.std().item() == pytest.approx(1.0)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4])
def test_whitening_survives_a_large_offset_and_keeps_the_mean_if_asked(offset):
    values = LOGP.double() + offset
    torch.testing.assert_close(whiten(values, MASK), whiten(LOGP.double(), MASK), atol=1e-6, rtol=0)
    kept = whiten(values, MASK, shift=False)[MASK]
    torch.testing.assert_close(kept.mean(), values[MASK].mean())
    assert kept.std().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e8 / 3])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_whitening_without_spread_is_exactly_zero(value, count):
    for dtype in (torch.float32, torch.float64):
        values = torch.full((count,), value, dtype=dtype)
        assert not whiten(values).any()
        assert whiten(values, shift=False).tolist() == pytest.approx(values.tolist())


def test_position_baseline_ignores_what_the_mask_hides():
    returns = torch.where(MASK, VALUES, math.nan)
    longer = torch.cat([returns, returns.new_full((4, 2), math.inf)], 1)
    mask = torch.cat([MASK, MASK.new_zeros(4, 2)], 1)
    got = position_baseline(longer, mask)
    torch.testing.assert_close(got[:4], position_baseline(VALUES, MASK))
    assert got[3] == VALUES[2, 3]  # one row alone has a fourth token
    assert got[4:].tolist() == [0.0, 0.0]


def test_no_rows_at_all():
    empty = torch.zeros(0, 3)
    assert sequence_logprob(empty).shape == (0,)
    assert exact_kl(torch.zeros(0, 3, 5), torch.zeros(0, 3, 5)).shape == (0,)
    assert token_logprobs(torch.zeros(0, 3, 5), torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3)
    assert token_rewards(torch.zeros(0), empty, empty, 0.1).shape == (0, 3)
    assert group_advantages(torch.zeros(0), 4).shape == (0,)
    assert position_baseline(empty).tolist() == [0.0, 0.0, 0.0]
    assert reduce(empty, None, "sequence-mean").item() == 0.0
    assert importance_ratio(empty, empty).shape == truncated_importance_weight(empty, empty).shape == (0, 3)
    assert value_loss(empty, empty, empty).item() == 0.0
    assert kl_loss(empty, empty).shape == whiten(empty).shape == (0, 3)
    assert maxrl_advantages(torch.zeros(0), 4).shape == (0,)
    none = torch.zeros(0)
    assert dpo_loss(none, none, none, none, 0.1)[0].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_any_arithmetic(dtype):
    logits = LOGITS.to(dtype)
    tokens = torch.randint(6, (4, 4), generator=torch.Generator().manual_seed(1))
    logp = token_logprobs(logits, tokens)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, token_logprobs(logits.float(), tokens))
    ones = torch.full((1, 1000), -1.001, dtype=dtype)
    assert sequence_logprob(ones).item() == pytest.approx(1000 * ones[0, 0].item(), rel=1e-6)
    assert exact_kl(logits, logits).dtype == torch.float32
    assert kl_k1(ones, ones).dtype == torch.float32
    near = torch.full((1, 1000), -1.01, dtype=dtype)  # the difference is taken after widening
    gap = ones[0, 0].item() - near[0, 0].item()
    assert importance_ratio(ones, near, level="sequence")[0, 0].item() == pytest.approx(
        math.exp(gap), rel=1e-6
    )
    assert kl_loss(ones, near)[0, 0].item() == pytest.approx(gap**2 / 2, rel=1e-5)
    for x in (whiten(near), value_loss(near, ones, near), truncated_importance_weight(near, ones)):
        assert x.dtype == torch.float32


def test_half_precision_logits_get_a_gradient_of_their_own_dtype():
    logits = LOGITS.bfloat16().requires_grad_()
    token_logprobs(logits, torch.zeros(4, 4, dtype=torch.long)).sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
    want = -LOGITS.bfloat16().float().softmax(-1)
    want[..., 0] += 1
    torch.testing.assert_close(logits.grad.float(), want, atol=4e-3, rtol=4e-3)


def test_groups_do_not_see_each_other_or_a_common_offset():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(2))
    for function in (group_advantages, leave_one_out_advantages):
        together = function(rewards, 4)
        torch.testing.assert_close(together, torch.cat([function(g, 4) for g in rewards.split(4)]))
        torch.testing.assert_close(function(rewards + 100.0, 4), together, atol=1e-4, rtol=1e-4)
        assert torch.equal(function(rewards.view(3, 4), 4), together.view(3, 4))
    torch.testing.assert_close(group_advantages(rewards * 7, 4), group_advantages(rewards, 4))
    positive = rewards.abs()  # MaxRL sees the scale's zero, not its unit
    together = maxrl_advantages(positive, 4)
    torch.testing.assert_close(together, torch.cat([maxrl_advantages(g, 4) for g in positive.split(4)]))
    torch.testing.assert_close(maxrl_advantages(positive * 7, 4), together)
    assert not torch.allclose(maxrl_advantages(positive + 7, 4), together)
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    groups = torch.arange(3).repeat_interleave(4)
    torch.testing.assert_close(maxrl_advantages(positive[shuffle], 4, groups[shuffle]), together[shuffle])


def test_003_10_preference_losses_see_differences_only():
    w, losers, ref_w, ref_l = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)).unbind()
    plain = dpo_loss(w, losers, ref_w, ref_l, 0.3)[0]
    torch.testing.assert_close(dpo_loss(w + 9, losers + 9, ref_w - 4, ref_l - 4, 0.3)[0], plain)


def test_perfect_and_worst_calibration():
    outcomes = torch.tensor([True, False, True])
    right = outcomes.float()
    assert expected_calibration_error(right, outcomes).item() == brier_score(right, outcomes).item() == 0.0
    assert (
        expected_calibration_error(1 - right, outcomes).item()
        == brier_score(1 - right, outcomes).item()
        == 1.0
    )
    half = torch.full((4,), 0.5)
    assert expected_calibration_error(half, torch.tensor([1, 0, 1, 0])).item() == 0.0
    assert brier_score(half, torch.tensor([1, 0, 1, 0])).item() == 0.25


# ---------------------------------------------------------------- over-optimisation (004-51)

KL = torch.tensor([0.0, 0.5, 1.0, 4.0, 9.0, 25.0, 60.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("form", "gold", "peak_d"),
    [
        ("rl", lambda d: d * (1.2 - 0.5 * d.clamp(min=1e-300).log()), math.exp(1.2 / 0.5 - 1)),
        ("bon", lambda d: d * (1.2 - 0.1 * d), 1.2 / 0.2),
    ],
)
def test_004_51_fit_recovers_the_curve_and_its_peak(form, gold, peak_d):
    fit = fit_overoptimization(KL, gold(KL.sqrt()), form=form)
    assert (fit.alpha, fit.beta) == pytest.approx((1.2, 0.5 if form == "rl" else 0.1))
    assert fit.r_squared == pytest.approx(1.0)
    assert fit.peak_kl == pytest.approx(peak_d**2)
    assert fit.peak_gold == pytest.approx(gold(torch.tensor(peak_d, dtype=torch.float64)).item())
    grid = torch.linspace(0.01, 100, 20_000, dtype=torch.float64)
    best = fit.predict(grid)
    assert fit.peak_kl == pytest.approx(grid[best.argmax()].item(), abs=0.01)
    assert fit.peak_gold == pytest.approx(best.max().item(), abs=1e-6)


def test_004_51_r_squared_by_hand_and_noise_lowers_it():
    noise = torch.tensor([0.0, 0.3, -0.3, 0.2, -0.2, 0.3, -0.3], dtype=torch.float64)
    gold = KL.sqrt() * (1.2 - 0.1 * KL.sqrt()) + noise
    fit = fit_overoptimization(KL, gold, form="bon")
    residual = (gold - fit.predict(KL)).square().sum()
    assert fit.r_squared == pytest.approx((1 - residual / (gold - gold.mean()).square().sum()).item())
    assert 0.9 < fit.r_squared < 0.999


def test_004_51_no_peak_where_gold_only_rises_or_only_falls():
    rising = fit_overoptimization(KL, KL.sqrt() + 0.1 * KL, form="bon")
    assert rising.peak_kl is None and rising.peak_gold is None
    falling = fit_overoptimization(KL, -KL.sqrt() - 0.1 * KL, form="bon")
    assert falling.peak_kl is None
    straight = fit_overoptimization(KL, KL.sqrt(), form="rl")
    assert straight.peak_kl is None and straight.alpha == pytest.approx(1.0)
