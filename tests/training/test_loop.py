"""The loop's arithmetic, and what it does when something is not finite."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console as RichConsole
from safetensors.torch import load_file

from kleash.config import build
from kleash.errors import RunError, UsageError
from kleash.methods import METHODS
from kleash.methods.base import LossOutput, Models
from kleash.methods.sft import Config
from kleash.training import train
from kleash.training.console import Console
from kleash.training.feed import OnlineFeed
from kleash.training.optimizer import learning_rate, make_optimizer
from kleash.training.processes import Processes, add_sums, means
from kleash.training.watch import PATIENCE, Watch


def test_report_57_metrics_are_means_over_items_not_of_means() -> None:
    """Entropies 2.0 over one token and 1.0 over nine: 1.1."""
    sums: dict[str, tuple[float, float]] = {}
    add_sums(sums, {"entropy": (2.0, 1.0)})
    add_sums(sums, {"entropy": (9.0, 9.0), "never": (0.0, 0.0)})
    assert means(sums) == {"entropy": pytest.approx(1.1)}


def test_report_55_one_token_of_loss_4_and_three_of_0_is_1(
    tiny: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Not 2.0, the mean of the two micro-batches' means."""
    from dataclasses import replace

    def loss(models: Models, batch: Any, config: Any) -> LossOutput:
        count = batch.trained_tokens
        parameter = next(models.policy.parameters())
        return LossOutput(torch.full((count,), 4.0 if count == 2 else 0.0) + 0 * parameter.sum())

    monkeypatch.setitem(METHODS, "sft", replace(METHODS["sft"], loss=loss))
    rows = [{"prompt": "the", "completion": "dog"}, {"prompt": "the", "completion": "dog ran then sat over"}]
    run = train(
        "sft",
        **tiny.options(
            "sft", tmp_path / "run", data=rows, batch_size=2, micro_batch_size=1, eval_fraction=0.0
        ),
    )
    assert run.metrics[0]["loss"] == pytest.approx(4.0 * 2 / (2 + 6))


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_report_47_a_gradient_that_is_not_finite_stops_loudly_and_untouched(
    what: str, tiny: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    from dataclasses import replace

    real = METHODS["sft"].loss

    def loss(models: Models, batch: Any, config: Any) -> LossOutput:
        output = real(models, batch, config)
        parameter = next(models.policy.parameters())
        broken = (
            parameter.sum() * math.nan if what == "loss" else (parameter - parameter.detach()).sum().sqrt()
        )
        return LossOutput(output.per_item + broken, output.metrics)

    monkeypatch.setitem(METHODS, "sft", replace(METHODS["sft"], loss=loss))
    with pytest.raises(RunError, match=r"step 1: the gradient is not finite .*learning_rate=0\.01"):
        train("sft", **tiny.options("sft", tmp_path / "run"))


def test_report_59_a_step_without_items_changes_nothing(tiny: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from dataclasses import replace

    def loss(models: Models, batch: Any, config: Any) -> LossOutput:
        return LossOutput(METHODS["dpo"].sums(models.policy, batch).flatten()[:0])  # type: ignore[misc]

    monkeypatch.setitem(METHODS, "sft", replace(METHODS["sft"], loss=loss, count=lambda batch: 0))
    model = tiny.model()
    options = {"model": (model, tiny.tokenizer()), "batch_size": 2, "steps": 1, "eval_fraction": 0.0}
    run = train("sft", **tiny.options("sft", tmp_path / "run", **options))
    assert run.metrics[0]["loss"] == 0.0 and run.metrics[0]["optim/grad_norm"] == 0.0
    saved = load_file(run.path / "model" / "model.safetensors")
    assert torch.equal(saved["model.norm.weight"], model.model.norm.weight)


def test_a_weight_that_the_loss_did_not_reach_has_gradient_0(tiny: Any) -> None:
    """Momentum goes on as it does on several processes, which must exchange a gradient for it."""
    moved = []
    for reached in (True, False):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
        for factor in (1.0, 0.0):
            if factor or reached:
                (factor * weight).sum().backward()
            Processes().sum_gradients([weight])
            optimizer.step()
            optimizer.zero_grad()
        moved.append(weight.detach())
    assert torch.equal(*moved) and float(moved[0][0]) < 0.85


def test_report_62_metrics_hold_no_graph(tiny: Any) -> None:
    from kleash.data import Batch
    from kleash.methods.reward import Config as RewardConfig
    from kleash.models import RewardModel

    policy = RewardModel.from_policy(tiny.model(), tiny.tokenizer())
    tokens = torch.tensor([[3, 4, 5], [3, 4, 6]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    batch = Batch(tokens, mask, mask & (torch.arange(3) > 0), group_size=2, shared_prefix=torch.tensor([1]))
    output = METHODS["reward"].loss(Models(policy, None), batch, build(RewardConfig, {"data": []}))
    assert output.per_item.requires_grad
    assert all(type(value) is float for pair in output.metrics.values() for value in pair)


def test_report_3_cached_and_live_reference_train_alike(tiny: Any, tmp_path: Path) -> None:
    """The cache is used (the loss leaves ln 2 after one step) and gives the losses of the live reference."""
    live, cached, again = (
        train(
            "dpo",
            **tiny.options(
                "dpo", tmp_path / name, steps=5, cache_reference=name != "live", micro_batch_size=2
            ),
        )
        for name in ("live", "cached", "again")
    )
    losses = [[row["loss"] for row in run.metrics] for run in (live, cached, again)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and losses[1] == losses[2]
    assert abs(losses[1][1] - math.log(2)) > 1e-2
    assert any("read from" in note for note in again.manifest["notes"])
    assert any("computed and kept" in note for note in cached.manifest["notes"])


def test_a_damaged_cache_is_computed_again(tiny: Any, tmp_path: Path) -> None:
    import os

    first = train("dpo", **tiny.options("dpo", tmp_path / "a"))
    (file,) = Path(os.environ["KLEASH_CACHE"], "reference").iterdir()
    file.write_bytes(b"not tensors")
    second = train("dpo", **tiny.options("dpo", tmp_path / "b"))
    assert [r["loss"] for r in first.metrics] == [r["loss"] for r in second.metrics]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.8536, 0.5, 0.1464]),
    ],
)
def test_learning_rate_by_hand(schedule: str, expected: list[float]) -> None:
    config = build(Config, {"data": [], "learning_rate": 1.0, "warmup_steps": 2, "schedule": schedule})
    assert [learning_rate(step, 6, config) for step in range(1, 7)] == pytest.approx(expected, abs=1e-4)


def test_weight_decay_is_on_matrices_only(tiny: Any) -> None:
    groups = make_optimizer(tiny.model(), build(Config, {"data": [], "weight_decay": 0.1})).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim >= 2 for p in groups[0]["params"]) and all(p.ndim < 2 for p in groups[1]["params"])


def test_report_66_every_prompt_is_visited_once_an_epoch(tiny: Any) -> None:
    """Twenty prompts, six a step: any twenty places in a row from an epoch's start are all of them."""
    from kleash.methods.reinforce import Config as ReinforceConfig

    config = build(ReinforceConfig, {"data": [], "reward": len, "batch_size": 6})
    feed = OnlineFeed(
        METHODS["reinforce"], Models(tiny.model(), None), list(range(20)), [], config, Processes()
    )
    visits = [feed._visit(place) for place in range(60)]
    assert all(sorted(visits[start : start + 20]) == list(range(20)) for start in (0, 20, 40))
    assert visits[:20] != visits[20:40]


def test_epochs_decide_the_steps(tiny: Any, tmp_path: Path) -> None:
    run = train("sft", **tiny.options("sft", tmp_path / "run", steps=None, epochs=2.5, eval_fraction=0.0))
    assert run.metrics[-1]["step"] == 10 and run.metrics[-1]["epoch"] == 2.5


def test_log_every_keeps_the_first_and_the_last(tiny: Any, tmp_path: Path) -> None:
    run = train("sft", **tiny.options("sft", tmp_path / "run", steps=7, log_every=3))
    assert [row["step"] for row in run.metrics if row["split"] == "train"] == [1, 3, 6, 7]


def test_signs_are_said_once_and_only_when_they_last() -> None:
    watch = Watch()
    rows = [{"step": n, "kl/k1": -0.1 if n != 3 else 0.2} for n in range(1, 20)]
    said = [warning for row in rows for warning in watch.see(row)]
    assert len(said) == 1 and said[0].startswith(f"step {3 + PATIENCE}: kl/k1")
    assert "Usual causes" in said[0] and watch.warnings == said


def test_a_reward_that_scores_nothing_is_said() -> None:
    watch = Watch()
    for step in range(PATIENCE):
        watch.see({"step": step, "reward/missing": 1.0})
    assert len(watch.warnings) == 1 and "no response has a score" in watch.warnings[0]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_metrics_do_not_push_the_bar_out_of_the_terminal(width: int) -> None:
    console = Console()
    console.rich = RichConsole(file=io.StringIO(), force_terminal=True, width=width)
    metrics = {"loss": 0.6931, "dpo/logp_chosen": -24.84, "dpo/logp_rejected": -24.77, "dpo/margin": 0.0001}
    with console.steps("reinforce", 1500) as bar:
        bar.update(1499, metrics)
    shown = console.rich.file.getvalue()
    assert "reinforce" in shown and "1499/1500" in shown and "…" not in shown


def test_report_40_a_lasting_warning_reaches_the_evaluation(tiny: Any, tmp_path: Path) -> None:
    flat = lambda responses: [1.0] * len(responses)  # noqa: E731
    run = train(
        "reinforce",
        **tiny.options(
            "reinforce",
            tmp_path / "run",
            reward=flat,
            samples_per_prompt=2,
            steps=6,
            measure=True,
            eval_samples=2,
        ),
    )
    assert any("reward/no_spread" in warning for warning in run.evaluation["warnings"])


def test_tensorboard_gets_the_metrics(tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = train("sft", **tiny.options("sft", tmp_path / "run", tracker="tensorboard"))
    assert list(run.path.rglob("events.out.tfevents*"))


def test_an_unknown_tracker_is_named(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tracker=tensorbord"):
        train("sft", **tiny.options("sft", tmp_path / "run", tracker="tensorbord"))


def test_the_reward_model_is_standardised_by_its_own_held_out_scores(tiny: Any, tmp_path: Path) -> None:
    """Train a reward model, optimise it: the logged reward is (score − mean)/std, and it knows whose text
    it is for.
    """
    model = (tiny.model(), tiny.tokenizer())
    judge = train("reward", **tiny.options("reward", tmp_path / "rm", model=model, steps=8))
    meta = judge.manifest["reward_model"]
    assert meta["text_model"] == judge.manifest["models"]["model"]
    assert judge.evaluation["std"] > 0 and judge.evaluation["scored_responses"] == 6
    options = {"model": model, "reward": str(judge.path), "steps": 1, "beta": 0.0}
    scaled, raw = (
        train(
            "reinforce", **tiny.options("reinforce", tmp_path / str(flag), standardise_reward=flag, **options)
        )
        for flag in (True, False)
    )
    first, second = (run.metrics[0]["reward/mean"] for run in (scaled, raw))
    assert first == pytest.approx(
        (second - judge.evaluation["mean"]) / judge.evaluation["std"], rel=1e-4, abs=1e-5
    )
    assert scaled.manifest["parents"] == [{"option": "reward", "run": str(judge.path)}]
    assert "(score − mean)/std" in scaled.manifest["conventions"]["reward scale"]


def test_held_out_rows_are_required_where_a_method_needs_them(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="eval_fraction=0 leaves none"):
        train("reward", **tiny.options("reward", tmp_path / "run", eval_fraction=0.0))


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_eval_at_start_gives_both_ends_of_the_course(method: str, tiny: Any, tmp_path: Path) -> None:
    """Step 0 is the model before training: with learning rate 0 the last evaluation repeats it."""
    run = train(
        method, **tiny.options(method, tmp_path / "run", steps=2, learning_rate=0.0, eval_at_start=True)
    )
    first, last = (row for row in run.metrics if row["split"] == "eval")
    assert (first["step"], last["step"]) == (0, 2)
    key = "loss" if method == "sft" else "reward/mean"
    assert first[key] == last[key]


def test_pass_rates_of_every_prompt_are_in_the_run_folder(tiny: Any, tmp_path: Path) -> None:
    run = train("grpo", **tiny.options("grpo", tmp_path / "run", steps=3))
    visits = json.loads((run.path / "pass_rates.json").read_text())
    assert sum(len(of_prompt) for of_prompt in visits.values()) == 3 * 2  # two prompts a step
    assert all(right <= sampled == 4 for v in visits.values() for _, right, sampled in v)
