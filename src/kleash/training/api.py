"""`kleash.train` and `kleash.check`: from a method and its options to a run, or to what is wrong."""

from __future__ import annotations

import difflib
from dataclasses import asdict
from typing import Any

from kleash.config import build, resolved
from kleash.errors import UsageError
from kleash.methods import METHODS, Method
from kleash.models import RewardModel
from kleash.run import Run, create_run, free_name, reopen_run
from kleash.training.checkpoint import checkpoints, load_checkpoint, remove_leftovers
from kleash.training.console import Console
from kleash.training.evaluate import evaluate_held_out, finish_model, measure_policy
from kleash.training.loop import Loop
from kleash.training.manifest import manifest
from kleash.training.preflight import CheckReport, preflight
from kleash.training.processes import Processes, means
from kleash.training.save import check_room, save_model
from kleash.training.setup import Job, prepare

# Options that may differ when a run is resumed: they say how far and how often, not what is computed.
FREE_ON_RESUME = {
    "resume", "out", "steps", "epochs", "log_every", "eval_every", "save_every", "keep_checkpoints",
    "tracker", "quiet", "preflight", "measure", "eval_at_start", "eval_prompts", "eval_prompt_count",
    "eval_samples",
    "reward_timeout", "reward_workers",
}  # fmt: skip


def train(method: str, **options: Any) -> Run:
    """Train, measure and save; returns the run.

    `options` are the keys of a recipe; model, reference, data, reward and gold may be objects. UsageError
    where the request is wrong (nothing is trained), RunError where the run fails (what was saved stays),
    Interrupted after a Ctrl-C.
    """
    found = find_method(method)
    config = build(found.config, options)
    processes = Processes(config.tracker, config.out)
    config.out = processes.agree(config.out or str(free_name("runs", method)))
    console = Console(config.quiet or not processes.main)
    run = _open(config, processes)
    job = prepare(found, config, processes)
    check_room(job.models.policy, run.model)
    if config.preflight:
        report = preflight(job)
        _announce(report, console)
        job.checks = [asdict(finding) for finding in report.findings]
    loop = Loop(job, run, console)
    _start(job, run, loop, console)
    loop.train()
    _finish(job, run, loop, console)
    return run


def check(method: str, **options: Any) -> CheckReport:
    """A dry run: what `train` would refuse, with the rows as they would be trained, and what memory and time
    it would take.

    Loads the data and the model, writes nothing. Raises UsageError only where the request cannot even be
    tried.
    """
    found = find_method(method)
    config = build(found.config, options)
    return preflight(prepare(found, config, Processes()), full=True)


def find_method(name: str) -> Method:
    """The method of that name; UsageError with the nearest one."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        raise UsageError(
            f"there is no method {name}: "
            + (f"did you mean {near[0]}?" if near else f"there are {', '.join(METHODS)}.")
        )
    return METHODS[name]


def _open(config: Any, processes: Processes) -> Run:
    """The run folder, refused before any work where it cannot serve; the main process answers for all."""
    if not processes.main:
        return Run(config.out)
    if not config.resume:
        return create_run(config.out, resumable=True)
    run = reopen_run(config.out)
    if not checkpoints(run.checkpoints):
        raise UsageError(
            f"resume=true: {run.checkpoints} holds no complete checkpoint, so there is nothing to go on "
            "from. Start anew in another out=, with save_every=… to have checkpoints."
        )
    _check_same(run.config, config)
    return run


def _check_same(before: dict[str, Any], config: Any) -> None:
    """UsageError where an option that decides results differs from the one the run was started with."""
    for name, value in resolved(config).items():
        if name not in FREE_ON_RESUME and name in before and before[name] != value:
            raise UsageError(
                f"resume=true with {name}={value}, but the run was started with {name}={before[name]}: the "
                "result would be neither run. Resume with the same options, or start another run."
            )


def _check_same_inputs(run: Run, job: Job) -> None:
    """UsageError where data or model changed on disk since the run was started."""
    before = run.manifest
    pairs = [
        ("data", before["data"]["train"]["sha256"], job.data.rows.sha256),
        ("model", before["models"]["model"], job.identities["model"]),
    ]
    for name, old, new in pairs:
        if old != new:
            raise UsageError(
                f"resume=true: {name}={getattr(job.config, name)} is not what it was when the run was "
                f"started ({old[:19]}, now {new[:19]}). Restore it, or start another run."
            )


def _start(job: Job, run: Run, loop: Loop, console: Console) -> None:
    """Record a new run, or bring back the newest checkpoint of an old one."""
    config, processes = job.config, job.processes
    recorded = {"method": job.method.name, **resolved(config), "resume": False}
    processes.wait()
    if config.resume:
        _check_same_inputs(run, job)
        newest = checkpoints(run.checkpoints)[-1]
        state = load_checkpoint(newest, job.models.learner, loop.optimizer)
        if config.schedule != "constant" and state["total_steps"] != job.total_steps:
            raise UsageError(
                f"resume=true with {job.total_steps} steps, but the run was started with "
                f"{state['total_steps']}, which schedule={config.schedule} depends on. Resume with the same "
                "steps."
            )
        if state["step"] > job.total_steps:
            raise UsageError(
                f"resume=true with {job.total_steps} steps, but {state['step']} are done in {newest}. "
                f"Give steps={state['step']} or more, or start another run for fewer."
            )
        loop.restore(state)
        console.note(f"Going on from {newest}: step {loop.done} of {job.total_steps} is done.")
    if processes.main:
        if config.resume:
            remove_leftovers(run.checkpoints)
            run.truncate(loop.done)
        else:
            run.write_json("manifest.json", manifest(job))
        run.write_config(recorded)
    processes.wait()
    processes.start_tracker(run.path.name, recorded)
    for note in job.notes:
        console.note(note)


def _finish(job: Job, run: Run, loop: Loop, console: Console) -> None:
    """Save the model first, then measure it: a failed measurement loses nothing."""
    loop.optimizer.state.clear()  # its memory is needed no more
    processes, policy = job.processes, job.models.policy
    held_out = loop.held_out or means(
        evaluate_held_out(job)
    )  # a run resumed after its last step has not evaluated
    record: dict[str, Any] = {}
    if job.method.finish is not None:
        record = finish_model(job)
        if isinstance(policy, RewardModel):
            policy.meta.update(record)
    if processes.main:
        save_model(policy, job.models.tokenizer, run.model)
        evaluation = {"step": loop.done, "held_out": held_out, **record}
        if job.prompts:
            with console.stages() as progress:
                measured = measure_policy(job, progress)
            evaluation = {**measured.to_json(samples=False), **evaluation}
            evaluation["warnings"] = [*measured.warnings, *loop.watch.warnings]
            mark = {"step": loop.done, "policy": run.path.name, "measured": True}
            run.append("samples.jsonl", ({**mark, **sample.to_json()} for sample in measured.samples))
        run.write_json("evaluation.json", evaluation)
        if job.models.memory.tries:
            run.write_json("pass_rates.json", job.models.memory.to_json()["tries"])
        console.note(f"Done: {run.path}")
    processes.wait()
    processes.end_tracker()


def _announce(report: CheckReport, console: Console) -> None:
    """Say what was checked; UsageError with every failing check."""
    failed = [finding for finding in report.findings if finding.passed is False]
    if failed:
        raise UsageError(
            "the start is broken, so nothing was trained. "
            + " ".join(f"[{f.name}] {f.message}" for f in failed)
        )
    passed = [finding.name for finding in report.findings if finding.passed]
    console.note(f"Checked before step 1: {', '.join(passed)}.")
