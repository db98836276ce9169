"""`python -m benchmarks [TASK …]`: our side and another, by turns, each measurement in its own process.

Prints the tables, and writes results.json with every step's figures and results.md beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.job import ROOT, Answer, Job, Side, Task, run_job
from benchmarks.machine import commit, machine, today
from benchmarks.rows import GROUP, write_prompts, write_questions, write_rows
from benchmarks.sampling import RESPONSES
from benchmarks.summary import (
    Accuracy,
    Comparison,
    accuracy,
    accuracy_table,
    best,
    figures,
    speed_table,
)
from kleash.errors import KLeashError
from kleash.models.load import resolve_source

TASKS: dict[str, tuple[Task, ...]] = {
    "sft": ("sft",),
    "reward": ("reward",),
    "dpo": ("dpo", "dpo-cached"),
    "grpo": ("grpo",),
    "rloo": ("rloo",),
    "sampling": ("sampling-grouped", "sampling-distinct"),
}
CHOICES = (*TASKS, "accuracy")
BATCH = {"sft": 8, "reward": 4, "dpo": 4, "grpo": 64, "rloo": 64}
OFFLINE = ("sft", "reward", "dpo")
TRAINERS: tuple[Side, ...] = ("kleash", "trl")
SAMPLERS: tuple[Side, ...] = ("kleash", "generate-autocast", "generate-bfloat16")
DATA = ROOT.parent / "shared" / "data" / "hh-rlhf-harmless-test.jsonl.gz"
QUESTIONS = ROOT.parent / "shared" / "data" / "gsm8k-test.jsonl"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(CHOICES)}; all by default")
    parser.add_argument("--steps", type=int, default=5, help="timed optimizer steps in each round")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them, not timed")
    parser.add_argument("--rounds", type=int, default=2, help="times that each side is measured, by turns")
    parser.add_argument("--repeats", type=int, default=3, help="timed sampling calls in each round")
    parser.add_argument("--batches", type=int, default=4, help="batches whose loss is compared (accuracy)")
    parser.add_argument("--model", default="smollm2-135m", help="model folder, hub id or bundled model")
    parser.add_argument("--data", type=Path, default=DATA, help="preference pairs, any form KLeash reads")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="problems to sample answers to")
    parser.add_argument("--max-length", type=int, default=256, help="longest row in tokens")
    parser.add_argument("--prompt-length", type=int, default=128, help="longest prompt in tokens (sampling)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--allocator", choices=["keep", "default"], default="keep",
        help="keep: glibc keeps freed memory, on both sides; default: as it comes",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="also writes the .md beside")
    return parser


@dataclass
class Session:
    """What one run of the benchmarks is asked for, and what it has measured so far."""

    options: argparse.Namespace
    folder: Path
    model: str
    raw: list[dict[str, Any]] = field(default_factory=list)

    def job(self, task: Task, side: Side) -> Job:
        """The job of a task for one side, as the options say."""
        o = self.options
        job = Job(task, side, self.model, str(self.folder), o.threads, max_length=o.max_length)
        if task.startswith("sampling"):
            return replace(job, repeats=o.repeats)
        return replace(job, batch_size=BATCH[job.method], steps=o.warm_up + o.steps)

    def measure(self, job: Job) -> Answer:
        """Run a job; its answer is kept for the record."""
        answer = run_job(job, keep_memory=self.options.allocator == "keep")
        kept = {key: value for key, value in asdict(job).items() if key not in ("folder", "model", "out")}
        self.raw.append({"job": kept, "answer": asdict(answer)})
        seconds = " ".join(f"{s:.2f}" for s in answer.seconds)
        _say(f"{job.task:18} {job.side:18} {seconds} s, peak {answer.peak_bytes / 1e9:.2f} GB")
        return answer

    def rounds(self, task: Task, sides: Sequence[Side]) -> dict[Side, list[Answer]]:
        """Every side in every round; the order turns round by round, so that none is always first."""
        answers: dict[Side, list[Answer]] = {side: [] for side in sides}
        for number in range(self.options.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                answers[side].append(self.measure(self.job(task, side)))
        return answers


def compare(session: Session, task: Task) -> list[Comparison]:
    """One task, all sides; sampling is compared with the best of `generate`'s settings."""
    sampling = task.startswith("sampling")
    warm_up = 0 if sampling else session.options.warm_up
    answers = session.rounds(task, SAMPLERS if sampling else TRAINERS)
    sides = {side: figures(side, of_side, warm_up) for side, of_side in answers.items()}
    return [Comparison(task, sides.pop("kleash"), best(list(sides.values())))]


def measure_accuracy(session: Session) -> list[Accuracy]:
    """Losses of a few batches on both sides, the learning rate 0 so that the weights stay put."""

    def losses(task: Task, side: Side, dtype: Any = "bfloat16") -> Answer:
        job = replace(session.job(task, side), steps=session.options.batches, learning_rate=0.0, dtype=dtype)
        return session.measure(job)

    return [
        accuracy(
            side, losses("sft", side), losses("sft", side, "float32"), losses("dpo", side),
            losses("dpo-cached", side),
        )
        for side in TRAINERS
    ]  # fmt: skip


def prepare(session: Session) -> None:
    """Write the rows and prompts that the asked-for tasks need."""
    o = session.options
    steps = max(o.warm_up + o.steps, o.batches)
    if set(o.tasks) & {*OFFLINE, "accuracy"}:
        count = steps * max(BATCH[task] for task in OFFLINE)
        write_rows(o.data, session.folder, session.model, o.max_length, count)
    if set(o.tasks) & {"grpo", "rloo"}:
        write_questions(o.questions, session.folder, (o.warm_up + o.steps) * BATCH["grpo"] // GROUP)
    if "sampling" in o.tasks:
        write_prompts(o.data, session.folder, session.model, o.prompt_length, RESPONSES)


def run(options: argparse.Namespace) -> None:
    """Everything asked for; written after each task, so that an interruption loses one at most."""
    comparisons: list[Comparison] = []
    checks: list[Accuracy] = []
    with tempfile.TemporaryDirectory(prefix="kleash-rows-") as folder:
        session = Session(options, Path(folder), resolve_source(options.model))
        prepare(session)
        for name in options.tasks:
            for task in TASKS.get(name, ()):
                comparisons += compare(session, task)
                write(options, session, comparisons, checks)
        if "accuracy" in options.tasks:
            checks = measure_accuracy(session)
            write(options, session, comparisons, checks)
    print(page(options, comparisons, checks))


def write(
    options: argparse.Namespace, session: Session, comparisons: list[Comparison], checks: list[Accuracy]
) -> None:
    """results.json and results.md."""
    record = {
        **header(options),
        "comparisons": [c.to_json() for c in comparisons],
        "accuracy": [asdict(check) for check in checks],
        "measurements": session.raw,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    options.out.with_suffix(".md").write_text(page(options, comparisons, checks), encoding="utf-8")


def header(options: argparse.Namespace) -> dict[str, Any]:
    """Command, commit, machine and settings."""
    settings = {key: str(v) if isinstance(v, Path) else v for key, v in vars(options).items() if key != "out"}
    settings |= {"data": options.data.name, "questions": options.questions.name}
    return {
        "command": options.command,
        "commit": commit(),
        "date": today(),
        "machine": machine(),
        "settings": settings,
    }


def page(options: argparse.Namespace, comparisons: list[Comparison], checks: list[Accuracy]) -> str:
    """The results as a page."""
    h = header(options)
    m = h["machine"]
    parts = [
        "# Speed, memory and accuracy beside TRL\n",
        f"`{h['command']}`, commit {h['commit']}, {h['date']}. {m['processor']}, {m['cores']} cores, "
        f"{m['memory_gb']} GB, {', '.join(m['bfloat16']) or 'no fast bfloat16'}; Python {m['python']}, torch "
        f"{m['torch']}, transformers {m['transformers']}, accelerate {m['accelerate']}, TRL {m['trl']}.\n",
        _method(options),
    ]
    if comparisons:
        parts.append(speed_table(comparisons) + "\n")
    if checks:
        parts.append(
            f"Loss of {checks[0].batches} batches at the model's own weights; the worst batch is shown.\n\n"
            + accuracy_table(checks)
            + "\n"
        )
    return "\n".join(parts)


def _method(o: argparse.Namespace) -> str:
    allocator = (
        "glibc is told to keep freed memory on both sides"
        if o.allocator == "keep"
        else "glibc's settings are its own on both sides"
    )
    return (
        f"{o.rounds} rounds of {o.warm_up} + {o.steps} steps a side, by turns, one process at a time, "
        f"{o.threads} threads, model {Path(o.model).name}. The first {o.warm_up} steps are left out. Rows: "
        f"{o.data.name}, at most {o.max_length} tokens, the same ids in the same micro-batches, "
        "one micro-batch a step: 8 demonstrations (SFT) or 4 pairs (reward, DPO). bfloat16 autocast over "
        f"float32 weights, fused AdamW, gradient checkpointing off; {allocator}. Ours is `kleash.train` with "
        "its checks before step 1 and its save at the end; TRL's trainer saves too. Tokens are those of the "
        "rows without padding, a pair's prompt counted twice on both sides. Peak memory is the process's "
        f"VmHWM. GRPO and RLOO: 8 problems of {o.questions.name} × 8 responses of 48 tokens, end token ruled "
        "out, a reward that costs nothing, beta 0, 4 micro-batches, one gradient step a rollout on both "
        "sides; a step is sampling, scoring, backward and update, and its tokens are the sampled ones. "
        f"Sampling: {RESPONSES} responses of 48 tokens, prompts of at most {o.prompt_length} tokens, "
        "8 prompts × 8 or 64 prompts × 1; a step is one call, and `generate` is shown at the faster of "
        "autocast and bfloat16 weights.\n"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 with one paragraph on what is wrong."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = arguments()
    options = parser.parse_args(given)
    unknown = [task for task in options.tasks if task not in CHOICES]
    if unknown:
        parser.error(f"there is no task {unknown[0]}: they are {', '.join(CHOICES)}")
    for name in ("steps", "rounds", "repeats", "batches", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    options.tasks = options.tasks or list(CHOICES)
    options.command = " ".join(["python -m benchmarks", *given])
    try:
        run(options)
    except KLeashError as error:
        _say(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
