"""The children: started late, kept, replaced, ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kleash
from kleash.errors import RunError, UsageError
from kleash.verifiers import Reply, ask, pool, require

pytestmark = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs the extra verifiers")
SOURCE = str(Path(kleash.__path__[0]).parent)
TOWER = "9^{9^{9^9}}"


def question(found: str, expected: str = "1/2") -> dict[str, Any]:
    return {"expected": expected, "found": found, "boxed": True}


@pytest.fixture
def one_child(monkeypatch: pytest.MonkeyPatch) -> Iterator[pool.Pool]:
    """The pool of math-verify with one place, empty before and after."""
    pool.close_all()
    monkeypatch.setattr(pool, "PROCESSES", 1)
    yield pool._pool("math")
    pool.close_all()


def child_of(used: pool.Pool) -> pool.Child:
    child = used.places.get()
    used.places.put(child)
    assert child is not None
    return child


def test_a_child_is_kept_over_calls_and_equal_requests_are_asked_once(one_child: pool.Pool) -> None:
    assert one_child.places.queue == [None]  # nothing runs before it is needed
    assert ask("math", [question("0.5"), question("2"), question("0.5")]) == [
        Reply(1.0),
        Reply(0.0),
        Reply(1.0),
    ]
    first = child_of(one_child)._process.pid
    asked: list[str] = []
    original = pool.Child.ask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool.Child, "ask", lambda self, text, s: asked.append(text) or original(self, text, s))
        assert ask("math", [question("50\\%")] * 5) == [Reply(1.0)] * 5
    assert len(asked) == 1 and child_of(one_child)._process.pid == first


def test_a_request_that_computes_too_long_is_stopped_and_the_next_gets_another_child(
    one_child: pool.Pool,
) -> None:
    replies = ask("math", [question("0.5"), question(TOWER), question("\\frac12")], seconds=0.5)
    assert replies == [Reply(1.0), Reply(0.0, stopped=True), Reply(1.0)]


def test_a_request_that_waits_instead_of_computing_is_stopped_by_the_clock(
    one_child: pool.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("math", [question("0.5")]) == [Reply(1.0)]
    monkeypatch.setattr(pool, "WALL", 0.5)
    child = child_of(one_child)
    os.kill(child._process.pid, signal.SIGSTOP)
    started = time.perf_counter()
    (reply,) = ask("math", [question("2")], seconds=1)
    assert time.perf_counter() - started < 5
    assert reply.score is None and "more time or memory" in reply.fault  # it had not even read the reference
    assert not child.alive


def test_memory_is_limited(one_child: pool.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MEMORY", 100 * 2**20)
    bomb = "(a+b+c+d+x+y)^{60}"  # expanded: nearly nine million terms, half a gigabyte and more
    (reply,) = ask("math", [question(bomb, expected="x+1")], seconds=30)
    assert reply.score == 0.0 and ask("math", [question("0.5")]) == [Reply(1.0)]
    status = Path(f"/proc/{child_of(one_child)._process.pid}/status")
    if status.exists():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmPeak"))
        assert 60 * 1024 < int(peak.split()[1]) <= 100 * 1024


def test_a_child_that_somebody_ended_is_replaced(one_child: pool.Pool) -> None:
    assert ask("math", [question("0.5")]) == [Reply(1.0)]
    before = child_of(one_child)
    before._process.kill()
    before._process.wait()
    assert ask("math", [question("0.25", "1/4")]) == [Reply(1.0)]
    assert child_of(one_child) is not before


def test_a_reference_that_cannot_be_read_is_a_fault_and_no_score() -> None:
    (reply,) = ask("math", [question("5", expected="((")])
    assert reply.score is None and "finds no mathematics" in reply.fault


def test_threads_share_the_children(one_child: pool.Pool) -> None:
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda n: ask("math", [question(str(n), str(n % 2))])[0].score, range(4)))
    assert replies == [1.0, 1.0, 0.0, 0.0]


def test_no_requests_start_no_process(one_child: pool.Pool) -> None:
    assert ask("math", []) == [] and one_child.places.queue == [None]


def test_a_child_knows_no_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    child = pool.Child("math")
    try:
        environment = Path(f"/proc/{child._process.pid}/environ")
        if not environment.exists():
            pytest.skip("needs /proc")
        assert b"secret" not in environment.read_bytes()
    finally:
        child.close()


def test_a_verifier_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr')\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(RunError, match="math verifier did not start: ImportError: no antlr"):
        pool.Child("math")


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pool.PACKAGES, "math", ("no_such_module", "math-verify"))
    with pytest.raises(
        UsageError, match=r"^reward=math needs the package math-verify.*'kleash\[verifiers\]'"
    ):
        require("math", "reward=math")


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": SOURCE},
    )  # fmt: skip


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ends_soon(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.parametrize("ending", ["", "os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_children_end_with_their_parent_however_it_ends(ending: str) -> None:
    done = run(f"""
        import os, signal, sys
        from kleash.verifiers import ask, pool
        print(ask("math", [{question("0.5")!r}])[0].score)
        print(pool._pool("math").places.get()._process.pid, flush=True)
        {ending}
    """)
    score, pid = done.stdout.split()
    assert score == "1.0" and ends_soon(int(pid)), done.stderr


def test_ctrl_c_reaches_the_trainer_and_not_its_children(one_child: pool.Pool) -> None:
    assert ask("math", [question("0.5")]) == [Reply(1.0)]
    assert os.getpgid(child_of(one_child)._process.pid) != os.getpgid(os.getpid())


def scores_in_a_fork(queue: Any) -> None:
    queue.put([reply.score for reply in ask("math", [question("0.5"), question("3")])])
    pool.close_all()


def test_a_forked_process_has_children_of_its_own(one_child: pool.Pool) -> None:
    assert ask("math", [question("0.5")]) == [Reply(1.0)]
    mine = child_of(one_child)._process.pid
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=scores_in_a_fork, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == [1.0, 0.0]
    process.join(60)
    assert alive(mine) and ask("math", [question("1")]) == [Reply(0.0)]


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "print('started')\nfrom kleash.verifiers import ask\n"
        f"print(ask('math', [{question('0.5')!r}])[0].score)\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )  # fmt: skip
    assert done.stdout.split() == ["started", "1.0"], done.stderr
