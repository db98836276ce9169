"""What the commands share: where they print, how they show progress, and how an error looks."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from kleash.training.console import Stages

PIPED_WIDTH = 120
DISPENSABLE = ("k2", "k3", "k1", "Length", "Seconds")
"""Columns left out of a table, in this order, where the terminal is too narrow for all."""


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH  # a pipe has no width to fit
    return console


out = _console()
"""Results: what a command is for. Progress and errors go to standard error."""


def debugging() -> bool:
    """Whether errors come with their traceback (--debug, or KLEASH_DEBUG=1)."""
    return os.environ.get("KLEASH_DEBUG", "") not in ("", "0")


def say(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """One line of result, as it is: no markup, no wrapping, so that it can be piped."""
    out.print(Text(text), soft_wrap=True)


def show_table(table: Table) -> None:
    """A table, without its least telling columns where it would not fit, and a line that names these."""
    left_out = fit(table, out.width)
    out.print(table)
    if left_out:
        show(f"Left out for want of width: {', '.join(left_out)}. The report has them.")


def fit(table: Table, width: int) -> list[str]:
    """Take dispensable columns off `table` until it fits `width`; returns their headings."""
    left_out: list[str] = []
    table.columns[0].no_wrap = True  # the first column names the row
    for heading in DISPENSABLE:
        if out.measure(table, options=out.options.update(max_width=10 * PIPED_WIDTH)).maximum <= width:
            break
        kept = [column for column in table.columns if column.header != heading]
        left_out += [heading] * (len(table.columns) - len(kept))
        # Numbered anew, because rich finds the first and the last column, and their padding, by number.
        table.columns = [replace(column, _index=number) for number, column in enumerate(kept)]
    return left_out


def hide_loading_bars() -> None:
    """Hide the bars that transformers shows when it reads and writes weights; downloads keep theirs."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def progress() -> AbstractContextManager[Stages]:
    """A `progress(done, total, note)` callback to give to library functions."""
    from kleash.training.console import Console as ProgressConsole

    return ProgressConsole().stages()


def write_what_can_be_written() -> None:
    """Let ? stand for what the encoding of a terminal or pipe lacks, where it would end the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict" and not in_full(stream):
            stream.reconfigure(errors="replace")


def in_full(stream: Any) -> bool:
    """Whether every text can be written on it."""
    return str(getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") in ("utf8", "utf16")


def plain_messages() -> None:
    """Warnings as `warning: …` without the line of code they come from; none that only concern the authors of
    other packages; the hub's notes once each.
    """

    standard = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        ours = filename.startswith(str(Path(__file__).parent))
        return f"warning: {message}\n" if ours else standard(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    for kind in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=kind, module="accelerate|datasets|peft|torch|transformers")
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own


def report_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook for errors nobody foresaw: one line with the place, and how to see the whole traceback."""
    if debugging() or trace is None:
        sys.__excepthook__(kind, error, trace)
        return
    say(crash_line(error, trace, sys.argv[1:]))


def crash_line(error: BaseException, trace: TracebackType, arguments: list[str]) -> str:
    """`error` with the innermost line of this package that it passed through."""
    frames = traceback.extract_tb(trace)
    package = str(Path(__file__).parent)
    place = next((frame for frame in reversed(frames) if frame.filename.startswith(package)), frames[-1])
    what = traceback.format_exception_only(error)[-1].strip()
    again = " ".join(["kleash", "--debug", *arguments])
    return (
        f"kleash: unexpected error, probably a fault of KLeash: {what} "
        f"(at {Path(place.filename).name}:{place.lineno}, in {place.name}). For the whole traceback: {again}"
    )
