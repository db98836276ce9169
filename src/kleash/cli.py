"""The command line: parse, call, print. What the commands do is in the library, and so are the messages of
its errors.

The library is imported inside each command, so that `kleash --help` does not wait for torch.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from kleash.errors import KLeashError, UsageError
from kleash.terminal import debugging, hide_loading_bars, in_full, out, progress, say, show, show_table

if TYPE_CHECKING:
    from kleash.config import Option
    from kleash.lab.lab import LabResult
    from kleash.training import CheckReport

RECIPES = Path(__file__).parent / "recipes"


class Commands(TyperGroup):
    """The group of commands; it turns the library's errors into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; KLeashError ends with its own exit code and Ctrl-C with 130. Any other error
        passes.
        """
        try:
            return super().invoke(ctx)
        except KLeashError as error:
            if debugging():
                raise
            say(f"kleash: {error}")
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            say("kleash: interrupted.")
            raise typer.Exit(130) from error


class Train(TyperCommand):
    """`train`, whose help ends with the methods: found by their recipes, so that it does without torch."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """A line a method, from the first comment of its recipe."""
        names = sorted(path.stem.removesuffix("-tiny") for path in RECIPES.glob("*-tiny.yaml"))
        with formatter.section("Methods, each with recipes METHOD.yaml and METHOD-tiny.yaml"):
            formatter.write_dl([(name, _first_comment(RECIPES / f"{name}.yaml")) for name in names])


def _first_comment(recipe: Path) -> str:
    return recipe.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Post-training on a KL leash: train a language model on what people prefer, and know how far it "
    "moved, what it gained, and whether the gain is real.",
)


def command() -> Any:
    """The whole command line as one callable."""
    return typer.main.get_command(app)


def _version(asked: bool) -> None:
    if asked:
        from kleash import __version__

        show(f"kleash {__version__}")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    if debug:
        os.environ["KLEASH_DEBUG"] = "1"


# Options that several commands share.
Model = Annotated[
    str, typer.Argument(metavar="MODEL|RUN", help="Run folder, model folder, hub id, or smollm2-135m.")
]
Models = Annotated[
    list[str], typer.Argument(metavar="RUN|MODEL …", help="Run folders, model folders or hub ids.")
]
Target = Annotated[
    str, typer.Argument(metavar="METHOD|RECIPE.yaml", help="A method's name or a recipe file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value …]", help="Options, over those of the recipe.", show_default=False),
]
Prompts = Annotated[
    str, typer.Option(help="Rows with a prompt: a JSONL, JSON, CSV or Parquet file, or a hub name.")
]
Reference = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="Model that drift is measured from. [a run's: the one it started from]"
    ),
]
Reward = Annotated[
    str | None, typer.Option(help="file.py:function, a reward model's folder, or the name of a rule.")
]
Gold = Annotated[
    str | None, typer.Option(help="An independent judge, not used in training; same forms as --reward.")
]
Samples = Annotated[int, typer.Option("--samples", "-n", min=1, help="Responses to each prompt.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="Sampling temperature; 1 is the policy as trained.")
]
FixedLength = Annotated[
    bool, typer.Option("--fixed-length", help="Remove end tokens: responses of exactly that length.")
]
Chat = Annotated[
    Literal["auto", "template", "plain"],
    typer.Option(help="Chat template: auto (for messages only), template, or plain (never)."),
]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Use only the first so many prompts.", show_default="all")
]
BatchRows = Annotated[int, typer.Option(min=1, help="Responses decoded at once; fewer need less memory.")]
OutFolder = Annotated[
    Path | None, typer.Option("--out", help="Folder to write.", show_default="a new one in runs/")
]


@app.command()
def lab(
    preset: Annotated[
        str, typer.Option(help="quick, standard or full (with the beta sweep); tiny tests itself.")
    ] = "standard",
    seed: Seed = 0,
    out_folder: Annotated[
        Path, typer.Option("--out", help="Folder to write; an unfinished lab in it goes on.")
    ] = Path("runs/lab"),
    model: Annotated[str | None, typer.Option(help="Another model.", show_default="smollm2-135m")] = None,
) -> None:
    """The whole story on the bundled model: samples, reward model, RLHF with and without the penalty, DPO,
    report.

    Exit code 1 if a checkpoint fails.
    """
    from kleash.lab.lab import run_lab
    from kleash.report import write_lab_report

    _get_ready(model or ("" if preset == "tiny" else "smollm2-135m"))
    result = run_lab(preset, seed, out_folder, model, say=say)
    page = write_lab_report(out_folder)
    _print_lab(result)
    show(f"\nReport: {page.resolve()}")
    if result.passed is False:
        raise typer.Exit(1)


@app.command(cls=Train)
def train(
    target: Target,
    overrides: Overrides = None,
    options: Annotated[bool, typer.Option("--options", help="List the method's options and stop.")] = False,
) -> None:
    """Train a model, measure it, and write a run folder with its report."""
    method, values = _method_and_options(target, overrides)
    if options:
        _print_options(method)
        return
    from accelerate import PartialState

    from kleash.config import build
    from kleash.report import write_report
    from kleash.training import find_method
    from kleash.training import train as train_method

    build(find_method(method).config, values)  # a typo costs no download
    _get_ready(str(values.get("model", "smollm2-135m")))
    run = train_method(method, **values)
    if not PartialState().is_main_process:
        return
    page = write_report([run.path], run.path)
    if run.evaluation.get("drift"):
        _print_table([(run.path.name, run.evaluation, run.metrics[-1]["seconds"])])
    _print_held_out(run.evaluation.get("held_out") or {})
    show(f"Run: {run.path}\nReport: {page.resolve()}")


@app.command()
def check(target: Target, overrides: Overrides = None) -> None:
    """A dry run: rows as they would be trained, token counts, invariants, memory and time. Writes nothing.

    Exit code 2 if a check fails.
    """
    from kleash.config import build
    from kleash.training import check as check_method
    from kleash.training import find_method

    method, values = _method_and_options(target, overrides)
    build(find_method(method).config, values)
    _get_ready(str(values.get("model", "smollm2-135m")))
    report = check_method(method, **values)
    _print_check(report)
    if not report.passed:
        raise typer.Exit(UsageError.exit_code)


@app.command()
def sample(
    model: Model,
    prompts: Prompts,
    samples: Samples = 1,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 1.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Keep the likeliest tokens with this probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the so many likeliest tokens; 0 keeps all.")] = 0,
    fixed_length: FixedLength = False,
    chat: Chat = "auto",
    seed: Seed = 0,
    limit: Limit = None,
    batch_rows: BatchRows = 64,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="JSONL file to write.", show_default="standard output")
    ] = None,
) -> None:
    """Responses with their log-probabilities, as JSONL."""
    from kleash.api import rollout_rows
    from kleash.api import sample as sample_model
    from kleash.models import load_model
    from kleash.run import write_text

    if out_file is not None:
        _check_file(out_file)
    _get_ready(model)
    loaded = load_model(model)
    with progress() as bar:
        rollouts = sample_model(
            loaded, _prompt_rows(prompts, limit), n=samples, max_new_tokens=max_new_tokens,
            temperature=temperature, top_p=top_p, top_k=top_k, fixed_length=fixed_length,
            chat=chat, seed=seed, batch_rows=batch_rows, progress=bar,
        )  # fmt: skip
    escaped = out_file is None and not in_full(sys.stdout)
    rows = rollout_rows(rollouts, loaded[1])
    lines = [json.dumps(row, ensure_ascii=escaped, default=str) for row in rows]
    if out_file is None:
        sys.stdout.writelines(line + "\n" for line in lines)
    else:
        write_text(out_file, "".join(line + "\n" for line in lines))
        show(f"{len(lines)} responses: {out_file}")


@app.command()
def measure(
    model: Model,
    prompts: Prompts,
    reference: Reference = None,
    reward: Reward = None,
    gold: Gold = None,
    samples: Samples = 4,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 1.0,
    fixed_length: FixedLength = False,
    chat: Chat = "auto",
    seed: Seed = 0,
    limit: Limit = None,
    batch_rows: BatchRows = 64,
    out_folder: OutFolder = None,
) -> None:
    """Drift from the reference, with its error, and what else can be measured on the model's own samples."""
    from kleash.comparison import common_origin, measure_into
    from kleash.report import write_report
    from kleash.run import free_name

    _get_ready(model, reference or "")
    folder = out_folder or free_name("runs", "measure")
    origin = reference or common_origin([model])
    with progress() as bar:
        found = measure_into(
            folder, model, reference=origin, prompts=_prompt_rows(prompts, limit), reward=reward, gold=gold,
            n=samples, max_new_tokens=max_new_tokens, temperature=temperature, fixed_length=fixed_length,
            chat=chat, seed=seed, batch_rows=batch_rows, progress=bar,
        )  # fmt: skip
    _print_table([(Path(model).name, found)])
    _print_warnings(found.warnings)
    show(f"Report: {write_report([folder], folder, title=Path(model).name).resolve()}")


@app.command()
def compare(
    models: Models,
    prompts: Prompts,
    reference: Reference = None,
    reward: Reward = None,
    gold: Gold = None,
    samples: Samples = 4,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 1.0,
    fixed_length: FixedLength = False,
    chat: Chat = "auto",
    seed: Seed = 0,
    limit: Limit = None,
    batch_rows: BatchRows = 64,
    out_folder: OutFolder = None,
) -> None:
    """Measure several models on the same prompts, one table and a side-by-side page."""
    from kleash.comparison import compare_models
    from kleash.run import free_name

    _get_ready(*models, reference or "")
    folder = out_folder or free_name("runs", "compare")
    with progress() as bar:
        found = compare_models(
            models, out=folder, reference=reference, prompts=_prompt_rows(prompts, limit), reward=reward,
            gold=gold, n=samples, max_new_tokens=max_new_tokens, temperature=temperature,
            fixed_length=fixed_length, chat=chat, seed=seed, batch_rows=batch_rows, progress=bar,
        )  # fmt: skip
    _print_table([(entry.label, entry.evaluation) for entry in found.entries])
    for name, summary in found.verdicts.items():
        show(f"{name}: {summary}")
    for entry in found.entries:
        _print_warnings(entry.evaluation.warnings)
    show(f"Report: {found.page.resolve()}")


@app.command()
def sweep(
    target: Target,
    overrides: Annotated[
        list[str], typer.Argument(metavar="key=a,b,c …", help="Options to sweep; one value fixes an option.")
    ],
    out_folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder of the runs; finished ones are not run again.",
            show_default="runs/sweep-METHOD",
        ),
    ] = None,
) -> None:
    """Train at every combination of the values given, and show the frontier: rewards against drift."""
    from kleash.config import parse_overrides
    from kleash.sweep import run_sweep, split_grid

    method, values = _method_and_options(target, [])
    fixed, grid = split_grid(method, parse_overrides(overrides))
    _get_ready(str(fixed.get("model", values.get("model", "smollm2-135m"))))
    found = run_sweep(method, {**values, **fixed}, grid, out_folder or Path("runs") / f"sweep-{method}", say)
    _print_table([(entry.label, entry.evaluation, entry.seconds) for entry in found.summary])
    show(f"Report: {found.page.resolve()}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN …", help="Run folders, or one lab folder.")],
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out", help="File to write.", show_default="report.html, in the folder of a single run"
        ),
    ] = None,
) -> None:
    """Write a self-contained page about one run, several, or a lab. Reads files only."""
    from kleash.report import write_lab_report, write_report

    if len(runs) == 1 and (runs[0] / "lab.json").exists():
        if out_file is not None:
            raise UsageError(
                "--out: the page of a lab is always report.html in its folder; leave --out away."
            )
        page = write_lab_report(runs[0])
    else:
        page = write_report(runs, out_file or (runs[0] if len(runs) == 1 else Path("report.html")))
    show(str(page.resolve()))


@app.command()
def dial(
    out_file: Annotated[
        Path, typer.Option("--out", help="File to write, or the folder of dial.html.")
    ] = Path("dial.html"),
) -> None:
    """Write the beta dial: a page to turn the KL coefficient and watch the optimal policy."""
    from kleash.report import write_dial

    show(str(write_dial(out_file).resolve()))


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="Name of a bundled model.")] = "smollm2-135m") -> None:
    """Fetch a bundled model into the cache, once, hash-checked, and print its folder."""
    from kleash.models.bundled import fetch as fetch_model

    show(str(fetch_model(name, _say_stage)))


def _say_stage(done: int, total: int, note: str) -> None:
    if done < total:
        say(f"[{done + 1}/{total}] {note}")


def _get_ready(*models: str) -> None:
    """Fetch the bundled model among `models` with its stages shown, before the library would do so in
    silence.
    """
    from kleash.models.bundled import BUNDLED
    from kleash.models.bundled import fetch as fetch_model

    hide_loading_bars()
    for model in BUNDLED.keys() & set(models):
        fetch_model(model, _say_stage)


def _method_and_options(target: str, overrides: list[str] | None) -> tuple[str, dict[str, Any]]:
    """Method and options of `METHOD|RECIPE.yaml key=value …`; a bare name may be a recipe of the package."""
    from kleash.config import parse_overrides, read_recipe
    from kleash.training import find_method

    if target.endswith((".yaml", ".yml")) or Path(target).is_file():
        shipped = RECIPES / target
        method, values = read_recipe(shipped if shipped.is_file() and not Path(target).exists() else target)
    else:
        method, values = target, {}
    find_method(method)
    return method, {**values, **parse_overrides(overrides or [])}


def _check_file(path: Path) -> None:
    """Make the folder of a file that is to be written; UsageError before anything is computed for it."""
    from kleash.run import check_writable

    if path.is_dir():
        raise UsageError(
            f"--out: {path} is a folder; give the name of a file, for example {path / 'x.jsonl'}."
        )
    check_writable(path.parent)


def _prompt_rows(source: str, limit: int | None) -> Any:
    from kleash.data import read_rows

    return read_rows(source, "prompts", limit=limit, advise=False)


def _print_options(method: str) -> None:
    """The options that all methods have alike, then those that this one adds or sets otherwise."""
    from kleash.config import options
    from kleash.methods import TrainConfig
    from kleash.training import find_method

    found = find_method(method)
    show(_wrapped(f"{method}: {found.summary}"))
    shared = options(TrainConfig)
    listed = options(found.config)
    show("\nAs in every method:\n")
    for o in listed:
        if o in shared:
            _print_option(o)
    show(f"\nOf {method}:\n")
    for o in listed:
        if o not in shared:
            _print_option(o)


def _print_option(o: Option) -> None:
    show(_wrapped(f"{o.name}={o.written_default}  ({o.type})"))
    show(_wrapped(f"    {o.help}"))


def _wrapped(text: str) -> str:
    """Text in lines that fit the terminal, all but the first indented."""
    return textwrap.fill(text, out.width, subsequent_indent="    ", break_on_hyphens=False)


def _print_table(rows: list[tuple[Any, ...]]) -> None:
    from kleash.report import Entry, final_table

    show_table(final_table([Entry(*row) for row in rows]))


HELD_OUT = {
    "loss": "loss", "accuracy": "accuracy", "margin": "margin", "reward/mean": "reward", "gold/mean": "gold",
    "kl/exact": "drift",
}  # fmt: skip
"""The held-out metrics that are printed, by the ends of their names, and what they are called there."""


def _print_held_out(held_out: dict[str, float]) -> None:
    """The few figures on the held-out rows that say how the training went, and where all of them are."""
    from kleash.report.text import format_number, nonnegative

    figures = [
        f"{word} {format_number(nonnegative(value) if word == 'drift' else value)}"
        for end, word in HELD_OUT.items()
        for name, value in held_out.items()
        if f"/{name}".endswith(f"/{end}")
    ]
    if figures:
        rest = "; the rest is in evaluation.json" if len(held_out) > len(figures) else ""
        show(f"Held out: {', '.join(figures)}{rest}")


def _print_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}")


def _print_check(report: CheckReport) -> None:
    """The rows with trained tokens in ⟦ ⟧, then a line a finding."""
    for row in report.rows:
        marked = ", trained tokens in ⟦ ⟧" if any(trained for _, trained in row.pieces) else ""
        show(f"{row.name}{marked}:")
        show(_marked(row.pieces) + "\n")
    marks = {True: "ok  ", False: "FAIL", None: "    "}
    for finding in report.findings:
        show(f"{marks[finding.passed]} {finding.name}: {finding.message}")


def _marked(pieces: list[tuple[str, bool]]) -> str:
    """The text with each stretch of trained pieces between ⟦ and ⟧."""
    text, inside = "", False
    for piece, trained in pieces:
        if trained != inside:
            text += "⟦" if trained else "⟧"
            inside = trained
        text += piece
    return text + ("⟧" if inside else "")


def _print_lab(result: LabResult) -> None:
    """The final table, the checkpoints, what was left out, and the verdict."""
    policies = result.facts["policies"]
    _print_table([(p["label"], result.evaluations[p["name"]], p["seconds"]) for p in policies])
    marks = {True: "passed", False: "FAILED", None: "not judged"}
    for point in result.checkpoints:
        show(f"{marks[point.passed]}: {point.name}: {point.measured} ({point.threshold})")
    for left_out in result.facts["skipped"]:
        show(f"Left out: {left_out}.")
    show(f"\n{result.facts['verdict']['summary']}")
