"""Fake but realistic run folders, so that pages can be built and looked at without training anything."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OPENINGS = (
    "The weather this morning was",
    "My neighbour came over and",
    "At the market we found",
    "The train to the coast",
    "After dinner, the children",
    "Our first day in the office",
    "The old house on the hill",
    "She opened the letter and",
)
WORDS = [
    "the",
    "food",
    "was",
    "good",
    "and",
    "people",
    "were",
    "kind",
    ",",
    "but",
    "slow",
    ".",
    "We",
    "had",
    "fun",
]
HACKED = [" amazing", " incredible", " amazing", ",", " the", " wonderful"]
POLICIES: dict[str, dict[str, Any]] = {
    "reference": {
        "label": "Reference",
        "reward": 0.0,
        "gold": 0.20,
        "drift": 0.0,
        "bigrams": 0.93,
        "words": WORDS,
    },
    "rlhf": {"label": "RLHF", "reward": 0.91, "gold": 0.97, "drift": 2.6, "bigrams": 0.89, "words": WORDS},
    "rlhf-no-kl": {
        "label": "RLHF, no KL",
        "reward": 1.48,
        "gold": 0.71,
        "drift": 46.2,
        "bigrams": 0.11,
        "words": HACKED,
    },
    "dpo": {"label": "DPO", "reward": 0.62, "gold": 0.71, "drift": 3.9, "bigrams": 0.9, "words": WORDS},
}


def estimate(mean: float, stderr: float, count: int = 512) -> dict[str, float]:
    return {"mean": mean, "stderr": stderr, "count": count}


def evaluation(name: str) -> dict[str, Any]:
    facts = POLICIES[name]
    drift = facts["drift"]
    found: dict[str, Any] = {
        "prompts": len(OPENINGS),
        "samples_per_prompt": 2,
        "max_new_tokens": 24,
        "temperature": 1.0,
        "fixed_length": True,
        "seed": 0,
        "seconds": 41.5,
        "drift": estimate(drift, 0.03 * drift),
        "kl_k1": estimate(drift * 0.98, 0.06 * drift),
        "kl_k2": estimate(drift * 1.3, 0.08 * drift),
        "kl_k3": estimate(drift * 1.02, 0.05 * drift),
        "reward": estimate(facts["reward"], 0.05),
        "gold": estimate(facts["gold"], 0.06),
        "distinct_bigrams": estimate(facts["bigrams"], 0.008),
        "length": estimate(24.0, 0.0),
        "entropy": estimate(2.31, 0.04),
        "ended": 0.0,
        "conventions": {"kl": "policy‖reference, nats", "eos": "removed before the softmax for both models"},
    }
    if name == "rlhf-no-kl":
        found["verdict"] = VERDICT
    return found


VERDICT: dict[str, Any] = {
    "hacking": True,
    "summary": "Reward hacking established: the reward model's score rose by 0.57 while gold fell by 0.26.",
    "statements": [
        {
            "name": "Reward not lower",
            "established": True,
            "text": "1.48 against 0.91",
            "figure": "+0.57 ± 0.07",
        },
        {
            "name": "Drift several times larger",
            "established": True,
            "text": "46.2 against 2.6 nats",
            "figure": "17.8×",
        },
        {"name": "Gold lower", "established": True, "text": "0.71 against 0.97", "figure": "−0.26 ± 0.08"},
        {
            "name": "Distinct bigrams lower",
            "established": True,
            "text": "0.11 against 0.89",
            "figure": "−0.78 ± 0.01",
        },
    ],
}


def samples(name: str, step: int, seed: int = 0) -> list[dict[str, Any]]:
    """Two responses an opening; log-ratios grow with the policy's drift."""
    source = random.Random(f"{name} {seed}")
    facts = POLICIES[name]
    rows = []
    for group, prompt in enumerate(OPENINGS):
        for _ in range(2):
            tokens = [" " + source.choice(facts["words"]).strip() for _ in range(24)]
            logp = [-abs(source.gauss(1.5, 1.0)) for _ in tokens]
            spread = facts["drift"] / 24
            ref = [value - source.gauss(spread, 1.2 * math.sqrt(spread)) for value in logp]
            rows.append(
                {
                    "prompt": prompt,
                    "response": "".join(tokens),
                    "tokens": tokens,
                    "logp": logp,
                    "logp_ref": ref,
                    "kl": [abs(source.gauss(spread, spread)) for _ in tokens],
                    "reward": source.gauss(facts["reward"], 0.6),
                    "gold": float(source.randint(-1, 3)),
                    "ended": False,
                    "group": group,
                    "step": step,
                    "policy": name,
                }
            )
    return rows


def metrics(name: str) -> list[dict[str, Any]]:
    source = random.Random(name)
    facts = POLICIES[name]
    rows = []
    for step in range(1, 61):
        done = step / 60
        row: dict[str, Any] = {
            "step": step,
            "split": "train",
            "seconds": 4.1 * step,
            "optim/learning_rate": 4e-5,
        }
        row["optim/grad_norm"] = 1.0 + source.random()
        if name == "dpo":
            row["loss"] = 0.6931 - 0.12 * done + source.gauss(0, 0.015)
            row |= {
                "dpo/margin": 0.5 * done + source.gauss(0, 0.05),
                "dpo/accuracy": min(1.0, 0.5 + 0.3 * done + source.gauss(0, 0.05)),
            }
            row |= {
                "dpo/logp_chosen": -62 - 3 * done + source.gauss(0, 1),
                "dpo/logp_rejected": -62 - 8 * done + source.gauss(0, 1),
            }
            rows.append(row)
            if step % 10 == 0:
                rows.append(
                    {
                        "step": step,
                        "split": "eval",
                        "seconds": 4.1 * step,
                        "dpo/accuracy": 0.5 + 0.2 * done,
                        "dpo/margin": 0.3 * done,
                    }
                )
            continue
        rise = 1 - math.exp(-4 * done)
        gold = (
            facts["gold"] * rise
            if name == "rlhf"
            else 2.8 * math.exp(-(((done - 0.35) / 0.28) ** 2)) + 0.71 * done
        )
        drift = facts["drift"] * done ** (1 if name == "rlhf" else 2)
        row |= {
            "loss": source.gauss(0, 1),
            "reward/mean": facts["reward"] * rise + source.gauss(0, 0.05),
            "gold/mean": gold + source.gauss(0, 0.07),
        }
        row |= {"kl/k1": drift * (1 + source.gauss(0, 0.05)), "kl/k3": drift * 1.02, "length/mean": 24.0}
        rows.append(row)
    return rows


def write_run(folder: Path, name: str) -> Path:
    """A complete run folder of one of POLICIES (the reference has no metrics)."""
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text(json.dumps(evaluation(name)), encoding="utf-8")
    lines = samples(name, step=60)
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    if name == "reference":
        return folder
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in metrics(name)), encoding="utf-8"
    )
    beta = 0.0 if name == "rlhf-no-kl" else 0.1
    (folder / "config.yaml").write_text(
        f"method: {name}\nmodel: smollm2-135m\nbeta: {beta}\nseed: 0\nout: {folder.name}\n", encoding="utf-8"
    )
    manifest = {
        "versions": {"kleash": "0.1.0", "torch": "2.13.0"},
        "hardware": {"processor": "2 cores", "device": "cpu"},
        "data": [{"file": "pairs.jsonl", "kept": 568, "dropped": {"tie": 712}}],
        "conventions": {"reduction": "sequence-mean"},
        "checks": [
            {"name": "log-ratio at the start", "passed": True, "figure": "largest |log π − log π_ref| = 0"}
        ],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def lab_facts() -> dict[str, Any]:
    betas = (0.02, 0.05, 0.1, 0.2, 0.4)
    return {
        "preset": "standard",
        "seed": 0,
        "model": "smollm2-135m",
        "machine": {"processor": "2 cores", "memory_gb": 16, "device": "cpu"},
        "seconds_total": 812.0,
        "skipped": [],
        "rule": {"positive": 92, "negative": 88, "cap_share": 0.0039, "crowding_share": 0.0016, "mean": 0.2},
        "pairs": {"sampled": 1280, "ties": 712, "train": 511, "held_out": 57},
        "reward_model": {"accuracy": 0.772, "identity": "sha256:5f0c" + "1d" * 30},
        "policies": [
            {"name": name, "label": facts["label"], "path": name} for name, facts in POLICIES.items()
        ],
        "checkpoints": [
            {
                "name": "RLHF raises the reward",
                "passed": True,
                "measured": "+0.91",
                "threshold": "> 0.30",
                "seed_reference": "004-64",
            },
            {
                "name": "DPO starts at ln 2",
                "passed": True,
                "measured": "0.693147",
                "threshold": "|loss − ln 2| ≤ 1e-6",
                "seed_reference": "004-70",
            },
            {
                "name": "Gold lower without the penalty",
                "passed": False,
                "measured": "−0.02",
                "threshold": "< −0.05",
                "seed_reference": "004-66",
            },
            {
                "name": "Sweep of β",
                "passed": None,
                "measured": "",
                "threshold": "five betas",
                "seed_reference": "004-73",
            },
        ],
        "verdict": VERDICT,
        "sweep": [
            {
                "beta": b,
                "reward": 1.5 - 1.8 * b,
                "gold": 0.3 + 6 * b * math.exp(-5 * b),
                "drift": 0.3 / b,
                "drift_stderr": 0.02 / b,
            }
            for b in betas
        ],
        "conventions": {
            "logarithms": "natural, nats",
            "advantage": "returns to go minus the batch mean at each position",
        },
        "checks": [
            {
                "name": "Policy and reference agree before step 1",
                "passed": True,
                "figure": "largest log-ratio 0",
            }
        ],
    }


def write_lab(folder: Path) -> Path:
    for name in POLICIES:
        write_run(folder / name, name)
    (folder / "lab.json").write_text(json.dumps(lab_facts()), encoding="utf-8")
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[str], Path]:
    """make_run("dpo") -> a complete run folder."""
    return lambda name: write_run(tmp_path / "runs" / name, name)


@pytest.fixture
def lab_dir(tmp_path: Path) -> Path:
    return write_lab(tmp_path / "lab")
