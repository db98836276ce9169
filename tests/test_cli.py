"""The command line: every command on a tiny model, and what wrong requests get."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from kleash import terminal
from kleash.cli import _print_held_out, app, command
from kleash.errors import RunError, UsageError
from kleash.methods import METHODS
from kleash.report import Entry, final_table
from kleash.training.console import figures

COMMANDS = ["lab", "train", "check", "sample", "measure", "compare", "sweep", "report", "dial", "fetch"]
PAIRS = [
    {"prompt": f"The {noun} was", "chosen": f" {good} and", "rejected": f" {bad} and"}
    for noun, good, bad in [
        ("food", "good", "bad"), ("room", "nice", "dirty"), ("train", "great", "awful"),
        ("film", "fun", "boring"), ("day", "perfect", "sad"), ("town", "lovely", "ugly"),
        ("soup", "tasty", "cold"), ("job", "easy", "hard"), ("song", "sweet", "dull"), ("cat", "cute", "ill"),
    ]
]  # fmt: skip


class Outcome:
    """Exit code, standard output and standard error of one command."""

    def __init__(self, result: Any) -> None:
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr
        self.exception = result.exception


def kleash(*arguments: Any) -> Outcome:
    return Outcome(CliRunner().invoke(app, [str(argument) for argument in arguments]))


def refused(code: int, *arguments: Any) -> str:
    """What a command that must fail says; never a traceback, and nothing on standard output."""
    outcome = kleash(*arguments)
    assert outcome.code == code, outcome.err or outcome.out
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    return " ".join(outcome.err.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of every kind the tests use."""
    path = tmp_path_factory.mktemp("cli")
    write_jsonl(path / "pairs.jsonl", PAIRS)
    write_jsonl(path / "prompts.jsonl", [{"prompt": pair["prompt"], "place": "here"} for pair in PAIRS[:4]])
    (path / "rule.py").write_text(
        "def words(prompts, responses, **columns):\n    return [float(len(r.split())) for r in responses]\n"
    )
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def dpo(folder: Path, tiny_folder: Path, out: Path, *more: str) -> list[str]:
    return [
        "dpo", f"model={tiny_folder}", f"data={folder / 'pairs.jsonl'}", f"out={out}", "steps=1",
        "batch_size=2", "max_new_tokens=4", "eval_samples=1", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(folder: Path, tiny_folder: Path) -> Path:
    """A finished DPO run."""
    outcome = kleash("train", *dpo(folder, tiny_folder, folder / "run"))
    assert outcome.code == 0, outcome.err
    return folder / "run"


# ---- help


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str) -> None:
    outcome = kleash(name, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"Usage: main {name}") or name in outcome.out.splitlines()[0]
    assert len(outcome.out.splitlines()) > 5


def test_help_lists_the_commands_of_the_design() -> None:
    listed = re.findall(r"^  (\w+)  ", kleash("--help").out.split("Commands:")[1], re.M)
    assert listed == COMMANDS


def test_version() -> None:
    assert kleash("--version").out == "kleash 0.1.0\n"


def test_options_of_a_method_are_listed() -> None:
    outcome = kleash("train", "dpo", "--options")
    assert outcome.code == 0
    assert re.search(r"^beta=0\.1  \(number\)\n    \w+", outcome.out, re.M)
    assert re.search(r"^data=required", outcome.out, re.M)


def test_options_end_with_those_of_the_method_and_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.out, "width", 80)
    shared, own = kleash("train", "grpo", "--options").out.split("\nOf grpo:\n")
    assert max(len(line) for line in (shared + own).splitlines()) <= 80
    assert "\nseed=0 " in shared and "\nbatch_size=64 " in own and "\nadvantage=group " in own
    assert "\nresume=false " in shared


def test_help_of_train_names_every_method_in_80_columns() -> None:
    lines = kleash("train", "--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if re.match(r"  [a-z]", line)} >= set(METHODS)


def test_progress_shows_reward_and_drift_before_counts() -> None:
    values = {"loss": 0.0, "groups/all_right": 0.5, "pass/mean": 0.5, "kl/k1": 2.0, "reward/mean": 1.0}
    assert figures(values).split("  ")[:3] == ["loss 0", "reward/mean 1", "kl/k1 2"]


# ---- every command once


def test_train_writes_a_run_and_its_report(run: Path) -> None:
    assert (run / "report.html").stat().st_size > 1000
    assert json.loads((run / "evaluation.json").read_text())["drift"]["mean"] > 0


def test_train_prints_table_and_paths(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    outcome = kleash("train", *dpo(folder, tiny_folder, tmp_path / "again"))
    assert "Drift" in outcome.out
    assert f"Run: {tmp_path / 'again'}" in outcome.out
    assert f"Report: {tmp_path / 'again' / 'report.html'}" in outcome.out


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        ({"loss": 6.2271}, "Held out: loss 6.23\n"),
        (
            {"loss": 0.69, "dpo/logp_chosen": -24.9, "dpo/margin": -0.5, "dpo/accuracy": 0.75},
            "Held out: loss 0.690, accuracy 0.750, margin −0.500; the rest is in evaluation.json\n",
        ),
        (
            {"kl/k1": 2.0, "kl/exact": 2.5, "reward/mean": 1.0, "reward/missing": 0.0},
            "Held out: reward 1, drift 2.50; the rest is in evaluation.json\n",
        ),
        ({}, ""),
    ],
)
def test_train_prints_the_few_held_out_figures_that_matter(
    held_out: dict[str, float], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "out", Console(width=120))
    _print_held_out(held_out)
    assert capsys.readouterr().out == said


def test_train_names_the_stages_of_the_measurement(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    outcome = kleash("train", *dpo(folder, tiny_folder, tmp_path / "staged"))
    stages = re.findall(r"^(\w+) \d+/\d+ ", outcome.err, re.M)
    assert stages == ["dpo", "sampled", "measured"]


def test_check_marks_trained_tokens_and_writes_nothing(
    folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    outcome = kleash("check", *dpo(folder, tiny_folder, tmp_path / "never"))
    assert outcome.code == 0, outcome.err
    assert re.search(r"^row 1, chosen, trained tokens in ⟦ ⟧:\nThe food was⟦ ?good and.*⟧", outcome.out, re.M)
    assert re.search(
        r"^row 1, rejected, trained tokens in ⟦ ⟧:\nThe food was⟦ ?bad and.*⟧", outcome.out, re.M
    )
    assert "ok   initial loss" in outcome.out
    assert "FAIL" not in outcome.out
    assert not (tmp_path / "never").exists()


def test_recipe_with_overrides(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"method: dpo\nmodel: {tiny_folder}\ndata: {folder / 'pairs.jsonl'}\nbeta: 0.5\nsteps: 3\n"
    )
    out = tmp_path / "run"
    outcome = kleash("train", recipe, f"out={out}", "steps=1", "batch_size=2", "measure=false")
    assert outcome.code == 0, outcome.err
    config = (out / "config.yaml").read_text()
    assert "beta: 0.5\n" in config and "steps: 1\n" in config


def test_recipe_of_the_package_by_its_bare_name() -> None:
    outcome = kleash("train", "dpo-tiny.yaml", "--options")
    assert outcome.code == 0
    assert outcome.out.startswith("dpo: ")


def test_sample_writes_jsonl(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ["sample", tiny_folder, "--prompts", folder / "prompts.jsonl", "-n", 2, "--max-new-tokens", 3]
    outcome = kleash(*arguments, "--limit", 3)
    rows = [json.loads(line) for line in outcome.out.splitlines()]
    assert len(rows) == 6
    assert [row["group"] for row in rows] == [0, 0, 1, 1, 2, 2]
    for row in rows:
        assert row["place"] == "here"
        assert len(row["ids"]) == len(row["tokens"]) == len(row["logp"]) <= 3
        assert all(logp <= 0 for logp in row["logp"])
    again = kleash(*arguments, "--limit", 3, "--out", tmp_path / "samples.jsonl")
    assert again.out == f"6 responses: {tmp_path / 'samples.jsonl'}\n"
    assert (tmp_path / "samples.jsonl").read_text() == outcome.out


def test_measure_a_run_from_the_model_it_started_from(run: Path, folder: Path, tmp_path: Path) -> None:
    outcome = kleash(
        "measure", run, "--prompts", folder / "prompts.jsonl", "-n", 2, "--max-new-tokens", 4,
        "--reward", f"{folder / 'rule.py'}:words", "--out", tmp_path / "measured",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "Drift" in outcome.out and "Reward" in outcome.out and "±" in outcome.out
    found = json.loads((tmp_path / "measured" / "evaluation.json").read_text())
    assert found["prompts"] == 4 and found["samples_per_prompt"] == 2
    assert found["reward"]["mean"] > 0
    assert (tmp_path / "measured" / "report.html").exists()


def test_compare_writes_one_table_and_one_page(
    run: Path, folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "both"
    outcome = kleash(
        "compare",
        run,
        run,
        "--prompts",
        folder / "prompts.jsonl",
        "-n",
        2,
        "--max-new-tokens",
        4,
        "--out",
        out,
    )
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in out.iterdir()) == ["reference", "report.html", "run", "run-2"]
    drift = {name: json.loads((out / name / "evaluation.json").read_text()) for name in ("reference", "run")}
    assert drift["reference"]["drift"]["mean"] == 0.0
    assert drift["run"]["prompts_hash"] == drift["reference"]["prompts_hash"]
    assert "verdict" in drift["run"]
    assert re.search(r"^run: .+", outcome.out, re.M)


def test_sweep_runs_the_grid_once_and_goes_on(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    fixed = [argument for argument in dpo(folder, tiny_folder, out) if not argument.startswith("out=")]
    outcome = kleash("sweep", *fixed, "beta=0.1,0.5", "seed=0,1", "--out", out)
    assert outcome.code == 0, outcome.err
    names = [f"beta={beta},seed={seed}" for beta in ("0.1", "0.5") for seed in (0, 1)]
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == names
    assert "beta=0.1" in outcome.out and "seed" not in outcome.out
    before = {name: (out / name / "evaluation.json").stat().st_mtime_ns for name in names}
    wider = kleash("sweep", *fixed, "beta=0.1,0.5", "seed=0,1,2", "--out", out)
    assert wider.code == 0, wider.err
    assert wider.err.count("is finished") == 4
    assert {name: (out / name / "evaluation.json").stat().st_mtime_ns for name in names} == before
    assert "holds a sweep" in refused(2, "sweep", *fixed, "chat=plain", "beta=0.1,0.5", "--out", out)


def test_a_wrong_value_in_a_sweep_costs_no_run(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    fixed = [argument for argument in dpo(folder, tiny_folder, tmp_path) if not argument.startswith("out=")]
    out = tmp_path / "sweep"
    assert "beta=abc is not" in refused(2, "sweep", *fixed, "beta=0.1,abc", "--out", out)
    assert not out.exists()


def test_report_of_one_run_and_of_two(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kleash("report", run).out == f"{run / 'report.html'}\n"
    monkeypatch.chdir(tmp_path)
    assert kleash("report", run, run).out == f"{tmp_path / 'report.html'}\n"
    assert kleash("report", run, "--out", tmp_path / "page.html").out == f"{tmp_path / 'page.html'}\n"


def test_dial(tmp_path: Path) -> None:
    assert kleash("dial", "--out", tmp_path / "dial.html").code == 0
    assert "<html" in (tmp_path / "dial.html").read_text()[:500]


def test_the_dial_leaves_the_report_of_a_run_alone(run: Path) -> None:
    before = (run / "report.html").read_bytes()
    assert kleash("dial", "--out", run).out == f"{run / 'dial.html'}\n"
    assert (run / "report.html").read_bytes() == before
    assert "The β dial" in (run / "dial.html").read_text(encoding="utf-8")
    (run / "dial.html").unlink()


def test_lab_on_a_tiny_model(tmp_path: Path) -> None:
    outcome = kleash("lab", "--preset", "tiny", "--out", tmp_path / "lab")
    assert outcome.code == 0, outcome.err
    for label in ("Reference", "RLHF", "RLHF, no penalty", "DPO"):
        assert re.search(rf"^ *{label} +\S", outcome.out, re.M)
    assert "not judged: DPO starts at ln 2: 0.69314" in outcome.out
    assert outcome.out.rstrip().endswith(f"Report: {tmp_path / 'lab' / 'report.html'}")
    assert kleash("report", tmp_path / "lab").code == 0


def test_lab_with_a_failed_checkpoint_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kleash.lab import lab
    from kleash.lab.checkpoints import Checkpoint

    facts = {"policies": [], "skipped": [], "verdict": {"summary": "undecided"}}
    result = lab.LabResult(tmp_path, facts, {}, [Checkpoint("drift", False, "9", "at most 8", "")])
    monkeypatch.setattr(lab, "run_lab", lambda *arguments, **options: result)
    monkeypatch.setattr("kleash.report.write_lab_report", lambda path: path / "report.html")
    outcome = kleash("lab", "--preset", "tiny", "--out", tmp_path)
    assert outcome.code == 1
    assert "FAILED: drift: 9 (at most 8)" in outcome.out


def test_fetch_prints_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fetch(name: str, progress: Callable[[int, int, str], None]) -> Path:
        progress(0, 4, "downloading")
        progress(4, 4, "done")
        return tmp_path

    monkeypatch.setattr("kleash.models.bundled.fetch", fetch)
    outcome = kleash("fetch", "smollm2-135m")
    assert (outcome.out, outcome.err) == (f"{tmp_path}\n", "[1/4] downloading\n")


# ---- wrong requests


def test_bad_input_unknown_command_and_option() -> None:
    assert "No such command 'trian'" in refused(2, "trian")
    assert "--bta" in refused(2, "dial", "--bta", "1")


def test_bad_input_unknown_method() -> None:
    assert "there is no method dpoo: did you mean dpo?" in refused(2, "train", "dpoo")


def test_bad_input_unknown_key_names_the_nearest(folder: Path) -> None:
    said = refused(2, "train", "dpo", f"data={folder / 'pairs.jsonl'}", "betta=0.1")
    assert "no option betta: did you mean beta?" in said


def test_bad_input_key_without_value() -> None:
    assert "write key=value" in refused(2, "train", "dpo", "beta")


def test_bad_input_value_out_of_range(folder: Path) -> None:
    assert "beta" in refused(2, "train", "dpo", f"data={folder / 'pairs.jsonl'}", "beta=-1")


def test_bad_input_recipe_is_missing(tmp_path: Path) -> None:
    assert f"{tmp_path / 'no.yaml'} cannot be read" in refused(2, "check", tmp_path / "no.yaml")


def test_bad_input_recipe_without_method(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("beta: 0.1\n")
    assert "does not say which method" in refused(2, "train", tmp_path / "r.yaml")


def test_bad_input_missing_data_file(tiny_folder: Path, tmp_path: Path) -> None:
    said = refused(2, "train", "dpo", f"model={tiny_folder}", "data=nowhere.jsonl", f"out={tmp_path / 'x'}")
    assert "nowhere.jsonl" in said


def test_bad_input_not_a_model_folder(folder: Path, tmp_path: Path) -> None:
    said = refused(2, "sample", tmp_path, "--prompts", folder / "prompts.jsonl")
    assert "is not a model folder" in said


def test_bad_input_missing_prompts(tiny_folder: Path) -> None:
    assert "absent.jsonl" in refused(2, "sample", tiny_folder, "--prompts", "absent.jsonl")


def test_bad_input_measure_without_reference(tiny_folder: Path, folder: Path, tmp_path: Path) -> None:
    said = refused(2, "measure", tiny_folder, "--prompts", folder / "prompts.jsonl", "--out", tmp_path / "m")
    assert "--reference" in said
    assert not (tmp_path / "m").exists()


def test_bad_input_reports_of_what_is_no_run(tmp_path: Path) -> None:
    assert "is not a run folder" in refused(2, "report", tmp_path)
    assert "does not exist" in refused(2, "report", tmp_path / "absent")


def test_bad_input_out_folder_in_use(run: Path, folder: Path, tiny_folder: Path) -> None:
    before = (run / "evaluation.json").read_bytes()
    assert "is not empty" in refused(2, "train", *dpo(folder, tiny_folder, run))
    assert (run / "evaluation.json").read_bytes() == before


def test_bad_input_measurement_into_a_folder_in_use(run: Path, folder: Path) -> None:
    message = refused(2, "measure", run, "--prompts", folder / "prompts.jsonl", "--out", run)
    assert "the folder is not empty. Choose another folder." in message and "resume" not in message


def test_bad_input_a_wrong_model_costs_no_measurement(run: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "compared"
    message = refused(
        2, "compare", run, folder, "--prompts", folder / "prompts.jsonl", "--out", out, "--reference", run
    )
    assert "is not a model folder" in message and not out.exists()


def test_bad_input_the_file_for_samples_cannot_be_written(run: Path, folder: Path, tmp_path: Path) -> None:
    prompts = ["--prompts", folder / "prompts.jsonl"]
    assert "is a folder; give the name of a file" in refused(2, "sample", run, *prompts, "--out", tmp_path)
    beneath = folder / "pairs.jsonl" / "x.jsonl"
    assert "the folder cannot be written" in refused(2, "sample", run, *prompts, "--out", beneath)


def test_bad_input_prompts_get_no_advice_that_the_command_lacks(run: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "questions.jsonl", [{"question": "Why?"}])
    message = refused(2, "sample", run, "--prompts", tmp_path / "questions.jsonl")
    assert "no column 'prompt'" in message and "bad_rows" not in message


def test_bad_input_a_file_where_the_lab_is_to_be(folder: Path) -> None:
    assert "the folder cannot be written" in refused(
        2, "lab", "--preset", "tiny", "--out", folder / "pairs.jsonl"
    )


def test_bad_input_unwritable_folder(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refused(2, "train", *dpo(folder, tiny_folder, tmp_path / "file" / "run"))
    assert "cannot be written" in said


def test_bad_input_unknown_preset(tmp_path: Path) -> None:
    said = refused(2, "lab", "--preset", "huge", "--out", tmp_path / "lab", "--model", "x")
    assert "preset=huge" in said and "quick" in said


def test_bad_input_nothing_to_sweep(folder: Path) -> None:
    assert "nothing to sweep" in refused(2, "sweep", "dpo", "beta=0.1")
    assert "empty or comes twice" in refused(2, "sweep", "dpo", "beta=0.1,0.1")


def test_bad_input_unknown_bundled_model() -> None:
    assert "no bundled model called 'gpt-9'" in refused(2, "fetch", "gpt-9")


# ---- errors and exit codes


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(path: Path) -> Path:
        raise error

    monkeypatch.setattr("kleash.report.write_dial", fail)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("the option is wrong."), 2, "kleash: the option is wrong."),
        (RunError("the disk [red]is full."), 1, "kleash: the disk [red]is full."),
        (KeyboardInterrupt(), 130, "kleash: interrupted."),
    ],
)
def test_error_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    failing(monkeypatch, error)
    assert refused(code, "dial") == said


def test_stopped_by_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    from kleash.training import Interrupted

    failing(monkeypatch, Interrupted("Stopped after step 3. To go on: …"))
    assert "To go on" in refused(130, "dial")


def test_debug_shows_the_traceback_of_a_known_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, UsageError("the option is wrong."))
    monkeypatch.setenv("KLEASH_DEBUG", "0")  # put back afterwards: --debug sets it
    assert isinstance(kleash("--debug", "dial").exception, UsageError)


def test_unforeseen_error_passes_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("x"))
    assert isinstance(kleash("dial").exception, ZeroDivisionError)


CRASH = """
import sys, kleash.report, kleash.__main__
def fail(path): raise ZeroDivisionError('of [all] things')
kleash.report.write_dial = fail
sys.argv = ['kleash', *sys.argv[1:]]
kleash.__main__.main()
"""


@pytest.mark.parametrize("debug", [False, True])
def test_unforeseen_error_is_one_line_and_never_swallowed(debug: bool) -> None:
    arguments = [*(["--debug"] if debug else []), "dial"]
    done = subprocess.run([sys.executable, "-c", CRASH, *arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ZeroDivisionError: of [all] things" in done.stderr
    if debug:
        assert "Traceback (most recent call last)" in done.stderr
    else:
        assert len(done.stderr.splitlines()) == 1
        assert "cli.py:" in done.stderr and "kleash --debug dial" in done.stderr


SHOWN = """
import sys, warnings, kleash.cli, kleash.__main__
from kleash.terminal import show
def print_and_warn(*args):
    show("\u00b10.1 \u27e6x\u27e7")
    warnings.warn_explicit("mind this", RuntimeWarning, kleash.cli.__file__, 1)
kleash.cli._print_options = print_and_warn
sys.argv = ["kleash", "train", "dpo", "--options"]
kleash.__main__.main()
"""


@pytest.mark.parametrize(("encoding", "text"), [("ascii", b"?0.1 ?x?\n"), ("utf-8", "±0.1 ⟦x⟧\n".encode())])
def test_an_encoding_that_lacks_a_character_ends_no_command(encoding: str, text: bytes) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, env=environment)
    assert (done.returncode, done.stdout) == (0, text), done.stderr
    assert done.stderr == b"warning: mind this\n"


def test_samples_are_whole_in_any_encoding(run: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "The food was", "note": "😀"}])
    command = [sys.executable, "-m", "kleash", "sample", run, "--prompts", tmp_path / "prompts.jsonl"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--max-new-tokens", "2"], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["note"] == "😀"


def test_command_is_the_whole_command_line() -> None:
    assert list(command().commands) == COMMANDS


# ---- the terminal


def wide_table() -> Table:
    table = Table()
    for heading in ("Policy", "Reward", "Drift", "k1", "k2", "k3", "Bigrams", "Length", "Seconds"):
        table.add_column(heading)
    table.add_row("a policy of some name", *["±0.123456"] * 8)
    return table


def test_a_narrow_terminal_keeps_names_and_drift() -> None:
    table = wide_table()
    left_out = terminal.fit(table, 80)
    kept = [str(column.header) for column in table.columns]
    assert left_out == ["k2", "k3", "k1", "Length"]
    assert kept == ["Policy", "Reward", "Drift", "Bigrams", "Seconds"]
    assert terminal.out.measure(table).maximum <= 80


@pytest.mark.parametrize("width", range(50, 120))
def test_no_heading_is_cut_where_columns_were_left_out(width: int) -> None:
    numbers = {"mean": -0.00012, "stderr": 0.00001}
    measured = dict.fromkeys(
        ("reward", "gold", "drift", "kl_k1", "kl_k2", "kl_k3", "distinct_bigrams", "length"), numbers
    )
    table = final_table([Entry("dpo", {**measured, "ended": 0.5}, 12.0)])
    terminal.fit(table, width)
    console = Console(width=max(width, terminal.out.measure(table).maximum))
    with console.capture() as shown:
        console.print(table)
    assert "…" not in shown.get()


def test_a_wide_terminal_keeps_every_column() -> None:
    table = wide_table()
    assert terminal.fit(table, 200) == []
    assert len(table.columns) == 9


def test_progress_has_a_bar_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress() as bar:
        for note in ("sampled", "measured"):
            for done in (1, 2):
                bar(done, 2, note)
    shown = capsys.readouterr().err
    assert "sampled 2/2" in shown and "measured 2/2" in shown
