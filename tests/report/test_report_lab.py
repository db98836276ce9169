"""The lab's page: content, and what happens when parts of the lab are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kleash.errors import UsageError
from kleash.report import write_lab_report


def written(lab_dir: Path) -> str:
    page = write_lab_report(lab_dir)
    assert page == lab_dir / "report.html"
    return page.read_text(encoding="utf-8")


def change(lab_dir: Path, **facts: Any) -> None:
    path = lab_dir / "lab.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def data_of(page: str, name: str) -> Any:
    start = page.index(f'<script type="application/json" id="{name}">')
    return json.loads(page[page.index(">", start) + 1 : page.index("</script>", start)])


def test_lab_page_holds_verdict_table_checkpoints_curves_samples_conventions_checks(lab_dir: Path) -> None:
    page = written(lab_dir)
    for section in "verdict table checkpoints curves drift samples setup conventions checks".split():  # noqa: SIM905
        assert f'<section id="{section}">' in page, section
    assert "Without the KL leash, the policy hacked its reward" in page
    assert "2 of 3 checkpoints passed, 1 skipped" in page
    assert page.index("RLHF, no KL") < page.index("DPO starts at ln 2") < page.index("0.693147")
    assert 'class="mark bad"' in page and "skipped</span>" in page
    assert "72" in page and "share reaching the cap" in page and "Mind, in reading" not in page
    columns = data_of(page, "samples-data")["columns"]
    assert [column["label"] for column in columns] == ["Reference", "RLHF", "RLHF, no KL", "DPO"]
    assert [column["colour"] for column in columns] == [0, 1, 2, 3]  # the colours of table and curves


def test_lab_page_draws_rewards_against_drift_along_training_and_for_the_sweep(lab_dir: Path) -> None:
    page = written(lab_dir)
    along = data_of(page, "drift-2")["data"][
        "values"
    ]  # RLHF without the penalty, twenty means of three steps
    gold = [point for point in along if point["which"] == "gold"]
    assert len(gold) == 20 and max(point["value"] for point in gold) > gold[-1]["value"] + 1
    sweep = data_of(page, "drift-3")["data"]["values"]
    assert {point["name"] for point in sweep} == {"β 0.02", "β 0.05", "β 0.1", "β 0.2", "β 0.4"}
    assert sweep[0]["high"] - sweep[0]["drift"] == pytest.approx(1.96 * 1.0)
    change(lab_dir, sweep=[])
    assert "Sweep of β</h3>" not in written(lab_dir)


def test_dpo_curves_show_both_log_probabilities_and_the_margin(lab_dir: Path) -> None:
    page = written(lab_dir)
    for title in (
        "Log-probability of the chosen answer",
        "Log-probability of the rejected answer",
        "Implicit-reward margin",
    ):
        assert f"<h3>{title}</h3>" in page, title


@pytest.mark.parametrize(
    ("hacking", "headline"),
    [
        (True, "Without the KL leash, the policy hacked its reward"),
        (False, "Without the KL leash, no reward hacking was found"),
        (None, "Reward hacking was not established"),
    ],
)
def test_system_004_63_the_headline_claims_no_more_than_the_verdict(
    lab_dir: Path, hacking: bool | None, headline: str
) -> None:
    change(lab_dir, verdict={"hacking": hacking, "summary": "s", "statements": []})
    assert f"<h1>{headline}</h1>" in written(lab_dir)


def test_lab_page_names_missing_policies_and_files(lab_dir: Path) -> None:
    for file in (lab_dir / "rlhf").iterdir():
        file.unlink()
    (lab_dir / "dpo" / "metrics.jsonl").unlink()
    facts = json.loads((lab_dir / "lab.json").read_text())
    change(
        lab_dir,
        policies=[*facts["policies"], {"name": "extra"}, {"name": "gone", "label": "Gone", "path": "gone"}],
    )
    page = written(lab_dir)
    for said in (
        "is not a run folder: it holds none of",
        "DPO: metrics.jsonl is missing.",
        "extra: lab.json names no folder for it (policies, entry 5, path).",
        "gone does not exist",
    ):
        assert said in page, said
    assert "46.2" in page  # the policies that are there are shown


def test_an_empty_lab_json_gives_a_page_that_says_what_is_missing(lab_dir: Path) -> None:
    (lab_dir / "lab.json").write_text("{}")
    page = written(lab_dir)
    assert "lab.json has no policies." in page
    assert "No verdict was recorded." in page


def test_lab_json_missing_or_cut_short_is_a_usage_error(lab_dir: Path) -> None:
    whole = (lab_dir / "lab.json").read_text()
    (lab_dir / "lab.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"lab\.json is not complete JSON: .* at line 1, column \d+"):
        write_lab_report(lab_dir)
    (lab_dir / "lab.json").write_text("[]")
    with pytest.raises(UsageError, match="holds a list"):
        write_lab_report(lab_dir)
    (lab_dir / "lab.json").unlink()
    with pytest.raises(UsageError, match=r"lab\.json is missing"):
        write_lab_report(lab_dir)
    with pytest.raises(UsageError, match="is not a folder"):
        write_lab_report(lab_dir / "nowhere")


def test_seconds_of_lab_json_stand_before_those_of_the_metrics(lab_dir: Path) -> None:
    assert "4 min 06 s" in written(lab_dir)
    facts = json.loads((lab_dir / "lab.json").read_text())
    change(lab_dir, policies=[policy | {"seconds": 4000} for policy in facts["policies"]])
    assert "1 h 06 min" in written(lab_dir) and "4 min 06 s" not in written(lab_dir)


@pytest.mark.parametrize("value", [None, 3, "text", [1], {"a": [None]}])
def test_lab_page_survives_any_type_in_any_place(lab_dir: Path, value: Any) -> None:
    keys = (
        "machine",
        "rule",
        "pairs",
        "reward_model",
        "policies",
        "checkpoints",
        "verdict",
        "sweep",
        "skipped",
        "checks",
    )
    change(lab_dir, **dict.fromkeys(keys, value))
    assert "<h1>Reward hacking was not established</h1>" in written(lab_dir)
