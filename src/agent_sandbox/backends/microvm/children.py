"""Monitors as processes that outlive this server: started, watched while it runs, and their words kept.

Nothing that a monitor writes grows: the guest's console and what it says of errors go into small files of fixed size
that have no name. The console's beginning is what tells why a guest did not boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.spawning import ENVIRONMENT, spawn
from agent_sandbox.backends.linux.waiting import settled
from agent_sandbox.errors import BackendError, LimitExceededError

OUTPUT_BYTES = 16 * 1024
CONSOLE_BYTES = 64 * 1024
PROBE_SECONDS = 10.0
PAUSE_SECONDS = 0.002
_CONSOLES_KEPT = 64
"""Of machines that ended, until somebody asks why."""
_WORDS = 300

T = TypeVar("T")


class Children:
    """The monitors that this server started. Use it from one event loop."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        self._consoles: OrderedDict[Process, int] = OrderedDict()

    def watch(self, pid: int) -> None:
        """Reap a child when it ends, as long as this monitor is open."""
        pidfd = os.pidfd_open(pid)
        self._pidfds[pid] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._forget, pid)

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)

    def keep_console(self, process: Process, console: int) -> None:
        """Keep what a machine's console says, for when its monitor has ended."""
        self._consoles[process] = fcntl.fcntl(console, fcntl.F_DUPFD_CLOEXEC, 0)
        ended = [one for one in self._consoles if one.pid not in self._pidfds]
        for one in ended[:-_CONSOLES_KEPT]:
            os.close(self._consoles.pop(one))

    def console(self, process: Process) -> str:
        """The first 64 KiB of a machine's console, which is its monitor's standard output. Blocks."""
        if process in self._consoles:
            words = said(self._consoles[process])
        else:  # of a machine that an earlier server started
            try:
                console = os.open(f"/proc/{process.pid}/fd/1", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                raise BackendError("the machine's monitor has ended") from None
            try:
                words = said(console) if process.alive() else ""
            finally:
                os.close(console)
        lines = words.replace("\r", "\n").split("\n")
        return "\n".join(line for line in (clean(line, CONSOLE_BYTES) for line in lines) if line)

    async def kill(self, pid: int) -> None:
        """Kill a child that was not given away yet, and wait until it is reaped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        while True:
            if pid not in self._pidfds:
                return
            await asyncio.sleep(PAUSE_SECONDS)

    def close(self) -> None:
        """Watch no longer. What runs goes on."""
        for pid in list(self._pidfds):
            self._forget(pid)
        while self._consoles:
            os.close(self._consoles.popitem()[1])


async def run(argv: list[str], remedy: str, descriptors: tuple[int, ...] = ()) -> tuple[int, str]:
    """Run a program to its end; its exit code and the beginning of its output. Killed after a while."""
    with ExitStack() as stack:
        output = memfd(stack, "output", OUTPUT_BYTES)
        pid = spawn(argv, output, descriptors, remedy)
        ended = asyncio.ensure_future(thread(os.waitpid, pid, 0))
        killer = asyncio.get_running_loop().call_later(PROBE_SECONDS, os.kill, pid, signal.SIGKILL)
        try:
            _, status = await settled(ended, lambda: os.kill(pid, signal.SIGKILL))
        finally:
            killer.cancel()
        return os.waitstatus_to_exitcode(status), said(output)


def owned(stack: ExitStack, descriptor: int) -> int:
    """Give a descriptor to a stack, which closes it."""
    stack.callback(os.close, descriptor)
    return descriptor


def memfd(stack: ExitStack, name: str, size: int, content: bytes = b"") -> int:
    """A file of ``size`` bytes without a name, which cannot grow: who writes more to it is refused."""
    file = owned(stack, os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(file, size)
    os.pwrite(file, content, 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def said(output: int) -> str:
    """What was written to a :func:`memfd`."""
    return os.pread(output, CONSOLE_BYTES, 0).rstrip(b"\0").decode(errors="replace").strip()


def find(name: str, remedy: str) -> str:
    """The path of a program. :class:`BackendError` with the remedy when it is not there."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":" + ENVIRONMENT["PATH"])
    if found is None:
        raise BackendError(f"{name} is not installed; {remedy}")
    return str(Path(found).absolute())


async def thread(work: Callable[..., T], *args: object) -> T:
    """Run blocking work on a thread and see it through, also when the caller is cancelled."""
    return await settled(asyncio.ensure_future(asyncio.to_thread(work, *args)))


@contextlib.contextmanager
def room() -> Iterator[None]:
    """Tell a full disk as :class:`LimitExceededError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LimitExceededError("the server's disk is full; free some space") from error
        raise


def clean(text: str, limit: int = _WORDS) -> str:
    """At most ``limit`` characters of ``text``, without what would speak to a terminal."""
    return "".join(char if char.isprintable() else " " for char in text[:limit]).strip()
