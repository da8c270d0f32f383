"""Files that a process may change without changing their times: shared maps, however they hide."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sandbox.backends.linux.inspection import has_shared_map

_EXIT = {"x86_64": 60, "aarch64": 93}
_MAP = """
import ctypes, mmap, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
READ, WRITE, SHARED, PRIVATE = 1, 2, 1, 2
def map(flags=os.O_RDWR, rights=READ | WRITE, kind=SHARED):
    descriptor = os.open(sys.argv[1], flags)
    at = libc.mmap(None, 4096, rights, kind, descriptor, 0)
    os.close(descriptor)
    return at
def wait():
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def process(file: Path, program: str) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", _MAP + program, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        try:
            yield child.pid
        finally:
            child.kill()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mapped"
    path.write_bytes(b"a" * 4096)
    return path


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("wait()", False),
        ("map(); wait()", True),
        ("map(kind=PRIVATE); wait()", False),
        ("map(os.O_RDONLY, READ); wait()", False),
        ("map(rights=READ); wait()", True),
        ("at = map(); ctypes.memset(at, 98, 1); libc.mprotect(at, 4096, READ); wait()", True),
        ("at = map(); ctypes.memset(at, 98, 1); libc.mprotect(at, 4096, 0); wait()", True),
    ],
)
def test_a_map_through_which_a_file_may_change(file: Path, program: str, expected: bool) -> None:
    with process(file, program) as pid:
        assert has_shared_map([pid]) is expected


def test_a_map_of_a_process_whose_first_thread_has_ended(file: Path) -> None:
    """Such a process shows no maps itself (proc(5)), though its other threads have them."""
    program = f"map(); threading.Thread(target=wait).start(); libc.syscall({_EXIT[platform.machine()]}, 0)"
    with process(file, program) as pid:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            os.sched_yield()
        assert Path(f"/proc/{pid}/maps").read_bytes() == b""
        assert has_shared_map([pid])


def test_a_process_that_has_gone_has_no_maps() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    assert not has_shared_map([child.pid])
