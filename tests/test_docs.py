"""What is documented is what the code does: links, commands, options, rows, names, thresholds, snippets."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kleash
from kleash.cli import command
from kleash.config import build, options, parse_overrides, read_recipe
from kleash.data import read_rows
from kleash.data.rows import EXAMPLES
from kleash.lab.presets import PRESETS
from kleash.measure import METRICS, Thresholds
from kleash.methods import METHODS
from kleash.methods.policy_gradient import PolicyConfig
from kleash.rewards.load import RULES, rule
from kleash.sweep import check_grid, split_grid

ROOT = Path(__file__).parents[1]
RECIPE_FOLDER = ROOT / "src" / "kleash" / "recipes"
RECIPES = sorted(RECIPE_FOLDER.glob("*.yaml"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
METRIC = re.compile(
    r"(?:dpo|reward|gold|kl|ended|length|policy|responses|optim|time|tokens|ratio|clip|groups|pass|value|return|"
    r"loss|ptx)/[a-z0-9_./]+"
)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", read(path))


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a language ("" for none)."""
    return [body for _, kind, body in FENCE.findall(read(path)) if kind == language]


def spans(path: Path) -> list[str]:
    """Code spans of a page's prose."""
    return re.findall(r"`([^`\n]+)`", prose(path))


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every `kleash …` of the pages' code blocks and the recipes' comments, with its place."""
    for path in PAGES:
        for line in "\n".join(blocks(path, "")).splitlines():
            if line.strip().startswith("kleash "):
                yield name(path), shlex.split(line, comments=True)[1:]
    for path in RECIPES:
        for line in read(path).splitlines():
            if line.startswith("#   kleash "):
                yield name(path), shlex.split(line[1:].replace("…", ""))[1:]


COMMANDS = list(command_lines())


# ---- links ----


RESULTS = ["docs/results/lab.md", "docs/results/speed.md", "docs/images/report.png"]


def test_measured_results_are_there() -> None:
    assert [file for file in RESULTS if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_resolve(path: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if found in [ROOT / result for result in RESULTS]:
            continue  # the test above
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_reached_from_the_index() -> None:
    index = read(ROOT / "docs" / "index.md")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages == {page for page in pages if f"({page})" in index}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_page_with_its_recipes_and_a_place_for_a_result(method: str) -> None:
    page = read(ROOT / "docs" / f"{method}.md")
    assert f"kleash train {method}-tiny.yaml" in page and f"(../src/kleash/recipes/{method}.yaml)" in page
    assert f"<!-- result: {method}" in page


# ---- commands and options ----


def test_commands_are_found_in_the_pages() -> None:
    assert len(COMMANDS) > 50
    assert {words[0] for _, words in COMMANDS} == set(command().commands)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_command_named_in_the_text_exists(path: Path) -> None:
    named = {tuple(span.split()[1:3]) for span in spans(path) if re.match(r"kleash [a-z]", span)}
    assert {words[0] for words in named} <= set(command().commands)
    methods = {words[1] for words in named if words[0] == "train" and len(words) > 1}
    assert {method for method in methods if re.fullmatch(r"[a-z][a-z-]*", method)} <= set(METHODS)


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[f"{w}: {' '.join(c)}" for w, c in COMMANDS])
def test_documented_command_parses(where: str, words: list[str]) -> None:
    chosen = command().commands[words[0]]
    context = chosen.make_context(words[0], [word for word in words[1:] if word != "--options"])
    if words[0] in ("train", "check", "sweep"):
        check_options(
            words[0], context.params["target"], context.params["overrides"] or [], "--options" in words
        )


def check_options(verb: str, target: str, overrides: list[str], listing: bool) -> None:
    """Method, recipe and `key=value` of a documented command build the method's config."""
    values = parse_overrides(overrides)
    if target.startswith("runs/"):  # the config of a run, which may be of any method
        assert target.endswith("config.yaml") and values.keys() <= {
            o.name for o in options(METHODS["dpo"].config)
        }
        return
    if target.endswith(".yaml"):
        method, base = read_recipe(RECIPE_FOLDER / target)
    else:
        method, base = target, {}
    if verb == "sweep":
        values, grid = split_grid(method, values)
        check_grid(method, grid)
        values = {**values, **{key: points[0] for key, points in grid.items()}}
    if not listing:
        build(METHODS[method].config, {**base, **values})


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_documented_option_exists(path: Path) -> None:
    known = {o.name for method in METHODS.values() for o in options(method.config)}
    known |= {"key"}  # stands for any of them
    written = {
        match[1] for span in spans(path) if (match := re.fullmatch(r"([a-z][a-z_0-9]*)=[^\"(]*", span))
    }
    assert written <= known


def test_options_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("docs_options", ROOT / "docs" / "options.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert read(ROOT / "docs" / "options.md") == module.page(), "run: python docs/options.py"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_documented_command_line_option_exists(path: Path) -> None:
    flags = {flag for c in command().commands.values() for p in c.params for flag in p.opts}
    flags |= {"--help", "--debug", "--multi_gpu"}  # the last is a flag of `accelerate launch`
    written = {span.split()[0] for span in spans(path) if re.match(r"--[a-z]", span)}
    assert written <= flags


# ---- rows ----


def documented_rows() -> list[tuple[str, str, str]]:
    """Place, kind and JSON of every row that the pages show."""
    found = []
    for kind, row in re.findall(
        r"^\| (\w+) \|.*\| `(\{.*\})` \|$", read(ROOT / "docs" / "data.md"), re.MULTILINE
    ):
        found.append(("docs/data.md", kind, row))
    for path in (ROOT / "README.md", ROOT / "docs" / "data.md"):
        lines = [line for body in blocks(path, "") for line in body.splitlines() if line.startswith("{")]
        found += [(name(path), kind_of(json.loads(line)), line) for line in lines]
    return found


def kind_of(row: dict[str, Any]) -> str:
    if "chosen" in row:
        return "preferences"
    return "demonstrations" if "completion" in row or "messages" in row else "prompts"


@pytest.mark.parametrize(("where", "kind", "row"), documented_rows())
def test_documented_row_is_right(where: str, kind: str, row: str) -> None:
    assert len(read_rows([json.loads(row)], kind, bad_rows="strict")) == 1  # type: ignore[arg-type]


def test_every_kind_of_rows_is_documented() -> None:
    assert {kind for where, kind, _ in documented_rows() if where == "docs/data.md"} == set(EXAMPLES)


# ---- names and numbers ----


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_documented_name_exists(path: Path) -> None:
    absent = []
    for span in spans(path):
        dotted = re.match(r"((?:kleash|functional)(?:\.[A-Za-z_]\w*)+)(?![\w.]*/)", span)
        if dotted and not exists(dotted[1]):
            absent.append(dotted[1])
    assert not absent


def exists(dotted: str) -> bool:
    """Whether `kleash.a.b` can be imported, or got from what can be."""
    first, *rest = ("kleash." + dotted if dotted.startswith("functional") else dotted).split(".")
    found: Any = importlib.import_module(first)
    for at, part in enumerate(rest, start=1):
        if not hasattr(found, part):
            try:
                found = importlib.import_module(".".join([first, *rest[:at]]))
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


@pytest.fixture(scope="module")
def logged(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every metric of the policy-gradient methods, from a step each of two that have all of them."""
    folder = tmp_path_factory.mktemp("logged")
    shared: dict[str, Any] = {
        "model": str(tiny_folder), "data": str(ROOT / "examples" / "pairs.jsonl"), "reward": "length:4",
        "gold": "length:2", "samples_per_prompt": 2, "batch_size": 4, "max_new_tokens": 6, "max_length": 64,
        "minibatches": 2, "steps": 1, "measure": False, "quiet": True,
    }  # fmt: skip
    runs = [
        kleash.train("grpo", **shared, importance="token", missing_end_penalty=0.1, out=str(folder / "grpo")),
        kleash.train("ppo", **shared, ptx_data=shared["data"], ptx_coef=0.1, out=str(folder / "ppo")),
    ]
    return {name for run in runs for row in run.metrics if row["split"] == "train" for name in row}


def test_metrics_of_policy_gradients_are_all_documented(logged: set[str]) -> None:
    written = set(spans(ROOT / "docs" / "policy-gradients.md"))
    generally = ("optim/", "time/", "tokens/")  # of every method, in runs.md, and `time/collect` beside them
    assert not {metric for metric in logged - written if "/" in metric and not metric.startswith(generally)}


def test_table_of_policy_gradients_is_what_the_code_says() -> None:
    head, _, *rows = re.findall(r"^\|.*\|$", section("policy-gradients.md", "The table"), re.MULTILINE)
    _, *columns = cells(head)
    found = {}
    for method, *values in map(cells, rows):
        found[method.partition("]")[0].lstrip("[")] = dict(zip(columns, values, strict=True))
    assert found.keys() == {m for m, method in METHODS.items() if issubclass(method.config, PolicyConfig)}
    for method, row in found.items():
        defaults = {"advantage": "GAE", "scale": "–", "no_spread": "–"}  # PPO has no such options
        defaults |= {o.name: shown(o.default) for o in options(METHODS[method].config)}
        assert row == {column: defaults[column] for column in columns}


def section(page: str, title: str) -> str:
    """What stands under a heading of the second level."""
    return read(ROOT / "docs" / page).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def cells(row: str) -> list[str]:
    """The cells of a row of a Markdown table."""
    return [cell.strip() for cell in row.strip("|").split("|")]


def shown(default: Any) -> str:
    """A default as the table has it."""
    return "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_documented_metric_is_logged(path: Path, logged: set[str]) -> None:
    code = "".join(read(file) for file in (ROOT / "src" / "kleash").rglob("*.py"))
    sides = {
        f"{side}/{part}" for side in ("reward", "gold") for part in ("mean", "missing", "hung", "no_spread")
    }
    parts = {f"reward/{rule}" for rule in RULES}  # parts of a combined reward carry their names
    written = {span for span in spans(path) if METRIC.fullmatch(span)}
    assert not {metric for metric in written - sides - parts - logged if f'"{metric}"' not in code}


def test_rules_are_all_documented() -> None:
    written = {span for span in spans(ROOT / "docs" / "rewards.md") if span.partition(":")[0] in RULES}
    assert {span.partition(":")[0] for span in written} == set(RULES)
    assert all(rule(span) is not None for span in written)


def test_measures_are_all_documented() -> None:
    page = read(ROOT / "docs" / "measurement.md")
    short = {"drift": "Drift", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}
    assert not [metric for metric in METRICS if short.get(metric, f"`{metric}`") not in page]


def test_thresholds_of_the_verdict_are_the_documented_ones() -> None:
    page, limits = read(ROOT / "docs" / "measurement.md"), Thresholds()
    assert f"at least {limits.drift_ratio:g} times" in page
    assert f"below {limits.drift_floor:g} nats counts as {limits.drift_floor:g}" in page
    assert f"falls by at least {limits.bigram_drop:g}" in page
    assert limits.length_share == 0.5 and "at least half of the gain" in page
    assert f"{limits.confidence:.0%}".replace("%", " %") + " interval" in page


def test_presets_of_the_lab_are_all_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", read(ROOT / "docs" / "lab.md"), re.MULTILINE)
    assert set(rows) == set(PRESETS)


def test_options_of_the_lab_are_the_documented_ones() -> None:
    page, sizes = read(ROOT / "docs" / "lab.md"), PRESETS["standard"]
    rate = f"{sizes.policy_rate:.0e}".replace("e-0", "e-")
    assert f"steps={sizes.policy_steps} batch_size={sizes.policy_batch} learning_rate={rate}" in page
    assert (
        f"max_new_tokens={sizes.response_tokens}" in page
        and f"{sizes.response_tokens}-token responses" in page
    )


# ---- snippets ----


def test_python_of_the_readme_runs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    names = run_snippets(ROOT / "README.md", tiny_folder, tmp_path, monkeypatch)
    assert names["run"].model.is_dir() and names["found"].drift.mean > 0
    assert names["short_and_right"](["it is 5"], ["5"]) == [pytest.approx(0.97)]


def test_python_of_the_python_page_runs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "examples" / "pairs.jsonl", tmp_path / "pairs.jsonl")
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "The room was"}\n{"prompt": "We went to"}\n', encoding="utf-8"
    )
    names = run_snippets(ROOT / "docs" / "python.md", tiny_folder, tmp_path, monkeypatch)
    assert names["loss"].item() == pytest.approx(0.598139, abs=1e-6)
    assert names["log_z"].exp().item() == pytest.approx(1.390364, abs=1e-5)
    assert names["before"].drift.mean == 0.0


def run_snippets(path: Path, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the Python blocks of a page in order, with the tiny model in place of the bundled one."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KLEASH_MALLOC", "default")  # the allocator is the whole process's
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks(path, "python"), start=1):
        code = block.replace('"smollm2-135m"', repr(str(model)))
        exec(compile(code, f"{path.name}, snippet {number}", "exec"), names)
    return names


def test_reward_of_the_rewards_page_works() -> None:
    names: dict[str, Any] = {}
    exec(blocks(ROOT / "docs" / "rewards.md", "python")[0], names)
    assert names["short_and_polite"]([""], ["Please sit"]) == [pytest.approx(0.98)]
