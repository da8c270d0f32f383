"""Driving the program of a runtime: starting it with exact descriptors, waiting for it, never for ever.

Runtimes take the descriptors to pass on by number (see ``spawning.py``). The child is waited for through a pidfd on the
event loop. It runs in its own session, so that a Ctrl-C at the server's terminal reaches neither it nor a sandbox.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.spawning import find_program, spawn
from agent_sandbox.errors import BackendError

_VERSION_SECONDS = 10.0
_KILL_GRACE_SECONDS = 5.0
"""A call whose caller went may finish for this long: half a container is harder to remove than a whole one."""
_QUIESCE_SECONDS, _QUIESCE_PAUSE_SECONDS = 10.0, 0.05
"""A process of a sandbox could pretend to be such a call, so the wait ends whatever is there."""
_OUTPUT_BYTES = 4096


class Runtime(abc.ABC):
    """A runtime with its state below ``root``, a directory that a reboot empties. A subclass knows one program."""

    program: ClassVar[str]
    remedy: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, root: Path) -> None:
        self.root = root
        self._program = ""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """The containers that the runtime holds state of, whole or not."""

    @abc.abstractmethod
    def process(self, name: str) -> Process | None:
        """The container's first process on the host as the runtime recorded it; None without readable state."""

    @abc.abstractmethod
    async def delete(self, name: str) -> None:
        """Remove a container that has ended. Succeeds when there is none, or when its state cannot be read."""

    async def find(self) -> str:
        """Locate the program and return its version. :class:`BackendError` with the remedy when it is not there."""
        program = find_program(self.program, self.remedy)
        self._program = program
        code, output = await self._capture(["--version"], _VERSION_SECONDS)
        if code != 0 or not output.startswith(f"{self.program} version "):
            raise BackendError(f"{program} does not answer as {self.program}: {output or f'exit code {code}'}")
        return output.splitlines()[0].removeprefix(f"{self.program} version ")

    def installed(self) -> bool:
        """Whether the program that :meth:`find` found is still there."""
        return bool(self._program) and os.access(self._program, os.X_OK)

    async def quiesce(self) -> None:
        """Wait for the calls that a server made which then died, so that none acts behind the next one's back."""
        deadline = asyncio.get_running_loop().time() + _QUIESCE_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            if not await asyncio.to_thread(self._calls):
                return
            await asyncio.sleep(_QUIESCE_PAUSE_SECONDS)

    def _calls(self) -> list[str]:
        wanted = b"\0--root\0" + os.fsencode(self.root) + b"\0"
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                if wanted in file.read(_OUTPUT_BYTES):
                    found.append(path.parent.name)
        return found

    async def _capture(self, argv: Sequence[str], seconds: float) -> tuple[int, str]:
        memory = os.memfd_create(f"{self.program}-output", os.MFD_CLOEXEC)
        try:
            code = await self._call(argv, memory, seconds)
            return code, os.pread(memory, _OUTPUT_BYTES, 0).decode(errors="replace").strip()
        finally:
            os.close(memory)

    async def _call(
        self,
        argv: Sequence[str],
        output: int,
        seconds: float,
        descriptors: Sequence[int] = (),
        through: Sequence[str] = (),
    ) -> int:
        """Run the program to its end; return its exit code, negative for a signal. It is killed after ``seconds``.

        ``through`` is a program, with its arguments, that becomes it.
        """
        pid = self._spawn(
            [*through, self._program, "--root", str(self.root), *self.options, *argv], output, descriptors
        )
        pidfd = os.pidfd_open(pid)
        grace = _KILL_GRACE_SECONDS
        loop = asyncio.get_running_loop()
        # A bare future: a task would be cancelled with all others when the loop ends, as if the child had ended.
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(pidfd, _notice, ended)
        try:
            await asyncio.wait_for(asyncio.shield(ended), seconds)
        except TimeoutError:
            grace = 0.0
            raise BackendError(f"{self.program} {argv[0]} did not finish within {seconds:.0f} seconds") from None
        finally:
            if not ended.done():
                await _finish(ended, pidfd, grace)
            loop.remove_reader(pidfd)
            os.close(pidfd)
            code = _reap(pid)
        return code

    def _spawn(self, argv: list[str], output: int, descriptors: Sequence[int]) -> int:
        try:
            return spawn(argv, output, descriptors, self.remedy)
        except OSError as error:
            raise BackendError(f"cannot start {argv[0]}: {error.strerror}") from error


def _reap(pid: int) -> int:
    """The exit code of a child that has ended, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _notice(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


async def _finish(ended: asyncio.Future[None], pidfd: int, grace: float) -> None:
    """Wait for a child whose caller went or whose time is up; kill it if it stays. Cancelling again changes nothing."""
    killed = asyncio.get_running_loop().call_later(grace, signal.pidfd_send_signal, pidfd, signal.SIGKILL)
    try:
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([ended])
    finally:
        killed.cancel()
