"""The seccomp profile call by call: every number of the table, as the daemon and as a command, against ``seccomp.py``.

A program in a sandbox makes each call in a child of its own, with arguments that no call can do anything with (all
bits set), and answers what came of it. What must come of it is generated: from the profile, with the runtime's own
library naming the numbers, and from the same program run without any filter, which says what this kernel answers on
its own.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.linux import seccomp
from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError
from agent_sandbox.types import ExecExit, ExecOutput, SandboxSpec
from tests.real.leaks import wait_until_clean

pytestmark = pytest.mark.real

SPEC = SandboxSpec(image="host", image_digest="", cpus=2, memory_mb=256, pids_limit=64, disk_mb=64, tmp_mb=32)
ALL = range(471)
"""All that the kernel of 2026 has on this machine: the same numbers everywhere from 424 on."""
NOTHING = (-1,) * 6
CLONE, SOCKET, PERSONALITY = "clone", "socket", "personality"
NEWNS, NEWUSER, NEWNET = 0x20000, 0x10000000, 0x40000000
THREAD = 0x003D0F00
CASES: list[tuple[str, tuple[int, ...]]] = [
    *((CLONE, (flag | 17, 0, 0, 0, 0)) for flag in (0, *seccomp.CLONE_NAMESPACES.values()) if flag != 0x80),
    *((SOCKET, (family, kind, 0)) for family in range(47) for kind in (1, 3)),
    *((SOCKET, (16, 3, protocol)) for protocol in range(23)),
    *((PERSONALITY, (value,)) for value in (0, 8, 0x20000, 0x40000, 0xFFFFFFFF, 0x80000, 0x400000)),
]
"""Calls whose answer is a matter of their arguments."""
LAUNCHER = dict.fromkeys(("name_to_handle_at", "open_tree_attr", "socketpair", "mknod", "mknodat"), seccomp.EPERM)
"""What the launcher's filter answers otherwise than the profile: what a command may not and the daemon may, a call that
is younger than the runtime's library and that the launcher knows by its number, families that do not exist, and files
that are devices (a mode of all bits is one)."""
UNFILTERED = {"x86_64": (335, 336)}
"""The kernel's own return points of probes (uretprobe, uprobe): no filter is asked, and other callers get a signal."""
YOUNG = {467: "open_tree_attr"}
"""Numbers that libraries of 2023 do not name."""
LETTERS = {None: "a", seccomp.EPERM: "P", seccomp.ENOSYS: "S"}

PROGRAM = """
import ctypes, json, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
def one(number, arguments):
    pid = os.fork()
    if pid == 0:
        null = os.open('/dev/null', os.O_RDWR)
        for fd in (0, 1, 2): os.dup2(null, fd)
        os.close(null)
        signal.alarm(2)
        result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments])
        os._exit(ctypes.get_errno() if result < 0 else 200)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return 'K' if os.WTERMSIG(status) == signal.SIGSYS else 'a'
    return {1: 'P', 38: 'S'}.get(os.WEXITSTATUS(status), 'a')
print('<' + ''.join(one(number, arguments) for number, arguments in json.loads(CALLS)) + '>', flush=True)
"""


class Names:
    """The runtime's own library, which knows the calls of this machine by number and name."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libseccomp.so.2")
        self._library.seccomp_syscall_resolve_num_arch.restype = ctypes.c_void_p
        self._native = self._library.seccomp_arch_native()
        self._libc = ctypes.CDLL(None)
        self._libc.free.argtypes = [ctypes.c_void_p]

    def name(self, number: int) -> str:
        found = self._library.seccomp_syscall_resolve_num_arch(self._native, number)
        if not found:
            return ""
        try:
            return (ctypes.cast(found, ctypes.c_char_p).value or b"").decode()
        finally:
            self._libc.free(found)

    def number(self, name: str) -> int:
        return int(self._library.seccomp_syscall_resolve_name(name.encode()))


def decided(name: str, arguments: tuple[int, ...]) -> int | None:
    """What the profile answers to a call: None when it passes, else the errno; the default for names it lacks."""
    profile = seccomp.profile(os.uname().machine)
    rules = [rule for rule in profile["syscalls"] if name in rule["names"]]
    matching = [rule for rule in rules if all(holds(condition, arguments) for condition in rule.get("args", []))]
    if not matching:
        return int(profile["defaultErrnoRet"])
    refusals = [int(rule["errnoRet"]) for rule in matching if rule["action"] == "SCMP_ACT_ERRNO"]
    return refusals[0] if refusals else None


def holds(condition: dict[str, Any], arguments: tuple[int, ...]) -> bool:
    value = arguments[condition["index"]] % (1 << 64) if condition["index"] < len(arguments) else 0
    match condition["op"]:
        case "SCMP_CMP_EQ":
            return bool(value == condition["value"])
        case "SCMP_CMP_GT":
            return bool(value > condition["value"])
        case "SCMP_CMP_MASKED_EQ":
            return bool(value & condition["value"] == condition["valueTwo"])
    raise AssertionError(condition)


@dataclasses.dataclass(frozen=True)
class Table:
    """The calls that are made, and what the profile says to each."""

    names: tuple[str, ...]
    calls: tuple[tuple[int, tuple[int, ...]], ...]
    expected: tuple[int | None, ...]

    @property
    def program(self) -> str:
        return f"CALLS = {json.dumps(self.calls)!r}\n{PROGRAM}"


@pytest.fixture(scope="module")
def table() -> Table:
    library = Names()
    numbers = [number for number in ALL if number not in UNFILTERED.get(os.uname().machine, ())]
    made: list[tuple[str, int, tuple[int, ...]]] = [(library.name(number), number, NOTHING) for number in numbers]
    made += [(name, library.number(name), arguments) for name, arguments in CASES]
    names = tuple(name or YOUNG.get(number, str(number)) for name, number, _ in made)
    calls = tuple((number, arguments) for _, number, arguments in made)
    return Table(names, calls, tuple(decided(name, arguments) for name, _, arguments in made))


@pytest.fixture(scope="module")
def unfiltered(table: Table) -> str:
    """What this kernel answers to a process without privileges and without a filter, in namespaces of its own."""
    alone = ["unshare", "--ipc", "--pid", "--net", "--mount-proc", "--fork", "--kill-child"]
    nobody = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", "--bounding-set", "-all"]
    done = subprocess.run(
        [*alone, *nobody, "--no-new-privs", sys.executable, "-c", table.program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    return answers(done.stdout, len(table.calls))


def answers(text: str, count: int) -> str:
    found = re.search(r"<([aPSK]+)>", text)
    assert found is not None, text
    assert len(found[1]) == count
    return found[1]


def wrong(table: Table, expected: list[int | None], got: str, unfiltered: str) -> list[str]:
    """The calls that were answered otherwise than expected."""
    found = []
    for name, call, errno, letter, natural in zip(table.names, table.calls, expected, got, unfiltered, strict=True):
        allowed = {"a", natural} if errno is None else {LETTERS[errno]}
        if letter not in allowed:
            found.append(f"{name}{call[1]} is {letter}, expected {sorted(allowed)}")
    return found


def test_the_expectation_is_worth_something(table: Table, unfiltered: str) -> None:
    assert len(table.calls) > 560
    assert sum(1 for name in table.names[: -len(CASES)] if not name.isdigit()) > 330
    kinds = {errno: sum(1 for each in table.expected[: -len(CASES)] if each == errno) for errno in (None, 1, 38)}
    assert kinds[None] > 230
    assert kinds[1] > 50
    assert kinds[38] > 20
    assert "K" not in unfiltered
    passes_alone = [name for name, letter in zip(table.names, unfiltered, strict=True) if letter == "a"]
    refused = [name for name, errno in zip(table.names, table.expected, strict=True) if errno == 1]
    assert len(set(refused) & set(passes_alone)) > 15


async def test_as_the_daemon(table: Table, unfiltered: str, tmp_path: Path) -> None:
    program = tmp_path / "instead-of-the-daemon"
    program.write_text(f"#!/usr/bin/python3\n{table.program}")
    program.chmod(0o755)
    backend = OciBackend(Settings(data_dir=tmp_path / "data", sandboxd=str(program)))
    await backend.start()
    try:
        with pytest.raises(BackendError) as caught:
            await backend.create("sb1-1", SPEC)
    finally:
        await backend.close()
    got = answers(caught.value.message, len(table.calls))
    assert wrong(table, list(table.expected), got, unfiltered) == []
    await wait_until_clean(tmp_path / "data")


async def test_as_a_command(table: Table, unfiltered: str, tmp_path: Path) -> None:
    backend = OciBackend(Settings(data_dir=tmp_path / "data"))
    await backend.start()
    try:
        await backend.create("sb1-1", SPEC)
        await backend.write_file("sb1-1", "/workspace/program.py", table.program.encode(), 0o644)
        output, end = b"", None
        argv = ["/usr/bin/python3", "/workspace/program.py"]
        async for event in backend.exec("sb1-1", argv, env={}, workdir="/", timeout_seconds=120):
            if isinstance(event, ExecOutput):
                output += event.data
            else:
                end = event
        assert isinstance(end, ExecExit)
        assert end.code == 0
    finally:
        await backend.destroy("sb1-1")
        await backend.close()
    expected = [LAUNCHER.get(name, errno) for name, errno in zip(table.names, table.expected, strict=True)]
    assert wrong(table, expected, answers(output.decode(), len(table.calls)), unfiltered) == []
    await wait_until_clean(tmp_path / "data")
