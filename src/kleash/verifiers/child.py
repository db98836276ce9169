"""The program of a child process: it answers one JSON request a line, and can do little else.

`pool.py` runs this file by its path in an isolated interpreter; it imports nothing of KLeash, so it starts
fast and holds no torch. Once the verifier is loaded, memory and file sizes are limited, `eval` in the
verifier's modules takes mathematics only, and files cannot be written nor processes or connections opened.
The parent sends the seconds of processor time that a request may take; past them the system ends the process.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

GYM = "reasoning_gym"
FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.spawn", "os.posix_spawn", "os.kill", "os.remove", "os.rename",
    "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate", "os.putenv",
    "subprocess.", "pty.", "socket.", "shutil.", "ctypes.", "tempfile.", "urllib.", "webbrowser.", "signal.",
)  # fmt: skip


class Unreadable(Exception):
    """The reference cannot be read, so no response can be judged against it."""


class Maths:
    """math-verify: is `found` the same mathematics as `expected`?

    Both are taken as the content of a \\boxed{}, but for a response without one (`boxed` false), in which
    math-verify looks for the answer itself.
    """

    def __init__(self) -> None:
        import math_verify

        self._library = math_verify
        logging.disable(logging.CRITICAL)  # its notes on timeouts, which are set here
        self.score(self.reference({"expected": "1/2"}), {"found": "0.5", "boxed": True})  # loads what is lazy

    def reference(self, request: dict[str, Any]) -> list[Any]:
        parsed = self._parse(request["expected"], boxed=True)
        if all(isinstance(item, str) for item in parsed):
            raise Unreadable("math-verify finds no mathematics in it")
        return parsed

    def score(self, reference: list[Any], request: dict[str, Any]) -> float:
        found = self._parse(request["found"], request["boxed"])
        return float(self._library.verify(reference, found, timeout_seconds=None))

    def _parse(self, text: str, boxed: bool) -> list[Any]:
        # No timeout of its own: that one is an alarm in Python, which a long multiplication does not hear.
        found = self._library.parse(f"\\boxed{{{text}}}" if boxed else text, parsing_timeout=None)
        return list(found)


class Gym:
    """reasoning-gym: the score that a task gives an answer to one of its entries; also makes entries."""

    def __init__(self) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        self._create, self._tasks = lru_cache(maxsize=64)(_creator(reasoning_gym.create_dataset)), DATASETS

    def reference(self, request: dict[str, Any]) -> Any:
        try:
            dataset = self._create(request["task"], 1, 0, json.dumps(request["parameters"]))
            return dataset, ast.literal_eval(request["entry"])
        except Exception as error:
            raise Unreadable(f"{type(error).__name__}: {error}") from error

    def score(self, reference: Any, request: dict[str, Any]) -> float:
        dataset, entry = reference
        return float(dataset.score_answer(request["found"], entry))

    def entries(self, request: dict[str, Any]) -> dict[str, Any]:
        """`size` entries from `seed` on, each as (question, answer, Python literal); what is wrong with the
        request otherwise.
        """
        import dataclasses

        task, parameters = request["task"], request["parameters"]
        if task not in self._tasks:
            return {"tasks": sorted(self._tasks)}
        known = [f.name for f in dataclasses.fields(self._tasks[task][1]) if f.name not in ("size", "seed")]
        unknown = [name for name in parameters if name not in known]
        if unknown:
            return {"unknown": unknown[0], "known": known}
        try:
            dataset = self._create(task, request["size"], request["seed"], json.dumps(parameters))
            made = [plain(dataset[i]) for i in range(request["size"])]
        except Exception as error:  # of whichever kind the task raises for a parameter it dislikes
            return {"refused": f"{type(error).__name__}: {error}"}
        return {"entries": [(entry["question"], entry["answer"], repr(entry)) for entry in made]}


def _creator(create: Callable[..., Any]) -> Callable[[str, int, int, str], Any]:
    """`create_dataset` with its parameters as JSON, so that what it made can be kept by its arguments."""
    return lambda task, size, seed, parameters: create(task, size=size, seed=seed, **json.loads(parameters))


# Each has `reference(request)` and `score(reference, request)`; only the second looks at a model's text.
CHECKS: dict[str, Callable[[], Any]] = {"math": Maths, "gym": Gym}


def plain(value: Any) -> Any:
    """An entry with NumPy's scalars as Python's, so that its repr is a literal; tuples stay tuples."""
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value)(plain(item) for item in value)
    return value.item() if hasattr(value, "item") else value


# ---- what the process is kept from ----


def mathematics_only(
    source: str | CodeType, globals_: dict[str, Any] | None = None, locals_: Mapping[str, Any] | None = None
) -> Any:
    """`eval` of literals, arithmetic and SymPy's objects; ValueError where a name means anything else.

    Some scorers, and SymPy's parser, evaluate an answer as Python. The names in compiled code (attributes
    included) are all it can reach: code whose names are SymPy's expressions can compute, and nothing more.
    """
    code = source if isinstance(source, CodeType) else compile(source.strip(), "<answer>", "eval")
    names = {**(globals_ or {}), **(locals_ or {})}
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        raise ValueError("an answer may not define functions")
    for name in code.co_names:
        if not _mathematical(names.get(name)):
            raise ValueError(f"an answer may not use {name}")
    return eval(code, {"__builtins__": {}, **names})


def _mathematical(value: Any) -> bool:
    import sympy

    if any(value is function for function in (sympy.sqrt, sympy.cbrt, sympy.root)):
        return True
    return isinstance(value, sympy.Basic) or (isinstance(value, type) and issubclass(value, sympy.Basic))


def guard_eval() -> None:
    """Put `mathematics_only` in the place of `eval` in the modules that meet an answer."""
    for name, module in list(sys.modules.items()):
        if name == "sympy.parsing.sympy_parser" or name.split(".")[0] == GYM:
            module.eval = mathematics_only  # type: ignore[attr-defined]


def limit(memory: int) -> bool:
    """At most `memory` bytes of address space, no file, no core dump; False if memory cannot be limited."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except (ValueError, OSError):  # macOS
        return False
    return True


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook, the second line of defence: PermissionError for whatever reaches out of the process."""
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    if event.startswith(FORBIDDEN) or (event == "open" and (arguments[2] or 0) & writes):
        raise PermissionError(f"{event} is not for a verifier")


def end_with(parent: int) -> None:
    """End this process once its parent is gone, even in the middle of a request (a daemon thread's work)."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


# ---- requests and replies ----


def answer(check: Any, request: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    """The last message in reply to a request; the stage is said as soon as it is reached."""
    if "size" in request:
        entries: dict[str, Any] = check.entries(request)
        return entries
    try:
        reference = check.reference(request)
    except (Unreadable, MemoryError, RecursionError) as error:
        return {"fault": str(error) or type(error).__name__}
    say(stage="response")  # whatever happens from here on, the response did it
    try:
        return {"score": check.score(reference, request)}
    except (MemoryError, RecursionError):
        return {"stopped": True}
    except Exception:  # text that the verifier chokes on is no answer
        return {"score": 0.0}


def main(kind: str, memory: int) -> None:
    """Load the check, give up what is not needed, and answer until the parent closes the pipe."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what a library prints must not be read as a reply
    os.dup2(nowhere, 2)

    def say(**reply: Any) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    sys.path[:] = json.loads(sys.stdin.readline())
    try:
        check = CHECKS[kind]()
    except Exception as error:
        say(failed=f"{type(error).__name__}: {error}")
        return
    guard_eval()
    say(ready=True, limited=limit(memory))
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    sys.addaudithook(watch)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        last = answer(check, request, say)
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(**last)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
