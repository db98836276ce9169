"""Run folders -> Vega-Lite specifications, built with altair, data inline.

Colours are CSS variables of the page's theme: a chart follows light and dark without being drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from kleash.report.table import Entry
from kleash.report.text import finite, visible

Spec = dict[str, Any]
Point = dict[str, Any]

PROXY, GOLD = "reward (proxy)", "gold"
DRIFT_KEYS = ("kl/exact", "kl/k1", "kl/k3")  # which measure of drift a metrics row offers, best first

MOST_DOTS = 20  # of one path
PASS_BINS = {  # metric -> what the share of prompts is of; from red to green
    "pass/none": ("no response right", "#b5482f"),
    "pass/low": ("up to a third", "#d99a4e"),
    "pass/middle": ("up to two thirds", "#cfc9a5"),
    "pass/high": ("more, not all", "#7fae8b"),
    "pass/all": ("all right", "#2f7d5b"),
}

# Curves, in order: metric keys (first that exists wins), title, unit.
CURVES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("reward/mean",), "Reward (proxy)", ""),
    (("gold/mean",), "Gold", ""),
    (DRIFT_KEYS, "Drift from the reference", "nats"),
    (("loss",), "Loss", ""),
    (("dpo/logp_chosen",), "Log-probability of the chosen answer", "nats"),
    (("dpo/logp_rejected",), "Log-probability of the rejected answer", "nats"),
    (("dpo/margin",), "Implicit-reward margin", ""),
    (("dpo/accuracy",), "Implicit-reward accuracy", "share"),
    (("reward_model/accuracy", "reward/accuracy"), "Reward-model accuracy", "share"),
    (("length/mean",), "Response length", "tokens"),
    (("ended/share",), "Responses that ended", "share"),
    (("pass/mean",), "Responses that are right", "share"),
    (("policy/entropy",), "Entropy", "nats/token"),
    (("policy/sampler_gap",), "Gap between sampler and trainer", "nats/token"),
    (("optim/grad_norm",), "Gradient norm", ""),
)


@dataclass(frozen=True)
class Series:
    """Metrics of one run under the label it has on the page."""

    label: str
    metrics: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A figure of the page: its title, what to say beneath it, and the Vega-Lite specification."""

    title: str
    caption: str
    spec: Spec


def _finish(chart: alt.Chart | alt.LayerChart, height: int, description: str) -> Spec:
    """The specification at its container's full width; without $schema, so nothing in it names an address."""
    spec: Spec = chart.properties(width="container", height=height, description=description).to_dict()
    spec.pop("$schema", None)
    spec.pop("config", None)  # the page's theme
    ((_, values),) = spec.pop("datasets").items()  # altair moves data aside under a hashed name
    spec["data"] = {"values": values}
    spec["autosize"] = {"type": "fit", "contains": "padding"}  # charts in a row end at the same line
    return spec


def series_colour(index: int) -> str:
    """The theme's colour of the series with this index, light and dark alike (CSS variables --c0 … --c7)."""
    return f"var(--c{index % 8})"


def _colour(labels: Sequence[str], first: int = 0) -> alt.Color:
    colours = [series_colour(first + index) for index in range(len(labels))]
    return alt.Color("run:N", scale=alt.Scale(domain=[*map(visible, labels)], range=colours), legend=None)


def _values(points: Iterable[Point]) -> alt.InlineData:
    return alt.InlineData(values=list(points))


def curve_charts(series: Sequence[Series], labels: Sequence[str], first: int = 0) -> list[Chart]:
    """One small chart a metric, all runs overlaid: training batches as lines, evaluation as dots.

    The first label has the theme's colour number `first`.
    """
    charts = []
    for keys, title, unit in CURVES:
        shown = _offline(series) if keys == ("loss",) else series
        points = [point for one in shown for point in _curve(one, keys)]
        if len({point["step"] for point in points}) < 2 or len({point["value"] for point in points}) < 2:
            continue  # nothing to draw, or a constant such as a fixed length
        used = sorted({point["metric"] for point in points}, key=keys.index)
        caption = " · ".join(used) + (f" ({unit})" if unit else "")
        charts.append(Chart(title, caption, _curve_spec(points, title, _colour(labels, first))))
    return charts


def _offline(series: Sequence[Series]) -> Sequence[Series]:
    """Series whose loss is worth a look: a policy-gradient loss has no meaning as a level."""
    return [one for one in series if not any("reward/mean" in row and "loss" in row for row in one.metrics)]


def _curve(one: Series, keys: tuple[str, ...]) -> list[Point]:
    """Points of the first key that this run logged, for each split apart."""
    points: list[Point] = []
    for split in ("train", "eval"):
        rows = [row for row in one.metrics if row.get("split", "train") == split]
        for key in keys:
            found = [
                {
                    "run": visible(one.label),
                    "step": row["step"],
                    "value": row[key],
                    "split": split,
                    "metric": key,
                }
                for row in rows
                if finite(row.get("step")) is not None and finite(row.get(key)) is not None
            ]
            if found:
                points += found
                break
    return points


def _curve_spec(points: list[Point], title: str, colour: alt.Color) -> Spec:
    tooltip = [
        alt.Tooltip("run:N"),
        alt.Tooltip("split:N"),
        alt.Tooltip("step:Q"),
        alt.Tooltip("value:Q", format=".4~f", title=title),
    ]
    base = alt.Chart(_values(points)).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, tickCount=5)),
        y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5)),
        color=colour,
        tooltip=tooltip,
    )
    layers: list[alt.Chart] = []
    splits = {point["split"] for point in points}
    if "train" in splits:
        layers.append(base.transform_filter("datum.split === 'train'").mark_line(strokeWidth=1.6))
    if "eval" in splits:
        held_out = base.transform_filter("datum.split === 'eval'")
        layers += [
            held_out.mark_line(strokeWidth=1.2, strokeDash=[2, 3]),
            held_out.mark_point(filled=True, size=34, opacity=1),
        ]
    layers.append(base.mark_point(opacity=0, size=120))  # a wider target for the pointer
    return _finish(alt.layer(*layers), 215, f"{title} against training step, one line a run")


def path_charts(series: Sequence[Series]) -> list[Chart]:
    """Proxy and gold against drift along training: a chart for each run that logged both in one row."""
    charts = []
    for one in series:
        drift, points = _path(one)
        steps = sorted({point["step"] for point in points})
        if len(steps) < 3:
            continue
        together = -(-len(steps) // MOST_DOTS)
        each = "a logged step" if together == 1 else f"the mean of {together} logged steps"
        caption = f"Drift is {drift}; each dot is {each}, joined in order of training."
        spec = _against_drift(_averaged(points, together), f"Proxy and gold against drift, {one.label}")
        charts.append(Chart(one.label, caption, spec))
    return charts


def _averaged(points: list[Point], together: int) -> list[Point]:
    """Means over `together` successive steps, for each of the two rewards: dots few enough to follow."""
    result = []
    for which in (PROXY, GOLD):
        ordered = sorted(
            (point for point in points if point["which"] == which), key=lambda point: point["step"]
        )
        for start in range(0, len(ordered), together):
            block = ordered[start : start + together]
            means = {
                key: sum(point[key] for point in block) / len(block) for key in ("step", "drift", "value")
            }
            result.append({"which": which, **means})
    return result


def _path(one: Series) -> tuple[str, list[Point]]:
    """Points (drift, reward, gold) of the split that has most of them; the drift key they use."""
    best: tuple[str, list[Point]] = ("", [])
    for split in ("eval", "train"):
        for key in DRIFT_KEYS:
            points: list[Point] = []
            for row in one.metrics:
                drift = finite(row.get(key))
                if row.get("split", "train") != split or drift is None or finite(row.get("step")) is None:
                    continue
                for name, metric in ((PROXY, "reward/mean"), (GOLD, "gold/mean")):
                    value = finite(row.get(metric))
                    if value is not None:
                        points.append({"step": row["step"], "drift": drift, "value": value, "which": name})
            if len(points) > 2 * len(best[1]) or (not best[1] and points):
                best = (key, points)
    return best


def pass_rate_charts(series: Sequence[Series]) -> list[Chart]:
    """How the pass rates of the sampled prompts are distributed along training: a stacked area a run."""
    charts = []
    for one in series:
        rows = [row for row in one.metrics if all(finite(row.get(key)) is not None for key in PASS_BINS)]
        rows = [row for row in rows if row.get("split", "train") == "train"]
        together = -(-len(rows) // MOST_DOTS)
        blocks = [rows[i : i + together] for i in range(0, len(rows), together)] if rows else []
        if len(blocks) < 3:
            continue
        points = [
            {
                "step": sum(row["step"] for row in block) / len(block),
                "share": sum(row[key] for row in block) / len(block),
                "bin": name,
                "order": order,
            }
            for block in blocks
            for order, (key, (name, _)) in enumerate(PASS_BINS.items())
        ]
        names, colours = zip(*PASS_BINS.values(), strict=True)
        chart = alt.Chart(_values(points)).mark_area(opacity=0.9).encode(
            x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, tickCount=5)),
            y=alt.Y("share:Q", title=None, stack="normalize", axis=alt.Axis(tickCount=4, format="%")),
            color=alt.Color(
                "bin:N",
                scale=alt.Scale(domain=list(names), range=list(colours)),
                legend=alt.Legend(orient="bottom", title=None, columns=3),
            ),
            order=alt.Order("order:Q"),
            tooltip=["bin:N", alt.Tooltip("step:Q", format=".0f"), alt.Tooltip("share:Q", format=".2f")],
        )  # fmt: skip
        each = "one step" if together == 1 else f"the mean of {together} steps"
        caption = f"Share of the step's prompts by how many of their responses are right; a point is {each}."
        title = f"Pass rates, {one.label}" if len(series) > 1 else "Pass rates"
        charts.append(Chart(title, caption, _finish(chart, 240, "Distribution of pass rates by step")))
    return charts


def sweep_chart(sweep: Sequence[Mapping[str, Any]]) -> Chart | None:
    """The frontier of a beta sweep: both rewards against drift, labelled by beta; None without two points."""
    points: list[Point] = []
    for row in sweep:
        drift, beta = finite(row.get("drift")), finite(row.get("beta"))
        if drift is None or beta is None:
            continue
        error = 1.96 * (finite(row.get("drift_stderr")) or 0.0)
        for name, key in ((PROXY, "reward"), (GOLD, "gold")):
            value = finite(row.get(key))
            if value is not None:
                point = {"drift": drift, "value": value, "which": name, "name": f"β {beta:g}"}
                points.append({**point, "low": max(0.0, drift - error), "high": drift + error})
    if len({point["name"] for point in points}) < 2:
        return None
    caption = "One training a beta, measured on the held-out prompts; bars are 95 % intervals of drift."
    return Chart(
        "Sweep of β",
        caption,
        _against_drift(_named(points), "Proxy and gold against drift, one point a beta"),
    )


def frontier_chart(entries: Sequence[Entry]) -> Chart | None:
    """Final reward and gold of every policy against exact drift; None when fewer than two have them."""
    points: list[Point] = []
    for entry in entries:
        drift = entry.figure("drift")
        if drift is None:
            continue
        low, high = drift.interval
        for name, key in ((PROXY, "reward"), (GOLD, "gold")):
            value = entry.figure(key)
            if value is not None:
                point = {
                    "drift": drift.mean,
                    "value": value.mean,
                    "which": name,
                    "name": visible(entry.label),
                }
                points.append({**point, "low": max(0.0, low), "high": high})
    if len({point["name"] for point in points}) < 2:
        return None
    caption = "Final policies on the held-out prompts; bars are 95 % intervals of drift."
    return Chart(
        "Final policies",
        caption,
        _against_drift(_named(points), "Final reward and gold against drift", joined=False),
    )


def _against_drift(points: list[Point], description: str, joined: bool = True) -> Spec:
    """Reward and gold over drift, the axis spaced by √KL, the variable of Gao et al. (2023)."""
    named = any("name" in point for point in points)
    domain = [name for name in (PROXY, GOLD) if any(point["which"] == name for point in points)]
    ranges = [{PROXY: "var(--proxy)", GOLD: "var(--gold)"}[name] for name in domain]
    tooltip = [
        alt.Tooltip("which:N", title="measure"),
        alt.Tooltip("name:N", title="point") if named else alt.Tooltip("step:Q"),
        alt.Tooltip("drift:Q", format=".3f", title="drift (nats)"),
        alt.Tooltip("value:Q", format=".3f"),
    ]
    axis = alt.Axis(labelOverlap="greedy", labelSeparation=6)
    base = alt.Chart(_values(points)).encode(
        x=alt.X(
            "drift:Q",
            title="drift: KL from the reference (nats)",
            scale=alt.Scale(type="sqrt", zero=True),
            axis=axis,
        ),
        y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=6)),
        color=alt.Color("which:N", scale=alt.Scale(domain=domain, range=ranges), legend=None),
        tooltip=tooltip,
    )
    layers: list[alt.Chart] = []
    if any("low" in point for point in points):
        layers.append(base.mark_rule(strokeWidth=1.4, opacity=0.7).encode(x="low:Q", x2="high:Q"))
    if joined:
        order = alt.Order("drift:Q") if named else alt.Order("step:Q")
        layers.append(base.mark_line(strokeWidth=1.8).encode(order=order))
    dots = base.mark_point(filled=True, size=46, opacity=1)
    layers.append(dots.encode(shape=alt.Shape("which:N", scale=alt.Scale(domain=domain), legend=None)))
    if named:  # a name stands once, above the higher of its two points
        names = base.transform_filter("datum.top").mark_text(dy=-11, fontSize=11)
        layers.append(names.encode(text="name:N", color=alt.ColorValue("var(--ink-soft)")))
    return _finish(alt.layer(*layers), 290, description)


def _named(points: list[Point]) -> list[Point]:
    """Points marked with `top` where they are the highest of their name."""
    best: dict[str, float] = {}
    for point in points:
        best[point["name"]] = max(point["value"], best.get(point["name"], point["value"]))
    return [{**point, "top": point["value"] == best[point["name"]]} for point in points]


def interval_charts(entries: Sequence[Entry], labels: Sequence[str]) -> list[Chart]:
    """Means with 95 % intervals, one strip a measure, one row a policy."""
    charts = []
    names = {
        "reward": "Reward (proxy)",
        "gold": "Gold",
        "drift": "Exact drift (nats)",
        "distinct_bigrams": "Distinct bigrams",
    }
    for key, title in names.items():
        points = []
        for entry in entries:
            value = entry.figure(key)
            if value is not None:
                low, high = value.interval
                points.append({"run": visible(entry.label), "mean": value.mean, "low": low, "high": high})
        if len(points) < 2:
            continue
        base = alt.Chart(_values(points)).encode(
            y=alt.Y(
                "run:N",
                title=None,
                sort=list(labels),
                axis=alt.Axis(labelLimit=130, ticks=False, domain=False),
            ),
            color=_colour(labels),
            tooltip=[alt.Tooltip("run:N")]
            + [alt.Tooltip(f"{name}:Q", format=".3f") for name in ("mean", "low", "high")],
        )
        x = alt.X("low:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
        chart = base.mark_rule(strokeWidth=2.2).encode(x=x, x2="high:Q") + base.mark_point(
            filled=True, size=70, opacity=1
        ).encode(x=alt.X("mean:Q", title=None))
        height = 26 * len(points) + 34
        charts.append(
            Chart(title, "", _finish(chart, height, f"{title} with 95 % interval, one row a policy"))
        )
    return charts
