"""The whole lab on a random tiny model: its stages, its files, and what an interrupted one costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kleash.errors import UsageError
from kleash.lab.checkpoints import judge
from kleash.lab.lab import LabResult, run_lab
from kleash.lab.openings import EVALUATION_OPENINGS, TRAINING_OPENINGS
from kleash.lab.pairs import label_pairs
from kleash.lab.presets import PRESETS
from kleash.lab.tiny import write_tiny_model
from kleash.measure import Estimate, Evaluation
from kleash.models import load_model
from kleash.run import Run
from kleash.sampling import sample

POLICIES = ("reference", "rlhf", "rlhf-no-kl", "dpo")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> LabResult:
    return run_lab("tiny", 0, tmp_path_factory.mktemp("lab") / "run", quiet=True)


def test_the_lab_leaves_every_policy_measured_on_the_same_openings(lab: LabResult) -> None:
    assert set(lab.evaluations) == set(POLICIES)
    assert len({found.prompts_hash for found in lab.evaluations.values()}) == 1
    for name in POLICIES:
        assert (lab.path / name / "evaluation.json").exists()
        assert (lab.path / name / "samples.jsonl").exists()
    assert lab.evaluations["reference"].drift.mean == 0.0
    assert {p["name"] for p in lab.facts["policies"]} == set(POLICIES)


def test_policies_are_measured_in_the_same_units(lab: LabResult) -> None:
    """Every reward comes from one reward model on one scale: another call on the same samples agrees."""
    from kleash.rewards import load_reward

    judge_ = load_reward(str(lab.path / "reward"), standardise=True)
    for name in POLICIES:
        samples = lab.evaluations[name].samples
        tokenizer = load_model(lab.facts["model"])[1]
        prompt_ids = [tokenizer(s.prompt)["input_ids"] for s in samples]
        scores = judge_(
            [s.prompt for s in samples],
            [s.response for s in samples],
            prompt_ids=prompt_ids,
            response_ids=[s.ids for s in samples],
        )
        assert scores == pytest.approx([s.reward for s in samples], abs=0.05)


def test_a_short_preset_judges_nothing_and_says_so(lab: LabResult) -> None:
    assert lab.passed is None
    assert all(checkpoint.passed is None for checkpoint in lab.checkpoints)
    assert any("checkpoints" in line for line in lab.facts["skipped"])


def test_what_was_checked_before_each_run_reaches_the_report(lab: LabResult) -> None:
    names = {check["name"] for check in lab.facts["checks"]}
    assert {"RLHF: log-ratio", "RLHF: sampler", "DPO: initial loss", "RLHF: reward model"} <= names
    assert all(check["passed"] is not False for check in lab.facts["checks"])


def test_dpo_starts_at_ln_2(lab: LabResult) -> None:
    first = next(row for row in Run(lab.path / "dpo").metrics if row["split"] == "train")
    assert first["loss"] == pytest.approx(0.693147, abs=1e-3)


def test_a_second_call_repeats_no_stage(lab: LabResult) -> None:
    before = {p: p.stat().st_mtime_ns for p in lab.path.glob("*/evaluation.json")}
    again = run_lab("tiny", 0, lab.path, quiet=True)
    assert {p: p.stat().st_mtime_ns for p in lab.path.glob("*/evaluation.json")} == before
    assert again.facts["verdict"] == lab.facts["verdict"]
    assert again.facts["seconds_total"] == lab.facts["seconds_total"] > 0


def test_other_settings_in_the_same_folder_are_refused(lab: LabResult) -> None:
    with pytest.raises(UsageError, match="holds a lab with"):
        run_lab("tiny", 1, lab.path, quiet=True)


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no lab"):
        run_lab("tiny", 0, tmp_path, quiet=True)


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(UsageError, match="preset=huge"):
        run_lab("huge")


def test_lab_json_is_plain_json_without_nan(lab: LabResult) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(name)

    json.loads((lab.path / "lab.json").read_text(), parse_constant=refuse)


def test_no_opening_has_pairs_on_both_sides(tmp_path: Path) -> None:
    model, tokenizer = load_model(str(write_tiny_model(tmp_path / "model")))
    rollouts = sample(
        model, tokenizer, TRAINING_OPENINGS[:10], n=6, max_new_tokens=8, fixed_length=True, seed=1
    )
    pairs = label_pairs(rollouts, 9, seed=0)
    assert not {row["prompt"] for row in pairs.train} & {row["prompt"] for row in pairs.held_out}
    assert pairs.sampled == 90
    assert len(pairs.train) + len(pairs.held_out) + pairs.ties == 90
    assert pairs.train and pairs.held_out
    texts = dict(zip(map(tuple, rollouts.response_ids.tolist()), rollouts.responses, strict=True))
    assert all(texts[tuple(row["chosen_ids"])] == row["chosen"] for row in pairs.train)


def test_training_and_evaluation_openings_share_nothing() -> None:
    assert not set(TRAINING_OPENINGS) & set(EVALUATION_OPENINGS)


def evaluation(reward: float, gold: float, drift: float, bigrams: float) -> Evaluation:
    values = {"reward": reward, "gold": gold, "drift": drift, "distinct_bigrams": bigrams}
    found = Evaluation(64, 4, 24, 1.0, True, 0, 1.0)
    for name, value in values.items():
        setattr(found, name, Estimate(value, 0.1, 64))
    return found


def test_checkpoints_pass_and_fail_each_on_its_own(tmp_path: Path, lab: LabResult) -> None:
    """The signature passes; undoing one measurement at a time fails exactly that checkpoint."""
    good = {
        "reference": evaluation(0.0, 0.2, 0.0, 0.97),
        "rlhf": evaluation(1.4, 1.7, 7.0, 0.94),
        "rlhf-no-kl": evaluation(1.5, 0.9, 58.0, 0.7),
        "dpo": evaluation(1.0, 0.9, 5.0, 0.95),
    }
    reward, dpo = Run(lab.path / "reward"), Run(lab.path / "dpo")

    def failed(**changes: Evaluation) -> set[str]:
        results = judge({**good, **changes}, reward, dpo, judged=True)
        return {c.name for c in results if not c.passed and "DPO" not in c.name}

    assert failed() == set()
    assert failed(**{"rlhf-no-kl": evaluation(1.5, 1.8, 58.0, 0.7)}) == {"no penalty: gold lower"}
    assert failed(**{"rlhf-no-kl": evaluation(1.2, 0.9, 58.0, 0.7)}) == {
        "no penalty: reward at least as high"
    }
    assert failed(**{"rlhf-no-kl": evaluation(1.5, 0.9, 58.0, 0.94)}) == {
        "no penalty: fewer distinct bigrams"
    }
    assert failed(**{"rlhf-no-kl": evaluation(1.5, 0.9, 7.5, 0.7)}) == {
        "no penalty: drift several times larger"
    }
    assert "RLHF raises the reward" in failed(rlhf=evaluation(0.1, 1.7, 7.0, 0.94))


def test_presets_that_judge_say_what_else_they_leave_out() -> None:
    assert PRESETS["full"].skipped == []
    assert len(PRESETS["standard"].skipped) == 1
    assert len(PRESETS["quick"].skipped) == 2
