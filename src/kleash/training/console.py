"""What a person sees while a run goes on: a bar with speed and time left in a terminal, a line now and then
elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

SHOWN = 5  # metrics beside the bar
FIRST = ("loss", "reward/mean", "gold/mean", "kl/k1", "length/mean")  # before a method's others
NARROW = 100  # columns, below which the bar is half as wide
SPEED_AND_TIME = len("99.99 it/s 0:00:00 ")
QUIET_SECONDS = 15.0  # between lines where there is no terminal


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.speed or 0.0
        if speed <= 0:
            return Text("")
        return Text(f"{speed:.2f} it/s" if speed >= 1 else f"{1 / speed:.1f} s/it")


class Console:
    """Progress and notes on standard error; silent when `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.rich = RichConsole(stderr=True, quiet=quiet)

    def note(self, text: str) -> None:
        """One line for the user."""
        self.rich.print(escape(text), highlight=False, soft_wrap=True)

    @contextmanager
    def steps(self, name: str, total: int, done: int = 0) -> Iterator[Bar]:
        """A bar over `total` steps, `done` of them already behind."""
        if self.quiet or not self.rich.is_terminal:
            yield Lines(self, name, total, done)
            return
        width = 24 if self.rich.width >= NARROW else 12
        taken = len(f"{name} {total}/{total} ") + width + 1 + SPEED_AND_TIME
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=width),
            MofNCompleteColumn(),
            _Speed(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.rich,
            speed_estimate_period=60,
        )
        with progress:
            task = progress.add_task(name, total=total, completed=done, figures="")
            yield Live(progress, task, self.rich.width - taken)

    @contextmanager
    def stages(self) -> Iterator[Stages]:
        """A `progress(done, total, note)` callback for library functions, with a bar for each stage."""
        with ExitStack() as stack:
            yield Stages(self, stack)


class Stages:
    """Progress of a library function as bars, a new one whenever it names another stage."""

    def __init__(self, console: Console, stack: ExitStack) -> None:
        self.console, self.stack = console, stack
        self.bar: Bar | None = None
        self.note = ""

    def __call__(self, done: int, total: int, note: str) -> None:
        if self.bar is None or note != self.note:
            self.stack.close()
            self.bar = self.stack.enter_context(self.console.steps(note, total))
            self.note = note
        self.bar.progress(done, total)


class Bar:
    """Where a loop reports; does nothing by itself."""

    def update(self, done: int, values: dict[str, Any]) -> None:
        """`done` steps are behind, with these metrics."""

    def progress(self, done: int, total: int) -> None:
        """The same for library functions that count their own work."""
        self.update(done, {})


class Live(Bar):
    """A rich progress bar; figures take no more than `room` columns, or they would push the bar out."""

    def __init__(self, progress: Progress, task: Any, room: int) -> None:
        self.bar, self.task, self.room = progress, task, room

    def update(self, done: int, values: dict[str, Any]) -> None:
        """See Bar."""
        self.bar.update(self.task, completed=done)
        if values:
            self.bar.update(self.task, figures=figures(values, self.room))

    def progress(self, done: int, total: int) -> None:
        """See Bar."""
        self.bar.update(self.task, completed=done, total=total)


class Lines(Bar):
    """A line of text now and then, with speed and time left."""

    def __init__(self, console: Console, name: str, total: int, done: int = 0) -> None:
        self.console, self.name, self.total, self.first = console, name, total, done
        self.started = self.shown = time.monotonic()

    def update(self, done: int, values: dict[str, Any]) -> None:
        """See Bar."""
        now = time.monotonic()
        if now - self.shown < QUIET_SECONDS and done < self.total:
            return
        self.shown = now
        each = (now - self.started) / max(1, done - self.first)
        left = each * (self.total - done)
        self.console.note(
            f"{self.name} {done}/{self.total}  {each:.2f} s/it  {left:.0f} s left  {figures(values)}"
        )


def figures(values: dict[str, Any], room: int | None = None) -> str:
    """The first few metrics, those that tell most before the rest; as many as there is room for."""
    names = [
        n for n in values if n == "loss" or ("/" in n and not n.startswith(("optim/", "time/", "tokens/")))
    ]
    names.sort(key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST))
    text = ""
    for part in [f"{n} {values[n]:.4g}" for n in names[:SHOWN] if isinstance(values[n], int | float)]:
        longer = f"{text}  {part}" if text else part
        if room is not None and len(longer) > room:
            break
        text = longer
    return text
