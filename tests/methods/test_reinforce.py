"""REINFORCE: baselines, missing scores, and that rewards, prompts and responses belong together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kleash.config import build
from kleash.data.items import PromptIds
from kleash.errors import RunError, UsageError
from kleash.methods.base import Context, Models
from kleash.methods.online import all_micro_batches, sample_prompts
from kleash.methods.reinforce import Config, advantages_of, collect, loss
from kleash.models import frozen_copy
from kleash.training import train

YES = torch.ones(4, dtype=torch.bool)


def config(**changes: Any) -> Config:
    base = {"data": [], "reward": len, "batch_size": 4, "max_new_tokens": 3}
    return build(Config, {**base, **changes})


def context() -> Context:
    return Context(step=1, generator=torch.Generator().manual_seed(0))


RETURNS = torch.tensor([[4.0, 2.0, 1.0], [2.0, 0.0, 0.0], [0.0, 6.0, 3.0], [6.0, 4.0, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0]]).bool()


def test_equation_6_position_baseline_is_the_batch_mean_at_each_position() -> None:
    advantages = advantages_of(RETURNS, MASK, YES, config(), context())
    expected = torch.tensor([[1.0, -1.0, -1.0], [-1.0, -3.0, 0.0], [-3.0, 3.0, 1.0], [3.0, 1.0, 0.0]])
    torch.testing.assert_close(advantages, expected)


def test_position_baseline_is_over_the_rows_of_all_processes() -> None:
    """A gather that adds another process's equal rows with returns 2 higher moves the baseline by 1."""
    both = replace(context(), gather=lambda t: torch.cat([t, t if t.dtype == torch.bool else t + 2.0]))
    one, two = (advantages_of(RETURNS, MASK, YES, config(), c) for c in (context(), both))
    torch.testing.assert_close(two, torch.where(MASK, one - 1.0, torch.zeros(())))


def test_no_baseline_leaves_the_returns() -> None:
    advantages = advantages_of(RETURNS, MASK, YES, config(baseline="none"), context())
    torch.testing.assert_close(advantages, RETURNS * MASK)


def test_prompt_baselines_compare_responses_to_one_prompt_only() -> None:
    """Total returns 4, 2 | 0, 6: group means 3 and 3; left one out: 2, 4 | 6, 0."""
    options = {"samples_per_prompt": 2}
    group = advantages_of(RETURNS, MASK, YES, config(baseline="prompt", **options), context())
    torch.testing.assert_close(group[:, 0], torch.tensor([1.0, -1.0, -3.0, 3.0]))
    out = advantages_of(RETURNS, MASK, YES, config(baseline="leave-one-out", **options), context())
    torch.testing.assert_close(out[:, 0], torch.tensor([2.0, -2.0, -6.0, 6.0]))


@pytest.mark.parametrize("baseline", ["none", "position", "prompt", "leave-one-out"])
def test_report_47_a_missing_score_is_left_out_and_gets_no_advantage(baseline: str) -> None:
    """rewards [1, None, 0, 1]: whatever stands in the missing row changes nothing, and its own advantages
    are 0.
    """
    used = torch.tensor([True, False, True, True])
    options = config(baseline=baseline, samples_per_prompt=2)
    first, second = (
        advantages_of(RETURNS.clone().index_fill_(0, torch.tensor(1), v), MASK, used, options, context())
        for v in (0.0, 1e9)
    )
    assert torch.equal(first, second) and bool((first[1] == 0).all()) and bool(first.isfinite().all())
    if baseline == "leave-one-out":
        assert bool((first[0] == 0).all()), (
            "the only scored response of its prompt has nobody to be compared with"
        )


def test_report_42_alike_scores_give_no_advantage_and_are_counted(tiny: Any, tmp_path: Path) -> None:
    """rewards [3, 3, 3, 3] and beta 0: advantages exactly 0, weights unmoved, the share of flat groups
    logged.
    """
    run = train(
        "reinforce",
        **tiny.options(
            "reinforce", tmp_path / "run", reward=lambda prompts, responses: [3.0] * len(responses), beta=0.0,
            baseline="prompt", samples_per_prompt=4, weight_decay=0.0,
        ),
    )  # fmt: skip
    steps = [row for row in run.metrics if row["split"] == "train"]
    assert all(row["loss"] == 0.0 and row["optim/grad_norm"] == 0.0 for row in steps)
    assert all(row["reward/no_spread"] == 1.0 for row in steps)


def test_report_42_a_group_of_one_is_refused() -> None:
    with pytest.raises(UsageError, match="samples_per_prompt=1 leaves no signal"):
        config(baseline="leave-one-out")


@pytest.mark.parametrize(("batch", "per_prompt", "micro"), [(8, 1, None), (8, 2, 2), (8, 4, 4)])
def test_report_48_the_reward_sees_the_prompt_that_made_the_answer(
    batch: int, per_prompt: int, micro: int | None, tiny: Any, tmp_path: Path
) -> None:
    """A reward that looks the answer up by its prompt's own ids and columns finds them matched at any batch
    size.
    """
    tokenizer = tiny.tokenizer()
    rows = [{**row, "number": i} for i, row in enumerate(tiny.prompts())]

    def judge(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        for i, prompt in enumerate(prompts):
            assert tokenizer(prompt)["input_ids"] == columns["prompt_ids"][i]
            assert rows[columns["number"][i]]["prompt"] == prompt
            assert tokenizer.decode(columns["response_ids"][i], skip_special_tokens=True) == responses[i]
        return [1.0] * len(prompts)

    options = {"batch_size": batch, "samples_per_prompt": per_prompt, "micro_batch_size": micro, "steps": 2}
    train("reinforce", **tiny.options("reinforce", tmp_path / "run", data=rows, reward=judge, **options))


def collected(tiny: Any, **changes: Any) -> tuple[Models, Config, Any]:
    tokenizer, policy = tiny.tokenizer(), tiny.model(1)
    models = Models(policy, tokenizer, reference=frozen_copy(tiny.model(2)), reward=tiny.reward)
    options = config(reward=tiny.reward, max_new_tokens=6, max_length=40, **changes)
    prompts = [PromptIds(tokenizer(r["prompt"])["input_ids"], r["prompt"]) for r in tiny.prompts(4)]
    return models, options, collect(models, prompts, options, context())


def test_equation_5_and_6_by_hand_on_a_batch(tiny: Any) -> None:
    """The loss is −Σ_t A_t log π_t with A from beta-penalised returns to go, recomputed here in plain
    loops.
    """
    models, options, batches = collected(tiny, beta=0.5, baseline="none")
    rollouts = sample_prompts(models, _prompts(models, tiny), options, torch.Generator().manual_seed(0))
    (batch,) = batches.updates[0].micro_batches
    scores = tiny.reward(rollouts.prompts, rollouts.responses)
    order = all_micro_batches(rollouts, options)[0]
    output = loss(models, batch, options)
    from kleash.models import response_logprobs

    logp_ref = response_logprobs(
        models.reference,
        rollouts.prompt_ids,
        rollouts.response_ids,
        rollouts.prompt_mask,
        rollouts.response_mask,
    )
    for place, row in enumerate(order):
        length = int(rollouts.response_mask[row].sum())
        rewards = [-0.5 * float(rollouts.logp[row, t] - logp_ref[row, t]) for t in range(length)]
        rewards[-1] += scores[row]
        returns = [math.fsum(rewards[t:]) for t in range(length)]
        expected = -math.fsum(g * float(rollouts.logp[row, t]) for t, g in enumerate(returns))
        assert float(output.per_item[place].detach()) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def _prompts(models: Models, tiny: Any) -> list[PromptIds]:
    return [PromptIds(models.tokenizer(r["prompt"])["input_ids"], r["prompt"]) for r in tiny.prompts(4)]


def test_what_is_trained_is_bit_for_bit_what_was_sampled(tiny: Any) -> None:
    models, options, batches = collected(tiny)
    rollouts = sample_prompts(models, _prompts(models, tiny), options, torch.Generator().manual_seed(0))
    (batch,) = batches.updates[0].micro_batches
    for place, row in enumerate(all_micro_batches(rollouts, options)[0]):
        sampled = rollouts.response_ids[row][rollouts.response_mask[row]]
        assert torch.equal(batch.batch.tokens[place][batch.batch.response_mask[place]], sampled)


def test_unfinished_responses_can_be_left_out(tiny: Any) -> None:
    _, _, batches = collected(tiny, unfinished="drop", fixed_length=True)
    assert batches.metrics["responses/unused"] == (4.0, 4.0)
    assert all(bool((batch.advantages == 0).all()) for batch in batches.updates[0].micro_batches)


def test_report_58_combined_rewards_log_the_weighted_sum_and_the_parts(tiny: Any, tmp_path: Path) -> None:
    def one(responses: list[str]) -> list[float]:
        return [1.0] * len(responses)

    def zero(responses: list[str]) -> list[float]:
        return [0.0] * len(responses)

    run = train(
        "reinforce", **tiny.options("reinforce", tmp_path / "run", reward={one: 0.7, zero: 0.3}, steps=1)
    )
    first = run.metrics[0]
    assert first["reward/mean"] == pytest.approx(0.7)
    assert (first["reward/one"], first["reward/zero"]) == (1.0, 0.0)


def test_a_reward_that_raises_stops_the_run_and_names_it(tiny: Any, tmp_path: Path) -> None:
    def broken(responses: list[str]) -> list[float]:
        raise ValueError("no such file")

    with pytest.raises(RunError, match=r"broken.*no such file"):
        train("reinforce", **tiny.options("reinforce", tmp_path / "run", reward=broken))


def test_gold_is_logged_beside_the_reward_and_samples_hold_both(tiny: Any, tmp_path: Path) -> None:
    gold = lambda responses: [-float(len(r.split())) for r in responses]  # noqa: E731
    run = train(
        "reinforce", **tiny.options("reinforce", tmp_path / "run", gold=gold, samples_every=2, samples_kept=3)
    )
    assert run.metrics[0]["gold/mean"] < 0
    assert sorted({sample["step"] for sample in run.samples}) == [1, 2, 4]
    assert len(run.samples) == 9 and run.samples[0]["gold"] == -float(len(run.samples[0]["response"].split()))
    for sample in run.samples:
        assert len(sample["tokens"]) == len(sample["logp"]) == len(sample["logp_ref"]) == len(sample["kl"])


def test_report_36_a_higher_beta_ends_nearer_the_reference(tiny: Any, tmp_path: Path) -> None:
    drifts = [
        train(
            "reinforce",
            **tiny.options(
                "reinforce", tmp_path / str(beta), beta=beta, steps=25, batch_size=16, log_exact_kl_every=25
            ),
        ).metrics[-2]["kl/exact"]
        for beta in (0.0, 5.0)
    ]
    assert drifts[1] < 0.2 * drifts[0], drifts
