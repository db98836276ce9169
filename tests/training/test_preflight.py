"""Before step 1: what a broken start looks like, and that it is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kleash.training.preflight as preflight_module
from kleash.errors import UsageError
from kleash.models import RewardModel, identity
from kleash.training import check, train
from kleash.training.preflight import CheckReport


def finding(report: CheckReport, name: str) -> Any:
    return next(f for f in report if f.name == name)


def run_check(tiny: Any, method: str, **changes: Any) -> CheckReport:
    options = tiny.options(method, Path("unused"), **changes)
    return check(method, **options)


@pytest.mark.parametrize("method", ["sft", "dpo", "reward", "reinforce"])
def test_a_sound_start_passes_and_writes_nothing(method: str, tiny: Any, tmp_path: Path) -> None:
    report = run_check(tiny, method)
    assert report.passed and not Path("unused").exists()
    assert all(f.passed or f.passed is None for f in report)
    assert {"rows", "tokens", "cost", "dropout"} <= {f.name for f in report}
    if method != "reward":
        assert finding(report, "forward pass").figure < 1e-5


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("micro", [None, 1, 2])
def test_report_1_2_dpo_starts_at_ln_2_with_dropout_in_the_model(
    cached: bool, micro: int | None, tiny: Any
) -> None:
    """Loss = ln 2, log-ratio exactly 0, although the model has dropout 0.3 and whatever the micro-batches."""
    model = (tiny.model(dropout=0.3), tiny.tokenizer())
    report = run_check(tiny, "dpo", model=model, cache_reference=cached, micro_batch_size=micro)
    assert finding(report, "initial loss").figure == pytest.approx(math.log(2), abs=1e-6)
    assert finding(report, "log-ratio").figure == 0.0 and finding(report, "dropout").passed


def test_report_1_the_first_step_is_at_ln_2_to_the_bit_with_the_cache_in_bfloat16(
    tiny: Any, tmp_path: Path
) -> None:
    """Cached in the first epoch's own micro-batches, so that bfloat16 rounds alike."""
    run = train("dpo", **tiny.options("dpo", tmp_path / "run", dtype="bfloat16", micro_batch_size=2))
    assert run.metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert run.metrics[0]["dpo/margin"] == 0.0


def test_another_reference_is_refused_unless_meant(tiny: Any, tmp_path: Path) -> None:
    other = (tiny.model(seed=7), tiny.tokenizer())
    with pytest.raises(UsageError, match=r"log-ratio.*start_at_reference=false") as raised:
        train("dpo", **tiny.options("dpo", tmp_path / "run", reference=other))
    assert "initial loss" in str(raised.value) and not any((tmp_path / "run").iterdir())
    run = train("dpo", **tiny.options("dpo", tmp_path / "run", reference=other, start_at_reference=False))
    assert run.metrics[0]["loss"] != pytest.approx(math.log(2), abs=1e-3)
    with pytest.raises(UsageError, match="log-ratio"):
        train("reinforce", **tiny.options("reinforce", tmp_path / "online", reference=other))


def test_report_33_sampler_and_trainer_must_agree(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled at temperature 0.5 but scored at 1: refused."""
    assert finding(run_check(tiny, "reinforce", temperature=0.5), "sampler").passed
    real = preflight_module.batch_logprobs

    def forgetful(model: Any, batch: Any, temperature: float = 1.0, forbidden: Any = ()) -> Any:
        return real(model, batch, forbidden=forbidden)

    monkeypatch.setattr(preflight_module, "batch_logprobs", forgetful)
    wrong = finding(run_check(tiny, "reinforce", temperature=0.5), "sampler")
    assert wrong.passed is False and wrong.figure > 1e-3


@pytest.mark.parametrize("method", ["dpo", "reinforce"])
def test_a_column_that_the_reward_lacks_is_said_before_training(
    method: str, tiny: Any, tmp_path: Path
) -> None:
    """Of DPO it is the measurement at the end that would need it."""

    def grade(responses: list[str], answer: list[str]) -> list[float]:
        return [0.0] * len(responses)

    options = tiny.options(method, tmp_path / "run", reward=grade, measure=method == "dpo")
    with pytest.raises(UsageError, match="reward grade needs answer, but what it can be given is"):
        train(method, **options)
    assert not any((tmp_path / "run").iterdir())


def test_a_mask_that_trains_the_prompt_is_refused(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from kleash.data import collate_examples
    from kleash.methods import METHODS

    def wrong(items: Any, pad_id: int, index: Any = None) -> Any:
        batch = collate_examples(items, pad_id, index)
        batch.response_mask[:, 2] = True
        return batch

    monkeypatch.setitem(METHODS, "sft", replace(METHODS["sft"], collate=wrong))
    with pytest.raises(UsageError, match="prompt untrained"):
        train("sft", **tiny.options("sft", tmp_path / "run"))


def reward_model(tiny: Any, text_model: str | None) -> RewardModel:
    model = RewardModel.from_policy(tiny.model(), tiny.tokenizer())
    torch.nn.init.normal_(model.score.weight)
    model.meta.update(text_model=text_model, mean=0.5, std=2.0)
    return model


def test_a_reward_model_of_this_reference_s_text_passes(tiny: Any) -> None:
    judge = reward_model(tiny, identity(tiny.model()))
    assert finding(run_check(tiny, "reinforce", reward=judge), "reward model").passed


@pytest.mark.parametrize("text_model", [None, "sha256:other"])
def test_a_foreign_reward_model_is_refused_unless_accepted(
    text_model: str | None, tiny: Any, tmp_path: Path
) -> None:
    judge = reward_model(tiny, text_model)
    with pytest.raises(UsageError, match=r"fitted on text from .*foreign_reward=true"):
        train("reinforce", **tiny.options("reinforce", tmp_path / "run", reward=judge))
    report = run_check(tiny, "reinforce", reward=judge, foreign_reward=True)
    assert finding(report, "reward model").passed is None and report.passed


def test_rendered_rows_mark_the_trained_tokens(tiny: Any) -> None:
    report = run_check(tiny, "sft")
    for row in report.rows:
        pieces = row.pieces
        trained = [text for text, flag in pieces if flag]
        assert trained[-1].strip() == "<eos>" and trained[0].strip() == "and"
        flags = [flag for _, flag in pieces]
        assert flags == sorted(flags), "the prompt, untrained, comes first"


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("sft", ["row 2", "row 3", "row 4"]),
        ("dpo", [f"row {n}, {side}" for n in (2, 3, 4) for side in ("chosen", "rejected")]),
        ("reinforce", ["row 2, prompt", "row 3, prompt", "row 4, prompt"]),
    ],
)
def test_rendered_rows_are_numbered_as_in_the_data(method: str, names: list[str], tiny: Any) -> None:
    """The first row is dropped here, for its length."""
    data = tiny.options(method, Path("unused"))["data"]
    data = [{**data[0], "prompt": "the " * 60}, *data[1:6]]
    report = run_check(tiny, method, data=data, eval_fraction=0.0, max_length=40)
    assert [row.name for row in report.rows] == names
    if method == "dpo":
        texts = ["".join(text for text, _ in row.pieces) for row in report.rows]
        assert [("good" in text, "bad" in text) for text in texts[:2]] == [(True, False), (False, True)]


def test_tokens_are_counted_alike_in_all_and_among_the_trained(tiny: Any) -> None:
    """Two pairs with 3 prompt tokens, 2 + 3 and 4 + 2 response tokens, end token included: 23, 11 trained."""
    rows = [
        {"prompt": "the cat sat", "chosen": " good", "rejected": " very bad"},
        {"prompt": "the dog ran", "chosen": " good very nice", "rejected": " bad"},
    ]
    report = run_check(tiny, "dpo", data=rows, eval_fraction=0.0, batch_size=2)
    assert finding(report, "tokens").message == (
        "23 tokens in 2 rows, the prompt counted with chosen and with rejected; a response with its prompt "
        "has 6 in the median and 7 at most, of max_length=1024"
    )
    assert "11 of 23 tokens are trained" in finding(report, "trained tokens").message


def test_counts_of_dropped_and_truncated_rows(tiny: Any) -> None:
    rows = [*tiny.demonstrations(8), {"prompt": "the " * 60, "completion": "dog"}]
    report = run_check(tiny, "sft", data=rows, eval_fraction=0.0, max_length=40)
    assert "1 longer than max_length" in finding(report, "rows").message
    report = run_check(tiny, "sft", data=rows, eval_fraction=0.0, max_length=40, truncation="prompt-left")
    assert "truncated: 1" in finding(report, "rows").message


def test_report_4_rows_without_a_response_token_never_train(tiny: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "the " * 40, "chosen": "good", "rejected": "bad"}] * 4
    with pytest.raises(UsageError, match="no row is left"):
        train("dpo", **tiny.options("dpo", tmp_path / "run", data=rows, max_length=32, eval_fraction=0.0))


def test_cost_counts_every_part(tiny: Any) -> None:
    """Adam's two moments, gradients and weights are 4 bytes each; the reference counts only where it is
    held.
    """
    count = sum(p.numel() for p in tiny.model().parameters())
    live, cached = (run_check(tiny, "dpo", cache_reference=flag) for flag in (False, True))
    mib = 4 * count / 2**20
    gap = finding(live, "cost").figure - finding(cached, "cost").figure
    assert gap >= 0.9 * mib, "a reference in memory is one more copy of the weights"
    assert finding(cached, "cost").figure > 4 * mib
    assert "s a step" in finding(cached, "cost").message


def test_report_60_weights_below_float32_are_refused(tiny: Any, tmp_path: Path) -> None:
    model = (tiny.model().to(torch.bfloat16), tiny.tokenizer())
    with pytest.raises(UsageError, match="Give the model in float32"):
        train("sft", **tiny.options("sft", tmp_path / "run", model=model, preflight=False))


def test_an_unknown_method_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean reinforce"):
        train("reinforc", data=[])
