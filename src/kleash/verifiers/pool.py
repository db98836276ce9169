"""Child processes that verify answers: started when first needed, kept, replaced when an answer ends one."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import selectors
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kleash.errors import RunError, UsageError

Kind = Literal["math", "gym"]
PACKAGES: dict[str, tuple[str, str]] = {
    "math": ("math_verify", "math-verify"),
    "gym": ("reasoning_gym", "reasoning-gym"),
    "language": ("py3langid", "py3langid"),
}
CHILD = Path(__file__).with_name("child.py")
PROCESSES = min(4, os.cpu_count() or 1)
SECONDS = 3.0
"""Seconds of processor time that one answer may take, so that a busy machine does not change a score."""
WALL = 20.0
"""Seconds by the clock for each of those, for an answer that waits instead of computing."""
MEMORY = 2**30
"""Bytes of address space of a child."""
START = 120.0
"""Seconds by the clock that a child may take to load its verifier."""
# All that a child is told of the environment: no key, no token.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL")


@dataclass(frozen=True)
class Reply:
    """What came of one answer: its score; `stopped` where a limit ended it (its score is 0); or the fault of
    the reference, which leaves the answer without a score.
    """

    score: float | None
    stopped: bool = False
    fault: str = ""


def require(name: str, asked: str) -> None:
    """UsageError unless the package behind a verifier is installed; `asked` is what the user wrote."""
    module, package = PACKAGES[name]
    if importlib.util.find_spec(module) is None:
        raise UsageError(
            f"{asked} needs the package {package}, which is not installed: pip install 'kleash[verifiers]'."
        )


def ask(kind: Kind, requests: Iterable[Mapping[str, Any]], seconds: float = SECONDS) -> list[Reply]:
    """A reply to each request, in order, from a few child processes at once; equal requests are asked once.

    `seconds` of processor time each. RunError where a child does not start.
    """
    texts = [json.dumps({**request, "seconds": seconds}) for request in requests]
    different = list(dict.fromkeys(texts))
    if not different:
        return []
    pool = _pool(kind)
    with ThreadPoolExecutor(min(PROCESSES, len(different))) as threads:
        said = threads.map(lambda text: pool.ask(text, seconds), different)
        replies = {text: _reply(messages) for text, messages in zip(different, said, strict=True)}
    return [replies[text] for text in texts]


def ask_once(kind: Kind, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
    """The child's own message in reply to one request; None where it ran into a limit."""
    messages = _pool(kind).ask(json.dumps({**request, "seconds": seconds}), seconds)
    return messages[-1] if messages and "stage" not in messages[-1] else None


def _reply(messages: Sequence[dict[str, Any]]) -> Reply:
    """The last message decides; a child that ended after it began on the response was ended by it."""
    last: dict[str, Any] = (
        messages[-1] if messages else {"fault": "reading it takes more time or memory than allowed"}
    )
    if "fault" in last:
        return Reply(None, fault=last["fault"])
    return Reply(last["score"]) if "score" in last else Reply(0.0, stopped=True)


class Child:
    """One child process, ready for requests. RunError where it does not get so far."""

    def __init__(self, kind: Kind) -> None:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD), kind, str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
            start_new_session=True,  # Ctrl-C is for the training process
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._buffer = b""
        hello = self.ask(json.dumps([path for path in sys.path if path]), START)
        if not hello or "ready" not in hello[-1]:
            self.close()
            why = hello[-1]["failed"] if hello else f"it ended, or said nothing for {START:g} seconds"
            raise RunError(f"the process that runs the {kind} verifier did not start: {why}.")
        if not hello[-1]["limited"]:
            warnings.warn(
                f"this system does not limit the memory of the {kind} verifier; only its time is limited.",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def _output(self) -> Any:
        assert self._process.stdout is not None
        return self._process.stdout

    def ask(self, request: str, seconds: float) -> list[dict[str, Any]]:
        """The messages in reply to a request, up to the last or to the end of process or time (by the
        clock), which close the child.
        """
        messages: list[dict[str, Any]] = []
        deadline = time.monotonic() + seconds
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return messages
        while not messages or "stage" in messages[-1]:
            line = self._line(deadline)
            if line is None:
                self.close()
                break
            messages.append(json.loads(line))
        return messages

    def _line(self, deadline: float) -> bytes | None:
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = os.read(self._output.fileno(), 2**20)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    @property
    def alive(self) -> bool:
        """Whether it can take a request."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process and its pipes."""
        self._process.kill()
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._output):
            with contextlib.suppress(BrokenPipeError):  # a request that nobody read
                pipe.close()  # type: ignore[union-attr]


class Pool:
    """Up to PROCESSES children of one kind; threads that ask take turns."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        # Last in, first out: a child that runs is taken before a free place.
        self.places: queue.LifoQueue[Child | None] = queue.LifoQueue()
        for _ in range(PROCESSES):
            self.places.put(None)

    def ask(self, request: str, seconds: float) -> list[dict[str, Any]]:
        """The messages of a child in reply to one request."""
        child = self.places.get()
        try:
            if child is not None and not child.alive:
                child.close()
                child = None
            child = child or Child(self.kind)
            return child.ask(request, seconds * WALL)
        finally:
            self.places.put(child if child is not None and child.alive else None)

    def close(self) -> None:
        """End every child that is not at work."""
        while True:
            try:
                child = self.places.get_nowait()
            except queue.Empty:
                return
            if child is not None:
                child.close()


# By process, since a forked process must not read from its parent's children.
_POOLS: dict[tuple[int, Kind], Pool] = {}


def _pool(kind: Kind) -> Pool:
    return _POOLS.setdefault((os.getpid(), kind), Pool(kind))


@atexit.register
def close_all() -> None:
    """End the children of this process."""
    for (process, _), pool in list(_POOLS.items()):
        if process == os.getpid():
            pool.close()
            _POOLS.pop((process, pool.kind), None)
