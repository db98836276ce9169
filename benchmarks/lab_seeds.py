"""Five labs to one page: the table of docs/results/lab.md and the smallest gap of each checkpoint over the
seeds.

for seed in 0 1 2 3 4; do kleash lab --seed $seed --out runs/lab-$seed; done
python -m benchmarks.lab_seeds runs/lab-* > docs/results/lab.md
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

METRICS = (("reward", 2), ("gold", 2), ("drift", 1), ("distinct_bigrams", 3))
POLICIES = {"reference": "reference", "rlhf": "RLHF", "rlhf-no-kl": "no penalty", "dpo": "DPO"}

HEADER = """# The lab over five seeds

Preset `{preset}`, model `{model}`. Command, for each seed: `kleash lab --seed SEED --out runs/lab-SEED`;
this page: `python -m benchmarks.lab_seeds runs/lab-*`. Commit `{commit}`. Machine: {machine}.

Evaluation: 64 openings no policy was trained on, 4 responses each. Reward is the reward model's score in
its own standard deviations; drift is exact KL from the reference, nats a response of 24 tokens. ± is one
standard error.
"""


def main(folders: list[str]) -> int:
    """Print the page for the lab folders given."""
    labs = sorted((read(Path(folder)) for folder in folders), key=lambda lab: lab["seed"])
    if not labs:
        print("usage: python -m benchmarks.lab_seeds LAB_FOLDER …", file=sys.stderr)
        return 2
    first = labs[0]
    print(
        HEADER.format(preset=first["preset"], model=first["model"], commit=commit(), machine=machine(first))
    )
    print(table(labs))
    print("\n## Reward model, DPO, time\n")
    print(other(labs))
    print("\n## Checkpoints\n")
    print(checkpoints(labs))
    print("\n## What was said of each seed\n")
    for lab in labs:
        print(f"- seed {lab['seed']}: {lab['verdict']['summary']}")
    return 0


def read(folder: Path) -> dict[str, Any]:
    """lab.json of a folder with the evaluations of its policies."""
    lab = json.loads((folder / "lab.json").read_text(encoding="utf-8"))
    lab["evaluations"] = {
        name: json.loads((folder / name / "evaluation.json").read_text(encoding="utf-8")) for name in POLICIES
    }
    lab["first_loss"] = next(
        row["loss"]
        for line in (folder / "dpo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if (row := json.loads(line)).get("split") == "train"
    )
    return lab


def commit() -> str:
    """The commit checked out here."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def machine(lab: dict[str, Any]) -> str:
    """The machine as the lab recorded it."""
    found = lab["machine"]
    torch = lab["versions"]["torch"]
    return f"{found['processor']}, {found['cpus']} cores, {found['threads']} threads, torch {torch}"


def table(labs: list[dict[str, Any]]) -> str:
    """One row a seed and policy."""
    lines = ["| seed | policy | reward | gold | drift | distinct bigrams |", "|---|---|---|---|---|---|"]
    for lab in labs:
        for name, label in POLICIES.items():
            found = lab["evaluations"][name]
            cells = [
                f"{found[key]['mean']:.{digits}f} ± {found[key]['stderr']:.{digits}f}"
                for key, digits in METRICS
            ]
            lines.append(f"| {lab['seed']} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def other(labs: list[dict[str, Any]]) -> str:
    """What else the issue of a lab asks of each seed."""
    lines = [
        "| seed | pairs (ties dropped) | reward model's held-out accuracy | DPO's held-out accuracy "
        "| DPO's first loss | cap or crowding on the reference | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for lab in labs:
        pairs, rule = lab["pairs"], lab["rule"]
        accuracy = lab["evaluations"]["dpo"]["held_out"]["dpo/accuracy"]
        lines.append(
            f"| {lab['seed']} | {pairs['sampled']} ({pairs['ties']}) "
            f"| {lab['reward_model']['accuracy']:.3f} "
            f"| {accuracy:.3f} | {lab['first_loss']:.6f} | {rule['fired_share']:.2%} "
            f"| {lab['seconds_total'] / 60:.1f} |"
        )
    return "\n".join(lines)


def checkpoints(labs: list[dict[str, Any]]) -> str:
    """Each checkpoint's figure in every seed beside its threshold."""
    lines = ["| checkpoint | " + " | ".join(f"seed {lab['seed']}" for lab in labs) + " | threshold |"]
    lines.append("|---|" + "---|" * (len(labs) + 1))
    for row in zip(*(lab["checkpoints"] for lab in labs), strict=True):
        figures = [f"{c['measured']}{'' if c['passed'] else ' (failed)'}" for c in row]
        lines.append(f"| {row[0]['name']} | " + " | ".join(figures) + f" | {row[0]['threshold']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
