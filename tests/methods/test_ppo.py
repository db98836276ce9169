"""PPO: where scores and penalties land, values and advantages token by token, whitening, the two value
models, and the likelihood that is mixed in.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import Bench, bench, constant, in_two, listed
from torch import Tensor

from kleash.config import build
from kleash.errors import UsageError
from kleash.methods import METHODS
from kleash.methods.online import Scored
from kleash.methods.ppo import MixedBatch, estimate
from kleash.models.value import token_outputs
from kleash.rewards import Scores
from kleash.training import train

# One pass and one update, advantages that are the rewards of single tokens.
PLAIN: dict[str, Any] = {"rollout_epochs": 1, "minibatches": 1, "whiten": False, "beta": 0.0}
BY_TOKEN = {**PLAIN, "lam": 0.0}


def scored(it: Bench, lengths: list[int], logp_ref: Tensor | None = None) -> Scored:
    rollouts = it.rollouts(lengths)
    numbers = [1] * len(lengths)
    scores = Scores(torch.zeros(len(lengths)), 0)
    ref = rollouts.logp if logp_ref is None else logp_ref
    return Scored(rollouts, scores, None, scores.present, numbers, ref)


@pytest.mark.parametrize("padded", [False, True])
def test_report_49_returns_accumulate_and_padding_does_not_leak(padded: bool, tiny: Any) -> None:
    """Score 1 at the end, values .2, .4, .6, λ = .95: advantages .751, .58, .40, beside a longer row or
    not.
    """
    it = bench("ppo", tiny, samples_per_prompt=2, lam=0.95, beta=0.3)
    rows = scored(it, [3, 6 if padded else 3])
    width = rows.rollouts.logp.shape[1]
    values = torch.full((2, width), 0.9)
    values[0, :3] = torch.tensor([0.2, 0.4, 0.6])
    mask = rows.rollouts.response_mask
    advantages, returns = estimate(rows, torch.tensor([1.0, 0.0]), values, mask, 0.3, it.config)
    assert advantages[0].tolist() == pytest.approx([0.751, 0.58, 0.40] + [0.0] * (width - 3), abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.951, 0.98, 1.0] + [0.0] * (width - 3), abs=1e-6)


def test_report_50_rewards_in_padded_slots_do_not_flow_back(tiny: Any) -> None:
    """Charges of 1.5 and 1, then 2 and 2 in padding: returns 2.5, 1, 0, 0."""
    it = bench("ppo", tiny, samples_per_prompt=2, lam=1.0)
    rows = scored(it, [2, 4])
    rows.logp_ref = rows.rollouts.logp + torch.tensor([1.5, 1.0, 2.0, 2.0])
    mask = rows.rollouts.response_mask
    _, returns = estimate(rows, torch.zeros(2), torch.zeros(2, 4), mask, 1.0, it.config)
    assert returns[0].tolist() == pytest.approx([2.5, 1.0, 0.0, 0.0], abs=1e-5)
    assert returns[1].tolist() == pytest.approx([6.5, 5.0, 4.0, 2.0], abs=1e-5)


def by_row(it: Bench, field: str, rollouts: Any = None) -> dict[tuple[int, ...], list[float]]:
    """A field of all rows of the first update, by the ids of their responses."""
    found = {}
    for batch in it.collect(rollouts).updates[0].micro_batches:
        for i, length in enumerate(batch.batch.response_lengths.tolist()):
            ids = batch.batch.tokens[i][batch.batch.response_mask[i]]
            values = getattr(batch, field)[i].tolist()
            assert not any(values[length:]), "padding is exactly 0"
            found[tuple(ids.tolist())] = values[:length]
    return found


def test_report_51_score_on_the_last_real_token_and_the_end_penalty_once(tiny: Any) -> None:
    """[t, t, end] with 2 and [t, t, t, t, t] with 2 less 1.5."""
    it = bench("ppo", tiny, reward=constant(2.0), missing_end_penalty=1.5, **BY_TOKEN)
    rollouts = it.rollouts([3, 5, 5, 5, 3, 3, 3, 3])
    rollouts.ended[1] = False
    rollouts.response_ids[1, 4] = 7
    found = by_row(it, "advantages", rollouts)
    ids = [
        tuple(row[keep].tolist())
        for row, keep in zip(rollouts.response_ids, rollouts.response_mask, strict=True)
    ]
    assert found[ids[0]] == [0.0, 0.0, 2.0]
    assert found[ids[1]] == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert found[ids[2]] == [0.0, 0.0, 0.0, 0.0, 2.0]


def test_report_51_overlong_responses_lose_once(tiny: Any) -> None:
    """At most 6 tokens, the last 4 a buffer: 5 tokens lose ¾, 2 nothing."""
    it = bench("ppo", tiny, reward=constant(1.0), overlong_buffer=4, **BY_TOKEN)
    found = by_row(it, "advantages", it.rollouts([5, 2] * 4))
    assert {len(ids): sum(values) for ids, values in found.items()} == {5: 0.25, 2: 1.0}


@pytest.mark.parametrize("field", ["advantages", "values_old", "logp_old"])
def test_report_51_a_pad_that_is_the_end_token_hides_nothing(field: str, tiny: Any) -> None:
    """The end token has a value, an advantage and a log-prob of its own, whatever pads."""
    found = []
    for pad in ("<pad>", "<eos>"):
        tokenizer = tiny.tokenizer()
        tokenizer.pad_token = pad
        it = bench("ppo", tiny, tokenizer=tokenizer, **{**PLAIN, "beta": 0.1})
        with_opinions(it)
        found.append(by_row(it, field, it.rollouts([3, 5, 4, 2] * 2)))
    assert found[0] == found[1]
    assert all(ids[-1] == tokenizer.eos_token_id and values[-1] != 0.0 for ids, values in found[0].items())


def with_opinions(it: Bench) -> None:
    """Give the value model a head that is not 0."""
    head = it.models.value.head
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(3)))
        head.bias.fill_(0.5)


@pytest.mark.parametrize("value", ["trunk", "separate"])
@pytest.mark.parametrize("field", ["values_old", "advantages", "returns", "logp_old"])
def test_report_52_micro_batches_by_length_change_nothing(field: str, value: str, tiny: Any) -> None:
    """Rows of 1 to 12 tokens in one batch, in groups of like length, under a token budget."""
    lengths = [1, 12, 3, 2, 9, 1, 1, 2, 12, 12, 11, 5, 6, 6, 1, 2]
    found = []
    for limits in ({}, {"micro_batch_size": 4}, {"micro_batch_tokens": 80}):
        it = bench("ppo", tiny, batch_size=16, max_new_tokens=12, value=value, minibatches=2, **limits)
        with_opinions(it)
        rows: dict[tuple[int, ...], list[float]] = {}
        step = it.collect(it.rollouts(lengths))
        assert len(step.updates[0].micro_batches) == (2 if limits else 1)
        for update in step.updates[:2]:
            for batch in update.micro_batches:
                for i, ids in enumerate(batch.batch.tokens.tolist()):
                    rows[tuple(ids[: int(batch.batch.attention_mask[i].sum())])] = getattr(batch, field)[
                        i
                    ].tolist()
        found.append(rows)
    for other in found[1:]:
        assert found[0].keys() == other.keys() and len(other) > 12
        for ids, values in found[0].items():
            shorter = min(len(values), len(other[ids]))
            assert other[ids][:shorter] == pytest.approx(values[:shorter], rel=1e-4, abs=2e-5)
            assert not any(values[shorter:]) and not any(other[ids][shorter:])


def test_report_53_whitened_over_real_tokens_and_padding_stays_0(tiny: Any) -> None:
    it = bench("ppo", tiny, whiten=True, minibatches=1)
    (batch,) = it.collect(it.rollouts([1, 2, 6, 3, 4, 4, 2, 5])).updates[0].micro_batches
    real = torch.arange(6) < batch.batch.response_lengths[:, None]
    assert float(batch.advantages[real].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(batch.advantages[real].std()) == pytest.approx(1.0, rel=1e-5)
    assert not batch.advantages[~real].any() and not bool(real.all())


def test_report_47_53_a_response_without_a_score_counts_in_nothing(tiny: Any) -> None:
    """Neither in the mean and deviation nor in the loss; its own advantages are 0."""
    reward = listed(4.0, None, 1.0, 0.0, *[None] * 3, 2.0)
    it = bench("ppo", tiny, reward=reward, minibatches=1, reduction="token-mean")
    update = it.collect(it.rollouts([1, 2, 6, 3, 4, 4, 2, 5])).updates[0]
    (batch,) = update.micro_batches
    real = (torch.arange(6) < batch.batch.response_lengths[:, None]) & batch.used[:, None]
    assert int(batch.used.sum()) == 4 and update.items == int(real.sum()) == 15
    assert float(batch.advantages[real].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(batch.advantages[real].std()) == pytest.approx(1.0, rel=1e-5)
    assert not batch.advantages[~real].any() and not batch.returns[~real].any()


def test_report_53_whitened_over_two_processes(tiny: Any) -> None:
    """Each holds its part of what one process would have, by the mean and deviation of all."""
    lengths = [1, 2, 6, 3, 4, 4, 2, 5]
    whole = bench("ppo", tiny, whiten=True, minibatches=1)
    rollouts = whole.rollouts(lengths)
    want = by_row(whole, "advantages", rollouts)

    def half(first: int) -> Any:
        def work(gather: Any) -> dict[tuple[int, ...], list[float]]:
            it = bench("ppo", tiny, whiten=True, minibatches=1, batch_size=4, prompts=2)
            it.models.reward = whole.models.reward
            part = rollouts.take(list(range(first, first + 4)))
            part = replace(part, group=torch.zeros(4, dtype=torch.long))
            step = it.collect
            it.collect = lambda rollouts: step(rollouts, gather=gather)  # type: ignore[method-assign]
            return by_row(it, "advantages", part)

        return work

    here, there = in_two(half(0), half(4))
    got = here | there
    assert got.keys() == want.keys()
    for ids, values in want.items():
        assert got[ids] == pytest.approx(values, rel=1e-4, abs=1e-5)


def test_report_54_the_value_loss_has_its_half_and_the_clip_its_right_pair(tiny: Any) -> None:
    """Ratio 1.5, ε = .2: −1.2 for A = +1 and +1.5 for A = −1; old value 0, new 1, return 1, clip .2: .32."""
    it = bench("ppo", tiny, reduction="sequence-mean", samples_per_prompt=2, batch_size=4, minibatches=1,
               value_coef=10.0)  # fmt: skip
    with torch.no_grad():
        it.models.value.head.bias.fill_(1.0)
    (batch,) = it.collect(it.rollouts([1] * 4)).updates[0].micro_batches
    batch.logp_old = batch.logp_old - math.log(1.5)
    batch.advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    batch.values_old, batch.returns = torch.zeros(4, 1), torch.ones(4, 1)
    output = it.loss(batch)
    surrogate = torch.tensor([-1.2, 1.5, -1.2, 1.5])
    torch.testing.assert_close(output.per_item.detach(), surrogate + 3.2, rtol=1e-5, atol=1e-5)
    assert output.metrics["value/loss"] == (pytest.approx(4 * 0.32), 4.0)
    shares = {name: output.metrics[f"clip/{name}"][0] for name in ("above_dead", "above_alive", "below_dead")}
    assert shares == {"above_dead": 2.0, "above_alive": 2.0, "below_dead": 0.0}


# The value models.


@pytest.mark.parametrize("value", ["trunk", "separate"])
def test_a_value_model_learns_a_constant_reward(value: str, tiny: Any, tmp_path: Path) -> None:
    run = train(
        "ppo",
        **tiny.options("ppo", tmp_path / "run", reward=constant(2.0), value=value, value_coef=1.0, beta=0.0,
                       steps=12, learning_rate=2e-2),
    )  # fmt: skip
    steps = [row for row in run.metrics if row["split"] == "train"]
    assert steps[0]["value/mean"] == 0.0 and steps[0]["value/loss"] > 1.0
    assert steps[-1]["value/mean"] == pytest.approx(2.0, abs=0.3) and steps[-1]["value/loss"] < 0.1


@pytest.mark.parametrize(("value", "reached"), [("trunk", True), ("separate", False)])
def test_the_value_loss_reaches_the_policy_through_a_shared_trunk_only(
    value: str, reached: bool, tiny: Any
) -> None:
    it = bench("ppo", tiny, value=value, minibatches=1)
    with_opinions(it)
    update = it.collect().updates[0]
    for batch in update.micro_batches:
        batch.advantages = torch.zeros_like(batch.advantages)
    assert bool(it.gradient(update).any()) == reached
    assert all(p.grad is not None and bool(p.grad.any()) for p in it.models.value.head.parameters())
    if not reached:
        assert it.models.value.backbone is not None
        grads = [p.grad for p in it.models.value.backbone.parameters()]
        assert any(g is not None and bool(g.any()) for g in grads)


def test_a_separate_value_model_starts_as_the_policy_s_transformer_and_is_not_it(tiny: Any) -> None:
    it = bench("ppo", tiny, value="separate")
    backbone = it.models.value.backbone
    ours = dict(it.models.policy.base_model.named_parameters())
    for name, parameter in backbone.named_parameters():
        assert torch.equal(parameter, ours[name]) and parameter.data_ptr() != ours[name].data_ptr()
    learner = dict(it.models.learner.named_parameters())
    assert any(name.startswith("value.backbone.") for name in learner)


@pytest.mark.parametrize("value", ["trunk", "separate"])
def test_report_1_values_are_looked_up_without_dropout(
    value: str, tiny: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """dropout=true is for the gradient: while rollouts are judged it is off, in the value model too."""
    seen: list[bool] = []
    method = METHODS["ppo"]

    def modes(models: Any) -> list[bool]:
        return [module.training for model in (models.policy, models.value) for module in model.modules()]

    def collect(models: Any, *rest: Any) -> Any:
        seen.append(any(modes(models)))
        return method.collect(models, *rest)  # type: ignore[misc]

    def loss(models: Any, *rest: Any) -> Any:
        seen.append(all(modes(models)))
        return method.loss(models, *rest)

    monkeypatch.setitem(METHODS, "ppo", replace(method, collect=collect, loss=loss))
    model = (tiny.model(dropout=0.2), tiny.tokenizer())
    train("ppo", **tiny.options("ppo", tmp_path / "run", model=model, value=value, dropout=True, steps=2))
    assert seen == [False, *[True] * 4] * 2


def test_explained_variance_of_values(tiny: Any) -> None:
    """0 for a constant, below 0 for worse: here the head knows nothing of the return."""
    it = bench("ppo", tiny, **PLAIN)
    assert it.collect().metrics["value/explained"] == (0.0, 1.0)
    with_opinions(it)
    assert it.collect().metrics["value/explained"][0] < 0.0


# Demonstrations mixed in.

DEMONSTRATIONS = [
    {"prompt": "the cat", "completion": " sat on the mat"},
    {"prompt": "the dog", "completion": " ran"},
    {"prompt": "a bird flew", "completion": " over the tree and then home"},
]


def ptx(tiny: Any, **changes: Any) -> Bench:
    """Nothing but the likelihood term has a gradient: scores are 0 and values cost nothing."""
    options = {"ptx_data": DEMONSTRATIONS, "ptx_coef": 0.7, "ptx_batch_size": 3, "value_coef": 0.0}
    return bench("ppo", tiny, reward=constant(0.0), **{**PLAIN, **options, **changes})


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("score", [0.0, None])
def test_004_19_ptx_adds_the_gradient_of_sft_times_its_weight(
    reduction: str, score: float | None, tiny: Any
) -> None:
    """Also in a step without any score."""
    it = ptx(tiny, reduction=reduction)
    it.models.reward = constant(score)
    update = it.collect().updates[0]
    (mixed,) = [b for b in update.micro_batches if isinstance(b, MixedBatch)]
    got = it.gradient(update)
    sft = METHODS["sft"]
    output = sft.loss(it.models, mixed.batch, build(sft.config, {"data": []}))
    it.models.policy.zero_grad()
    (0.7 * output.per_item.sum() / sft.count(mixed.batch)).backward()  # type: ignore[misc]
    want = torch.cat([p.grad.flatten() for p in it.models.policy.parameters()])
    assert want.norm() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    loss, tokens = it.loss(mixed).metrics["ptx/loss"]
    assert loss / tokens == pytest.approx(float(output.per_item.detach().mean()), rel=1e-5)


def test_report_55_ptx_beside_two_micro_batches_is_as_beside_one(tiny: Any) -> None:
    gradients = []
    for micro in (None, 4):
        mixed = {"ptx_data": DEMONSTRATIONS, "ptx_coef": 0.7, "ptx_batch_size": 3}
        it = bench("ppo", tiny, micro_batch_size=micro, minibatches=1, **mixed)
        update = it.collect().updates[0]
        assert len(update.micro_batches) == (2 if micro is None else 3)
        gradients.append(it.gradient(update))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_report_56_ptx_over_two_processes_is_one_mean(tiny: Any) -> None:
    """Their gradients, added up and divided as the loop does, are that of the mean over the tokens of both
    processes' demonstrations, of which they drew different ones.
    """

    def half(seed: int) -> Any:
        def work(gather: Any) -> tuple[Tensor, Tensor, int, float]:
            it = ptx(tiny)
            generator = torch.Generator().manual_seed(seed)
            update = it.collect(gather=gather, generator=generator).updates[0]
            (mixed,) = [b for b in update.micro_batches if isinstance(b, MixedBatch)]
            out = token_outputs(it.models.policy, mixed.batch)
            losses = it.loss(mixed).per_item.sum(), -(out.logp * out.mask).sum()
            grads = [torch.autograd.grad(loss, list(it.models.policy.parameters())) for loss in losses]
            ours, plain = (torch.cat([g.flatten() for g in grad]) for grad in grads)
            return ours, plain, mixed.trained_tokens, update.items

        return work

    here, there = in_two(half(0), half(1))
    assert here[2] != there[2]
    got = (here[0] + there[0]) / (here[3] + there[3])
    want = 0.7 * (here[1] + there[1]) / (here[2] + there[2])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("change", [{"ptx_coef": 0.5}, {"ptx_data": DEMONSTRATIONS}])
def test_ptx_needs_data_and_weight(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the likelihood term needs both"):
        build(METHODS["ppo"].config, {"data": [], "reward": len, **change})


@pytest.mark.parametrize(
    "variant",
    [
        {"value": "separate"},
        {"ptx_data": DEMONSTRATIONS, "ptx_coef": 0.5, "ptx_batch_size": 2},
        {"kl_control": "adaptive", "kl_target": 0.5, "curriculum": "edge"},
    ],
    ids=["separate", "ptx", "control"],
)
def test_report_63_resume_is_bit_identical(variant: dict[str, Any], tiny: Any, tmp_path: Path) -> None:
    """Weights of policy and value model, β and visits are in the checkpoint; what is drawn follows from
    step and seed.
    """
    whole = train("ppo", **tiny.options("ppo", tmp_path / "whole", steps=5, save_every=5, **variant))
    train("ppo", **tiny.options("ppo", tmp_path / "run", steps=2, save_every=2, **variant))
    again = train(
        "ppo", **tiny.options("ppo", tmp_path / "run", steps=5, save_every=5, resume=True, **variant)
    )
    for file in ("weights.safetensors", "optimizer.safetensors"):
        a, b = (run.checkpoints / "step-000005" / file for run in (whole, again))
        assert a.read_bytes() == b.read_bytes()
    clock = ("seconds", "time/", "tokens/per_second")
    rows = [
        [
            {k: v for k, v in row.items() if not k.startswith(clock)}
            for row in run.metrics
            if row["split"] == "train"
        ]
        for run in (whole, again)
    ]
    assert rows[0] == rows[1]
