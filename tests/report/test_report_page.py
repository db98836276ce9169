"""Pages about one run and about several: content, self-containment, escaping, bad input named."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from kleash.errors import RunError, UsageError
from kleash.report import write_report

MakeRun = Callable[[str], Path]

HOSTILE = (
    '<script>alert("x")</script>',
    "</script><script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "{{ 7 * 7 }}{% raw %}",
    "emoji 👩‍🚀🏽 and \U0001f600",
    "control \x00\x07\x1b[31m\x7f\x85",
    "lone \ud83d surrogate",
    "\u202egnp.exe \u2066 شكرا جزيلا שלום",
    "line\u2028separator & &amp; <!-- comment",
)


class Page(HTMLParser):
    """The elements, visible text and script contents of a page, as a browser's parser sees them."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_bytes().decode("utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self.inside: str | None = None
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside = tag
            if tag == "script":
                self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == self.inside:
            self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self.inside is None:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def programs(self) -> list[str]:
        return [text for attributes, text in self.scripts if attributes.get("type") != "application/json"]

    def data(self) -> dict[str, Any]:
        """The page's JSON by element id, read as strictly as a browser does (no NaN)."""

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is not JSON")

        return {
            str(attributes["id"]): json.loads(text, parse_constant=refuse)
            for attributes, text in self.scripts
            if attributes.get("type") == "application/json"
        }

    def ids(self) -> set[str | None]:
        return {attributes.get("id") for _, attributes in self.elements}


def report(paths: list[Path], tmp_path: Path, **options: Any) -> Page:
    return Page(write_report(paths, tmp_path / "page.html", **options))


def test_one_run_shows_numbers_verdict_curves_samples_checks_and_settings(
    make_run: MakeRun, tmp_path: Path
) -> None:
    page = report([make_run("rlhf-no-kl")], tmp_path)
    for said in (
        "Reward hacking established",
        "46.2 ± 1.4",
        "1.48 ± 0.05",
        "Gold lower",
        "log-ratio at the start",
        "smollm2-135m",
        "removed before the softmax for both models",
        "kept 568, dropped tie 712",
        "4 min 06 s",
    ):
        assert said in page.text, said
    assert {
        "table",
        "verdict",
        "curves",
        "drift",
        "samples",
        "checks",
        "conventions",
        "settings",
    } <= page.ids()
    groups = page.data()["samples-data"]["groups"]
    assert [group["prompt"] for group in groups][:2] == [
        "The weather this morning was",
        "My neighbour came over and",
    ]
    assert len(groups[0]["cells"]) == 1 and len(groups[0]["cells"][0]) == 2
    assert len(groups[0]["cells"][0][0]["tokens"]) == 24


def test_several_runs_stand_in_one_table_with_intervals_and_samples_side_by_side(
    make_run: MakeRun, tmp_path: Path
) -> None:
    page = report(
        [make_run(name) for name in ("reference", "rlhf", "dpo")], tmp_path, title="Which is better?"
    )
    assert "Which is better?" in page.text and "95 % intervals" in page.text
    assert "2.60 ± 0.08" in page.text and "3.90 ± 0.12" in page.text
    data = page.data()
    assert [column["label"] for column in data["samples-data"]["columns"]] == ["reference", "rlhf", "dpo"]
    assert all(len(group["cells"]) == 3 and all(group["cells"]) for group in data["samples-data"]["groups"])
    points = data["interval-1"]["data"]["values"]  # reward: mean ± 1.96 standard errors
    assert points[1] == {
        "run": "rlhf",
        "mean": 0.91,
        "low": pytest.approx(0.812),
        "high": pytest.approx(1.008),
    }
    frontier = {(p["name"], p["which"]): (p["drift"], p["value"]) for p in data["drift-1"]["data"]["values"]}
    assert frontier["dpo", "gold"] == (3.9, 0.71) and frontier["rlhf", "reward (proxy)"] == (2.6, 0.91)
    assert "Mind, in reading this page" not in page.text  # a measured model needs no training files


def test_settings_that_differ_are_set_against_each_other(make_run: MakeRun, tmp_path: Path) -> None:
    page = report([make_run("rlhf"), make_run("rlhf-no-kl")], tmp_path)
    rows = re.search(r"Setting that differs.*?</table>", page.source, re.S)
    assert rows is not None
    assert [cell for cell in re.findall(r'<th scope="row">(.*?)</th>', rows.group())] == ["method", "beta"]


def test_a_page_is_one_file_that_can_fetch_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    page = report([make_run("rlhf")], tmp_path)
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base"), tag
        assert "src" not in attributes and not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    policy = next(a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a)
    assert policy is not None and "default-src 'none'" in policy
    assert not re.search(r"@import|url\(", page.source[: page.source.index("</style>")])
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.programs]
    assert [f"'sha256-{digest}'" in policy for digest in hashes] == [True, True]
    assert "unsafe-eval" not in policy and policy.count("unsafe-inline") == 1  # styles alone
    assert sum(len(text) > 500_000 for text in page.programs) == 1  # one copy of the chart library


def test_a_page_without_charts_leaves_the_chart_library_out(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("reference")
    (run / "evaluation.json").unlink()
    page = report([run], tmp_path)
    assert len(page.source) < 200_000 and "samples" in page.ids()


def test_charts_are_valid_vega_lite(make_run: MakeRun, tmp_path: Path) -> None:
    data = report([make_run(name) for name in ("rlhf", "rlhf-no-kl", "dpo")], tmp_path).data()
    specs = {name: spec for name, spec in data.items() if name != "samples-data"}
    assert len(specs) > 10
    for name, spec in specs.items():
        compiled = vl_convert.vegalite_to_vega(spec)
        assert compiled["marks"], name
        assert "http" not in json.dumps(spec)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_model_text_is_escaped_everywhere(make_run: MakeRun, tmp_path: Path, hostile: str) -> None:
    run = make_run("rlhf-no-kl")
    harmless = report([run], tmp_path)
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        row["prompt"] = row["response"] = row["tokens"][0] = hostile
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["verdict"]["summary"] = evaluation["verdict"]["statements"][0]["text"] = hostile
    evaluation["conventions"][hostile] = hostile
    evaluation["warnings"] = [hostile]
    evaluation["reward_parts"] = {hostile: {"mean": 1.0, "stderr": 0.1, "count": 8}}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    manifest = {
        "checks": [{"name": hostile, "passed": False, "figure": hostile}],
        hostile: {hostile: hostile},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))

    page = report([run], tmp_path, title=hostile, labels=[hostile])

    count = [tag for tag, _ in page.elements].count
    assert count("script") == [tag for tag, _ in harmless.elements].count("script")
    assert count("img") == 0 and page.programs == harmless.programs
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    forbidden = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\ud800-\udfff]")
    assert not forbidden.search(page.source.replace("".join(page.programs), ""))
    start = re.split(r"[^\w ]", hostile.lstrip("<\"'>{/%\u202e "))[0]
    sample = page.data()["samples-data"]["groups"][0]
    assert start in sample["prompt"] and start in sample["cells"][0][0]["tokens"][0][0] and start in page.text


def test_nan_and_infinity_are_not_drawn_and_not_written_as_json(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("rlhf")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(
            '{"step": 61, "split": "train", "reward/mean": NaN, "kl/k1": Infinity, "gold/mean": -Infinity}\n'
        )
    rows = (run / "samples.jsonl").read_text().splitlines()
    first = json.loads(rows[0])
    first["logp"][0], first["reward"] = float("nan"), float("inf")
    (run / "samples.jsonl").write_text("\n".join([json.dumps(first), *rows[1:]]) + "\n")
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["drift"] = {"mean": float("nan"), "stderr": None, "count": 0}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    data = report([run], tmp_path).data()  # parsed strictly
    sample = data["samples-data"]["groups"][0]["cells"][0][0]
    assert sample["tokens"][0][1] is None and "reward" not in sample
    assert max(point["step"] for point in data["curve-1"]["data"]["values"]) == 60


def test_missing_and_half_written_files_are_named_on_the_page(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("dpo")
    for name in ("metrics.jsonl", "samples.jsonl", "evaluation.json"):  # as a killed process leaves them
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[:-20])
    (run / "config.yaml").write_text("method: [dpo\n")
    (run / "manifest.json").unlink()
    page = report([run], tmp_path)
    for said in (
        "the last line of metrics.jsonl was cut short (line 66)",
        "the last line of samples.jsonl was cut short (line 16)",
        "evaluation.json is not complete JSON",
        "config.yaml is not valid YAML",
        "manifest.json is missing",
    ):
        assert said in page.text, said
    assert "curves" in page.ids() and "samples" in page.ids()  # what could be read is shown


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("evaluation.json", "[1, 2]", "evaluation.json does not hold a mapping"),
        (
            "evaluation.json",
            '{"drift": "far", "reward": [1], "verdict": 3, "warnings": "w", "missing": []}',
            "rlhf",
        ),
        ("metrics.jsonl", "", "metrics.jsonl is empty"),
        (
            "metrics.jsonl",
            '[1]\n{"step": 1}\nnull\n{"step": "two", "loss": {}}\n',
            "2 unreadable line(s) (line 1, 3)",
        ),
        ("samples.jsonl", '{"prompt": 3}\n{"response": "r"}\n', "2 sample row(s) without a text prompt"),
        (
            "samples.jsonl",
            '{"prompt": "p", "response": "r", "tokens": ["r"], "logp": []}\n',
            "without colour",
        ),
        ("manifest.json", '{"conventions": [1], "checks": "all", "versions": null}', "not set"),
        ("config.yaml", "- a\n- b\n", "config.yaml does not hold a mapping"),
    ],
)
def test_odd_content_never_crashes_the_page(
    make_run: MakeRun, tmp_path: Path, name: str, content: str, said: str
) -> None:
    run = make_run("rlhf")
    (run / name).write_text(content)
    assert said in report([run, make_run("dpo")], tmp_path).text or said in report([run], tmp_path).text


def test_bytes_that_are_not_utf8_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("rlhf")
    (run / "config.yaml").write_bytes(b"model: caf\xe9\n")
    page = report([run], tmp_path)
    assert "config.yaml holds bytes that are not UTF-8" in page.text and "caf\ufffd" in page.text


def test_warnings_and_missing_rewards_of_the_measurement_are_said(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("rlhf")
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation |= {"warnings": ["the sampler and the trainer disagree"], "missing": {"reward": 3, "gold": 0}}
    evaluation["reward_parts"] = {"helpful": {"mean": 0.5, "stderr": 0.04, "count": 16}, "short": None}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    text = report([run], tmp_path).text
    assert "the sampler and the trainer disagree" in text
    assert "3 responses have no reward" in text and "responses have no gold" not in text
    assert "helpful 0.50 ± 0.04 short –" in text


def test_runs_measured_on_other_prompts_or_settings_are_marked(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("rlhf"), make_run("dpo")]
    assert "with care" not in report(runs, tmp_path).text
    evaluation = json.loads((runs[1] / "evaluation.json").read_text())
    evaluation |= {"temperature": 0.7, "prompts_hash": "b"}
    (runs[1] / "evaluation.json").write_text(json.dumps(evaluation))
    evaluation = json.loads((runs[0] / "evaluation.json").read_text())
    (runs[0] / "evaluation.json").write_text(json.dumps(evaluation | {"prompts_hash": "a"}))
    text = report(runs, tmp_path).text
    assert "temperature: rlhf 1, dpo 0.7" in text and "measured on different prompts" in text


def test_equal_folder_names_get_their_parents(make_run: MakeRun, tmp_path: Path) -> None:
    first = make_run("dpo")
    other = tmp_path / "seed-1" / "dpo"
    other.parent.mkdir()
    first.rename(other)
    page = report([make_run("dpo"), other], tmp_path)
    labels = [column["label"] for column in page.data()["samples-data"]["columns"]]
    assert labels == ["runs/dpo", "seed-1/dpo"]


def test_what_is_not_a_run_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path, said in (
        ("absent", "does not exist"),
        ("file", "is a file"),
        ("empty", "holds none of config.yaml"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            write_report([tmp_path / path], tmp_path / "page.html")
        assert str(tmp_path / path) in str(caught.value)
    with pytest.raises(UsageError, match="No run folder"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(UsageError, match="1 labels were given for 2"):
        write_report([make_run("rlhf"), make_run("dpo")], tmp_path / "page.html", labels=["a"])


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("dpo")
    old = tmp_path / "page.html"
    old.write_text("old")
    with pytest.raises(RunError, match="Cannot write the page .*blocked"):
        (tmp_path / "blocked").write_text("")
        write_report([run], tmp_path / "blocked" / "page.html")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kleash.report.html.os.replace", full)
    with pytest.raises(RunError, match="No space left on device"):
        write_report([run], old)
    assert old.read_text() == "old" and sorted(path.name for path in tmp_path.glob("*.html")) == ["page.html"]
    assert not list(tmp_path.glob(".report-*"))


def test_a_folder_as_out_gets_report_html(make_run: MakeRun) -> None:
    run = make_run("dpo")
    assert write_report([run], run) == run / "report.html"
    first = (run / "report.html").read_bytes()
    assert write_report([run], run).read_bytes() == first  # the same files give the same page
