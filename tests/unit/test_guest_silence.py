"""Floods and silences of a daemon, and callers who leave."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from agent_sandbox import wire
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    ConnectionLostError,
    InvalidRequestError,
    SandboxError,
)
from agent_sandbox.guest import Guest, GuestStalled, Program, limits
from agent_sandbox.types import (
    ExecGap,
)
from tests.unit.guest_harness import (
    ENTRY,
    KEY,
    PROGRAM,
    STATUS,
    Call,
    Daemon,
    answering,
    every,
    flooding,
    refused,
    scripted,
    source,
    talking_to,
)

# -- floods --------------------------------------------------------------------------


async def test_an_endless_list_of_commands() -> None:
    numbers = itertools.count()

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened | wire.Credit):
            while True:
                page = msgspec.msgpack.encode([{**STATUS, "id": f"n{next(numbers)}"} for _ in range(20)])
                if daemon.wire.send(event.stream, 1, page) != len(page):
                    break

    await refused(liar, lambda guest: guest.list_execs())
    assert next(numbers) < 2 * limits.MAX_EXECS + 5_000


async def test_a_flood_of_notes_is_held_back_by_the_credit() -> None:
    sent = 0
    note = wire.pack_note({"gap": 1})

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        nonlocal sent
        if isinstance(event, wire.Opened | wire.Credit):
            while taken := daemon.wire.send(event.stream, 4, note):
                sent += taken + 1

    async with talking_to(liar) as guest:
        events = guest.attach_exec("a", 0, True)
        async with aclosing(events), asyncio.timeout(60):
            assert await anext(events) == ExecGap(1)
            await asyncio.sleep(0.2)
            assert sent <= 2 * 262_144
            for _ in range(100_000):
                await anext(events)


async def test_without_following_there_is_no_endless_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REPLAY_BYTES", 1_000_000)
    await refused(flooding(1, b"x" * 50_000), lambda guest: every(guest.attach_exec("a", 0, False)))


async def test_a_tunnel_that_floods_is_held_back() -> None:
    sent = 0

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        nonlocal sent
        if isinstance(event, wire.Opened):
            daemon.wire.send(event.stream, 4, wire.pack_note({"connected": True}))
        if isinstance(event, wire.Opened | wire.Credit):
            while taken := daemon.wire.send(event.stream, 1, b"x" * 60_000):
                sent += taken

    async with talking_to(liar) as guest, await guest.dial(port=80) as tunnel:
        await tunnel.receive()
        await asyncio.sleep(0.1)
        assert sent < 3 * 262_144


@pytest.mark.parametrize("channel", [2, 4])
async def test_a_tunnel_on_another_channel(channel: int) -> None:
    note = wire.pack_note({"connected": True})
    async with talking_to(scripted((4, note), (channel, b"x"))) as guest, await guest.dial(port=80) as tunnel:
        with pytest.raises(BackendError):
            await tunnel.receive()


async def test_a_tunnel_that_ends_with_an_error_or_a_reset() -> None:
    note = wire.pack_note({"connected": True})
    end = {"error": {"code": "internal", "message": "it broke"}}
    async with talking_to(scripted((4, note), (1, b"x"), end=end)) as guest, await guest.dial(port=80) as tunnel:
        assert await tunnel.receive() == b"x"
        with pytest.raises(BackendError, match="it broke"):
            await tunnel.receive()
        with pytest.raises(ConflictError):
            await tunnel.send(b"x")

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            daemon.wire.send(event.stream, 4, note)
            daemon.wire.reset(event.stream, "no")

    async with talking_to(liar) as guest, await guest.dial(port=80) as tunnel:
        with pytest.raises(BackendError, match="gave up"):
            await tunnel.receive()


# -- silence ----------------------------------------------------------------------------


async def silent(daemon: Daemon, event: wire.Event) -> None:
    pass


@pytest.mark.parametrize("credit", [False, True], ids=["silent", "with credit"])
async def test_every_wait_has_a_limit(monkeypatch: pytest.MonkeyPatch, credit: bool) -> None:
    """Also when the daemon gives credit all the time, which is no progress for who waits for an answer."""
    for name in ("STALL_SECONDS", "LONG_SECONDS", "EXEC_GRACE_SECONDS"):
        monkeypatch.setattr(limits, name, 0.3)

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened) and credit:
            while True:
                await daemon.raw(wire.encode_frame(wire.Kind.CREDIT, event.stream, b"\0\0\0\1"))
                await asyncio.sleep(0.05)

    calls: list[tuple[Call, type[SandboxError]]] = [
        (lambda guest: guest.stat(b"/x"), BackendError),
        (lambda guest: guest.remove_file(b"/workspace/x"), BackendError),
        (lambda guest: guest.start_exec(PROGRAM), BackendError),
        (lambda guest: guest.list_execs(), BackendError),
        (lambda guest: guest.exec_status("a"), BackendError),
        (lambda guest: every(guest.attach_exec("a", 0, False)), BackendError),
        (lambda guest: every(guest.watch(b"/workspace")), BackendError),
        (lambda guest: guest.dial(port=80), BackendError),
        (lambda guest: every(guest.open_file(b"/x", 0, None)), BackendError),
        (lambda guest: guest.store_file(b"/workspace/x", source(b"x"), 0o644), BackendError),
        (lambda guest: every(guest.exec([b"sh"], [], b"/", 0.1)), GuestStalled),
    ]
    for call, kind in calls:
        async with talking_to(liar) as guest:
            with pytest.raises(kind):
                async with asyncio.timeout(20):
                    await call(guest)


@pytest.mark.parametrize(
    ("call", "first"),
    [
        (lambda guest: every(guest.attach_exec("a", 0, True)), b""),
        (lambda guest: every(guest.watch(b"/workspace")), wire.pack_note({"ready": True})),
        (lambda guest: guest.write_stdin("a", source(b"x" * 1_000_000)), b""),
        (lambda guest: every(guest.exec([b"sh"], [], b"/", 3_600)), b""),
    ],
)
async def test_a_dead_daemon_hangs_nobody(monkeypatch: pytest.MonkeyPatch, call: Call, first: bytes) -> None:
    """It holds the connection open, but answers nothing any more."""
    monkeypatch.setattr(limits, "PING_SECONDS", 0.1)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    daemon = Daemon(theirs, silent)

    async def dies() -> None:
        while data := await loop.sock_recv(theirs, 65_536):
            for event in daemon.wire.receive(data):
                if isinstance(event, wire.Opened):
                    if first:
                        daemon.wire.send(event.stream, 4, first)
                        await daemon.flush()
                    return
            await daemon.flush()

    task = asyncio.create_task(dies())
    guest = await Guest.connect(ours, KEY)
    started = loop.time()
    with pytest.raises(ConnectionLostError, match="did not answer"):
        async with asyncio.timeout(30):
            await call(guest)
    assert loop.time() - started > 0.25
    await task
    guest.close()
    theirs.close()


async def test_who_waits_on_a_daemon_that_lives_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PING_SECONDS", 0.02)
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.1)
    async with talking_to(silent) as guest:
        reader = asyncio.ensure_future(every(guest.attach_exec("a", 0, True)))
        writer = asyncio.ensure_future(guest.write_stdin("a", source(b"x" * 1_000_000)))
        done, _ = await asyncio.wait([reader, writer], timeout=1.0)
        assert not done
        assert not guest.closed
        reader.cancel()
        writer.cancel()
        await asyncio.wait([reader, writer])


async def test_a_pong_that_was_not_asked_for_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PING_SECONDS", 0.1)

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            await daemon.raw(wire.encode_frame(wire.Kind.PONG, 0, b"12345678"))
            await daemon.raw(wire.encode_frame(wire.Kind.PONG, 0, (1).to_bytes(8, "big")))
            await asyncio.sleep(5)

    await refused(liar, lambda guest: every(guest.attach_exec("a", 0, True)), ConnectionLostError)


async def test_an_idle_connection_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PING_SECONDS", 0.02)
    async with talking_to(answering({"entry": ENTRY})) as guest:
        await guest.stat(b"/x")
        await asyncio.sleep(0.3)
        assert not guest.closed
        await guest.stat(b"/x")


# -- leaving ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda guest: every(guest.attach_exec("a", 0, True)),
        lambda guest: every(guest.open_exec(PROGRAM)),
        lambda guest: every(guest.watch(b"/workspace")),
        lambda guest: guest.dial(port=80),
        lambda guest: guest.write_stdin("a", source(b"x" * 1_000_000)),
        lambda guest: guest.sync(),
    ],
)
async def test_who_is_cancelled_leaves_nothing_behind(call: Call) -> None:
    told: list[wire.Event] = []

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        told.append(event)

    async with talking_to(liar) as guest:
        task = asyncio.ensure_future(call(guest))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0.05)
        assert guest.wire.can_open()
        assert not guest._streams
    assert isinstance(told[-1], wire.Reset)


async def test_a_source_that_breaks_gives_the_upload_up() -> None:
    told: list[wire.Event] = []

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        told.append(event)

    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise ZeroDivisionError

    async with talking_to(liar) as guest:
        with pytest.raises(ZeroDivisionError):
            await guest.store_file(b"/workspace/x", broken(), 0o644)
        await asyncio.sleep(0.05)
    assert [type(event) for event in told[-2:]] == [wire.Data, wire.Reset]


async def test_what_the_caller_may_not_ask_is_not_sent() -> None:
    async with talking_to(silent) as guest:
        wrongs: list[dict[str, Any]] = [{}, {"port": 0}, {"port": 65_536}, {"port": 1, "path": b"/x"}]
        for wrong in wrongs:
            with pytest.raises(InvalidRequestError):
                await guest.dial(**wrong)
        for program in (Program([b"sh"], [], b"/", 1, "A"), Program([b"sh"], [], b"/", 1, "a", "x" * 257)):
            with pytest.raises(InvalidRequestError):
                await guest.start_exec(program)
        assert not guest._streams
