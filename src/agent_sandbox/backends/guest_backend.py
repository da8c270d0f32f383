"""What every backend with ``sandboxd`` inside shares: exec, files and archives over one wire for each environment.

A subclass makes environments and says how to reach the daemon (:meth:`GuestBackend.endpoint`); everything else is here.
One connection serves an environment; it is made on first use and again when it broke. An operation is tried once: when
the wire breaks under it, the caller is told that its outcome is unknown.
"""

from __future__ import annotations

import abc
import asyncio
import os
import signal as signals
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from agent_sandbox.backends.base import Backend, ByteSink, ByteSource, Tunnel
from agent_sandbox.errors import BackendError, ConflictError, ConnectionLostError
from agent_sandbox.guest import HELLO_SECONDS, Carrier, Guest, GuestStalled, Program
from agent_sandbox.types import (
    WORKSPACE,
    AttachEvent,
    ChangesLost,
    ExecEvent,
    ExecExit,
    ExecRequest,
    ExecStatus,
    ExportReport,
    FileChange,
    FileEntry,
    GuestStats,
    SandboxSpec,
    TerminalSize,
)

_TRIES = 5
"""To say hello over a vsock that is closed before there is an answer."""
_PATIENCE_SECONDS = 1.0
"""For the first answer to a hello over a vsock, then twice as long each time: it takes 20 ms, emulated twice 0.5 s."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A connected stream socket to the daemon, its key, and what the environment was made from.

    ``seconds`` is how long the daemon may take to answer: one that boots takes longer.
    """

    socket: socket.socket
    key: bytes
    spec: SandboxSpec
    image_env: Mapping[str, str]
    carrier: Carrier = Carrier.SOCKET
    seconds: float = HELLO_SECONDS


@dataclass(frozen=True, slots=True)
class _Link:
    guest: Guest
    env: Mapping[str, str]


class GuestBackend(Backend):
    """The daemon-driven half of a backend. Subclasses call :meth:`guest_ready` and :meth:`drop_guest`."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._connecting: dict[str, asyncio.Task[_Link]] = {}

    # -- what the subclass gives -------------------------------------------------

    @abc.abstractmethod
    async def endpoint(self, id: str) -> Endpoint:
        """Connect to the daemon. :class:`NotFoundError` for unknown ids, :class:`BackendError` when it is dead."""

    @abc.abstractmethod
    async def kill_guest(self, id: str) -> None:
        """Freeze and kill every process of the environment, the daemon too: the host's last word. Never raises."""

    @abc.abstractmethod
    def oom_kills(self, id: str) -> int | None:
        """How many processes of the environment the kernel has killed for want of memory; ``None`` if unknown."""

    # -- what the subclass calls ---------------------------------------------------

    async def guest_ready(self, id: str, timeout: float = HELLO_SECONDS) -> None:
        """Return once the daemon of a new environment answers; :class:`BackendError` after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._link(id)
        except TimeoutError:
            raise BackendError(f"the sandbox's daemon did not answer within {timeout:g} s") from None

    async def drop_guest(self, id: str) -> None:
        """Close the wire of an environment that is going away."""
        task = self._connecting.pop(id, None)
        if task is not None:
            task.cancel()
        link = self._links.pop(id, None)
        if link is not None:
            link.guest.close()

    async def close(self) -> None:
        """Close every wire. Environments and their commands go on."""
        for id in [*self._links, *self._connecting]:
            await self.drop_guest(id)

    # -- the contract -----------------------------------------------------------------

    async def exec(
        self,
        id: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        workdir: str,
        timeout_seconds: float,
    ) -> AsyncGenerator[ExecEvent, None]:
        link = await self._link(id)
        killed_before = self.oom_kills(id)
        command = link.guest.exec(_argv(argv), _environment(link, env), os.fsencode(workdir), timeout_seconds)
        async with self._host_ends(id), aclosing(command) as events:
            async for event in events:
                if isinstance(event, ExecExit):
                    event = replace(event, oom_killed=self._out_of_memory(id, event, killed_before))
                yield event

    async def open_exec(self, id: str, request: ExecRequest) -> AsyncGenerator[AttachEvent, None]:
        link = await self._link(id)
        killed_before = self.oom_kills(id)
        async with self._host_ends(id), aclosing(link.guest.open_exec(_program(link, request))) as events:
            async for event in events:
                if isinstance(event, ExecExit):
                    event = replace(event, oom_killed=self._out_of_memory(id, event, killed_before))
                yield event

    async def start_exec(self, id: str, request: ExecRequest) -> int:
        link = await self._link(id)
        async with self._host_ends(id):
            return await link.guest.start_exec(_program(link, request))

    async def attach_exec(
        self, id: str, exec_id: str, *, cursor: int = 0, follow: bool = True
    ) -> AsyncGenerator[AttachEvent, None]:
        guest = await self._guest(id)
        async with self._host_ends(id), aclosing(guest.attach_exec(exec_id, cursor, follow)) as events:
            async for event in events:
                yield _as_known(event) if isinstance(event, ExecExit) else event

    async def list_execs(self, id: str) -> list[ExecStatus]:
        return [_status(status) for status in await (await self._guest(id)).list_execs()]

    async def exec_status(self, id: str, exec_id: str) -> ExecStatus:
        return _status(await (await self._guest(id)).exec_status(exec_id))

    async def write_stdin(self, id: str, exec_id: str, src: ByteSource) -> int:
        return await (await self._guest(id)).write_stdin(exec_id, src)

    async def close_stdin(self, id: str, exec_id: str) -> None:
        await (await self._guest(id)).close_stdin(exec_id)

    async def signal_exec(self, id: str, exec_id: str, signal: int) -> int:
        return await (await self._guest(id)).signal_exec(exec_id, signal)

    async def resize_exec(self, id: str, exec_id: str, size: TerminalSize) -> None:
        await (await self._guest(id)).resize_exec(exec_id, size)

    async def forget_exec(self, id: str, exec_id: str) -> None:
        guest = await self._guest(id)
        async with self._host_ends(id):
            await guest.forget_exec(exec_id)

    def _out_of_memory(self, id: str, end: ExecExit, before: int | None) -> bool | None:
        end = _as_known(end)
        if end.oom_killed is not None:
            return end.oom_killed
        now = self.oom_kills(id)
        return None if now is None or before is None else now > before

    @asynccontextmanager
    async def _host_ends(self, id: str) -> AsyncIterator[None]:
        """Where the daemon cannot end a command, the host ends every process of the sandbox."""
        try:
            yield
        except GuestStalled as error:
            await self.kill_guest(id)
            raise BackendError(f"{error.message}; every process of the sandbox was ended") from error

    async def read_file(self, id: str, path: str, max_bytes: int) -> bytes:
        return await (await self._guest(id)).read_file(os.fsencode(path), max_bytes)

    async def open_file(
        self, id: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        guest = await self._guest(id)
        async with aclosing(guest.open_file(os.fsencode(path), offset, length)) as pieces:
            async for piece in pieces:
                yield piece

    async def write_file(self, id: str, path: str, data: bytes, mode: int) -> FileEntry:
        return await (await self._guest(id)).write_file(os.fsencode(path), data, mode)

    async def store_file(self, id: str, path: str, src: ByteSource, mode: int) -> FileEntry:
        return await (await self._guest(id)).store_file(os.fsencode(path), src, mode)

    async def list_files(self, id: str, path: str) -> list[FileEntry]:
        return await (await self._guest(id)).list_files(os.fsencode(path))

    async def stat_file(self, id: str, path: str, *, follow: bool = True) -> FileEntry:
        return await (await self._guest(id)).stat(os.fsencode(path), follow=follow)

    async def make_directory(self, id: str, path: str, mode: int, *, parents: bool = True) -> FileEntry:
        return await (await self._guest(id)).make_directory(os.fsencode(path), mode, parents=parents)

    async def move_file(self, id: str, source: str, target: str, *, replace: bool = True) -> FileEntry:
        return await (await self._guest(id)).move_file(os.fsencode(source), os.fsencode(target), replace=replace)

    async def remove_file(self, id: str, path: str, *, recursive: bool = False) -> int:
        return await (await self._guest(id)).remove_file(os.fsencode(path), recursive=recursive)

    async def change_mode(self, id: str, path: str, mode: int) -> FileEntry:
        return await (await self._guest(id)).change_mode(os.fsencode(path), mode)

    async def export_workspace(self, id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        return await (await self._guest(id)).export_tar(os.fsencode(WORKSPACE), dest, max_bytes)

    async def import_workspace(self, id: str, src: ByteSource, max_bytes: int) -> None:
        await (await self._guest(id)).import_tar(os.fsencode(WORKSPACE), src, max_bytes)

    async def export_directory(self, id: str, path: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        return await (await self._guest(id)).export_tar(os.fsencode(path), dest, max_bytes)

    async def import_directory(self, id: str, path: str, src: ByteSource, max_bytes: int) -> None:
        await (await self._guest(id)).import_tar(os.fsencode(path), src, max_bytes)

    async def watch(
        self, id: str, path: str, *, recursive: bool = True, ready: asyncio.Event | None = None
    ) -> AsyncGenerator[FileChange | ChangesLost, None]:
        guest = await self._guest(id)
        async with aclosing(guest.watch(os.fsencode(path), recursive=recursive, ready=ready)) as changes:
            async for change in changes:
                yield change

    async def dial(self, id: str, *, port: int | None = None, path: str | None = None) -> Tunnel:
        guest = await self._guest(id)
        return await guest.dial(port=port, path=None if path is None else os.fsencode(path))

    async def guest_stats(self, id: str) -> GuestStats:
        return await (await self._guest(id)).stats()

    async def sync(self, id: str) -> None:
        await (await self._guest(id)).sync()

    # -- the wire ------------------------------------------------------------------------

    async def _guest(self, id: str) -> Guest:
        return (await self._link(id)).guest

    async def _link(self, id: str) -> _Link:
        link = self._links.get(id)
        if link is not None and not link.guest.closed:
            return link
        task = self._connecting.get(id)
        if task is None:
            task = self._connecting[id] = asyncio.create_task(self._connect(id))
            task.add_done_callback(lambda done: self._connected(id, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ConflictError("the sandbox is being removed or replaced") from None
            raise

    async def _connect(self, id: str) -> _Link:
        # A machine that goes on from what was saved ends the connections it had, and may end the first new one, or
        # leave it without an answer until somebody makes another.
        lost, patience, began = 0, _PATIENCE_SECONDS, time.monotonic()
        while True:
            endpoint = await self.endpoint(id)
            left = endpoint.seconds
            if endpoint.carrier is Carrier.VSOCK:
                left -= time.monotonic() - began
            again = endpoint.carrier is Carrier.VSOCK and patience < left
            try:
                guest = await Guest.connect(
                    endpoint.socket, endpoint.key, timeout=patience if again else max(left, 0), carrier=endpoint.carrier
                )
                break
            except ConnectionLostError as error:
                lost += 1
                if not again or lost == _TRIES:
                    raise BackendError(error.message) from error  # nothing was asked yet whose outcome is unknown
            except BackendError:
                if not again:
                    raise
                patience *= 2
        image_env = {"PATH": DEFAULT_PATH, **endpoint.image_env, "HOME": WORKSPACE}
        return _Link(guest, {**image_env, **endpoint.spec.env})

    def _connected(self, id: str, task: asyncio.Task[_Link]) -> None:
        current = self._connecting.get(id) is task
        if current:
            del self._connecting[id]
        if task.cancelled() or task.exception() is not None:
            return
        if current:
            self._links[id] = task.result()
        else:
            task.result().guest.close()


def _argv(argv: Sequence[str]) -> list[bytes]:
    return [os.fsencode(arg) for arg in argv]


def _environment(link: _Link, env: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(os.fsencode(name), os.fsencode(value)) for name, value in {**link.env, **env}.items()]


def _program(link: _Link, request: ExecRequest) -> Program:
    return Program(
        _argv(request.argv),
        _environment(link, request.env),
        os.fsencode(request.workdir),
        request.timeout_seconds,
        request.id,
        request.tag,
        request.stdin,
        request.tty,
    )


def _killed(end: ExecExit) -> bool:
    """Whether the kernel may have ended it for want of memory."""
    return not end.timed_out and (end.signal == signals.SIGKILL or end.code == 128 + signals.SIGKILL)


def _as_known(end: ExecExit) -> ExecExit:
    """An exit as its daemon tells it, who counts at the very end of a kept command: every look at it says the same."""
    return end if _killed(end) else replace(end, oom_killed=False)


def _status(status: ExecStatus) -> ExecStatus:
    return status if status.exit is None else replace(status, exit=_as_known(status.exit))
