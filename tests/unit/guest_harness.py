"""Daemons that lie, for the tests of the server's side of the guest."""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from agent_sandbox import wire
from agent_sandbox.errors import (
    BackendError,
    SandboxError,
)
from agent_sandbox.guest import Guest, Program

KEY = os.urandom(32)
Liar = Callable[["Daemon", wire.Event], Awaitable[None]]


class Daemon:
    """A daemon that does the hello right and then what the test wants."""

    def __init__(self, sock: socket.socket, liar: Liar) -> None:
        self.sock, self.liar = sock, liar
        self.wire = wire.Connection("daemon", KEY)

    async def flush(self) -> None:
        for piece in self.wire.data_to_send():
            await asyncio.get_running_loop().sock_sendall(self.sock, piece)

    async def raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def run(self) -> None:
        try:
            while data := await asyncio.get_running_loop().sock_recv(self.sock, 65_536):
                for event in self.wire.receive(data):
                    await self.liar(self, event)
                await self.flush()
        except OSError:
            pass


@asynccontextmanager
async def talking_to(liar: Liar) -> AsyncIterator[Guest]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    task = asyncio.create_task(Daemon(theirs, liar).run())
    guest = await Guest.connect(ours, KEY)
    try:
        yield guest
    finally:
        guest.close()
        task.cancel()
        await asyncio.wait([task])
        theirs.close()


def answering(result: dict[str, Any], data: bytes = b"") -> Liar:
    """A daemon that answers each operation with one piece of data and one END."""

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            if data:
                daemon.wire.send(event.stream, 1, data)
            daemon.wire.end(event.stream, result)

    return liar


ENTRY = {"name": b"x", "path": b"/x", "type": "file", "size": 1, "mode": 0o644, "mtime_ns": 1}
EXIT = {"code": 0, "timed_out": False, "user_us": 0, "system_us": 0, "max_rss_kb": 0, "wall_us": 5}
STATUS = {
    "id": "a",
    "tag": "t",
    "argv": [b"sh"],
    "pid": 7,
    "started_ms": 1_500,
    "running": False,
    "tty": False,
    "cursor": 9,
    "first": 2,
    "exit": EXIT,
}
CHANGE = {"kind": "created", "path": b"/workspace/d/x", "directory": False}
PROGRAM = Program([b"sh"], [], b"/", 60.0, "a")
FIRST = wire.pack_note({"started": True, "pid": 7})
Call = Callable[[Guest], Coroutine[Any, Any, Any]]


def scripted(*frames: tuple[int, bytes], end: dict[str, Any] | None = None) -> Liar:
    """A daemon that answers each operation with these pieces and this END."""

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            for channel, data in frames:
                daemon.wire.send(event.stream, channel, data)
            if end is not None:
                daemon.wire.end(event.stream, end)

    return liar


def flooding(channel: int, data: bytes, first: bytes = b"") -> Liar:
    """A daemon that sends the same piece for as long as it may."""

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened) and first:
            daemon.wire.send(event.stream, wire.CHANNEL_NOTE, first)
        if isinstance(event, wire.Opened | wire.Credit):
            for _ in range(1_000):
                if not daemon.wire.send(event.stream, channel, data):
                    break

    return liar


async def every(events: AsyncGenerator[Any, None], most: int = 1_000_000) -> list[Any]:
    async with aclosing(events):
        found = []
        async for event in events:
            found.append(event)
            if len(found) >= most:
                break
        return found


async def source(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def refused(liar: Liar, call: Call, kind: type[SandboxError] = BackendError) -> None:
    """The call fails with exactly this error, in time, and the connection lives where only the operation lied."""
    async with talking_to(liar) as guest:
        with pytest.raises(kind):
            async with asyncio.timeout(10):
                await call(guest)
