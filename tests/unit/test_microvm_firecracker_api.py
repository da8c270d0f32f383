"""Firecracker's API: what a real one answered, replayed; and another side that may be hostile.

``firecracker-1.12.1.json`` is what was sent to Firecracker 1.12.1 in a machine with KVM and what it answered, byte for
byte: a machine boots, is saved, goes on, is saved again, and another is refused whose state is damaged.
``tests/nested/record.py`` records it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.microvm import firecracker_api as api
from agent_sandbox.backends.microvm import firecracker_requests as asking
from agent_sandbox.backends.microvm.firecracker import FirecrackerMonitor
from agent_sandbox.backends.microvm.firecracker_api import FirecrackerError
from agent_sandbox.backends.microvm.monitor import MEMORY_FILE, STATE_FILE, Machine, MachineSpec
from agent_sandbox.errors import BackendError, LimitExceededError

RECORDED = json.loads(Path(__file__).with_name("firecracker-1.12.1.json").read_text())
MIB = 1 << 20
MEMORY_MB = 224
"""Of the machine that was recorded."""
PAGE = b"x" * 4096
Answer = Callable[[str, str, Any], Awaitable[bytes] | bytes]


@contextlib.asynccontextmanager
async def monitor_at(place: Path, answer: Answer) -> AsyncIterator[list[tuple[str, str, Any]]]:
    """Something that answers as a monitor at a socket; it gives what it was asked."""
    asked: list[tuple[str, str, Any]] = []
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = head[0].split(" ")
            length = next((int(line.split(":")[1]) for line in head if line.lower().startswith("content-length")), 0)
            body = json.loads(await reader.readexactly(length)) if length else None
            asked.append((method, target, body))
            reply = answer(method, target, body)
            writer.write(reply if isinstance(reply, bytes) else await reply)
            await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_unix_server(begin, place)
    try:
        yield asked
    finally:
        server.close()
        for task in serving:
            task.cancel()
        ends = await asyncio.gather(*serving, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, ConnectionError):
                raise end


def ok(body: bytes = b"", status: bytes = b"200 ") -> bytes:
    head = b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


# -- what a real one answered ----------------------------------------------------------------


async def test_what_firecracker_was_asked_and_answered_is_asked_again_and_understood(tmp_path: Path) -> None:
    root = tmp_path / "env" / "jail" / "firecracker" / "machine" / "root"
    root.mkdir(parents=True)
    (run := tmp_path / "run").mkdir()
    (run / "jail").symlink_to(root)
    (root / "workspace").touch()
    with (base := tmp_path / "env" / "jail" / "base").open("wb") as file:
        file.truncate(MEMORY_MB * MIB)
    process = Process.of(os.getpid())
    assert process is not None
    machine, monitor = Machine(run, process), FirecrackerMonitor()
    left = list(RECORDED)

    def replay(method: str, target: str, body: Any) -> bytes:
        recorded = left.pop(0)
        assert (method, target, body) == (recorded["method"], recorded["target"], recorded["body"])
        if target == "/snapshot/create":
            (root / asking.SAVED_STATE).write_bytes(b"state")
            with (root / asking.SAVED_MEMORY).open("r+b") as file:
                file.truncate(MEMORY_MB * MIB)
                file.seek(3 * MIB)
                file.write(PAGE)
        return str(recorded["reply"]).encode("latin-1")

    async def ask(requests: list[asking.Request]) -> None:
        for method, target, body in requests:
            await api.request(root / asking.API_SOCKET, method, target, body)

    anywhere = tmp_path / "absent"
    spec = MachineSpec(
        **dict.fromkeys(("kernel", "initrd", "root", "workspace", "config", "layers"), anywhere),
        memory_mb=MEMORY_MB,
        vcpus=1,
        directory=run,
        jail=anywhere,
        uid=1,
        gid=1,
    )
    template, dest = tmp_path / "template", tmp_path / "saved"
    template.mkdir()
    dest.mkdir()
    async with monitor_at(root / asking.API_SOCKET, replay):
        assert not await monitor.running(machine)
        await ask([*asking.boots(spec), asking.START])
        await monitor.pause(machine)
        await monitor.save(machine, MEMORY_MB, template)
        assert not await monitor.running(machine)
        await ask([*asking.goes_on(), asking.RESUME])
        await monitor.pause(machine)
        await monitor.save(machine, MEMORY_MB, dest)
        assert not await monitor.running(machine)
        await monitor.resume(machine)
        assert not await monitor.running(machine)
        with pytest.raises(FirecrackerError, match="CRC64 validation failed") as refused:
            await ask(list(asking.goes_on()))
    assert refused.value.status == 400
    assert not left
    assert (dest / STATE_FILE).read_bytes() == b"state"
    saved = (dest / MEMORY_FILE).read_bytes()
    assert len(saved) == MEMORY_MB * MIB
    assert saved.count(0) == len(saved) - len(PAGE)
    assert saved[3 * MIB :].startswith(PAGE)
    # From here on its changes are counted from what was saved; nothing that was made for saving stays.
    assert base.samefile(dest / MEMORY_FILE)
    assert sorted(path.name for path in root.iterdir()) == [asking.API_SOCKET, "workspace"]


async def test_a_machine_that_runs_is_not_saved(tmp_path: Path) -> None:
    (tmp_path / "jail").mkdir()
    process = Process.of(os.getpid())
    assert process is not None
    async with monitor_at(tmp_path / "jail" / asking.API_SOCKET, lambda *_: ok(b'{"state": "Running"}')) as asked:
        with pytest.raises(BackendError, match="only while it is paused"):
            await FirecrackerMonitor().save(Machine(tmp_path, process), 16, tmp_path)
    assert asked == [("GET", "/", None)]


async def test_a_full_disk_is_told_as_one_and_nothing_is_left(tmp_path: Path) -> None:
    (root := tmp_path / "env" / "jail" / "firecracker" / "machine" / "root").mkdir(parents=True)
    (root / "workspace").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "jail").symlink_to(root)
    process = Process.of(os.getpid())
    assert process is not None

    def answer(method: str, target: str, body: Any) -> bytes:
        if target != "/snapshot/create":
            return ok(b'{"state": "Paused"}')
        return ok(b'{"fault_message": "Cannot write: No space left on device (os error 28)"}', b"400 ")

    async with monitor_at(root / asking.API_SOCKET, answer):
        with pytest.raises(LimitExceededError, match="disk is full"):
            await FirecrackerMonitor().save(Machine(tmp_path / "run", process), 16, tmp_path)
    assert sorted(path.name for path in root.iterdir()) == [asking.API_SOCKET, "workspace"]


# -- what one may answer that its guest has taken over ------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 \r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        ok(b"{"),
        ok(b"[1]"),
        ok(b"[" * 20_000),
        ok(b"\xff\xfe"),
        b"HTTP/1.1 200 \r\nContent-Length: 10\r\n\r\n{}",
        b"HTTP/1.1 200 \r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 \r\nContent-Length: 99999999999\r\n\r\n" + b" " * (api.REPLY_BYTES + 1),
        b"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + b" " * 4096 + b"\r\n" * 20,
        b"HTTP/1.1 200 \r\nX: " + b"y" * (api.REPLY_BYTES + 1),
        b"HTTP/1.1 100 \r\n\r\n" * 1000,
    ],
)
async def test_a_reply_that_cannot_be_right_is_an_error(tmp_path: Path, reply: bytes) -> None:
    async with monitor_at(tmp_path / "api.sock", lambda *_: reply):
        with pytest.raises(BackendError):
            await api.request(tmp_path / "api.sock", "GET", "/")


async def test_a_reply_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async def answer() -> bytes:
        await asyncio.Event().wait()
        return b""

    async with monitor_at(tmp_path / "api.sock", lambda *_: answer()):
        with pytest.raises(BackendError, match=r"did not answer GET / within 0\.2 s"):
            await api.request(tmp_path / "api.sock", "GET", "/", seconds=0.2)


async def test_words_of_a_refusal_are_short_and_clean(tmp_path: Path) -> None:
    words = json.dumps({"fault_message": "\x1b[31mno\x07 " + "x" * 10_000}).encode()
    async with monitor_at(tmp_path / "api.sock", lambda *_: ok(words, b"400 ")):
        with pytest.raises(FirecrackerError) as refused:
            await api.request(tmp_path / "api.sock", "PUT", "/actions", {"action_type": "x"})
    assert refused.value.status == 400
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 400


async def test_a_link_in_the_sockets_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "api.sock").symlink_to("other.sock")
    async with monitor_at(tmp_path / "other.sock", lambda *_: ok(b"{}")) as asked:
        with pytest.raises(BackendError, match="is none"):
            await api.request(tmp_path / "api.sock", "GET", "/")
    assert not asked


async def test_nobody_at_the_socket_is_told(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="has no socket"):
        await api.request(tmp_path / "api.sock", "GET", "/")
    async with monitor_at(tmp_path / "api.sock", lambda *_: ok()):
        pass
    with pytest.raises(BackendError, match=r"does not answer GET /: .*refused"):
        await api.request(tmp_path / "api.sock", "GET", "/")
