"""The allocator setting, told by page faults: memory that is kept is not asked for again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ALLOCATE = """
import ctypes, resource
from kleash.allocator import keep_freed_memory
print(keep_freed_memory())
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
size = 64 << 20
def use():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = (64 << 20) // os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def allocate(setting: str) -> tuple[str, int]:
    """Whether the allocator was set, and the page faults of using 64 MiB three times more."""
    environment = {**os.environ, "KLEASH_MALLOC": setting}
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE], capture_output=True, text=True, env=environment, check=True
    )
    answer, faults = done.stdout.split()
    return answer, int(faults)


glibc = pytest.mark.skipif(
    sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names,
    reason="only glibc has the setting",
)


@glibc
def test_freed_memory_is_kept() -> None:
    answer, faults = allocate("")
    assert answer == "True"
    assert faults < PAGES // 10


@glibc
def test_the_environment_leaves_the_allocator_alone() -> None:
    assert allocate("default")[0] == "False"


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    from kleash import allocator

    monkeypatch.delenv("KLEASH_MALLOC", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert allocator.keep_freed_memory() is False
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert allocator.keep_freed_memory() is False


def test_a_refused_threshold_falls_back_to_taking_no_block_from_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kleash import allocator

    calls: list[tuple[int, int]] = []

    class OldGlibc:
        @staticmethod
        def mallopt(parameter: int, value: int) -> int:
            calls.append((parameter, value))
            return int(parameter != allocator.M_MMAP_THRESHOLD)

    monkeypatch.delenv("KLEASH_MALLOC", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: OldGlibc)
    assert allocator.keep_freed_memory() is True
    assert calls == [(-3, 1 << 30), (-4, 0), (-1, -1)]
