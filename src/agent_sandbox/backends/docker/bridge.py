"""The wire to a daemon on an engine that shares no files with this host: ``docker exec … sandboxd bridge``.

The engine runs a second process in the container that copies bytes between its standard streams and the daemon's
socket; the engine's connection for it is taken over, and its other end here is a socket pair like any other endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

from agent_sandbox.backends.docker.engine import Engine, Frames
from agent_sandbox.errors import BackendError, SandboxError

_log = logging.getLogger(__name__)

_PIECE = 64 * 1024
_STARTS_SECONDS = 30.0
_STDOUT, _STDERR = 1, 2
_WORDS = 500


class Bridges:
    """The bridges of one backend. Use it from one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, container: str, argv: list[str]) -> socket.socket:
        """Run ``argv`` in the container and give a connected socket to its standard input and output.

        :class:`BackendError` when it cannot be started; one that ends later closes the socket.
        """
        made = await self._engine.post(
            f"/containers/{container}/exec",
            {"Cmd": argv, "User": "0:0", "AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Tty": False},
        )
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._carry(made["Id"], theirs, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(_STARTS_SECONDS):
                await asyncio.shield(started)
        except BaseException as error:
            ours.close()
            task.cancel()
            if isinstance(error, TimeoutError):
                raise BackendError("the Docker engine did not start the bridge to the sandbox's daemon") from None
            raise
        return ours

    async def close(self) -> None:
        """End every bridge."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _carry(self, exec_id: str, end: socket.socket, started: asyncio.Future[None]) -> None:
        try:
            start = {"Detach": False, "Tty": False}
            async with self._engine.hijack(f"/exec/{exec_id}/start", start) as stream:
                started.set_result(None)
                copies = [asyncio.create_task(_out(stream, end)), asyncio.create_task(_in(stream, end))]
                try:
                    await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for copy in copies:
                        copy.cancel()
                    await asyncio.wait(copies)
        except SandboxError as error:
            if not started.done():
                started.set_exception(error)
            else:
                _log.debug("a bridge ended: %s", error.message)
        finally:
            end.close()


async def _out(stream: Any, end: socket.socket) -> None:
    loop, frames = asyncio.get_running_loop(), Frames()
    with contextlib.suppress(Exception):
        while data := await stream.read(_PIECE):
            for channel, piece in frames.feed(data):
                if channel == _STDOUT:
                    await loop.sock_sendall(end, piece)
                elif channel == _STDERR:
                    _log.warning("a bridge says: %s", piece[:_WORDS].decode(errors="replace").strip())


async def _in(stream: Any, end: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(Exception):
        while data := await loop.sock_recv(end, _PIECE):
            await stream.write(data)
