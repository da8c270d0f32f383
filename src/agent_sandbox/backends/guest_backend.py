"""What every backend with ``sandboxd`` inside shares: exec, files and archives over one wire for each environment.

A subclass makes environments and says how to reach the daemon (:meth:`GuestBackend.endpoint`); everything else is here.
One connection serves an environment; it is made on first use and again when it broke. An operation is tried once: when
the wire breaks under it, the caller is told that its outcome is unknown.
"""

from __future__ import annotations

import abc
import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from agent_sandbox.backends.base import Backend, ByteSink, ByteSource
from agent_sandbox.errors import BackendError, ConflictError
from agent_sandbox.guest import HELLO_SECONDS, Guest, GuestStalled
from agent_sandbox.types import WORKSPACE, ExecEvent, ExecExit, ExportReport, FileEntry, SandboxSpec

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A connected stream socket to the daemon, its key, and what the environment was made from."""

    socket: socket.socket
    key: bytes
    spec: SandboxSpec
    image_env: Mapping[str, str]


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
        whole = {**link.env, **env}
        pairs = [(os.fsencode(name), os.fsencode(value)) for name, value in whole.items()]
        killed_before = self.oom_kills(id)
        command = link.guest.exec([os.fsencode(arg) for arg in argv], pairs, os.fsencode(workdir), timeout_seconds)
        try:
            async with aclosing(command) as events:
                async for event in events:
                    if isinstance(event, ExecExit):
                        event = replace(event, oom_killed=self._out_of_memory(id, event, killed_before))
                    yield event
        except GuestStalled as error:
            await self.kill_guest(id)
            raise BackendError(f"{error.message}; every process of the sandbox was ended") from error

    def _out_of_memory(self, id: str, end: ExecExit, before: int | None) -> bool | None:
        if end.timed_out or (end.signal != signal.SIGKILL and end.code != 128 + signal.SIGKILL):
            return False
        now = self.oom_kills(id)
        return None if now is None or before is None else now > before

    async def read_file(self, id: str, path: str, max_bytes: int) -> bytes:
        return await (await self._guest(id)).read_file(os.fsencode(path), max_bytes)

    async def write_file(self, id: str, path: str, data: bytes, mode: int) -> FileEntry:
        return await (await self._guest(id)).write_file(os.fsencode(path), data, mode)

    async def list_files(self, id: str, path: str) -> list[FileEntry]:
        return await (await self._guest(id)).list_files(os.fsencode(path))

    async def export_workspace(self, id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        return await (await self._guest(id)).export_workspace(dest, max_bytes)

    async def import_workspace(self, id: str, src: ByteSource, max_bytes: int) -> None:
        await (await self._guest(id)).import_workspace(src, max_bytes)

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
        endpoint = await self.endpoint(id)
        guest = await Guest.connect(endpoint.socket, endpoint.key)
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
