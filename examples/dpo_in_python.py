"""DPO on a file of pairs, then the same measurement for the model before and after, and what it establishes.

python examples/dpo_in_python.py
python examples/dpo_in_python.py my-pairs.jsonl --steps 100 --out runs/mine
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kleash.allocator import keep_freed_memory

keep_freed_memory()  # before torch is loaded: on a CPU with Linux, training is then a good deal faster

import kleash  # noqa: E402
from kleash.measure import verdict  # noqa: E402

HERE = Path(__file__).parent
PROMPTS = ["The new shop in our street is", "My aunt opened the window and", "After the long walk we were"]


def main(
    data: str | Path = HERE / "pairs.jsonl",
    model: str = "smollm2-135m",
    out: str = "runs/dpo-in-python",
    steps: int = 20,
) -> str:
    """Train, measure both models on prompts that are not in the data; returns the verdict's summary."""
    options = {"beta": 0.1, "learning_rate": 2e-5, "steps": steps, "max_length": 128}
    run = kleash.train("dpo", model=model, data=data, out=out, **options)
    first = next(row["loss"] for row in run.metrics if row["split"] == "train")
    print(f"first loss {first:.6f}, held-out accuracy {run.evaluation['held_out']['dpo/accuracy']:.2f}")

    how = {"reference": model, "prompts": PROMPTS, "n": 4, "max_new_tokens": 24}
    judges = {"reward": f"{HERE / 'own_reward.py'}:cheerful", "gold": f"{HERE / 'own_reward.py'}:varied"}
    before = kleash.measure(model, **how, **judges)
    after = kleash.measure(run.path, **how, **judges)
    for name, found in (("before", before), ("after", after)):
        print(f"{name}: drift {found.drift} nats, reward {found.reward}, gold {found.gold}")
    print(after.samples[0].prompt + after.samples[0].response)

    summary = verdict(after, before, reward_name="cheerful words", gold_independent=True).summary
    print(summary)
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", nargs="?", default=HERE / "pairs.jsonl")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", default="runs/dpo-in-python")
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
