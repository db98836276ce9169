"""Numbers and untrusted text; the table in the terminal; samples and charts as data."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kleash.report import Entry, final_table, view
from kleash.report.charts import Series, curve_charts, path_charts, sweep_chart
from kleash.report.samples import Column, columns_over_time, final_rows, side_by_side
from kleash.report.text import (
    Figure,
    figure,
    format_figure,
    format_number,
    format_seconds,
    format_value,
    visible,
)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0"), (-0.0, "0"), (0.12345, "0.123"), (-1.5, "−1.50"), (123.456, "123.5"), (12345.6, "12,346"),
        (3, "3"), (0.0001, "1.0e−04"), (-0.0000001, "−1.0e−07"),
        (None, "–"), (float("nan"), "–"), (True, "–"), ("x", "–"),
    ],
)  # fmt: skip
def test_numbers(value: Any, said: str) -> None:
    assert format_number(value) == said


@pytest.mark.parametrize(
    ("drift", "said"), [(-3e-7, "0"), (-9e-5, "0"), (3e-7, "3.0e−07"), (-0.5, "−0.500"), (-2e-4, "−2.0e−04")]
)
def test_what_rounding_leaves_of_no_drift_reads_0(drift: float, said: str) -> None:
    """Exact KL is never negative; a drift that is more than rounding below 0 is a fault, and shown."""
    entry = Entry("dpo", {"drift": {"mean": drift, "stderr": None}, "kl_k1": -3e-7})
    assert format_figure(entry.figure("drift")) == (said, "")
    assert format_figure(entry.figure("kl_k1")) == ("−3.0e−07", "")
    statement = {"name": "drift", "established": False, "text": "", "figure": drift}
    assert view.statements({"statements": [statement]})[0].figure == said


@pytest.mark.parametrize(
    ("mean", "stderr", "said"),
    [
        (0.9734, 0.0412, ("0.97", "± 0.04")),
        (2.604, 0.0781, ("2.60", "± 0.08")),
        (46.234, 1.421, ("46.2", "± 1.4")),
        (56.2, 23.0, ("56", "± 23")),
        (-0.001, 0.02, ("−0.001", "± 0.020")),
        (-0.0004, 0.02, ("0.000", "± 0.020")),
        (0.5, 0.0, ("0.500", "± 0")),
        (0.5, None, ("0.500", "")),
        (1.0, 1e-7, ("1.0000", "± 0.0000")),
    ],
)
def test_means_are_given_to_the_digits_their_error_allows(
    mean: float, stderr: float | None, said: Any
) -> None:
    assert format_figure(Figure(mean, stderr)) == said


def test_figures_come_from_numbers_mappings_and_objects_or_are_absent() -> None:
    @dataclass
    class Estimate:
        mean: float
        stderr: float | None
        count: int

    assert (
        figure(Estimate(1.0, 0.1, 8)) == figure({"mean": 1, "stderr": 0.1, "count": 8}) == Figure(1.0, 0.1, 8)
    )
    assert figure(2) == Figure(2.0)
    for absent in (None, "1", {}, {"mean": float("nan")}, [], {"mean": None, "stderr": 1}):
        assert figure(absent) is None
    assert Figure(1.0, 0.5).interval == (pytest.approx(0.02), pytest.approx(1.98))


def test_durations_and_settings() -> None:
    assert [format_seconds(s) for s in (4.26, 48.2, 185, 4321, None)] == [
        "4.3 s",
        "48 s",
        "3 min 05 s",
        "1 h 12 min",
        "–",
    ]
    assert format_value({"a": [1, 2.50, True], "b": None, "c": {}}) == "a 1, 2.5, yes, b not set, c none"


def test_unsafe_characters_are_spelled_out() -> None:
    assert visible("a\x00\x1b\x7f\x9b") == "a␀␛\\x7f\\x9b"
    assert visible("\ud83d!") == "\\ud83d!"
    assert visible("\ud83d\ude00") == "😀"  # a pair that a JSON writer left apart
    assert visible("abc\u202edef\u2066") == "abc\\u202edef\\u2066"
    assert visible("tab\tline\n👩‍🚀 שלום") == "tab\tline\n👩‍🚀 שלום"


@given(st.text(st.characters(exclude_categories=())))
def test_visible_text_always_encodes_and_is_stable(text: str) -> None:
    shown = visible(text)
    shown.encode("utf-8")
    assert visible(shown) == shown


def test_terminal_table_shows_what_was_measured_and_reads_no_markup() -> None:
    far = {"drift": {"mean": 46.2, "stderr": 1.4}, "reward": {"mean": 1.48, "stderr": 0.05}, "ended": 0.25}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(
        final_table([Entry("[red]far[/red]\x1b[2J", far, 246.4), Entry("near", {"drift": None})], title="T")
    )
    shown = console.export_text()
    assert "[red]far[/red]␛[2J" in shown and "\x1b" not in shown
    head = next(line for line in shown.splitlines() if "Policy" in line)
    assert head.split() == [
        "Policy",
        "Reward",
        "Drift",
        "Ended",
        "Seconds",
    ]  # gold was not measured: no column
    assert [word in shown for word in ("46.2", "±1.4", "25.0 %", "246")] == [True] * 4
    near = next(line for line in shown.splitlines() if "near" in line)
    assert near.split() == ["near", "–", "–", "–", "–"]


def test_terminal_table_leaves_ended_out_where_the_length_is_fixed() -> None:
    table = final_table([Entry("a", {"drift": 1.0, "ended": 0.0, "fixed_length": True})])
    assert [column.header for column in table.columns] == ["Policy", "Drift", "Seconds"]


def row(prompt: str, step: float = 0, policy: str = "p", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "response": "r", "step": step, "policy": policy} | more


def test_samples_stand_side_by_side_by_prompt_and_what_is_left_out_is_counted() -> None:
    left = [row("one", response=str(n)) for n in range(6)] + [row("two")]
    view = side_by_side([Column("a", left), Column("b", [row("two"), row("three"), {"prompt": None}])])
    assert [group["prompt"] for group in view.groups] == ["one", "two", "three"]
    assert [[len(cell) for cell in group["cells"]] for group in view.groups] == [[4, 0], [1, 1], [0, 1]]
    assert view.most == 4
    assert any("2 more" in note for note in view.notes) and any(
        "1 sample row(s)" in note for note in view.notes
    )


def test_final_rows_are_those_of_the_last_step_of_the_policy() -> None:
    rows = [row("x", 10), row("x", 20), row("x", 20, "reference"), row("x", 0, "reference")]
    assert final_rows(rows) == [rows[1]] and final_rows(rows, reference=True) == [rows[2]]
    assert final_rows([rows[3]]) == [rows[3]]  # a folder of the reference alone


def test_one_run_shows_reference_then_steps_with_first_and_last() -> None:
    rows = [row("x", step) for step in range(0, 100, 10)] + [row("x", 0, "reference")]
    assert [column.label for column in columns_over_time(rows)] == [
        "reference",
        "step 0",
        "step 40",
        "step 90",
    ]


def test_ended_is_shown_only_where_a_response_could_end() -> None:
    fixed = side_by_side([Column("a", [row("x", ended=False)])])
    free = side_by_side([Column("a", [row("x", ended=False), row("y", ended=True)])])
    assert "ended" not in fixed.groups[0]["cells"][0][0] and free.groups[0]["cells"][0][0]["ended"] is False


def test_curves_prefer_exact_drift_and_skip_constants() -> None:
    rows = [{"step": s, "split": "train", "kl/k1": s, "kl/exact": 2 * s, "length/mean": 24} for s in range(4)]
    charts = curve_charts([Series("a", rows)], ["a"])
    assert [chart.title for chart in charts] == ["Drift from the reference"]
    assert [point["value"] for point in charts[0].spec["data"]["values"]] == [0, 2, 4, 6]


def test_a_policy_gradient_loss_is_not_set_beside_a_preference_loss() -> None:
    online = Series("ppo", [{"step": s, "loss": -s, "reward/mean": s} for s in range(3)])
    offline = Series("dpo", [{"step": s, "loss": 0.7 - 0.1 * s} for s in range(3)])
    charts = {
        chart.title: chart.spec["data"]["values"] for chart in curve_charts([online, offline], ["ppo", "dpo"])
    }
    assert {point["run"] for point in charts["Loss"]} == {"dpo"}
    assert "Loss" not in {chart.title for chart in curve_charts([online], ["ppo"])}, "its level means nothing"


def test_paths_average_steps_in_order_so_that_they_can_be_followed() -> None:
    rows = [
        {"step": s, "kl/k1": float(s), "reward/mean": 1.0 * s, "gold/mean": -1.0 * s} for s in range(1, 41)
    ]
    chart = path_charts([Series("a", rows)])[0]
    gold = [point for point in chart.spec["data"]["values"] if point["which"] == "gold"]
    assert [point["drift"] for point in gold] == [1.5 + 2 * n for n in range(20)]
    assert [point["value"] for point in gold] == [-1.5 - 2 * n for n in range(20)]
    assert "mean of 2 logged steps" in chart.caption and "kl/k1" in chart.caption


def test_a_sweep_needs_two_points() -> None:
    one = {"beta": 0.1, "reward": 1.0, "gold": 0.5, "drift": 2.0, "drift_stderr": 0.1}
    assert sweep_chart([one, {"beta": None, "drift": 3.0}, {"beta": 0.2}]) is None
    assert sweep_chart([one, one | {"beta": 0.2}]) is not None
