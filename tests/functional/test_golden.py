"""The numbers worked out in the seed documents, to the digits printed there. IDs are those of the survey."""

from __future__ import annotations

import math

import pytest
import torch

from kleash.functional import (
    bradley_terry_loss,
    cispo_objective,
    clipped_surrogate,
    distillation_advantages,
    dpo_loss,
    exact_kl,
    gae,
    group_advantages,
    implicit_reward,
    kl_k1,
    kl_k2,
    kl_k3,
    lagrangian_beta,
    leave_one_out_advantages,
    maxrl_advantages,
    optimal_policy,
    returns_to_go,
    sapo_objective,
    token_rewards,
)

REF = torch.tensor([0.80, 0.19, 0.01], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
GOLD = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)


def near(want, tolerance=1e-6):
    return pytest.approx(want, abs=tolerance)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return exact_kl(p.log().view(1, 1, -1), q.log().view(1, 1, -1)).item()


def toy(beta: float) -> tuple[torch.Tensor, float, float, float]:
    """Optimal policy of the three-response example, its proxy reward, gold and drift."""
    p, _ = optimal_policy(REF, REWARDS, beta)
    return p, float(p @ REWARDS), float(p @ GOLD), kl(p, REF)


# ---------------------------------------------------------------- seed 000


def test_000_01_distillation_advantage_of_each_token():
    student, _ = optimal_policy(REF, REWARDS, 1.0)
    advantages = distillation_advantages(REF.log(), student.log())
    assert advantages.tolist() == near([0.3296, -0.6704, -1.6704], 5e-5)


def test_000_02_its_expectation_is_minus_the_reverse_kl():
    student, _ = optimal_policy(REF, REWARDS, 1.0)
    expected = student @ distillation_advantages(REF.log(), student.log())
    assert expected.item() == near(-0.14819, 5e-6)
    assert expected.item() == near(-kl(student, REF), 1e-12)


def test_000_04_the_two_directions_differ():
    p, _ = optimal_policy(REF, REWARDS, 1.0)
    assert kl(p, REF) == near(0.1482, 5e-5)
    assert kl(REF, p) == near(0.1196, 5e-5)


def test_000_06_kl_is_no_distance():
    a, b, c = t(0.5, 0.5), t(0.25, 0.75), t(0.1, 0.9)
    assert kl(a, c) == near(0.5108, 5e-5)
    assert kl(a, b) + kl(b, c) == near(0.2362, 5e-5)


def test_000_07_kl_is_cross_entropy_minus_entropy():
    p, _ = optimal_policy(REF, REWARDS, 1.0)
    cross, own = -(p @ REF.log()), -(p @ p.log())
    assert (cross.item(), own.item()) == (near(0.99004, 5e-6), near(0.84185, 5e-6))
    assert kl(p, REF) == near((cross - own).item(), 1e-12)


def test_000_09_estimators_by_enumeration():
    """k1 and k3 have the exact mean, k2 does not; k3 has the smallest spread."""
    p, _ = optimal_policy(REF, REWARDS, 1.0)
    for estimator, mean, deviation in ((kl_k1, 0.1482, 0.596), (kl_k2, 0.1889, None), (kl_k3, 0.1482, 0.178)):
        values = estimator(p.log(), REF.log())
        assert (p @ values).item() == near(mean, 5e-5)
        if deviation is not None:
            assert (p @ (values - p @ values).square()).sqrt().item() == near(deviation, 5e-4)


@pytest.mark.parametrize(
    ("shift", "want", "ratios", "bias"),
    [(0.1, 0.005, (20, 1.42, 1.42), 0.0025), (1, 0.5, (2, 1.73, 1.70), 0.25)],
)
def test_000_09_estimators_on_two_normals(shift, want, ratios, bias):
    """Schulman's table, by quadrature: samples from N(0, 1), reference N(shift, 1)."""
    x = torch.linspace(-12, 12, 48_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    logp, logp_ref = -x.square() / 2, -(x - shift).square() / 2
    for estimator, ratio in zip((kl_k1, kl_k2, kl_k3), ratios, strict=True):
        values = estimator(logp, logp_ref)
        mean = density @ values
        assert mean.item() == near(want + (bias * want if estimator is kl_k2 else 0), 1e-6)
        deviation = (density @ (values - mean).square()).sqrt()
        assert deviation.item() / want == near(ratio, 6e-3)


def test_000_11_log_before_mean():
    gaps = t(0.5, -2.0).requires_grad_()
    loss = bradley_terry_loss(gaps, torch.zeros_like(gaps))
    loss.backward()
    assert loss.item() == near(1.3005, 5e-5)
    assert loss.item() != near(0.9920, 1e-2)  # -log of the mean probability
    assert gaps.grad is not None
    assert (-2 * gaps.grad).tolist() == near([0.378, 0.881], 5e-4)


def test_000_12_logsigmoid_is_stable_far_out():
    losses = bradley_terry_loss(torch.tensor([1e4, -1e4]), torch.zeros(2), reduction="none")
    assert losses.tolist() == [0.0, 1e4]


def test_000_23_returns_with_and_without_discount():
    rewards = t(-0.05, 0.0, 1.8).view(1, 3)
    assert returns_to_go(rewards)[0].tolist() == near([1.75, 1.8, 1.8])
    assert returns_to_go(rewards, gamma=0.9)[0].tolist() == near([1.408, 1.62, 1.8])


def test_000_24_gae_at_lambda_one_is_return_minus_value():
    rewards, values = t(-0.05, 0.0, 1.8).view(1, 3), t(0.3, -0.2, 0.9).view(1, 3)
    advantages, returns = gae(rewards, values, gamma=0.9, lam=1.0)
    torch.testing.assert_close(advantages, returns_to_go(rewards, gamma=0.9) - values)
    torch.testing.assert_close(returns, returns_to_go(rewards, gamma=0.9))
    td_error, _ = gae(rewards, values, gamma=0.9, lam=0.0)
    assert td_error[0].tolist() == near([-0.05 + 0.9 * -0.2 - 0.3, 0.9 * 0.9 + 0.2, 1.8 - 0.9])


CLIP_TABLE = [  # ratio, advantage, value, gradient with respect to log π; epsilon 0.2
    (1.3, 2.0, 2.4, 0.0),  # 003-14
    (0.7, -1.0, -0.8, 0.0),  # 003-15
    (0.7, 1.0, 0.7, 0.7),  # 003-16
    (1.3, -1.0, -1.3, -1.3),  # 003-16
    (1.5, 2.0, 2.4, 0.0),  # 004-36
    (1.5, -2.0, -3.0, -3.0),  # 004-36
]


@pytest.mark.parametrize(("ratio", "advantage", "value", "gradient"), CLIP_TABLE)
def test_000_29_and_003_18_clip_table(ratio, advantage, value, gradient):
    log_pi = t(math.log(ratio)).requires_grad_()
    objective = clipped_surrogate(log_pi.exp(), t(advantage))
    objective.sum().backward()
    assert objective.item() == near(value)
    assert log_pi.grad is not None and log_pi.grad.item() == near(gradient)


SOFT_TABLE = [  # ratio, advantage, CISPO's weight (0.2 below, 0.4 above), SAPO's value, SAPO's gradient
    (1.3, 2.0, 2.6, 4.5955, 2.5424),
    (0.7, -1.0, -0.8, -1.6072, -0.6829),
    (0.7, 1.0, 0.8, 1.7022, 0.6845),
    (1.3, -1.0, -1.3, -2.2023, -1.2683),
    (1.5, 2.0, 2.8, 4.9797, 2.8200),
    (1.5, -2.0, -2.8, -4.7872, -2.8024),
]


@pytest.mark.parametrize(("ratio", "advantage", "weight", "value", "gradient"), SOFT_TABLE)
def test_section_f_cispo_and_sapo(ratio, advantage, weight, value, gradient):
    """CISPO clips the weight and keeps the gradient; SAPO fades it out. Both in d/d log π."""
    log_pi = t(math.log(ratio)).requires_grad_()
    cispo = cispo_objective(log_pi, log_pi.exp(), t(advantage), epsilon=0.2, epsilon_high=0.4)
    (slope,) = torch.autograd.grad(cispo.sum(), log_pi)
    assert slope.item() == near(weight)
    sapo = sapo_objective(log_pi.exp(), t(advantage))
    (slope,) = torch.autograd.grad(sapo.sum(), log_pi)
    assert (sapo.item(), slope.item()) == (near(value, 5e-5), near(gradient, 5e-5))


def test_cispo_without_a_lower_bound_is_the_default():
    log_pi = t(math.log(0.01)).requires_grad_()
    (slope,) = torch.autograd.grad(cispo_objective(log_pi, log_pi.exp(), t(3.0)).sum(), log_pi)
    assert slope.item() == near(0.03)


# ---------------------------------------------------------------- seed 003


@pytest.mark.parametrize(
    ("rewards", "want"), [((9.0, 10.0, 8.0, 9.0), (0, 1, -1, 0)), ((0.9, 1.0, 0.8, 0.9), (0, 0.1, -0.1, 0))]
)
def test_003_05_and_06_mean_baseline(rewards, want):
    assert group_advantages(t(*rewards), 4, scale="none").tolist() == near(want)
    assert group_advantages(t(*rewards), 4, scale="std").tolist() == near((0, 1.414214, -1.414214, 0))


def test_003_09_and_10_bradley_terry_and_its_shift():
    assert bradley_terry_loss(t(1.2), t(0.7)).item() == near(0.474077)
    assert bradley_terry_loss(t(101.2), t(100.7)).item() == near(0.474077)


def test_003_19_objective_equals_beta_log_z_minus_kl_to_the_optimum():
    beta, p = 0.7, t(0.2, 0.5, 0.3)
    optimum, log_z = optimal_policy(REF, REWARDS, beta)
    objective = float(p @ REWARDS) - beta * kl(p, REF)
    assert objective == near(beta * log_z.item() - beta * kl(p, optimum), 1e-12)


def test_003_21_and_22_implicit_reward_gives_the_reward_back_up_to_a_constant():
    p, log_z = optimal_policy(REF, REWARDS, 1.0)
    implied = implicit_reward(p.log(), REF.log(), 1.0)
    assert implied.tolist() == near([-0.3296, 0.6704, 1.6704], 5e-5)
    assert (implied + log_z).tolist() == near([0.0, 1.0, 2.0], 1e-12)
    for beta in (0.05, 0.25, 3.0):
        p, _ = optimal_policy(REF, REWARDS, beta)
        assert implicit_reward(p.log(), REF.log(), beta).diff().tolist() == near([1.0, 1.0], 1e-9)


def dpo(beta: float, ratio_w: float, ratio_l: float, **options):
    """Loss of one pair with those log-ratios, and the loss's slope in the winner's log-probability."""
    logp_w, logp_l = t(-3.0 + ratio_w).requires_grad_(), t(-7.0 + ratio_l)
    loss, reward_w, reward_l = dpo_loss(logp_w, logp_l, t(-3.0), t(-7.0), beta, **options)
    (slope,) = torch.autograd.grad(loss, logp_w)
    return loss.item(), reward_w.item(), reward_l.item(), slope.item()


@pytest.mark.parametrize(
    ("beta", "w", "l", "loss", "smoothed", "weight"),
    [
        (0.2, 1.0, -0.5, 0.554355, 0.584355, 0.425557),  # 003-25
        (0.1, 0.8, 0.2, 0.663597, 0.669597, 0.485004),  # 003-29
        (0.1, -1.0, -3.0, 0.598139, 0.618139, 0.450166),  # 004-47
    ],
)
def test_section_f_dpo_and_cdpo(beta, w, l, loss, smoothed, weight):  # noqa: E741
    got, reward_w, reward_l, slope = dpo(beta, w, l)
    assert got == near(loss)
    assert (reward_w, reward_l) == (near(beta * w), near(beta * l))
    assert slope == near(-beta * weight)
    assert dpo(beta, w, l, label_smoothing=0.1)[0] == near(smoothed)


def test_003_26_weight_at_margin_one():
    assert dpo(1.0, 1.0, 0.0)[3] == near(-0.268941)


def test_004_42_gradient_carries_beta():
    assert dpo(0.2, 1.0, -0.5)[3] == near(-0.0851, 5e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("beta", [0.01, 0.1, 5.0])
def test_003_27_loss_is_ln_2_before_the_first_step(beta, label_smoothing):
    logp_w, logp_l = torch.tensor([-12.5, -80.0]), torch.tensor([-30.1, -2.0])
    loss, reward_w, reward_l = dpo_loss(logp_w, logp_l, logp_w, logp_l, beta, label_smoothing)
    assert loss.item() == near(0.693147)
    assert not reward_w.any() and not reward_l.any()


def test_section_f_reward_model_with_zero_head_starts_at_ln_2():
    assert bradley_terry_loss(torch.zeros(3), torch.zeros(3)).item() == near(0.693147)


# 003-33, 003-36, 003-05. Rewards; population, sample deviation, mean only, leave one out, MaxRL: of the
# first and of the last member.
GROUPS = [
    ((1, 1, 1, 0, 0), (0.8165, -1.2247), (0.7303, -1.0954), (0.4, -0.6), (0.5, -0.75), (0.6667, -1)),
    ((1,) + 7 * (0,), (2.6458, -0.3780), (2.4749, -0.3536), (0.875, -0.125), (1.0, -0.1429), (7, -1)),
    ((10, 9, 9, 8), (1.4142, -1.4142), (1.2247, -1.2247), (1, -1), (1.3333, -1.3333), (0.1111, -0.1111)),
]  # fmt: skip


@pytest.mark.parametrize(("rewards", "population", "sample", "mean_only", "leave_one_out", "maxrl"), GROUPS)
def test_section_f_group_advantages(rewards, population, sample, mean_only, leave_one_out, maxrl):
    r = torch.tensor(rewards, dtype=torch.float32)
    n = len(rewards)
    for got, want in (
        (group_advantages(r, n), population),
        (group_advantages(r, n, scale="sample_std"), sample),
        (group_advantages(r, n, scale="none"), mean_only),
        (leave_one_out_advantages(r, n), leave_one_out),
        (maxrl_advantages(r, n), maxrl),
    ):
        assert (got[0].item(), got[-1].item()) == near(want, 5e-5)
        assert got.sum().item() == near(0.0)


def test_003_34_a_group_without_spread_is_exactly_zero():
    for value in (0.0, 1.0, 0.1, 1e8 / 3):
        for scale in ("std", "sample_std", "batch_std", "none"):
            assert not group_advantages(torch.full((7,), value), 7, scale=scale).any()
        assert not maxrl_advantages(torch.full((7,), value), 7).any()


# ---------------------------------------------------------------- seed 004


def test_004_26_point_masses():
    """A policy that says one thing: KL is -log of the reference's probability of it, 0·log 0 included."""
    point = torch.full((3, 1, 3), -torch.inf)
    point[[0, 1, 2], 0, [0, 1, 2]] = 0.0
    got = exact_kl(point, REF.float().log().expand(3, 1, 3))
    assert got.tolist() == near([0.2231, 1.6607, 4.6052], 5e-5)
    assert (got[2] / got[0]).item() == near(20.64, 5e-3)


def test_004_32_token_rewards_and_returns():
    logp, logp_ref = t(-1.0, -2.0, -0.5).view(1, 3), t(-1.5, -2.0, -2.5).view(1, 3)
    rewards = token_rewards(t(2.0), logp, logp_ref, beta=0.1)
    assert rewards[0].tolist() == near([-0.05, 0.0, 1.8], 1e-12)
    assert returns_to_go(rewards)[0].tolist() == near([1.75, 1.8, 1.8], 1e-12)
    assert (logp - logp_ref)[0, 2].exp().item() == near(7.389, 5e-4)


def test_004_05_three_checks_of_token_rewards():
    logp = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -0.2, -0.3]], requires_grad=True)
    logp_ref = torch.tensor([[-1.5, -2.0, -2.5], [-0.4, -0.1, -0.9]])
    score = torch.tensor([2.0, -1.0], requires_grad=True)
    assert token_rewards(score, logp, logp_ref, beta=0.0).tolist() == [[0, 0, 2], [0, 0, -1]]
    rewards = token_rewards(score, logp, logp_ref, beta=0.3)
    torch.testing.assert_close(rewards.sum(1), (score - 0.3 * (logp - logp_ref).sum(1)).detach())
    assert not rewards.requires_grad


def test_004_30_sequence_form_gives_one_return_at_every_position():
    total = 2.0 - 0.1 * 2.5
    assert returns_to_go(t(0.0, 0.0, total).view(1, 3))[0].tolist() == near([1.75, 1.75, 1.75])


def test_004_38_optimum_at_beta_one():
    p, proxy, _, drift = toy(1.0)
    _, log_z = optimal_policy(REF, REWARDS, 1.0)
    assert log_z.exp().item() == near(1.390364)
    assert p.tolist() == near([0.575389, 0.371466, 0.053145])
    assert (proxy, drift) == (near(0.477756), near(0.148190))
    assert proxy - drift == near(0.329566)
    assert log_z.item() == near(0.329566)
    assert float(REF @ REWARDS) == near(0.21)


def test_004_39_optimum_at_beta_one_quarter():
    p, proxy, _, drift = toy(0.25)
    assert p.tolist() == near([0.01952, 0.25312, 0.72736], 5e-6)
    assert (proxy, drift) == (near(1.70784, 5e-6), near(3.11820, 5e-6))
    assert proxy - 0.25 * drift == near(0.92829, 5e-6)


@pytest.mark.parametrize(
    ("beta", "proxy", "gold", "drift"),
    [
        (10, 0.2293, 0.1935, 0.0010),
        (1, 0.4778, 0.3183, 0.1482),
        (0.65901, 0.6842, 0.3513, 0.4098),
        (0.5, 0.9076, 0.3120, 0.8037),
        (0.25, 1.7078, -0.4742, 3.1182),
        (0.1, 1.9991, -0.9983, 4.5957),
    ],
)
def test_section_f_beta_frontier(beta, proxy, gold, drift):
    assert toy(beta)[1:] == (near(proxy, 6e-5), near(gold, 6e-5), near(drift, 6e-5))


@pytest.mark.parametrize(("beta", "delta"), [(0.5, 0.8037), (1.0, 0.1482), (0.25, 3.1182)])
def test_section_f_dual_ascent_ends_at_the_beta_of_the_frontier(beta, delta):
    """KL ≤ δ: a policy climbs E[r] - β·KL by exact natural gradients, and β moves with it."""
    logits, found = REF.log().clone(), 2.0
    for _ in range(4000):
        logits = logits + 0.2 * (REWARDS - found * (logits.softmax(0) / REF).log())
        found = lagrangian_beta(found, kl(logits.softmax(0), REF), delta, rate=0.01)
    assert kl(logits.softmax(0), REF) == pytest.approx(delta, rel=0.02)
    assert found == pytest.approx(beta, rel=0.02)
    assert kl(optimal_policy(REF, REWARDS, found)[0], REF) == pytest.approx(delta, rel=0.02)


def test_dual_ascent_lets_go_where_the_constraint_does_not_bind():
    """The best response of all costs -log 0.01 = 4.605 nats: with more than that allowed, β ends at 0."""
    beta, steps = 1.0, 0
    while beta > 0:
        drift = toy(beta)[3]
        beta, steps = lagrangian_beta(beta, drift, delta=5.0, rate=0.05), steps + 1
    assert steps < 30 and lagrangian_beta(0.0, 4.605, 5.0, 0.05) == 0.0
    assert lagrangian_beta(0.0, 6.0, 5.0, 0.05) == near(0.05)


def test_dual_ascent_follows_the_slope_of_the_dual():
    """d/dβ of max E[r] - β·(KL - δ) = β·log Z + β·δ is δ - KL at the optimum: descent on it is the rule."""
    beta, delta, h = 0.7, 0.5, 1e-5

    def dual(b: float) -> float:
        return b * optimal_policy(REF, REWARDS, b)[1].item() + b * delta

    slope = (dual(beta + h) - dual(beta - h)) / (2 * h)
    assert lagrangian_beta(beta, toy(beta)[3], delta, rate=0.1) == near(beta - 0.1 * slope, 1e-8)


def test_004_52_to_54_the_dial():
    """Proxy rises along all 121 betas; gold peaks at 0.659 and later falls below where it started."""
    betas = [10 ** (1 - i / 60) for i in range(121)]
    path = [toy(beta) for beta in betas]
    assert all(a[1] < b[1] for a, b in zip(path, path[1:], strict=False))
    best = max(range(121), key=lambda i: path[i][2])
    assert betas[best] == near(0.6556, 5e-4)
    low, high = 0.5, 0.9
    for _ in range(100):  # golden-section search of the exact peak
        left, right = low + 0.382 * (high - low), low + 0.618 * (high - low)
        low, high = (low, right) if toy(left)[2] > toy(right)[2] else (left, high)
    assert low == near(0.65901, 1e-4)
    assert toy(low)[2:] == (near(0.351305), near(0.4098, 5e-5))
    assert all(toy(beta)[2] == near(0.351, 8e-4) for beta in (0.63, 0.66, 0.69))
    assert toy(0.3998)[2] > 0.18 > toy(0.3996)[2]
    assert toy(0.3997)[3] == near(1.348, 1e-3)
    assert toy(0.3397)[2] > 0 > toy(0.3395)[2]


def test_e1_small_beta_does_not_overflow():
    probs, log_z = optimal_policy(REF.float(), REWARDS.float(), 0.001)
    assert probs.tolist() == near([0.0, 0.0, 1.0])
    assert 0.001 * log_z.item() == near(2.0, 5e-3)
