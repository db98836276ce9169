"""The group-relative methods, and what all online methods share: public failures of other libraries, by their
numbers, through collect and loss.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import FAMILY, GROUP, ONLINE, bench, constant, listed, varied

from kleash.config import build
from kleash.errors import UsageError
from kleash.methods import METHODS
from kleash.methods.base import Context
from kleash.methods.group import advantages_of
from kleash.models import autocast
from kleash.training.processes import add_sums, means


def options(name: str, **changes: Any) -> Any:
    return build(METHODS[name].config, {"data": [], "reward": varied, **changes})


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.5])
@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo", "reinforce"])
def test_report_33_temperature_acts_on_both_sides(name: str, temperature: float, tiny: Any) -> None:
    """As sampled, as trained, under an equal reference and as the model itself says at that temperature: one
    log-prob, ratio 1, KL 0.
    """
    several = {} if name == "reinforce" else {"rollout_epochs": 2, "minibatches": 1}
    it = bench(name, tiny, start=1, beta=0.1, temperature=temperature, **several)
    step = it.collect(exact_kl=True)
    assert all(abs(means(step.metrics)[f"kl/{kind}"]) < 1e-5 for kind in ("k1", "k3", "exact"))
    (batch,) = step.updates[0].micro_batches
    metrics = it.loss(batch).metrics
    assert metrics["policy/sampler_gap"][0] / metrics["policy/sampler_gap"][1] < 1e-5
    if several:
        assert metrics["ratio/mean"][0] == metrics["ratio/mean"][1]
    for row, trained, logp in zip(batch.batch.tokens, batch.batch.response_mask, batch.logp, strict=True):
        with torch.no_grad():
            logits = it.models.policy(row[None]).logits[0, :-1] / temperature
        own = logits.log_softmax(-1).gather(-1, row[1:, None])[trained[1:], 0]
        torch.testing.assert_close(logp[: len(own)], own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_k": 50}])
def test_report_34_a_truncated_sampler_is_refused(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"top_p=.* top_k=.*: a truncated sampler renormalises"):
        options(name, **change)


@pytest.mark.parametrize(
    ("level", "raw"),
    [("sequence", math.exp(1.2)), ("sequence-mean", math.exp(0.012)), ("token", math.exp(0.012))],
)
def test_report_35_which_weight_is_named_and_logged_raw_and_cut_off(
    level: str, raw: float, tiny: Any
) -> None:
    """100 tokens that the trainer finds more likely by 0.012 each: summed 3.32, averaged 1.012."""
    it = bench("grpo", tiny, importance=level, importance_cap=2.0, samples_per_prompt=2, max_new_tokens=100)
    rollouts = it.rollouts([100] * 2)
    (batch,) = it.collect(rollouts).updates[0].micro_batches
    batch.logp = batch.logp - 0.012
    metrics = means(it.loss(batch).metrics)
    assert metrics["policy/importance/raw"] == pytest.approx(raw, rel=1e-4)
    assert metrics["policy/importance"] == pytest.approx(min(raw, 2.0), rel=1e-4)
    assert METHODS["grpo"].conventions(it.config)["importance"] == f"{level}, cut off at 2"


@pytest.mark.parametrize(("name", "level"), [("grpo", "token"), ("gspo", "sequence")])
def test_report_35_which_ratio_is_named_and_does_not_grow_with_length(
    name: str, level: str, tiny: Any
) -> None:
    """The same 100 tokens against the old policy: neither the token's nor GSPO's ratio is 3.32."""
    it = bench(name, tiny, rollout_epochs=2, samples_per_prompt=2, max_new_tokens=100)
    (batch,) = it.collect(it.rollouts([100] * 2)).updates[0].micro_batches
    it.loss(batch)
    batch.logp_old = batch.logp_old - 0.012
    metrics = means(it.loss(batch).metrics)
    assert metrics["ratio/mean"] == pytest.approx(math.exp(0.012), rel=1e-5)
    assert (metrics["clip/above_dead"] > 0) == (name == "gspo"), "1.012 is above 1.0004, and not above 1.2"
    assert METHODS[name].conventions(it.config)["ratio"].startswith(level)


@pytest.mark.parametrize("gap", [100.0, -100.0])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_report_38_a_wild_token_keeps_loss_and_gradient_finite(estimator: str, gap: float, tiny: Any) -> None:
    """One token 100 nats off the reference, then off the old policy."""
    it = bench("grpo", tiny, beta=0.1, kl_in="loss", kl_estimator=estimator, rollout_epochs=2)
    step = it.collect()
    (batch,) = step.updates[0].micro_batches
    for field in ("logp_ref", "logp_old"):
        it.loss(batch)
        whole = getattr(batch, field).clone()
        wild = whole.clone()
        wild[0, 0] += gap
        setattr(batch, field, wild)
        gradient = it.gradient(step.updates[0])
        assert bool(gradient.isfinite().all()) and math.isfinite(float(gradient.norm()))
        assert all(math.isfinite(value) for value in means(it.loss(batch).metrics).values())
        setattr(batch, field, whole)


def test_report_40_log_ratios_are_float32_under_bfloat16(tiny: Any) -> None:
    it = bench("grpo", tiny)
    with autocast("bfloat16"):
        (batch,) = it.collect().updates[0].micro_batches
        output = it.loss(batch)
    tensors = (batch.logp, batch.logp_old, batch.logp_ref, batch.advantages, output.per_item)
    assert all(tensor.dtype == torch.float32 for tensor in tensors)


@pytest.mark.parametrize("value", [3.0, 0.0, -2.5])
@pytest.mark.parametrize("name", GROUP)
def test_report_42_alike_scores_give_no_gradient_and_are_counted(name: str, value: float, tiny: Any) -> None:
    value = abs(value) if name == "maxrl" else value
    it = bench(name, tiny, beta=0.0, reward=constant(value))
    step = it.collect()
    metrics = means(step.metrics)
    assert not it.gradient(step.updates[0]).any() and float(it.mean_loss(step.updates[0])) == 0.0
    assert metrics["reward/no_spread"] == 1.0
    assert metrics["groups/all_right"] == float(value >= 1.0) == 1 - metrics["groups/all_wrong"]


@pytest.mark.parametrize("name", GROUP)
def test_report_42_a_kl_in_the_loss_teaches_where_scores_do_not(name: str, tiny: Any) -> None:
    """Alike scores leave the KL's gradient, and it alone."""
    kl = {"beta": 0.1, "kl_in": "loss", "kl_estimator": "exact"}
    it = bench(name, tiny, reward=constant(1.0), **kl)
    gradient = it.gradient(it.collect().updates[0])
    assert gradient.norm() > 1e-3
    it.config.beta, it.config.kl_estimator = 0.2, "exact"
    torch.testing.assert_close(it.gradient(it.collect().updates[0]), 2 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", GROUP)
def test_report_42_a_group_of_one_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="samples_per_prompt=1"):
        options(name, samples_per_prompt=1)


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize(
    ("name", "change", "best"),
    [
        ("grpo", {}, 1.0),
        ("grpo", {"scale": "sample_std"}, 0.5**0.5),
        ("dr-grpo", {}, 0.5),
        ("rloo", {"beta": 0.0}, 1.0),
        ("maxrl", {}, 1.0),
        ("grpo", {"scale": "batch_std"}, 0.5 / 4.762),
    ],
)
def test_report_43_44_scores_are_compared_within_their_prompt(
    name: str, change: dict[str, Any], best: float, micro: int | None, tiny: Any
) -> None:
    """Prompt A scores 1 and 0, prompt B 10 and 10, whatever stands beside what in a micro-batch."""

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        first = prompts.index(prompts[0])
        return [10.0 if p != prompts[0] else float(i == first) for i, p in enumerate(prompts)]

    it = bench(
        name, tiny, reward=reward, samples_per_prompt=2, batch_size=4, micro_batch_size=micro, **change
    )
    step = it.collect(it.rollouts([3, 3, 5, 5]))
    a = torch.tensor(it.prompts[0].prompt_ids)
    found = [
        (bool(torch.equal(row[: len(a)], a)), advantage)
        for batch in step.updates[0].micro_batches
        for row, advantage in zip(batch.batch.tokens, batch.advantages[:, 0].tolist(), strict=True)
    ]
    assert [x for is_a, x in found if is_a] == pytest.approx([best, -best], rel=1e-3)
    assert all(x == 0.0 for is_a, x in found if not is_a)


def test_report_44_the_two_deviations_are_not_exchanged() -> None:
    """1, 0 and 10, 10: the group's own deviation is 1/2, that of all four 4.76."""
    rewards = torch.tensor([1.0, 0.0, 10.0, 10.0])
    context = Context(step=1, generator=torch.Generator())
    group, batch = (
        advantages_of(rewards, options("grpo", samples_per_prompt=2, batch_size=4, scale=scale), context)
        for scale in ("std", "batch_std")
    )
    everything = rewards.std(correction=0)
    torch.testing.assert_close(group, torch.tensor([1.0, -1.0, 0.0, 0.0]))
    torch.testing.assert_close(batch, torch.tensor([0.5, -0.5, 0.0, 0.0]) / everything)


def test_report_44_the_batch_is_that_of_all_processes() -> None:
    """What each of two processes gets is its share of what one would."""
    rewards = torch.tensor([1.0, 0.0, 10.0, 10.0, 2.0, 4.0, torch.nan, 3.0])
    config = options("grpo", samples_per_prompt=2, batch_size=8, scale="batch_std")
    seen: list[torch.Tensor] = []

    def context(gather: Any) -> Context:
        return Context(step=1, generator=torch.Generator(), gather=gather)

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    whole = advantages_of(rewards, config, context(lambda t: t))
    for half in (rewards[:4], rewards[4:]):
        advantages_of(half, config, context(remember))
    parts = [
        advantages_of(half, config, context(lambda t: torch.cat(seen))) for half in (rewards[:4], rewards[4:])
    ]
    assert all(tensor.shape == seen[0].shape for tensor in seen)
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("reduction", "value"),
    [("token-mean", 0.2), ("sequence-token-mean", 0.5), ("constant", 0.125), ("sequence-mean", 1.0)],
)
def test_report_45_each_mean_by_its_name(reduction: str, value: float, tiny: Any) -> None:
    """Lengths 2 and 8, token losses 1 and 0, at most 8 tokens."""
    it = bench("dr-grpo", tiny, reduction=reduction, samples_per_prompt=2, max_new_tokens=8, batch_size=2,
               reward=listed(0.0, 1.0))  # fmt: skip
    update = it.collect(it.rollouts([2, 8])).updates[0]
    (batch,) = update.micro_batches
    short = batch.batch.response_lengths == 2
    batch.advantages = -short.float()[:, None].expand_as(batch.advantages).contiguous()
    assert float(it.mean_loss(update).detach()) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", ONLINE)
def test_report_46_tokens_after_the_end_change_nothing(name: str, tiny: Any) -> None:
    """[7, end, 9, 9] and [7, end, 4, 5], and whatever log-probs stand there."""
    it = bench(name, tiny)
    clean = it.rollouts([2, 4, 3, 6, 1, 5, 5, 2])
    after = ~clean.response_mask
    dirty = replace(
        clean,
        response_ids=clean.response_ids.masked_fill(after, 5),
        logp=clean.logp.masked_fill(after, -50.0),
    )
    assert not torch.equal(clean.response_ids, dirty.response_ids)
    first, second = (it.collect(rollouts) for rollouts in (clean, dirty))
    a, b = (means(step.metrics) for step in (first, second))
    assert {k: v for k, v in a.items() if "time" not in k} == {k: v for k, v in b.items() if "time" not in k}
    gradients = [it.gradient(step.updates[0]) for step in (first, second)]
    assert torch.equal(*gradients) and gradients[0].norm() > 0.01


@pytest.mark.parametrize("name", GROUP)
def test_report_47_a_missing_score_is_left_out_of_its_group(name: str, tiny: Any) -> None:
    """1, None, 0, 1 beside a prompt without any score: as if the missing responses had not been sampled."""
    it = bench(name, tiny, beta=0.0, reward=listed(1.0, None, 0.0, 1.0, *[None] * 4), no_spread="keep")
    rollouts = it.rollouts([3, 4, 5, 6, 2, 2, 2, 2])
    update = it.collect(rollouts).updates[0]
    (batch,) = update.micro_batches
    assert batch.used.tolist() == [True, False, True, True]
    three = bench(name, tiny, beta=0.0, reward=listed(1.0, 0.0, 1.0), no_spread="keep", samples_per_prompt=3,
                  batch_size=3)  # fmt: skip
    alone = three.collect(replace(rollouts.take([0, 2, 3]), group=torch.zeros(3, dtype=torch.long)))
    assert update.items == alone.updates[0].items
    torch.testing.assert_close(it.gradient(update), three.gradient(alone.updates[0]), rtol=1e-4, atol=1e-6)
    metrics = it.collect(rollouts).metrics
    assert metrics["reward/missing"] == (5.0, 8.0) and metrics["responses/unused"] == (5.0, 8.0)
    assert metrics["reward/mean"] == (2.0, 3.0)


def test_report_47_a_missing_score_is_not_a_wrong_answer(tiny: Any) -> None:
    """Pass rates and the memory of prompts are over scored responses."""
    it = bench("grpo", tiny, reward=listed(1.0, None, 0.0, 1.0, *[None] * 4))
    metrics = it.collect(it.rollouts([3] * 8)).metrics
    assert metrics["pass/mean"] == (pytest.approx(2 / 3), 1.0)
    assert metrics["pass/none"] == (0.0, 1.0) and metrics["pass/middle"] == (1.0, 1.0)
    assert metrics["groups/all_wrong"] == (0.0, 1.0)
    assert it.models.memory.tries == {1: [[2, 2, 3]]}


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("micro", [None, 4])
def test_report_48_the_reward_sees_the_prompt_that_made_the_answer(
    name: str, micro: int | None, tiny: Any
) -> None:
    """Prompt, its ids, its columns and the answer's ids and text belong together, in every round of
    sampling.
    """
    calls = []

    def judge(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        calls.append(len(prompts))
        for i, prompt in enumerate(prompts):
            assert tokenizer(prompt)["input_ids"] == columns["prompt_ids"][i]
            assert columns["mine"][i] == prompt
            assert tokenizer.decode(columns["response_ids"][i], skip_special_tokens=True) == responses[i]
        return [float(i % 2) if prompt == prompts[0] else 1.0 for i, prompt in enumerate(prompts)]

    it = bench(name, tiny, reward=judge, micro_batch_size=micro, prompts=6, batch_size=12)
    tokenizer = it.models.tokenizer
    prompts = [replace(p, columns={"mine": p.text}) for p in it.prompts]
    it.prompts, rest = prompts[:3], prompts[3:]
    step = it.collect(more=lambda count: [rest.pop() for _ in range(min(count, len(rest)))])
    assert calls == ([12, 8, 4] if name == "dapo" else [12])
    for batch in step.updates[0].micro_batches:
        for row, trained in zip(batch.batch.tokens, batch.batch.response_mask, strict=True):
            assert row[: int(trained.long().argmax())].tolist() in [p.prompt_ids for p in prompts]


@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "cispo", "sapo"])
def test_report_57_metrics_are_weighted_by_their_counts(name: str, tiny: Any) -> None:
    """Micro-batches of 8 and of 32 tokens, on the second pass: sums and counts are those of one batch."""
    sums = []
    for micro in (None, 4):
        it = bench(name, tiny, micro_batch_size=micro, rollout_epochs=2, minibatches=1, max_new_tokens=8)
        step = it.collect(it.rollouts([2] * 4 + [8] * 4))
        assert len(step.updates[0].micro_batches) == (1 if micro is None else 2)
        for batch in step.updates[0].micro_batches:
            it.loss(batch)
        with torch.no_grad():
            for parameter in it.models.learner.parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                parameter += 0.02 * noise
        joined: dict[str, tuple[float, float]] = {}
        for batch in step.updates[0].micro_batches:
            add_sums(joined, it.loss(batch).metrics)
        sums.append(joined)
    assert sums[0].keys() == sums[1].keys()
    for key, pair in sums[0].items():
        assert sums[1][key] == pytest.approx(pair, rel=1e-4, abs=1e-5), key
    assert sums[0]["policy/entropy"][1] == 40.0


@pytest.mark.parametrize("name", ONLINE)
def test_report_59_a_step_without_any_score_is_0_and_moves_nothing(name: str, tiny: Any) -> None:
    it = bench(name, tiny, reward=constant(None))
    step = it.collect()
    for update in step.updates:
        assert float(it.mean_loss(update).detach()) == 0.0
        gradient = it.gradient(update)
        assert not gradient.any() and bool(gradient.isfinite().all())
    assert all(math.isfinite(value) for value in means(step.metrics).values())
    assert means(step.metrics)["reward/missing"] == 1.0 and "reward/mean" not in means(step.metrics)


@pytest.mark.parametrize("name", FAMILY)
def test_report_59_a_batch_without_a_row_that_counts(name: str, tiny: Any) -> None:
    """Straight into the loss: 0, zero gradient, metrics without 0/0."""
    it = bench(name, tiny, rollout_epochs=1, minibatches=1)
    update = it.collect().updates[0]
    for batch in update.micro_batches:
        batch.used = torch.zeros_like(batch.used)
    assert float(it.mean_loss(update).detach()) == 0.0 and not it.gradient(update).any()
    metrics = means(it.loss(update.micro_batches[0]).metrics)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", ONLINE)
def test_report_62_metrics_hold_no_graph(name: str, tiny: Any) -> None:
    several = {} if name in ("reinforce", "rloo") else {"rollout_epochs": 2}
    it = bench(name, tiny, **several)
    step = it.collect(keep_samples=True, exact_kl=True)
    output = it.loss(step.updates[0].micro_batches[0])
    assert output.per_item.requires_grad
    for metrics in (step.metrics, output.metrics):
        assert all(type(value) is float for pair in metrics.values() for value in pair)
    batch = step.updates[0].micro_batches[0]
    assert not batch.advantages.requires_grad and not batch.logp.requires_grad
    assert name == "reinforce" or not batch.logp_old.requires_grad


# Groups without spread: kept, dropped, sampled again.


def by_prompt(flat: set[str], right: bool = True) -> Any:
    """A reward under which all responses to some prompts score alike."""

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        return [float(right) if p in flat else float(i % 2) for i, p in enumerate(prompts)]

    return reward


def test_groups_without_spread_count_in_the_mean_or_not(tiny: Any) -> None:
    """keep: gradient 0 over all responses; drop: over those of the other prompts."""
    gradients, items = [], []
    for choice in ("keep", "drop"):
        it = bench("grpo", tiny, beta=0.0, no_spread=choice, batch_size=16)
        it.models.reward = by_prompt({it.prompts[0].text, it.prompts[2].text})
        step = it.collect()
        gradients.append(it.gradient(step.updates[0]))
        items.append(step.updates[0].items)
        assert step.metrics["reward/no_spread"] == (2.0, 4.0), "all that was sampled is counted"
        assert step.metrics["groups/all_right"] == (2.0, 4.0)
    assert items == [16.0, 8.0]
    torch.testing.assert_close(gradients[1], 2 * gradients[0], rtol=1e-4, atol=1e-6)


def test_further_prompts_take_the_places_of_groups_without_spread(tiny: Any) -> None:
    """Two of four prompts teach nothing; of the two that come instead one does not either, nor the next."""
    it = bench("dapo", tiny, batch_size=16, prompts=9)
    flat = {it.prompts[i].text for i in (0, 2, 4, 6)}
    it.models.reward = by_prompt(flat)
    it.prompts, rest = it.prompts[:4], it.prompts[4:]
    asked: list[int] = []

    def more(count: int) -> list[Any]:
        asked.append(count)
        chosen, rest[:] = rest[:count], rest[count:]
        return chosen

    step = it.collect(more=more)
    assert asked == [2, 1, 1]
    trained = {
        tuple(row[: int(trained.long().argmax())].tolist())
        for batch in step.updates[0].micro_batches
        for row, trained in zip(batch.batch.tokens, batch.batch.response_mask, strict=True)
    }
    assert step.updates[0].items == sum(b.trained_tokens for b in step.updates[0].micro_batches)
    assert len(trained) == 4
    assert step.metrics["groups/all_right"] == (4.0, 8.0)
    assert step.metrics["pass/all"] == (4.0, 8.0) and step.metrics["pass/middle"] == (4.0, 8.0)
    assert step.metrics["time/wasted"][0] > 0.0
    assert sorted(it.models.memory.tries) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("choice", ["drop", "resample"])
def test_what_describes_the_policy_is_over_all_that_was_sampled(choice: str, tiny: Any) -> None:
    """KL, length and the beta that follows the KL do not depend on which groups are trained on."""
    change = {"kl_control": "constraint", "kl_target": 1e-3, "overlong_buffer": 4, "kl_in": "loss"}
    described, gradients = [], []
    for no_spread in ("keep", choice):
        it = bench("grpo", tiny, no_spread=no_spread, **change)
        it.models.reward = by_prompt({it.prompts[0].text})
        step = it.collect(it.rollouts([2, 3, 4, 5, 6, 6, 5, 6]), exact_kl=True, keep_samples=True)
        described.append(
            [{k: v for k, v in step.metrics.items() if k != "time/wasted"}, it.models.memory.beta]
        )
        gradients.append(it.gradient(step.updates[0]))
        assert len(step.samples) == 8
    assert described[0] == described[1] and described[0][1] != it.config.beta
    assert not torch.allclose(*gradients)


def test_resampling_stops_after_its_rounds(tiny: Any) -> None:
    it = bench("dapo", tiny, resample_rounds=3, prompts=8, reward=constant(0.0))
    it.prompts, rest = it.prompts[:2], it.prompts[2:]
    step = it.collect(more=lambda count: [rest.pop() for _ in range(count)])
    assert len(rest) == 2 and step.metrics["groups/all_wrong"] == (6.0, 6.0)
    assert step.updates[0].micro_batches == [] and step.updates[0].items > 0


@pytest.mark.parametrize("choice", ["drop", "resample"])
def test_where_nothing_has_spread_the_step_is_empty_and_whole(choice: str, tiny: Any) -> None:
    """The first round is kept: its metrics, its KL term; nothing is divided by 0."""
    it = bench("grpo", tiny, no_spread=choice, reward=constant(2.0), minibatches=2, beta=0.0)
    step = it.collect()
    assert len(step.updates) == 2 and not it.gradient(step.updates[0]).any()
    assert step.metrics["length/mean"][1] == 8.0
    it = bench("grpo", tiny, no_spread=choice, reward=constant(2.0))
    assert it.gradient(it.collect().updates[0]).any(), "the KL in the loss is left"


@pytest.mark.parametrize(
    ("right", "bin_"),
    [(0, "none"), (1, "low"), (2, "low"), (3, "middle"), (4, "middle"), (5, "high"), (6, "all")],
)
def test_003_35_pass_rates_in_bins(right: int, bin_: str, tiny: Any) -> None:
    it = bench(
        "grpo", tiny, samples_per_prompt=6, batch_size=6, reward=listed(*[1.0] * right, *[0.0] * (6 - right))
    )
    metrics = means(it.collect().metrics)
    assert metrics["pass/mean"] == pytest.approx(right / 6)
    assert {name for name in ("none", "low", "middle", "high", "all") if metrics[f"pass/{name}"]} == {bin_}


def test_what_counts_as_right_is_the_score_as_given(tiny: Any) -> None:
    """pass_score is compared before anything is taken off."""
    it = bench(
        "grpo", tiny, fixed_length=True, missing_end_penalty=5.0, reward=constant(0.75), pass_score=0.75
    )
    metrics = means(it.collect().metrics)
    assert metrics["pass/mean"] == 1.0 and metrics["reward/mean"] == 0.75
    assert metrics["reward/shaped"] == pytest.approx(-4.25)
