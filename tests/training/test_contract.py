"""One contract for every method: finite, deterministic, resumable to the bit, whatever the accumulation."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kleash.errors import RunError
from kleash.methods import METHODS
from kleash.training import Interrupted, train
from kleash.training.loop import Loop
from kleash.training.watch import PATIENCE

TIMES = ("seconds", "time/", "tokens/per_second")
GROUP = {
    "loss", "reward/mean", "reward/missing", "reward/no_spread", "kl/k1", "kl/k3", "kl/exact", "length/mean",
    "ended/share", "groups/all_right", "groups/all_wrong", "pass/mean", "policy/entropy",
    "policy/sampler_gap",
}  # fmt: skip
EXPECTED = {
    "sft": {"loss"},
    "reward": {"loss", "reward/margin", "reward/accuracy", "reward/chosen", "reward/rejected"},
    "dpo": {
        "loss", "dpo/logp_chosen", "dpo/logp_rejected", "dpo/reward_chosen", "dpo/reward_rejected",
        "dpo/margin", "dpo/accuracy", "dpo/weight",
    },
    "reinforce": {
        "loss", "reward/mean", "reward/missing", "kl/k1", "kl/k3", "kl/exact", "length/mean", "ended/share",
    },
}  # fmt: skip


ONLINE = sorted(name for name, method in METHODS.items() if method.online)


@pytest.fixture(params=sorted(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what a clock decides."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def weights(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.path / "model" / "model.safetensors")


def assert_same(a: Any, b: Any) -> None:
    """Two runs are one: metrics, samples and weights, bit for bit."""
    assert timeless(a.metrics) == timeless(b.metrics)
    assert [dict(s, policy="") for s in a.samples] == [dict(s, policy="") for s in b.samples]
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_every_metric_is_named_and_finite(method: str, tiny: Any, tmp_path: Path) -> None:
    run = train(method, **tiny.options(method, tmp_path / "run", eval_every=2))
    first, steps = run.metrics[0], [row for row in run.metrics if row["split"] == "train"]
    assert EXPECTED.get(method, GROUP) <= first.keys()
    assert {"optim/learning_rate", "optim/grad_norm", "time/step", "tokens/trained", "epoch"} <= first.keys()
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["step"] for row in run.metrics if row["split"] == "eval"] == [2, 4]
    assert all(math.isfinite(v) for row in run.metrics for v in row.values() if isinstance(v, float))
    assert steps[-1]["tokens/trained"] > steps[0]["tokens/trained"] > 0


def test_same_seed_same_run_other_seed_another(method: str, tiny: Any, tmp_path: Path) -> None:
    a, b = (train(method, **tiny.options(method, tmp_path / name)) for name in "ab")
    assert_same(a, b)
    c = train(method, **tiny.options(method, tmp_path / "c", seed=1))
    assert timeless(c.metrics) != timeless(a.metrics)


@pytest.mark.parametrize("stops", [[3], [7], [2, 5]], ids=["mid-run", "later-epoch", "twice"])
def test_report_63_64_66_resume_is_bit_identical(
    method: str, stops: list[int], tiny: Any, tmp_path: Path
) -> None:
    """Ids seen, sampled tokens, metrics and weights after resuming are those of a run that never stopped."""
    common: dict[str, Any] = {"steps": 9, "eval_every": 3, "dropout": True}
    if METHODS[method].online:
        common["samples_every"] = 2
    model = (tiny.model(dropout=0.2), tiny.tokenizer())
    whole = train(method, **tiny.options(method, tmp_path / "whole", model=model, **common))
    resumed = tmp_path / "resumed"
    for number, stop in enumerate(stops):
        steps = {**common, "steps": stop, "save_every": stop, "resume": number > 0}
        train(method, **tiny.options(method, resumed, model=model, **steps))
    b = train(method, **tiny.options(method, resumed, model=model, resume=True, **common))
    rows = [row for row in timeless(b.metrics) if row["split"] == "train" or row["step"] % 3 == 0]
    assert rows == [row for row in timeless(whole.metrics) if row["split"] == "train" or row["step"] % 3 == 0]
    assert [dict(s, policy="") for s in b.samples] == [dict(s, policy="") for s in whole.samples]
    first, second = weights(whole), weights(b)
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_report_68_ctrl_c_finishes_the_step_and_the_run_goes_on_from_there(
    method: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(method, **tiny.options(method, tmp_path / "whole"))
    real = Loop._step

    def step(self: Loop, number: int, total: int) -> dict[str, Any]:
        row = real(self, number, total)
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return row

    with monkeypatch.context() as patched, pytest.raises(Interrupted, match="Stopped after step 2 of 4"):
        patched.setattr(Loop, "_step", step)
        train(method, **tiny.options(method, tmp_path / "run"))
    assert_same(train(method, **tiny.options(method, tmp_path / "run", resume=True)), whole)


@pytest.mark.parametrize(
    "micro", [{"micro_batch_size": 1}, {"micro_batch_size": 2}, {"micro_batch_tokens": 40}]
)
def test_report_55_accumulation_is_the_big_batch(
    method: str, micro: dict[str, int], tiny: Any, tmp_path: Path
) -> None:
    """8×1 = 4×2 = 1×8: same loss, same gradient length, same metrics, same weights (1e-6 before Adam's
    division).
    """
    if METHODS[method].online:
        micro = {"micro_batch_size": 4} if "micro_batch_size" in micro else {"micro_batch_tokens": 60}
    runs = [
        train(
            method,
            **tiny.options(method, tmp_path / name, batch_size=8, steps=2, learning_rate=1e-3, **extra),
        )
        for name, extra in (("one", {}), ("many", micro))
    ]
    for whole, parts in zip(*(timeless(run.metrics) for run in runs), strict=True):
        assert whole.keys() == parts.keys()
        for key, value in whole.items():
            assert parts[key] == (
                value if isinstance(value, str) else pytest.approx(value, rel=2e-5, abs=2e-6)
            ), key
    for key, value in weights(runs[0]).items():
        torch.testing.assert_close(weights(runs[1])[key], value, rtol=0, atol=1e-4)


def test_run_folder_is_readable_without_this_library(method: str, tiny: Any, tmp_path: Path) -> None:
    run = train(method, **tiny.options(method, tmp_path / "run", measure=True, save_every=2))
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["data"]["train"]["kept"] > 0 and manifest["data"]["train"]["sha256"]
    assert manifest["conventions"]["loss"] and manifest["versions"]["torch"] == torch.__version__
    assert run.config["method"] == method and run.config["learning_rate"] == 0.01
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000004"]
    assert {"held_out", "step"} <= run.evaluation.keys()
    if METHODS[method].generates:
        assert run.evaluation["drift"]["mean"] > 0, "drift is measured for every method"
        assert any(sample.get("measured") for sample in run.samples)


def test_given_objects_are_never_changed(method: str, tiny: Any, tmp_path: Path) -> None:
    model = tiny.model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    train(method, **tiny.options(method, tmp_path / "run", model=(model, tiny.tokenizer())))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("method", ["sft", "dpo", "reward"], indirect=False)
def test_it_learns_sixteen_pairs(method: str, tiny: Any, tmp_path: Path) -> None:
    run = train(
        method, **tiny.options(method, tmp_path / "run", steps=40, batch_size=16, eval_data=tiny.pairs(4))
    )
    losses = [row["loss"] for row in run.metrics if row["split"] == "train"]
    assert losses[-1] < {"sft": 0.7, "dpo": 0.05, "reward": 0.05}[method] < losses[0]


def test_it_learns_a_countable_reward(tiny: Any, tmp_path: Path) -> None:
    run = train(
        "reinforce", **tiny.options("reinforce", tmp_path / "run", steps=40, batch_size=32, beta=0.01)
    )
    means = [row["reward/mean"] for row in run.metrics if row["split"] == "train"]
    assert means[0] < 0.5 and sum(means[-5:]) / 5 > 2.0, means


# Bad rewards, for every method that asks one.


def broken(responses: list[str]) -> list[float]:
    raise ValueError("no such file")


def not_a_number(responses: list[str]) -> list[float]:
    return [math.nan, *[1.0] * (len(responses) - 1)]


def one_too_few(responses: list[str]) -> list[float]:
    return [1.0] * (len(responses) - 1)


def nothing(responses: list[str]) -> None:
    return None


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (broken, r"reward broken raised ValueError: no such file .*test_contract.py, line \d+"),
        (not_a_number, r"reward not_a_number returned nan for response 1 of 8 \(prompt"),
        (one_too_few, "reward one_too_few returned 7 values for 8 responses"),
        (nothing, "reward nothing returned None; expected a list of 8 numbers"),
    ],
    ids=["raises", "nan", "wrong count", "no list"],
)
@pytest.mark.parametrize("method", ONLINE)
def test_a_bad_reward_stops_the_run_in_one_paragraph(
    method: str, reward: Callable[..., Any], said: str, tiny: Any, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=said) as raised:
        train(method, **tiny.options(method, tmp_path / "run", reward=reward, preflight=False))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("method", ONLINE)
def test_report_47_missing_scores_are_left_out_and_counted(method: str, tiny: Any, tmp_path: Path) -> None:
    """Every third response has no score: the mean is over the others, and the run goes on."""

    def some(responses: list[str]) -> list[float | None]:
        return [None if i % 3 == 1 else float(i % 2) for i in range(len(responses))]

    options = tiny.options(method, tmp_path / "run", reward=some, steps=2, eval_fraction=0.0, preflight=False)
    run = train(method, **{**options, "resample_rounds": 1} if method == "dapo" else options)
    for row in run.metrics:
        assert row["reward/missing"] == row["responses/unused"] == 3 / 8
        assert row["reward/mean"] == 2 / 5
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))


@pytest.mark.parametrize("method", ONLINE)
def test_report_71_a_reward_that_hangs_is_missing_with_a_warning(
    method: str, tiny: Any, tmp_path: Path
) -> None:
    never = threading.Event()
    options = {
        "reward": lambda responses: never.wait(20),
        "reward_timeout": 0.05,
        "steps": 1,
        "preflight": False,
    }
    with pytest.warns(RuntimeWarning, match=r"did not return within 0.05 seconds: 8 responses"):
        run = train(method, **tiny.options(method, tmp_path / "run", eval_fraction=0.0, **options))
    never.set()
    assert run.metrics[0]["reward/missing"] == 1.0 and run.metrics[0]["optim/grad_norm"] == 0.0


@pytest.mark.parametrize("method", ONLINE)
def test_report_59_a_reward_that_never_answers_teaches_nothing_and_it_is_said(
    method: str, tiny: Any, tmp_path: Path, capsys: Any
) -> None:
    """No score at all, and a KL in the loss of nobody: gradient 0, weights as they were, never nan."""
    model = tiny.model()
    options = tiny.options(
        method, tmp_path / "run", reward=lambda responses: [None] * len(responses), steps=PATIENCE,
        quiet=False, model=(model, tiny.tokenizer()),
    )  # fmt: skip
    run = train(method, **options)
    for row in run.metrics:
        assert row.get("loss", 0.0) == 0.0 and row.get("optim/grad_norm", 0.0) == 0.0
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert None not in row.values() and "reward/mean" not in row
    assert "no response has a score, so nothing is learnt" in " ".join(capsys.readouterr().err.split())
    saved, before = weights(run), model.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in saved.items())
