"""The server's side of a guest that lies, stalls or leaves. The daemon here is the test."""

import asyncio
import pathlib
import socket
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from agent_sandbox import wire
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    ConnectionLostError,
    ForbiddenError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    PayloadTooLargeError,
    SandboxError,
)
from agent_sandbox.guest import ERRORS, Guest, GuestStalled, limits
from agent_sandbox.types import ExecExit, ExecOutput
from tests.unit.guest_harness import ENTRY, KEY, Daemon, answering, talking_to


async def run(guest: Guest, timeout: float = 5.0) -> list[Any]:
    async with aclosing(guest.exec([b"true"], [], b"/", timeout)) as events:
        return [event async for event in events]


async def test_a_command_as_it_should_be() -> None:
    told = {"code": 3, "timed_out": False, "user_us": 1_500_000, "wall_us": 2_000_000, "max_rss_kb": 7, "new": "field"}
    async with talking_to(answering(told, b"hi")) as guest:
        events = await run(guest)
    assert events[0] == ExecOutput("stdout", b"hi")
    assert events[1] == ExecExit(3, user_seconds=1.5, wall_seconds=2.0, max_rss_kb=7)


@pytest.mark.parametrize(
    "lie",
    [
        {},
        {"code": 1},
        {"timed_out": False},
        {"code": 1, "signal": 9, "timed_out": False},
        {"code": "0", "timed_out": False},
        {"code": 256, "timed_out": False},
        {"code": -1, "timed_out": False},
        {"signal": 65, "timed_out": False},
        {"code": True, "timed_out": False},
        {"code": 0, "timed_out": False, "message": 3},
        {"code": 0, "timed_out": False, "wall_us": "long"},
        {"error": {}},
        {"error": {"code": 3, "message": []}},
    ],
)
async def test_an_exit_that_cannot_be_is_an_error_and_never_a_success(lie: dict[str, Any]) -> None:
    async with talking_to(answering(lie)) as guest:
        with pytest.raises(BackendError):
            await run(guest)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_request", InvalidRequestError),
        ("not_found", NotFoundError),
        ("workdir", InvalidRequestError),
        ("permission", ForbiddenError),
        ("conflict", ConflictError),
        ("too_large", PayloadTooLargeError),
        ("no_space", LimitExceededError),
        ("exhausted", LimitExceededError),
        ("stuck", GuestStalled),
        ("unsupported", BackendError),
        ("internal", BackendError),
        ("who knows", BackendError),
    ],
)
async def test_every_error_of_the_wire_is_typed(code: str, kind: type[SandboxError]) -> None:
    async with talking_to(answering({"error": {"code": code, "message": "x" * 10_000}})) as guest:
        with pytest.raises(SandboxError) as caught:
            await guest.read_file(b"/x", 10)
    assert type(caught.value) is kind
    assert len(caught.value.message) <= 1_000


def test_the_table_of_errors_is_that_of_the_page() -> None:
    page = pathlib.Path(__file__).parents[2] / "spec" / "wire.md"
    rows = page.read_text().rpartition("| error code | meaning |")[2]
    assert {line.split("`")[1] for line in rows.splitlines() if line.startswith("| `")} == set(ERRORS)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/etc/passwd", b"a\0b", b"x" * 256, "text", 3])
async def test_a_listing_with_names_that_cannot_be(name: Any) -> None:
    data = msgspec.msgpack.encode([{**ENTRY, "name": name}])
    async with talking_to(answering({"count": 1}, data)) as guest:
        with pytest.raises(BackendError):
            await guest.list_files(b"/workspace")


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\x91", b"\xdd\xff\xff\xff\xff", b"\x80", msgspec.msgpack.encode([{"name": b"x"}])]
)
async def test_a_broken_listing(data: bytes) -> None:
    async with talking_to(answering({"count": 1}, data)) as guest:
        with pytest.raises(BackendError):
            await guest.list_files(b"/workspace")


@pytest.mark.parametrize(
    "lie", [{}, {"entry": 3}, {"entry": {**ENTRY, "size": -1}}, {"entry": {**ENTRY, "mtime_ns": 2**63}}]
)
async def test_an_entry_that_cannot_be(lie: dict[str, Any]) -> None:
    async with talking_to(answering(lie)) as guest:
        with pytest.raises(BackendError):
            await guest.stat(b"/x")


async def test_more_bytes_than_asked_for_are_refused() -> None:
    async with talking_to(answering({"size": 3}, b"x" * 11)) as guest:
        with pytest.raises(PayloadTooLargeError):
            await guest.read_file(b"/x", 10)


async def test_an_endless_listing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LISTING_ENTRIES", 1_000)
    page = msgspec.msgpack.encode([ENTRY] * 100)

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened | wire.Credit):
            while daemon.wire.send(event.stream, 1, page) == len(page):
                pass

    async with talking_to(liar) as guest:
        with pytest.raises(PayloadTooLargeError):
            await guest.list_files(b"/workspace")


async def test_a_flood_is_held_back_by_the_credit() -> None:
    sent = 0

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        nonlocal sent
        if isinstance(event, wire.Opened | wire.Credit):
            while taken := daemon.wire.send(event.stream, 1, b"x" * 60_000):
                sent += taken

    async with talking_to(liar) as guest, aclosing(guest.exec([b"yes"], [], b"/", 60)) as events:
        await anext(events)
        await asyncio.sleep(0.1)
        assert sent < 3 * 262_144


async def test_data_beyond_the_credit_ends_the_connection_alone() -> None:
    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            await daemon.raw(wire.encode_frame(wire.Kind.DATA, event.stream, b"\x01" + b"x" * 65_535) * 5)

    async with talking_to(liar) as guest:
        events = guest.exec([b"yes"], [], b"/", 60)
        await anext(events)
        async with asyncio.timeout(5):
            await guest.wait_closed()
        with pytest.raises(ConnectionLostError):
            async for _ in events:
                pass
        with pytest.raises(ConnectionLostError):
            await guest.info()


@pytest.mark.parametrize(
    "noise",
    [b"\xff" * 64, b"\0\0\0\0\x63\0\0\0\0", b"\0\0\0\x01\x06\0\0\0\x01\xc1", b"\0\0\0\x02\x03\0\0\x10\x01\x01x"],
)
async def test_a_hostile_frame_ends_the_connection_alone(noise: bytes) -> None:
    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            await daemon.raw(noise)

    async with talking_to(liar) as guest:
        with pytest.raises(ConnectionLostError):
            await run(guest)


async def test_a_daemon_that_leaves_in_the_middle() -> None:
    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            await daemon.raw(b"\0\0\x01\0\x03\0")
            daemon.sock.shutdown(socket.SHUT_RDWR)

    async with talking_to(liar) as guest:
        with pytest.raises(ConnectionLostError):
            await run(guest)


async def test_a_daemon_that_opens_streams_is_told_no() -> None:
    told: list[wire.Event] = []

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Ready):
            daemon.wire.open("give.me", {"root": True})
        elif isinstance(event, wire.Opened):
            daemon.wire.end(event.stream, {"code": 0, "timed_out": False})
        else:
            told.append(event)

    async with talking_to(liar) as guest:
        assert (await run(guest))[-1].code == 0
        await asyncio.sleep(0.05)
    assert told == [wire.Reset(2, "nothing is served here")]


async def test_a_daemon_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BACKLOG", 100_000)

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            ping = wire.encode_frame(wire.Kind.PING, 0, b"12345678") * 4_096
            for _ in range(500):
                await daemon.raw(ping)

    async with talking_to(liar) as guest:
        with pytest.raises(ConnectionLostError):
            await run(guest, timeout=30)


async def test_silence_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(limits, "EXEC_GRACE_SECONDS", 0.2)

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        pass

    async with talking_to(liar) as guest:
        with pytest.raises(BackendError):
            await guest.info()
        with pytest.raises(BackendError):
            await guest.write_file(b"/workspace/x", b"x" * 1_000_000, 0o644)
        with pytest.raises(GuestStalled):
            await run(guest, timeout=0.1)


async def test_output_without_end_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AFTER_DEADLINE_BYTES", 1_000_000)

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened | wire.Credit):
            while daemon.wire.send(event.stream, 1, b"x" * 60_000):
                pass

    async with talking_to(liar) as guest:
        with pytest.raises(GuestStalled):
            await run(guest, timeout=0.1)


async def test_leaving_early_resets_the_stream() -> None:
    told: list[wire.Event] = []

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        told.append(event)
        if isinstance(event, wire.Opened):
            daemon.wire.send(event.stream, 1, b"x")

    async with talking_to(liar) as guest:
        async with aclosing(guest.exec([b"yes"], [], b"/", 60)) as events:
            await anext(events)
        await asyncio.sleep(0.05)
    assert isinstance(told[-1], wire.Reset)


async def test_a_peer_with_another_key_or_no_answer_is_refused() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    daemon = Daemon(theirs, answering({}))
    daemon.wire = wire.Connection("daemon", b"another key" + bytes(21))
    task = asyncio.create_task(daemon.run())
    with pytest.raises(BackendError, match="refused"):
        await Guest.connect(ours, KEY)
    await task
    theirs.close()
    ours, silent = socket.socketpair()
    with pytest.raises(BackendError, match="did not answer"):
        await Guest.connect(ours, KEY, timeout=0.1)
    silent.close()


@pytest.mark.parametrize("wrong", [-1, -(2**63), 2**63, 2**64 - 1])
async def test_counts_that_cannot_be_are_refused(wrong: int) -> None:
    async def forget(data: bytes) -> None:
        pass

    for name in ("entries", "file_bytes", "skipped_total"):
        report = {"entries": 0, "file_bytes": 0, "skipped_total": 0, name: wrong}
        async with talking_to(answering(report)) as guest:
            with pytest.raises(BackendError, match="wrong shape"):
                await guest.export_tar(b"/workspace", forget, 100)
    for name in ("user_us", "system_us", "max_rss_kb", "wall_us"):
        async with talking_to(answering({"code": 0, "timed_out": False, name: wrong})) as guest:
            with pytest.raises(BackendError, match="wrong shape"):
                await run(guest)
    async with talking_to(answering({"entry": {**ENTRY, "size": wrong}})) as guest:
        with pytest.raises(BackendError, match="wrong shape"):
            await guest.stat(b"/x")


async def test_a_listing_nested_without_end_is_an_error_like_others() -> None:
    entry = msgspec.msgpack.encode(ENTRY)
    nested = b"\xa1z" + b"\x91" * 60_000 + b"\xc0"
    listing = b"\x91" + bytes([entry[0] + 1]) + entry[1:] + nested
    async with talking_to(answering({}, listing)) as guest:
        with pytest.raises(BackendError, match="broken listing"):
            await guest.list_files(b"/x")
