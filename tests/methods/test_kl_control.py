"""The KL: where it may be charged, what is logged of it, and how β follows it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import GROUP, bench, in_two

from kleash.config import build
from kleash.errors import UsageError
from kleash.functional import adaptive_beta, lagrangian_beta
from kleash.methods import METHODS
from kleash.methods.base import Context
from kleash.methods.group import TABLE
from kleash.methods.online import Scored, metrics_of
from kleash.methods.policy_gradient import ADAPTIVE_CLIP
from kleash.rewards import Scores
from kleash.training import train
from kleash.training.processes import means
from kleash.training.watch import PATIENCE, Watch

ADAPTIVE: dict[str, Any] = {"kl_control": "adaptive", "kl_rate": 0.1, "beta": 0.2}
CONSTRAINT: dict[str, Any] = {"kl_control": "constraint", "kl_rate": 0.01, "beta": 0.2}


@pytest.mark.parametrize("name", ["ppo", "rloo", "dr-grpo"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_in": "loss", "kl_estimator": "k1"}, "k1 in the loss pulls nowhere"),
        ({"kl_in": "reward", "kl_estimator": "k2"}, "only k1's expected policy gradient"),
        ({"kl_in": "reward", "kl_estimator": "k3"}, "only k1's expected policy gradient"),
    ],
)
def test_report_39_an_estimator_in_the_wrong_place_is_refused(
    name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build(METHODS[name].config, {"data": [], "reward": len, "beta": 0.1, **change})


@pytest.mark.parametrize("scale", ["std", "sample_std", "batch_std"])
@pytest.mark.parametrize("name", [name for name in GROUP if TABLE[name].scale == "std"])
def test_a_kl_in_the_reward_is_not_divided_by_a_deviation(name: str, scale: str) -> None:
    """Equally good answers would differ by it alone, and any difference is divided up to size."""
    kl = {"beta": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    with pytest.raises(UsageError, match=f"kl_in=reward with scale={scale}"):
        build(METHODS[name].config, {"data": [], "reward": len, "scale": scale, **kl})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_control": "adaptive", "beta": 0.1}, "kl_target=None"),
        ({"kl_target": 1.0}, "kl_control=fixed with kl_target=1.0"),
        ({"kl_control": "adaptive", "kl_target": 1.0, "beta": 0.0}, "multiplies beta"),
        ({"kl_control": "adaptive", "kl_target": 1.0, "beta": 0.1, "kl_rate": 0.3}, "at most 0.2"),
    ],
)
def test_controls_that_cannot_work_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(METHODS["rloo"].config, {"data": [], "reward": len, **change})


def test_report_36_the_loss_grows_with_the_kl_times_its_coefficient(tiny: Any) -> None:
    """d loss / d β = +KL at the visited states, whatever the scores."""
    losses, exact = [], 0.0
    for beta in (0.1, 0.6):
        it = bench("grpo", tiny, beta=beta, kl_in="loss", kl_estimator="exact", reduction="sequence-mean")
        update = it.collect().updates[0]
        losses.append(float(it.mean_loss(update).detach()))
        exact = means(it.loss(update.micro_batches[0]).metrics)["loss/kl"]
    assert exact > 1e-3
    assert (losses[1] - losses[0]) / 0.5 == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo", "reinforce"])
def test_report_40_sampled_kl_is_logged_at_every_step(name: str, tiny: Any) -> None:
    metrics = means(bench(name, tiny, beta=0.1).collect().metrics)
    assert metrics["kl/k3"] > 0.0 and math.isfinite(metrics["kl/k1"]) and metrics["kl/token/max"] > 0.0


def test_report_40_a_kl_that_stays_below_0_is_said_with_its_causes() -> None:
    watch = Watch()
    said = [watch.see({"step": step, "kl/k1": -0.06}) for step in range(1, PATIENCE + 3)]
    assert [len(new) for new in said] == [0] * (PATIENCE - 1) + [1, 0, 0]
    assert "top-p" in watch.warnings[0] and "dropout" in watch.warnings[0]


def test_report_41_the_token_that_blew_up_is_in_the_metrics_and_the_samples(tiny: Any) -> None:
    """One token of 200 whose reference probability is e⁶ times higher: e⁶ − 7 nats of k3, all there is."""
    it = bench("grpo", tiny, samples_per_prompt=2, batch_size=2, max_new_tokens=100)
    rollouts = it.rollouts([100] * 2)
    ref = rollouts.logp.clone()
    ref[1, 37] += 6.0
    scores = Scores(torch.zeros(2), 0)
    made = Scored(rollouts, scores, None, scores.present, [1, 1], ref)
    metrics = metrics_of(it.models, made, it.config, Context(1, torch.Generator()))
    assert metrics["kl/token/max"] == (pytest.approx(math.exp(6) - 7, rel=1e-4), 1.0)
    assert metrics["kl/token/max"][0] / metrics["kl/k3"][0] == pytest.approx(1.0, rel=1e-4)
    (row, *_) = it.collect(keep_samples=True).samples
    assert len(row["kl"]) == len(row["logp"]) == len(row["tokens"])


# Control of β.


@pytest.mark.parametrize("name", ["rloo", "grpo", "dapo", "ppo"])
@pytest.mark.parametrize("control", [ADAPTIVE, CONSTRAINT], ids=["adaptive", "constraint"])
@pytest.mark.parametrize("target", [1e-3, 50.0])
def test_beta_rises_above_the_target_and_falls_below_it(
    name: str, control: dict[str, Any], target: float, tiny: Any
) -> None:
    """A step is charged with the β it began with; the next one with what followed from this step's KL."""
    it = bench(name, tiny, kl_target=target, **control)
    rollouts = it.rollouts([6] * 8)
    rollouts.logp += 0.1  # as a policy that has moved would have sampled them
    metrics = means(it.collect(rollouts).metrics)
    kl, after = metrics["kl/k1"], it.models.memory.beta
    assert metrics["kl/beta"] == 0.2 and kl > 0.3
    assert after is not None and (after > 0.2) == (kl > target)
    if control is ADAPTIVE:
        want = adaptive_beta(0.2, kl, target, ADAPTIVE_CLIP / 0.1, ADAPTIVE_CLIP)
        assert abs(after / 0.2 - 1) == pytest.approx(0.1), "kl_rate is the share it may change by"
    else:
        want = lagrangian_beta(0.2, kl, target, 0.01)
    assert after == pytest.approx(want, rel=1e-5)
    assert means(it.collect().metrics)["kl/beta"] == after


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_what_is_charged_is_the_beta_as_it_stands(kl_in: str, tiny: Any) -> None:
    """β = 0.7 in memory trains as a fixed β of 0.7 does."""
    estimator = {"reward": "k1", "loss": "k3"}[kl_in]
    kl = {"kl_in": kl_in, "kl_estimator": estimator}
    moved = bench("rloo", tiny, beta=0.1, kl_control="constraint", kl_target=1.0, **kl)
    moved.models.memory.beta = 0.7
    fixed = bench("rloo", tiny, beta=0.7, **kl)
    a, b = (it.gradient(it.collect().updates[0]) for it in (moved, fixed))
    assert torch.equal(a, b)


def test_beta_follows_the_kl_of_all_processes(tiny: Any) -> None:
    """Two processes with different responses agree on one β, that of all responses."""

    def work(first: int) -> Any:
        def run(gather: Any) -> tuple[float, tuple[float, float]]:
            it = bench("rloo", tiny, kl_target=1.0, **CONSTRAINT)
            rollouts = it.rollouts([6] * 8).take(list(range(first, first + 4)))
            rollouts.group[:] = 0
            metrics = it.collect(rollouts, gather=gather).metrics
            assert it.models.memory.beta is not None
            return it.models.memory.beta, metrics["kl/k1"]

        return run

    (a, kl_a), (b, kl_b) = in_two(work(0), work(4))
    assert a == b and kl_a != kl_b
    mean = (kl_a[0] + kl_b[0]) / (kl_a[1] + kl_b[1])
    assert a == pytest.approx(lagrangian_beta(0.2, mean, 1.0, 0.01), rel=1e-5)


@pytest.mark.parametrize("name", ["rloo", "ppo"])
def test_beta_and_visits_survive_a_resume(name: str, tiny: Any, tmp_path: Path) -> None:
    common: dict[str, Any] = {"kl_target": 0.05, "save_every": 1, "beta": 0.1, "kl_control": "adaptive"}
    whole = train(name, **tiny.options(name, tmp_path / "whole", **common))
    train(name, **tiny.options(name, tmp_path / "run", steps=2, **{**common}))
    saved = json.loads((tmp_path / "run/checkpoints/step-000002/state.json").read_text())["memory"]
    assert saved["beta"] != 0.1 and sum(len(visits) for visits in saved["tries"].values()) == 2 * 2
    again = train(name, **tiny.options(name, tmp_path / "run", resume=True, **common))
    betas = [[row["kl/beta"] for row in run.metrics if row["split"] == "train"] for run in (whole, again)]
    assert betas[0] == betas[1] and betas[0][2] == saved["beta"] and len(set(betas[0])) == 4


def test_a_constraint_ends_at_its_kl(tiny: Any, tmp_path: Path) -> None:
    """One prompt, responses of one word: without a leash 3.4 nats from the reference, here at 1."""
    run = train(
        "rloo",
        **tiny.options(
            "rloo", tmp_path / "run", data=[{"prompt": "the cat"}] * 32, eval_fraction=0.0, max_new_tokens=1,
            fixed_length=True, batch_size=64, steps=60, learning_rate=5e-3, beta=0.3, kl_control="constraint",
            kl_target=1.0, kl_rate=0.02, log_exact_kl_every=1, log_every=1,
        ),
    )  # fmt: skip
    rows = [row for row in run.metrics if row["split"] == "train"]
    kl = [row["kl/exact"] for row in rows]
    assert kl[0] < 1e-6
    assert sum(kl[-10:]) / 10 == pytest.approx(1.0, abs=0.25), [round(x, 2) for x in kl]
    assert len({row["kl/beta"] for row in rows}) > 50
