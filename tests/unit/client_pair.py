"""Both SDKs under one name for one suite, and servers that misbehave by script.

What blocks is awaited on a thread, so that a test is written once.

``Awaited(x)`` of a blocking object has its methods as coroutines, its iterators as asynchronous iterators and its
context manager as an asynchronous one; whatever it returns that belongs to the SDK is ``Awaited`` as well.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from agent_sandbox.client import AsyncSandbox, AsyncSandboxClient, Execution, Sandbox, SandboxClient, Terminal

_END = object()
_OURS = (SandboxClient, Sandbox, Execution, Terminal)


class Awaited:
    """A blocking object of the SDK as if it were the asynchronous one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not inspect.ismethod(value):
            return wrapped(value)
        if inspect.isgeneratorfunction(value.__func__) or name == "stream_archive":
            return lambda *args, **options: AwaitedIterator(value(*args, **options))
        if hasattr(value.__func__, "__wrapped__"):  # a context manager made of a generator
            return lambda *args, **options: AwaitedContext(value(*args, **options))

        async def call(*args: Any, **options: Any) -> Any:
            plain = [getattr(arg, "inner", arg) for arg in args]
            return wrapped(await asyncio.to_thread(value, *plain, **options))

        return call

    async def __aenter__(self) -> Awaited:
        await asyncio.to_thread(self.inner.__enter__)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await asyncio.to_thread(self.inner.__exit__, *exc)

    def __repr__(self) -> str:
        return repr(self.inner)


class AwaitedIterator:
    """A blocking iterator as an asynchronous one."""

    def __init__(self, inner: Generator[Any, None, None]) -> None:
        self.inner = inner

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        value = await asyncio.to_thread(next, self.inner, _END)
        if value is _END:
            raise StopAsyncIteration
        return value

    async def aclose(self) -> None:
        await asyncio.to_thread(self.inner.close)


class AwaitedContext:
    """A blocking context manager as an asynchronous one."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self.inner = inner

    async def __aenter__(self) -> Any:
        return await asyncio.to_thread(self.inner.__enter__)

    async def __aexit__(self, *exc: Any) -> bool | None:
        return await asyncio.to_thread(self.inner.__exit__, *exc)


def wrapped(value: Any) -> Any:
    """Wrap what belongs to the SDK; leave everything else."""
    if isinstance(value, list):
        return [wrapped(item) for item in value]
    return Awaited(value) if isinstance(value, _OURS) else value


def open_client(kind: str, *args: Any, **options: Any) -> Any:
    """A client of either kind, to be used with ``await``."""
    if kind == "async":
        return AsyncSandboxClient(*args, **options)
    return Awaited(SandboxClient(*args, **options))


async def all_of(events: Any) -> list[Any]:
    return [event async for event in events]


class Scripted:
    """A server that sends each connection the next of its replies and hangs up; it keeps what it was asked."""

    def __init__(self, *replies: list[bytes]) -> None:
        self.asked: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, args=(replies,)).start()

    def _serve(self, replies: Sequence[list[bytes]]) -> None:
        with self._listener:
            for pieces in replies:
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(10)
                    request = b""
                    while b"\r\n\r\n" not in request or not _whole(request):
                        request += connection.recv(65536)
                    self.asked.append(request)
                    for piece in pieces:
                        connection.sendall(piece)


def _whole(request: bytes) -> bool:
    head, _, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return length is None or len(body) >= int(length[1])


def key_of(request: bytes) -> str | None:
    found = re.search(rb"(?i)\r\nidempotency-key: (\S+)\r\n", request)
    return None if found is None else found[1].decode()


def json_reply(value: Any, status: bytes = b"200 OK") -> list[bytes]:
    body = json.dumps(value).encode()
    return [b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status, len(body), body)]


SANDBOX = {
    "id": "sb1",
    "status": "running",
    "image": "host",
    "cpus": 1.0,
    "memory_mb": 512,
    "pids_limit": 256,
    "network": False,
    "read_only_rootfs": True,
    "created_at": "2026-01-01T00:00:00Z",
    "expires_at": "2026-01-01T00:15:00Z",
}
EXEC = {
    "id": "e1",
    "tag": "",
    "command": ["x"],
    "pid": 7,
    "status": "running",
    "started_at": "2026-01-01T00:00:00Z",
    "exit_code": None,
    "signal": None,
    "timed_out": False,
    "tty": False,
    "cursor": 0,
    "first_cursor": 0,
}
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def sandbox_of(client: Any) -> Any:
    """A sandbox that no server was asked for."""
    if isinstance(client, Awaited):
        return Awaited(Sandbox(client.inner, dict(SANDBOX)))
    return AsyncSandbox(client, dict(SANDBOX))
