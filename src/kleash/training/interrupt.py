"""Ctrl-C: the first asks for a clean stop after the step, the second quits at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from kleash.errors import KLeashError


class Interrupted(KLeashError):
    """The user stopped the run; what was done is saved. Exit code 130, as shells expect."""

    exit_code = 130


class Interrupt:
    """While inside, Ctrl-C sets `asked` and calls `notify`; a second one raises KeyboardInterrupt where it
    hits.

    Off the main thread, where Python delivers no signals, nothing changes.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.asked = False
        self.notify = notify
        self.previous: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.notify()
