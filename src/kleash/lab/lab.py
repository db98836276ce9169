"""The lab: reward model, REINFORCE with and without the KL penalty, DPO, on one model and one set of
openings (seed 004, Lab 10).

Every stage writes its own folder inside the lab's and is skipped when that folder is complete, so an
interrupted lab goes on where it stopped. The stages only call what a user can call: `kleash.sample`,
`kleash.train`, `kleash.measure`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kleash.errors import UsageError
from kleash.lab.checkpoints import Checkpoint, judge
from kleash.lab.openings import EVALUATION_OPENINGS, TRAINING_OPENINGS
from kleash.lab.pairs import Pairs, label_pairs, rule_record
from kleash.lab.presets import BETA, SWEEP, Preset, find_preset
from kleash.lab.rule import gold_reward
from kleash.lab.tiny import write_tiny_model
from kleash.measure import Evaluation, measure, verdict
from kleash.models import autocast, identity, load_model
from kleash.report.text import format_number
from kleash.run import Run, check_writable, write_text
from kleash.sampling import sample
from kleash.training import train
from kleash.training.manifest import hardware, versions

REWARD_NAME = "the reward model's score"
LABELS = {"reference": "Reference", "rlhf": "RLHF", "rlhf-no-kl": "RLHF, no penalty", "dpo": "DPO"}

Say = Callable[[str], None]


@dataclass
class LabResult:
    """What a finished lab comes down to; `passed` is None where the preset judges nothing."""

    path: Path
    facts: dict[str, Any]
    evaluations: dict[str, Evaluation]
    checkpoints: list[Checkpoint]

    @property
    def passed(self) -> bool | None:
        """Whether every judged checkpoint passed."""
        results = [c.passed for c in self.checkpoints if c.passed is not None]
        return all(results) if results else None


@dataclass
class Lab:
    """The settings of one lab and what its stages have found so far."""

    preset: Preset
    seed: int
    model: str
    path: Path
    quiet: bool
    say: Say

    @property
    def openings(self) -> tuple[list[str], list[str]]:
        """Training and evaluation openings in use."""
        return list(TRAINING_OPENINGS[: self.preset.openings]), list(
            EVALUATION_OPENINGS[: self.preset.openings]
        )


def run_lab(
    preset: str = "standard",
    seed: int = 0,
    out: str | Path = "runs/lab",
    model: str | None = None,
    *,
    quiet: bool = False,
    say: Say = lambda text: None,
) -> LabResult:
    """Run the lab, or what is missing of it, into the folder `out`; returns its table, checkpoints and
    verdict.

    `model` is what `load_model` takes by name; by default the bundled one (the tiny preset makes a random
    one). `say` is told, in a line each, what the stages find. UsageError where `out` holds a lab of other
    settings.
    """
    sizes = find_preset(preset)
    path = Path(out)
    check_writable(path)
    lab = Lab(sizes, seed, _model_name(sizes, model, path), path, quiet, say)
    _open(lab)
    pairs, facts = _samples_and_pairs(lab)
    reward = _train(lab, "reward", "reward", _reward_options(lab, pairs))
    say(f"Reward model: held-out accuracy {reward.evaluation['held_out']['reward/accuracy']:.3f}.")
    _measure_reference(lab)
    for name, beta in (("rlhf", BETA), ("rlhf-no-kl", 0.0)):
        _describe(lab, name, _train(lab, name, "reinforce", _policy_options(lab, beta)))
    _describe(lab, "dpo", _train(lab, "dpo", "dpo", _dpo_options(lab, pairs)))
    sweep = _sweep(lab) if sizes.sweep else []
    return _conclude(lab, facts, sweep)


def _model_name(preset: Preset, model: str | None, path: Path) -> str:
    if model is not None:
        return model
    return str(write_tiny_model(path / "tiny-model")) if preset.name == "tiny" else "smollm2-135m"


def _open(lab: Lab) -> None:
    """Make the lab's folder, or check that the lab already in it is this one."""
    settings = {"preset": lab.preset.name, "seed": lab.seed, "model": lab.model}
    file = lab.path / "settings.json"
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        if before != settings:
            raise UsageError(
                f"out={lab.path} holds a lab with {before}, and this one has {settings}. Choose another "
                f"out, or remove that "
                "folder."
            )
        return
    if lab.path.exists() and any(child.name != "tiny-model" for child in lab.path.iterdir()):
        raise UsageError(f"out={lab.path}: the folder is not empty and holds no lab. Choose another out.")
    lab.path.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(settings, indent=2) + "\n")


def _samples_and_pairs(lab: Lab) -> tuple[Pairs, dict[str, Any]]:
    """Steps 0 and 1: the reference's responses, the rule on them, labelled pairs; read back if they are
    there.
    """
    file = lab.path / "pairs.json"
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        return Pairs(**kept["pairs"]), kept["facts"]
    started = time.perf_counter()
    policy, tokenizer = load_model(lab.model)
    with autocast():
        rollouts = sample(
            policy,
            tokenizer,
            lab.openings[0],
            n=lab.preset.responses,
            max_new_tokens=lab.preset.response_tokens,
            fixed_length=True,
            seed=lab.seed,
            batch_rows=160,
        )
    pairs = label_pairs(rollouts, lab.preset.pairs, lab.seed)
    rule = rule_record(rollouts.responses)
    facts = {
        "rule": rule,
        "pairs": pairs.record(),
        "identity": identity(policy),
        "seconds": time.perf_counter() - started,
    }
    lab.say(
        f"The rule on {len(rollouts)} responses of the reference: mean {rule['mean']:.2f}; cap or crowding "
        f"penalty in {rule['fired_share']:.2%} of them. {pairs.sampled} pairs, {pairs.ties} ties dropped, "
        f"{len(pairs.train)} to train on, {len(pairs.held_out)} held out."
    )
    kept = {"pairs": vars(pairs), "facts": facts}
    write_text(file, json.dumps(kept, ensure_ascii=False) + "\n")
    return pairs, facts


def _shared_options(lab: Lab) -> dict[str, Any]:
    return {
        "model": lab.model,
        "seed": lab.seed,
        "chat": "plain",
        "max_length": 128,
        "fixed_length": True,
        "max_new_tokens": lab.preset.response_tokens,
        "quiet": lab.quiet,
    }


def _measured(lab: Lab) -> dict[str, Any]:
    return {
        "reward": str(lab.path / "reward"),
        "gold": gold_reward,
        "eval_prompts": lab.openings[1],
        "eval_prompt_count": lab.preset.openings,
        "eval_samples": lab.preset.eval_samples,
        "sampling_rows": 128,
    }


def _reward_options(lab: Lab, pairs: Pairs) -> dict[str, Any]:
    return {
        **_shared_options(lab),
        "data": pairs.train,
        "eval_data": pairs.held_out,
        "epochs": lab.preset.reward_epochs,
        "batch_size": 16,
        "learning_rate": lab.preset.reward_rate,
        "schedule": "linear",
    }


def _policy_options(lab: Lab, beta: float) -> dict[str, Any]:
    return {
        **_shared_options(lab),
        **_measured(lab),
        "data": lab.openings[0],
        "eval_fraction": 0.0,
        "beta": beta,
        "steps": lab.preset.policy_steps,
        "batch_size": lab.preset.policy_batch,
        "learning_rate": lab.preset.policy_rate,
        "samples_every": 10,
    }


def _dpo_options(lab: Lab, pairs: Pairs) -> dict[str, Any]:
    return {
        **_shared_options(lab),
        **_measured(lab),
        "data": pairs.train,
        "eval_data": pairs.held_out,
        "beta": BETA,
        "epochs": lab.preset.dpo_epochs,
        "batch_size": 16,
        "learning_rate": lab.preset.dpo_rate,
        "schedule": "linear",
    }


def _train(lab: Lab, name: str, method: str, options: dict[str, Any]) -> Run:
    """One training run in the lab's folder: done already, resumed from its checkpoint, or new."""
    run = Run(lab.path / name)
    if run.evaluation:
        return run
    resume = run.checkpoints.is_dir() and any(run.checkpoints.glob("step-*"))
    if run.path.exists() and not resume:
        shutil.rmtree(run.path)  # begun by an earlier call of this lab and left before its first checkpoint
    started = time.perf_counter()
    run = train(method, **options, out=str(run.path), resume=resume)
    seconds = time.perf_counter() - started
    run.write_json("evaluation.json", {**run.evaluation, "training_seconds": seconds})
    return run


def _measure_reference(lab: Lab) -> None:
    """Every judge on the reference's own samples, before anything is trained against them."""
    run = Run(lab.path / "reference")
    if run.evaluation:
        return
    options = _measured(lab)
    policy = load_model(lab.model)
    measured = measure(
        policy,
        reference=policy,
        prompts=options["eval_prompts"],
        reward=options["reward"],
        gold=options["gold"],
        n=options["eval_samples"],
        max_new_tokens=lab.preset.response_tokens,
        fixed_length=True,
        seed=lab.seed,
        batch_rows=options["sampling_rows"],
        chat="plain",
    )
    run.path.mkdir(exist_ok=True)
    run.append(
        "samples.jsonl",
        ({"step": 0, "policy": "reference", "measured": True, **s.to_json()} for s in measured.samples),
    )
    run.write_json("evaluation.json", measured.to_json(samples=False))
    _describe(lab, "reference", run)


def _describe(lab: Lab, name: str, run: Run) -> None:
    found = Evaluation.from_json(run.evaluation)
    numbers = [
        f"{key} {format_number(value.mean, 2)}"
        for key in ("reward", "gold", "drift")
        if (value := getattr(found, key)) is not None
    ]
    lab.say(f"{LABELS.get(name, name)}: {', '.join(numbers)} on the {found.prompts} evaluation openings.")


def _sweep(lab: Lab) -> list[dict[str, Any]]:
    """Reward and gold against drift for five coefficients; the two already trained are reused."""
    rows = []
    for beta in SWEEP:
        run = _train(lab, _sweep_folder(beta), "reinforce", _policy_options(lab, beta))
        found = Evaluation.from_json(run.evaluation)
        assert found.reward is not None and found.gold is not None and found.drift is not None
        rows.append(
            {
                "beta": beta,
                "reward": found.reward.mean,
                "gold": found.gold.mean,
                "drift": found.drift.mean,
                "drift_stderr": found.drift.stderr,
            }
        )
        lab.say(
            f"beta {beta:g}: reward {format_number(found.reward.mean, 2)}, "
            f"gold {format_number(found.gold.mean, 2)}, drift {format_number(found.drift.mean, 2)}."
        )
    return rows


def _conclude(lab: Lab, facts: dict[str, Any], sweep: list[dict[str, Any]]) -> LabResult:
    """Table, checkpoints and verdict from the folders of the stages, written to lab.json."""
    runs = {name: Run(lab.path / name) for name in LABELS}
    found = {name: _evaluation(run) for name, run in runs.items()}
    reward = Run(lab.path / "reward")
    checkpoints = judge(found, reward, runs["dpo"], judged=lab.preset.judged)
    said = verdict(found["rlhf-no-kl"], found["rlhf"], reward_name=REWARD_NAME, gold_independent=True)
    results = {
        "preset": lab.preset.name,
        "seed": lab.seed,
        "model": lab.model,
        "machine": hardware("cpu"),
        "versions": versions(),
        "seconds_total": facts["seconds"] + sum(_seconds(Run(lab.path / name)) for name in _stages(lab)),
        "skipped": lab.preset.skipped,
        "rule": facts["rule"],
        "pairs": facts["pairs"],
        "reward_model": {
            "accuracy": reward.evaluation["held_out"]["reward/accuracy"],
            "identity": facts["identity"],
        },
        "policies": [
            {"name": name, "label": label, "path": name, "seconds": _seconds(runs[name])}
            for name, label in LABELS.items()
        ],
        "checkpoints": [vars(checkpoint) for checkpoint in checkpoints],
        "verdict": said.to_json(),
        "sweep": sweep,
        "conventions": {**found["rlhf"].conventions, **runs["rlhf"].manifest.get("conventions", {})},
        "checks": _checks(runs),
    }
    write_text(
        lab.path / "lab.json", json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    )
    return LabResult(lab.path, results, found, checkpoints)


def _evaluation(run: Run) -> Evaluation:
    """The measurement at the end of a run, with its samples: intervals are then paired by opening."""
    return Evaluation.from_json(run.evaluation, [row for row in run.samples if row.get("measured")])


def _stages(lab: Lab) -> list[str]:
    """The run folders of this lab: what its total time is made of, whenever each was run."""
    swept = [_sweep_folder(beta) for beta in SWEEP] if lab.preset.sweep else []
    return list(dict.fromkeys(["reward", *LABELS, *swept]))


def _sweep_folder(beta: float) -> str:
    """Where the sweep's run of one coefficient lives; two of them are the lab's own runs."""
    return {BETA: "rlhf", 0.0: "rlhf-no-kl"}.get(beta, f"beta-{beta:g}")


def _seconds(run: Run) -> float:
    """What a stage took: training with its measurement, or the reference's measurement alone."""
    found = run.evaluation
    return float(found["training_seconds"] if "training_seconds" in found else found["seconds"])


def _checks(runs: dict[str, Run]) -> list[dict[str, Any]]:
    """What each training run had checked before its first step."""
    return [
        {**finding, "name": f"{LABELS[name]}: {finding['name']}"}
        for name, run in runs.items()
        for finding in run.manifest.get("checks", [])
    ]
