"""Driving the runc program: starting it with exact descriptors, and reading the state it keeps.

runc takes the descriptors to pass on by number (3, 4, …), which in a process full of descriptors only a spawn with file
actions can give without a helper: :func:`os.posix_spawn`. The child is waited for through a pidfd on the event loop.
It runs in its own session, so that a Ctrl-C at the server's terminal reaches neither it nor a sandbox.

Limits of single processes are given to runc itself, by ``prlimit``, for its containers to inherit. Those in a bundle it
would set from outside, which takes a privilege in the sandbox's own user namespace that this host's root may lack.

runc's state directory is only read (``state.json``), which spares a process where nothing changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.errors import BackendError

INSTALL = "install it with: apt-get install runc"
_RUN_SECONDS, _DELETE_SECONDS, _VERSION_SECONDS = 30.0, 20.0, 10.0
"""A start takes 40 ms and a removal 15; these are for hosts that swap."""
_KILL_GRACE_SECONDS = 5.0
"""A call whose caller went may finish for this long: half a container is harder to remove than a whole one."""
_QUIESCE_SECONDS, _QUIESCE_PAUSE_SECONDS = 10.0, 0.05
"""A process of a sandbox could pretend to be such a call, so the wait ends whatever is there."""
_OUTPUT_BYTES = 4096
_STATE_BYTES = 1 << 20
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
"""Python ignores the first two and a server's starter may ignore others; a sandbox must not inherit that."""


class Runc:
    """The runtime with its state below ``root``, a directory that a reboot empties."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._program = ""
        self._limiter = ""

    async def find(self) -> str:
        """Locate runc and return its version. :class:`BackendError` with the remedy when it is not there."""
        program = shutil.which("runc", path=os.environ.get("PATH", "") + ":" + _ENV["PATH"])
        if program is None:
            raise BackendError(f"runc is not installed; {INSTALL}")
        limiter = shutil.which("prlimit", path=os.environ.get("PATH", "") + ":" + _ENV["PATH"])
        if limiter is None:
            raise BackendError("prlimit is not installed; install it with: apt-get install util-linux")
        self._program, self._limiter = program, limiter
        code, output = await self._capture(["--version"], _VERSION_SECONDS)
        if code != 0 or not output.startswith("runc version "):
            raise BackendError(f"{program} does not answer as runc: {output or f'exit code {code}'}")
        return output.splitlines()[0].removeprefix("runc version ")

    def installed(self) -> bool:
        """Whether the program that :meth:`find` found is still there."""
        return bool(self._program) and os.access(self._program, os.X_OK)

    async def run(
        self, name: str, bundle: Path, output: int, descriptors: Sequence[int], limits: Mapping[str, int]
    ) -> None:
        """Start the container and return once its first process runs.

        ``descriptors`` become 3, 4, … in it, ``output`` its standard output and error, ``limits`` those of each of its
        processes, by prlimit(1)'s names. :class:`BackendError` when it does not start; what runc said is in ``output``.
        """
        argv = ["run", "--detach", "--preserve-fds", str(len(descriptors)), "--bundle", str(bundle), name]
        limiter = [self._limiter, *(f"--{limit}={value}:{value}" for limit, value in limits.items())]
        code = await self._call(argv, output, _RUN_SECONDS, descriptors, limiter)
        if code != 0:
            raise BackendError(f"runc could not start the sandbox (exit code {code})")

    async def delete(self, name: str) -> None:
        """Remove a container that has ended. Succeeds when there is none, or when runc cannot read its own state."""
        if not (self.root / name).exists():
            return
        code, output = await self._capture(["delete", "--force", name], _DELETE_SECONDS)
        if not (self.root / name).exists():
            return
        if self.process(name) is not None:
            raise BackendError(f"runc could not remove a sandbox (exit code {code}): {output}")
        await asyncio.to_thread(shutil.rmtree, self.root / name)

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

    def names(self) -> list[str]:
        """The containers that runc holds state of, whole or not."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def process(self, name: str) -> Process | None:
        """The container's first process as runc recorded it; None when there is no readable state."""
        try:
            with (self.root / name / "state.json").open("rb") as file:
                state = json.loads(file.read(_STATE_BYTES))
            return Process(int(state["init_process_pid"]), int(state["init_process_start"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    async def _capture(self, argv: Sequence[str], seconds: float) -> tuple[int, str]:
        memory = os.memfd_create("runc-output", os.MFD_CLOEXEC)
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
        """Run runc to its end; return its exit code, negative for a signal. It is killed after ``seconds``.

        ``through`` is a program, with its arguments, that becomes runc.
        """
        pid = self._spawn([*through, self._program, "--root", str(self.root), *argv], output, descriptors)
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
            raise BackendError(f"runc {argv[0]} did not finish within {seconds:.0f} seconds") from None
        finally:
            if not ended.done():
                await _finish(ended, pidfd, grace)
            loop.remove_reader(pidfd)
            os.close(pidfd)
            code = _reap(pid)
        return code

    def _spawn(self, argv: list[str], output: int, descriptors: Sequence[int]) -> int:
        first_free = 3 + len(descriptors)
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first_free) for fd in (output, *descriptors)]
        try:
            actions: list[tuple[int, ...]] = [
                (os.POSIX_SPAWN_DUP2, copies[0], 1),
                (os.POSIX_SPAWN_DUP2, copies[0], 2),
                *((os.POSIX_SPAWN_DUP2, copy, 3 + index) for index, copy in enumerate(copies[1:])),
            ]
            null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            return os.posix_spawn(
                argv[0], argv, _ENV, file_actions=[null, *actions], setsid=True, setsigmask=[], setsigdef=_SIGNALS
            )
        except OSError as error:
            remedy = f"; {INSTALL}" if error.errno == errno.ENOENT else ""
            raise BackendError(f"cannot start {argv[0]}: {error.strerror}{remedy}") from error
        finally:
            for copy in copies:
                os.close(copy)


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
