"""Slow twins: plain Python loops written from the formulas, against the functions on random shapes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from kleash.functional import (
    aggregate,
    bradley_terry_loss,
    brier_score,
    cispo_objective,
    clip_shares,
    clipped_surrogate,
    dpo_loss,
    exact_kl,
    expected_calibration_error,
    gae,
    group_advantages,
    importance_ratio,
    kl_loss,
    leave_one_out_advantages,
    masked_moments,
    maxrl_advantages,
    optimal_policy,
    overlong_penalty,
    position_baseline,
    reduce,
    reinforce_loss,
    returns_to_go,
    sapo_objective,
    sequence_logprob,
    token_logprobs,
    token_rewards,
    truncated_importance_weight,
    value_loss,
    whiten,
)

SEEDS = range(6)


class Case:
    """Random (N, L) tensors and a mask with holes, empty rows and padding on both sides."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.rng, self.n, self.length = rng, rng.randint(1, 6), rng.randint(1, 7)
        self.mask = torch.tensor([[rng.random() < 0.7 for _ in range(self.length)] for _ in range(self.n)])
        self.real = [[t for t in range(self.length) if row[t]] for row in self.mask.tolist()]

    def draw(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        return torch.tensor([self.rng.gauss(0, 1) for _ in range(count)], dtype=torch.float64).view(shape)

    def matrix(self) -> Tensor:
        return self.draw(self.n, self.length)


@pytest.fixture(params=SEEDS)
def case(request) -> Case:
    return Case(request.param)


def same(got: Tensor, want: list) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64).view(got.shape))


def test_token_logprobs(case):
    logits = case.draw(case.n, case.length, 5)
    tokens = torch.tensor([[case.rng.randrange(5) for _ in range(case.length)] for _ in range(case.n)])
    want = [
        [logits[i, t, tokens[i, t]].item() - math.log(sum(math.exp(z) for z in logits[i, t].tolist()))
         for t in range(case.length)]
        for i in range(case.n)
    ]  # fmt: skip
    same(token_logprobs(logits, tokens), want)


def test_exact_kl(case):
    logits, logits_ref = case.draw(case.n, case.length, 5), case.draw(case.n, case.length, 5)
    logits[..., 2] = -math.inf
    want = []
    for i in range(case.n):
        total = 0.0
        for t in case.real[i]:
            z_p, z_q = logits[i, t].tolist(), logits_ref[i, t].tolist()
            sum_p, sum_q = sum(map(math.exp, z_p)), sum(map(math.exp, z_q))
            for a, b in zip(z_p, z_q, strict=True):
                p, q = math.exp(a) / sum_p, math.exp(b) / sum_q
                total += p * math.log(p / q) if p > 0 else 0.0
        want.append(total)
    same(exact_kl(logits, logits_ref, case.mask), want)


def test_sequence_logprob(case):
    logp = case.matrix()
    sums = [sum(logp[i, t].item() for t in real) for i, real in enumerate(case.real)]
    same(sequence_logprob(logp, case.mask), sums)
    means = [s / len(real) if real else 0.0 for s, real in zip(sums, case.real, strict=True)]
    same(sequence_logprob(logp, case.mask, "mean"), means)


def test_token_rewards(case):
    logp, logp_ref, score, beta = case.matrix(), case.matrix(), case.draw(case.n), 0.37
    want = [[0.0] * case.length for _ in range(case.n)]
    for i, real in enumerate(case.real):
        for t in real:
            want[i][t] = -beta * (logp[i, t] - logp_ref[i, t]).item()
        if real:
            want[i][real[-1]] += score[i].item()
    same(token_rewards(score, logp, logp_ref, beta, case.mask), want)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_returns_to_go(case, gamma):
    rewards = case.matrix()
    want = [[0.0] * case.length for _ in range(case.n)]
    for i, real in enumerate(case.real):
        for k, t in enumerate(real):
            want[i][t] = sum(gamma**j * rewards[i, u].item() for j, u in enumerate(real[k:]))
    same(returns_to_go(rewards, case.mask, gamma), want)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (0.7, 1.0)])
def test_gae_as_a_sum_of_td_errors(case, gamma, lam):
    rewards, values = case.matrix(), case.matrix()
    want = [[0.0] * case.length for _ in range(case.n)]
    for i, real in enumerate(case.real):
        v = [values[i, t].item() for t in real] + [0.0]
        errors = [rewards[i, t].item() + gamma * v[k + 1] - v[k] for k, t in enumerate(real)]
        for k, t in enumerate(real):
            want[i][t] = sum((gamma * lam) ** j * e for j, e in enumerate(errors[k:]))
    advantages, returns = gae(rewards, values, gamma, lam, case.mask)
    same(advantages, want)
    torch.testing.assert_close(returns, (advantages + values) * case.mask)


def test_position_baseline_averages_the_rows_that_have_the_position(case):
    returns = case.matrix()
    want = []
    for t in range(case.length):
        column = [returns[i, t].item() for i in range(case.n) if t in case.real[i]]
        want.append(sum(column) / len(column) if column else 0.0)
    same(position_baseline(returns, case.mask), want)


@pytest.mark.parametrize("scale", ["std", "sample_std", "batch_std", "none"])
def test_group_advantages(case, scale):
    size = 4
    rewards = case.draw(case.n * size).tolist()
    for i in range(len(rewards)):
        if case.rng.random() < 0.3:
            rewards[i] = math.nan
    everything = [r for r in rewards if not math.isnan(r)]
    want, loo = [], []
    for g in range(case.n):
        group = rewards[g * size : (g + 1) * size]
        present = [r for r in group if not math.isnan(r)]
        mean = sum(present) / len(present) if present else 0.0
        pool = everything if scale == "batch_std" else present
        middle = sum(pool) / len(pool) if pool else 0.0
        squares = sum((r - middle) ** 2 for r in pool)
        divisor = len(pool) - (scale == "sample_std")
        s = 1.0 if scale == "none" else math.sqrt(squares / divisor) if len(pool) > 1 else 1.0
        for r in group:
            want.append(0.0 if math.isnan(r) else (r - mean) / s)
            others = len(present) - 1
            loo.append(0.0 if math.isnan(r) or others == 0 else r - (sum(present) - r) / others)
    same(group_advantages(torch.tensor(rewards, dtype=torch.float64), size, scale), want)
    same(leave_one_out_advantages(torch.tensor(rewards, dtype=torch.float64), size), loo)


def test_maxrl_advantages(case):
    size = 4
    rewards = [
        math.nan if case.rng.random() < 0.3 else case.rng.choice((0.0, 0.0, 1.0, 0.3))
        for _ in range(case.n * size)
    ]
    want = []
    for g in range(case.n):
        group = rewards[g * size : (g + 1) * size]
        present = [r for r in group if not math.isnan(r)]
        mean = sum(present) / len(present) if present else 0.0
        want += [0.0 if math.isnan(r) or mean == 0 else (r - mean) / mean for r in group]
    same(maxrl_advantages(torch.tensor(rewards, dtype=torch.float64), size), want)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence-mean"])
def test_ratios_and_weights(case, level):
    logp, other = case.matrix(), case.matrix()
    want = [[1.0] * case.length for _ in range(case.n)]
    for i, real in enumerate(case.real):
        gaps = {t: (logp[i, t] - other[i, t]).item() for t in real}
        total = sum(gaps.values())
        row = {"sequence": total, "sequence-mean": total / max(len(real), 1)}
        for t in real:
            want[i][t] = math.exp(gaps[t] if level == "token" else row[level])
    same(truncated_importance_weight(logp, other, math.inf, case.mask, level), want)
    for cap in (1.5, 0.5):  # a masked slot is 1 below a cap of any height
        capped = [
            [min(w, cap) if t in case.real[i] else 1.0 for t, w in enumerate(row)]
            for i, row in enumerate(want)
        ]
        same(truncated_importance_weight(logp, other, cap, case.mask, level), capped)
    if level != "sequence":
        same(importance_ratio(logp, other, case.mask, level.removesuffix("-mean")), want)


def test_clip_shares(case):
    ratio, advantages = case.matrix().exp(), case.matrix()
    want = dict.fromkeys(("above_dead", "below_dead", "above_alive", "below_alive", "tokens"), 0)
    for i, real in enumerate(case.real):
        for t in real:
            rho, a = ratio[i, t].item(), advantages[i, t].item()
            want["tokens"] += 1
            if rho > 1.3:
                want["above_dead" if a > 0 else "above_alive"] += 1
            elif rho < 0.8:
                want["below_dead" if a < 0 else "below_alive"] += 1
    assert clip_shares(ratio, advantages, case.mask, 0.2, 0.3) == want


def test_cispo_and_sapo(case):
    logp, ratio, advantages = case.matrix(), case.matrix().exp(), case.matrix()
    rows = list(zip(*(x.flatten().tolist() for x in (logp, ratio, advantages)), strict=True))
    same(
        cispo_objective(logp, ratio, advantages, 0.1, 0.5),
        [min(max(r, 0.9), 1.5) * a * z for z, r, a in rows],
    )
    same(cispo_objective(logp, ratio, advantages, None, 0.5), [min(r, 1.5) * a * z for z, r, a in rows])
    tau = [2.0 if a > 0 else 3.0 for _, _, a in rows]
    gates = [4 / x / (1 + math.exp(-x * (r - 1))) for x, (_, r, _) in zip(tau, rows, strict=True)]
    same(
        sapo_objective(ratio, advantages, 2.0, 3.0), [g * a for g, (_, _, a) in zip(gates, rows, strict=True)]
    )


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss(case, clip):
    values, old, returns = case.matrix(), case.matrix(), case.matrix()
    want = [[0.0] * case.length for _ in range(case.n)]
    for i, real in enumerate(case.real):
        for t in real:
            v, o, g = (x[i, t].item() for x in (values, old, returns))
            near = v if clip is None else min(max(v, o - clip), o + clip)
            want[i][t] = max((v - g) ** 2, (near - g) ** 2) / 2
    same(value_loss(values, old, returns, clip, case.mask, "none"), want)
    tokens = max(sum(map(len, case.real)), 1)
    same(value_loss(values, old, returns, clip, case.mask), [sum(map(sum, want)) / tokens])


def test_kl_loss(case):
    logp, logp_ref = case.matrix(), case.matrix()
    want = {"k2": [], "k3": []}
    for i in range(case.n):
        for t in range(case.length):
            d = (logp[i, t] - logp_ref[i, t]).item() if t in case.real[i] else 0.0
            want["k2"].append(d * d / 2)
            want["k3"].append(math.exp(-d) - 1 + d)
    for estimator, values in want.items():
        same(kl_loss(logp, logp_ref, estimator, case.mask), values)


def test_overlong_penalty(case):
    lengths = [case.rng.randint(0, 40) for _ in range(50)]
    want = [0.0 if n <= 20 else (20 - n) / 10 if n <= 30 else -1.0 for n in lengths]
    torch.testing.assert_close(overlong_penalty(torch.tensor(lengths), 30, 10), torch.tensor(want))


def test_masked_moments(case):
    values = case.matrix()
    real = [values[i, t].item() for i, row in enumerate(case.real) for t in row]
    same(masked_moments(values, case.mask), [len(real), sum(real), sum(x * x for x in real)])


def test_whiten(case):
    values = case.matrix()
    real = [values[i, t].item() for i, row in enumerate(case.real) for t in row]
    want = [[0.0] * case.length for _ in range(case.n)]
    if len(real) > 1:
        mean = sum(real) / len(real)
        std = math.sqrt(sum((x - mean) ** 2 for x in real) / (len(real) - 1))
        for i, row in enumerate(case.real):
            for t in row:
                want[i][t] = (values[i, t].item() - mean) / std
    same(whiten(values, case.mask), want)


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sequence-token-mean", "constant"])
def test_reduce_and_aggregate(case, reduction):
    values, length = case.matrix(), 5 if reduction == "constant" else None
    rows = [[values[i, t].item() for t in real] for i, real in enumerate(case.real) if real]
    sequences, tokens = max(len(rows), 1), max(sum(map(len, rows)), 1)
    want = {
        "token-mean": sum(map(sum, rows)) / tokens,
        "sequence-mean": sum(map(sum, rows)) / sequences,
        "sequence-token-mean": sum(sum(r) / len(r) for r in rows) / sequences,
        "constant": sum(map(sum, rows)) / 5 / sequences,
    }
    same(reduce(values, case.mask, reduction, length), [want[reduction]])
    items, count = aggregate(values, case.mask, reduction, length)
    same(items.sum() / count.clamp(min=1), [want[reduction]])


def test_reinforce_loss(case):
    logp, advantages = case.matrix(), case.matrix()
    sequences = max(sum(map(bool, case.real)), 1)
    total = sum(advantages[i, t].item() * logp[i, t].item() for i, real in enumerate(case.real) for t in real)
    same(reinforce_loss(logp, advantages, case.mask), [-total / sequences])
    one = case.draw(case.n)
    total = sum(one[i].item() * logp[i, t].item() for i, real in enumerate(case.real) for t in real)
    same(reinforce_loss(logp, one, case.mask), [-total / sequences])


def test_clipped_surrogate(case):
    ratio, advantages = case.matrix().exp(), case.matrix()
    want = [
        min(r * a, min(max(r, 0.8), 1.3) * a)
        for r, a in zip(ratio.flatten().tolist(), advantages.flatten().tolist(), strict=True)
    ]
    same(clipped_surrogate(ratio, advantages, 0.2, 0.3), want)


def test_pair_losses(case):
    w, losers, ref_w, ref_l, margin = (case.draw(case.n) for _ in range(5))
    rows = list(zip(*(x.tolist() for x in (w, losers, ref_w, ref_l, margin)), strict=True))

    def minus_log_sigmoid(x: float) -> float:
        return math.log1p(math.exp(-x))

    bt = [minus_log_sigmoid(a - b - m) + 0.1 * (a + b) ** 2 for a, b, _, _, m in rows]
    same(bradley_terry_loss(w, losers, margin, 0.1, "none"), bt)
    same(bradley_terry_loss(w, losers, margin, 0.1, "sum"), [sum(bt)])
    margins = [0.3 * ((a - c) - (b - d)) for a, b, c, d, _ in rows]
    dpo = [0.9 * minus_log_sigmoid(m) + 0.1 * minus_log_sigmoid(-m) for m in margins]
    loss, reward_w, reward_l = dpo_loss(w, losers, ref_w, ref_l, 0.3, 0.1)
    same(loss, [sum(dpo) / len(dpo)])
    same(reward_w, [0.3 * (a - c) for a, _, c, _, _ in rows])
    same(reward_l, [0.3 * (b - d) for _, b, _, d, _ in rows])


def test_optimal_policy(case):
    ref, rewards = case.draw(case.n, 5).softmax(-1), case.draw(case.n, 5)
    probs, log_z = optimal_policy(ref, rewards, 0.4)
    for i in range(case.n):
        weights = [q * math.exp(r / 0.4) for q, r in zip(ref[i].tolist(), rewards[i].tolist(), strict=True)]
        same(probs[i], [w / sum(weights) for w in weights])
        same(log_z[i], [math.log(sum(weights))])


def test_calibration(case):
    n = 40
    probs = torch.tensor([round(case.rng.random(), 2) for _ in range(n)], dtype=torch.float64)
    outcomes = torch.tensor([case.rng.random() < p for p in probs.tolist()])
    edges = [b / 10 for b in range(11)]
    want = 0.0
    for b in range(10):
        inside = [
            (p, o)
            for p, o in zip(probs.tolist(), outcomes.tolist(), strict=True)
            if edges[b] < p <= edges[b + 1] or (b == 0 and p == 0)
        ]
        if inside:
            confidence, accuracy = (sum(x) / len(inside) for x in zip(*inside, strict=True))
            want += len(inside) / n * abs(accuracy - confidence)
    same(expected_calibration_error(probs, outcomes, 10), [want])
    same(
        brier_score(probs, outcomes),
        [sum((p - o) ** 2 for p, o in zip(probs.tolist(), outcomes.tolist(), strict=True)) / n],
    )
