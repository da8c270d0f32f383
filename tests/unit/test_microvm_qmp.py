"""The control connection to QEMU, against a made-up other side that may be hostile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.microvm.children import clean
from agent_sandbox.backends.microvm.qmp import LINE_BYTES, Qmp, QmpError
from agent_sandbox.errors import BackendError

GREETING = b'{"QMP": {"version": {"qemu": {"major": 7}}, "capabilities": []}}\r\n'
Answer = Callable[[dict[str, Any]], bytes]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def other_side(
    path: Path, answer: Answer, greeting: bytes = GREETING, *, bytewise: bool = False
) -> AsyncIterator[list[dict[str, Any]]]:
    """A server that says ``greeting`` and answers each command; it gives what it was told."""
    told: list[dict[str, Any]] = []

    async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
        for piece in (data[i : i + 1] for i in range(len(data))) if bytewise else (data,):
            writer.write(piece)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await send(writer, greeting)
            while line := await reader.readline():
                command = json.loads(line)
                told.append(command)
                done = command["execute"] == "qmp_capabilities"
                await send(writer, b'{"return": {}}\r\n' if done else answer(command))

    async with listening(path, serve):
        yield told


@asynccontextmanager
async def listening(path: Path, serve: Serve) -> AsyncIterator[None]:
    """Let ``serve`` have each connection until the block is left and it has ended."""
    tasks = []

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_unix_server(serve_one, path)
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*(task for task in tasks if task is not None))


def returning(value: object) -> Answer:
    return lambda _: json.dumps({"return": value}).encode() + b"\r\n"


@pytest.mark.parametrize("bytewise", [False, True])
async def test_a_command_is_answered_though_events_come_between(tmp_path: Path, bytewise: bool) -> None:
    def answer(command: dict[str, Any]) -> bytes:
        event = b'{"event": "STOP", "timestamp": {"seconds": 1, "microseconds": 2}}\r\n'
        return event + json.dumps({"return": command["arguments"]}).encode() + b"\r\n" + event

    async with other_side(tmp_path / "s", answer, bytewise=bytewise) as told, Qmp(tmp_path / "s") as qmp:
        assert await qmp.execute("one", {"a": 1}) == {"a": 1}
        assert await qmp.execute("two") == {}
    assert [command["execute"] for command in told] == ["qmp_capabilities", "one", "two"]


async def test_a_refusal_is_told_with_its_class_and_clean_words(tmp_path: Path) -> None:
    refusal = {"error": {"class": "GenericError", "desc": "no\x1b[31m " + "x" * 1000}}
    async with other_side(tmp_path / "s", lambda _: json.dumps(refusal).encode() + b"\n"), Qmp(tmp_path / "s") as qmp:
        with pytest.raises(QmpError, match="QEMU refused stop: no") as caught:
            await qmp.execute("stop")
    assert caught.value.kind == "GenericError"
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (b'{"hello": 1}\n', "is not QEMU"),
        (b"[1]\n", "not QMP"),
        (b"\xff\xfe\n", "not QMP"),
        (b"[" * 100_000 + b"\n", "not QMP"),
        (b"x" * (LINE_BYTES + 100_000), "without end"),
    ],
)
async def test_what_is_not_qemu_is_told(tmp_path: Path, greeting: bytes, words: str) -> None:
    async with other_side(tmp_path / "s", returning({}), greeting):
        with pytest.raises(BackendError, match=words):
            async with Qmp(tmp_path / "s"):
                pass


async def test_nobody_there_a_silent_one_and_one_that_ends(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="QEMU does not run"):
        async with Qmp(tmp_path / "none"):
            pass
    async with other_side(tmp_path / "silent", returning({}), b""):
        with pytest.raises(BackendError, match=r"did not answer within 0\.2 seconds"):
            async with Qmp(tmp_path / "silent", 0.2):
                pass
    async with other_side(tmp_path / "slow", lambda _: b'{"event": "X"}\n'), Qmp(tmp_path / "slow", 0.5) as qmp:
        with pytest.raises(BackendError, match=r"did not answer within 0.5 seconds \(stop\)"):
            await qmp.execute("stop")
        with pytest.raises(BackendError, match="closed"):
            await qmp.execute("stop")

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readline()

    async with listening(tmp_path / "ends", end):
        with pytest.raises(BackendError, match="has ended"):
            async with Qmp(tmp_path / "ends"):
                pass


async def test_a_descriptor_is_sent_beside_its_command(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()

    def serve() -> str:
        with listener, listener.accept()[0] as connection:
            connection.sendall(GREETING)
            connection.recv(1000)
            connection.sendall(b'{"return": {}}\n')
            data, descriptors, _, _ = socket.recv_fds(connection, 1000, 2)
            connection.sendall(b'{"return": {"fdset-id": 3}}\n')
            with os.fdopen(descriptors[0], "wb") as file:
                file.write(b"through it")
            return str(json.loads(data)["execute"])

    serving: Awaitable[str] = asyncio.to_thread(serve)
    task = asyncio.ensure_future(serving)
    read_end, write_end = os.pipe()
    async with Qmp(tmp_path / "s") as qmp:
        assert await qmp.execute("add-fd", descriptors=(write_end,)) == {"fdset-id": 3}
    os.close(write_end)
    assert await task == "add-fd"
    with os.fdopen(read_end, "rb") as file:
        assert file.read() == b"through it"


def test_words_are_short_and_speak_to_no_terminal() -> None:
    assert clean("a\nb\x1b[0m\x00c\u202e") == "a b [0m c"
    assert len(clean("x" * 10_000)) == 300
