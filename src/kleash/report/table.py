"""The table every comparison ends with: one row a policy, alike on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kleash.report.text import (
    ABSENT,
    Figure,
    figure,
    finite,
    format_figure,
    format_number,
    nonnegative,
    visible,
)


@dataclass(frozen=True)
class Column:
    """One measure of an evaluation: its key there, its heading, its unit, and what it means in a sentence."""

    key: str
    heading: str
    unit: str
    meaning: str
    short: str = ""  # heading in the terminal, where width is dear; "-" leaves the column out there


COLUMNS = (
    Column("reward", "Reward", "", "the proxy that training optimises, on the policy's own samples"),
    Column("gold", "Gold", "", "the independent judge"),
    Column(
        "drift", "Drift", "nats", "KL(policy‖reference), exact over the vocabulary, summed over the response"
    ),
    Column("kl_k1", "k1", "nats", "sampled estimate of drift: log-ratio"),
    Column(
        "kl_k2", "k2", "nats", "sampled estimate of drift: half the squared log-ratio, per token (biased)"
    ),
    Column("kl_k3", "k3", "nats", "sampled estimate of drift: ratio − 1 − log-ratio, inverse ratio"),
    Column(
        "distinct_bigrams",
        "Distinct bigrams",
        "share",
        "distinct / total token bigrams over one prompt's samples",
        "Bigrams",
    ),
    Column("length", "Length", "tokens", "tokens per response"),
    Column("entropy", "Entropy", "nats/token", "mean entropy of the next-token distribution", "-"),
)


@dataclass(frozen=True)
class Entry:
    """One policy of a table; its evaluation is a mapping as in evaluation.json, or an Evaluation."""

    label: str
    evaluation: Any
    seconds: float | None = None

    def value(self, key: str) -> Any:
        if isinstance(self.evaluation, Mapping):
            return self.evaluation.get(key)
        return getattr(self.evaluation, key, None)

    def figure(self, key: str) -> Figure | None:
        found = figure(self.value(key))
        if found is None or key != "drift":
            return found
        return replace(found, mean=nonnegative(found.mean))


def measured_columns(entries: Sequence[Entry]) -> list[Column]:
    """The columns that at least one policy has a number for."""
    return [column for column in COLUMNS if any(entry.figure(column.key) is not None for entry in entries)]


def ended_shares(entries: Sequence[Entry]) -> bool:
    """Whether to show which share of the responses ended: not where their length was fixed beforehand."""
    return any(
        finite(entry.value("ended")) is not None and not entry.value("fixed_length") for entry in entries
    )


def final_table(entries: Sequence[Entry], title: str | None = None) -> Table:
    """The final table for the terminal (rich): means with standard errors beneath, training time last."""
    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, caption_justify="left"
    )
    table.caption = "± one standard error, clustered by prompt; drift and k1–k3 in nats"
    table.add_column("Policy", overflow="fold")
    columns = [column for column in measured_columns(entries) if column.short != "-"]
    ended = ended_shares(entries)
    for heading in [column.short or column.heading for column in columns] + ["Ended"] * ended + ["Seconds"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        cells = [Text(visible(entry.label))]  # Text: a label is never read as rich markup
        cells += [_stacked(entry.figure(column.key)) for column in columns]
        cells += [Text(format_percent(entry.value("ended")))] * ended
        table.add_row(*cells, Text(format_number(entry.seconds, 0)))
    return table


def _stacked(value: Figure | None) -> Text:
    mean, error = format_figure(value)
    text = Text(mean)
    if error:
        text.append("\n" + error.replace(" ", ""), style="dim")
    return text


def format_percent(value: Any) -> str:
    """A share in per cent, "–" when not measured."""
    number = finite(value)
    return ABSENT if number is None else f"{format_number(100 * number, 1 if 0 < number < 1 else 0)} %"
