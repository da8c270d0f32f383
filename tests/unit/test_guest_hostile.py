"""Lies, floods and silences of a daemon in the operations on kept commands, files, watches and tunnels."""

import asyncio
import itertools
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
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
    NotFoundError,
    SandboxError,
)
from agent_sandbox.guest import Guest, GuestStalled, Program, limits
from agent_sandbox.types import (
    ChangesLost,
    ExecExit,
    ExecGap,
    ExecOutput,
    ExecStarted,
    ExecStatus,
    FileChange,
    GuestStats,
    TerminalSize,
)
from tests.unit.test_guest import ENTRY, KEY, Daemon, Liar, answering, talking_to

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


# -- as it should be -------------------------------------------------------------------


async def test_a_kept_command_as_it_should_be() -> None:
    async with talking_to(scripted((4, FIRST), (1, b"x"), (2, b"y"), end=EXIT)) as guest:
        events = await every(guest.open_exec(PROGRAM))
    end = ExecExit(0, wall_seconds=5e-6)
    assert events == [ExecStarted(7), ExecOutput("stdout", b"x"), ExecOutput("stderr", b"y"), end]


async def test_an_attachment_as_it_should_be() -> None:
    gap = wire.pack_note({"gap": 5, "later": 1})
    async with talking_to(scripted((1, b"x"), (4, gap), (1, b"yz"), end={"cursor": 11, "exit": EXIT})) as guest:
        events = await every(guest.attach_exec("a", 3, True))
    assert events[:3] == [ExecOutput("stdout", b"x"), ExecGap(5), ExecOutput("stdout", b"yz")]


async def test_a_list_as_it_should_be() -> None:
    other = {name: value for name, value in STATUS.items() if name not in ("exit", "tag")}
    piece = msgspec.msgpack.encode([STATUS, {**other, "id": "0", "running": True, "started_ms": 1_000}])
    async with talking_to(answering({"count": 2}, piece)) as guest:
        listed = await guest.list_execs()
        assert listed[1] == ExecStatus("a", "t", ("sh",), 7, 1.5, False, False, 9, 2, ExecExit(0, wall_seconds=5e-6))
        assert (listed[0].id, listed[0].tag, listed[0].exit, listed[0].running) == ("0", "", None, True)
        assert await guest.exec_status("a") == listed[1]
        with pytest.raises(NotFoundError):
            await guest.exec_status("b")


async def test_a_watch_as_it_should_be() -> None:
    changes = [CHANGE, {"overflow": True}, {**CHANGE, "kind": "moved", "to": b"/workspace/y", "directory": True}]
    ready = asyncio.Event()
    note = wire.pack_note({"ready": True})
    async with talking_to(scripted((4, note), (1, msgspec.msgpack.encode(changes)))) as guest:
        seen = await every(guest.watch(b"/workspace", ready=ready), 3)
    assert ready.is_set()
    assert seen == [
        FileChange("created", "/workspace/d/x", None, False),
        ChangesLost(),
        FileChange("moved", "/workspace/d/x", "/workspace/y", True),
    ]


async def test_arguments_are_those_of_the_page() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    async def liar(daemon: Daemon, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            asked.append((event.op, event.args))
            told = {"id": "a", "pid": 7} if event.op == "exec.start" else {"processes": 1, "removed": 1, "size": 0}
            daemon.wire.end(event.stream, told)

    async with talking_to(liar) as guest:
        await guest.start_exec(
            Program([b"sh"], [(b"A", b"b")], b"/", 1.5, "a", "t", stdin=True, tty=TerminalSize(24, 80))
        )
        await guest.signal_exec("a", 15)
        await guest.resize_exec("a", TerminalSize(1, 2))
        await guest.remove_file(b"/workspace/x", recursive=True)
        await every(guest.open_file(b"/workspace/x", 3, 4))
        await every(guest.open_file(b"/workspace/x", 3, None))
    start = {"argv": [b"sh"], "env": [[b"A", b"b"]], "cwd": b"/", "timeout_ms": 1_500, "id": "a", "tag": "t"}
    assert asked == [
        ("exec.start", start | {"stdin": True, "tty": {"rows": 24, "cols": 80}, "detach": True}),
        ("exec.signal", {"id": "a", "signal": 15}),
        ("exec.resize", {"id": "a", "rows": 1, "cols": 2}),
        ("fs.remove", {"path": b"/workspace/x", "recursive": True}),
        ("fs.read", {"path": b"/workspace/x", "offset": 3, "length": 4}),
        ("fs.read", {"path": b"/workspace/x", "offset": 3}),
    ]


# -- lies in every field ------------------------------------------------------------------

NUMBERS: list[Any] = [-1, 2**63, "7", 1.5, None, True, b"7", [7], {}]
ARGVS: list[Any] = [[], ["text"], [3], None, b"sh", {}]


@pytest.mark.parametrize(
    "note",
    [{"pid": 7}, {"started": True}, {"started": False, "pid": 7}, {"started": 1, "pid": 7}, {"gap": 1}, {}]
    + [{"started": True, "pid": pid} for pid in [*NUMBERS, 4_194_305]],
)
async def test_a_start_that_cannot_be(note: dict[str, Any]) -> None:
    await refused(scripted((4, wire.pack_note(note)), end=EXIT), lambda guest: every(guest.open_exec(PROGRAM)))


@pytest.mark.parametrize(
    "frames", [[(1, b"x")], [(4, FIRST), (4, FIRST)], [(4, b"\xc1")], [(4, b"\x80\x80")], [(2, b"x")]]
)
async def test_a_start_out_of_order(frames: list[tuple[int, bytes]]) -> None:
    await refused(scripted(*frames, end=EXIT), lambda guest: every(guest.open_exec(PROGRAM)))


async def test_a_plain_command_has_no_notes() -> None:
    await refused(scripted((4, FIRST), end=EXIT), lambda guest: every(guest.exec([b"sh"], [], b"/", 5.0)))


@pytest.mark.parametrize(
    "lie",
    [{}, {"id": "a"}, {"pid": 7}, {"id": "b", "pid": 7}, {"id": 3, "pid": 7}, EXIT, {**EXIT, "code": 1}]
    + [{"id": "a", "pid": pid} for pid in NUMBERS],
)
async def test_a_detached_start_that_cannot_be(lie: dict[str, Any]) -> None:
    await refused(answering(lie), lambda guest: guest.start_exec(PROGRAM))


@pytest.mark.parametrize("gap", [0, *NUMBERS])
async def test_a_gap_that_cannot_be(gap: Any) -> None:
    await refused(scripted((4, wire.pack_note({"gap": gap}))), lambda guest: every(guest.attach_exec("a", 0, True)))


async def test_gaps_that_add_up_to_more_than_there_can_be() -> None:
    note = wire.pack_note({"gap": 2**62})
    await refused(scripted((4, note), (4, note), (4, note)), lambda guest: every(guest.attach_exec("a", 0, True)))


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize(
    "end",
    [
        {},
        {"cursor": 4},
        {"cursor": 2, "exit": EXIT},
        {"cursor": 4, "exit": EXIT},
        {"cursor": 3, "exit": {}},
        {"cursor": 3, "exit": 3},
        {"cursor": 3, "exit": {**EXIT, "signal": 9}},
        *({"cursor": value, "exit": EXIT} for value in NUMBERS),
        *({"cursor": 3, "exit": {**EXIT, name: -1}} for name in ("user_us", "system_us", "max_rss_kb", "wall_us")),
    ],
)
async def test_an_attachment_that_ends_where_it_cannot(end: dict[str, Any], follow: bool) -> None:
    await refused(scripted((1, b"abc"), end=end), lambda guest: every(guest.attach_exec("a", 0, follow)))


async def test_only_who_does_not_follow_may_miss_the_exit() -> None:
    liar = scripted((1, b"abc"), end={"cursor": 3})
    await refused(liar, lambda guest: every(guest.attach_exec("a", 0, True)))
    async with talking_to(liar) as guest:
        assert await every(guest.attach_exec("a", 0, False)) == [ExecOutput("stdout", b"abc")]


@pytest.mark.parametrize(
    "lie",
    [
        *({**STATUS, name: value} for name in ("pid", "started_ms", "cursor", "first") for value in NUMBERS),
        *({**STATUS, "id": id} for id in ("", "A", "../x", "x" * 65, 3, None, b"a")),
        *({**STATUS, "argv": argv} for argv in ARGVS),
        *({**STATUS, name: flag} for name in ("running", "tty") for flag in (1, None, "true")),
        {**STATUS, "tag": "x" * 257},
        {**STATUS, "tag": None},
        {**STATUS, "first": 10},
        {**STATUS, "running": True},
        {name: value for name, value in STATUS.items() if name != "exit"},
        {**STATUS, "exit": {}},
        {**STATUS, "exit": {**EXIT, "code": 256}},
        *({n: v for n, v in STATUS.items() if n != name} for name in ("id", "argv", "pid", "started_ms", "cursor")),
    ],
)
async def test_a_command_that_cannot_be(lie: dict[str, Any]) -> None:
    await refused(answering({"count": 1}, msgspec.msgpack.encode([lie])), lambda guest: guest.list_execs())


@pytest.mark.parametrize("count", [0, 2, *NUMBERS])
async def test_a_count_that_is_another(count: Any) -> None:
    await refused(answering({"count": count}, msgspec.msgpack.encode([STATUS])), lambda guest: guest.list_execs())
    await refused(
        answering({"count": count}, msgspec.msgpack.encode([ENTRY])), lambda guest: guest.list_files(b"/workspace")
    )


@pytest.mark.parametrize("piece", [b"\x90", b"\xc1", b"\x91", b"\xdd\xff\xff\xff\xff", b"\x80", b"\x91" * 60_000])
async def test_broken_arrays(piece: bytes) -> None:
    await refused(answering({"count": 0}, piece), lambda guest: guest.list_execs())
    note = wire.pack_note({"ready": True})
    await refused(scripted((4, note), (1, piece)), lambda guest: every(guest.watch(b"/workspace")))


async def test_the_same_command_twice() -> None:
    await refused(answering({"count": 2}, msgspec.msgpack.encode([STATUS] * 2)), lambda guest: guest.list_execs())


@pytest.mark.parametrize(
    "lie",
    [
        {},
        {"kind": "created"},
        {"path": b"/workspace/x"},
        {**CHANGE, "kind": "painted"},
        {**CHANGE, "kind": "moved"},
        {**CHANGE, "to": b"/workspace/y"},
        {**CHANGE, "directory": 1},
        {"overflow": False},
        {"overflow": 1},
        *(
            {**CHANGE, "path": path}
            for path in (b"", b"/", b"/etc/passwd", b"/workspacex", b"/workspace/../etc", b"/workspace/a//b", b"x")
        ),
        *(
            {**CHANGE, "path": path}
            for path in (b"/workspace/", b"/workspace/.", b"/workspace/a\0b", b"/workspace/" + b"x" * 5_000, "text")
        ),
        {**CHANGE, "kind": "moved", "to": b"/etc/passwd"},
        {**CHANGE, "kind": "moved", "to": b"/workspace/d/../../etc"},
    ],
)
async def test_a_change_that_cannot_be(lie: dict[str, Any]) -> None:
    note, piece = wire.pack_note({"ready": True}), msgspec.msgpack.encode([lie])
    await refused(scripted((4, note), (1, piece)), lambda guest: every(guest.watch(b"/workspace"), 1))


@pytest.mark.parametrize("first", [(1, b"x"), (4, wire.pack_note({})), (4, wire.pack_note({"ready": 1})), (4, b"\xc1")])
async def test_a_watch_or_tunnel_that_is_not_ready(first: tuple[int, bytes]) -> None:
    ready = asyncio.Event()
    await refused(scripted(first), lambda guest: every(guest.watch(b"/workspace", ready=ready)))
    await refused(scripted(first), lambda guest: guest.dial(port=80))
    await refused(answering({}), lambda guest: every(guest.watch(b"/workspace", ready=ready)))
    await refused(answering({"sent": 0, "received": 0}), lambda guest: guest.dial(port=80))
    assert not ready.is_set()


async def test_a_watch_that_ends() -> None:
    note = wire.pack_note({"ready": True})
    await refused(scripted((4, note), end={}), lambda guest: every(guest.watch(b"/workspace")))
    gone = {"error": {"code": "not_found", "message": "gone"}}
    await refused(scripted((4, note), end=gone), lambda guest: every(guest.watch(b"/workspace")), NotFoundError)
    await refused(scripted((4, note), (2, b"\x90")), lambda guest: every(guest.watch(b"/workspace")))


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("name", ["processes", "execs", "memory_bytes", "ring_bytes"])
async def test_stats_that_cannot_be(name: str, value: Any) -> None:
    stats = {"processes": 1, "execs": 2, "memory_bytes": 3, "ring_bytes": 4}
    async with talking_to(answering(stats)) as guest:
        assert await guest.stats() == GuestStats(1, 2, 3, 4)
    await refused(answering({**stats, name: value}), lambda guest: guest.stats())


@pytest.mark.parametrize("value", NUMBERS)
async def test_numbers_that_cannot_be(value: Any) -> None:
    await refused(answering({"processes": value}), lambda guest: guest.signal_exec("a", 9))
    await refused(answering({"removed": value}), lambda guest: guest.remove_file(b"/workspace/x"))
    await refused(answering({"size": value}, b"x"), lambda guest: guest.read_file(b"/workspace/x", 10))
    await refused(answering({"taken": value}), lambda guest: guest.write_stdin("a", source(b"x")))


async def test_more_input_taken_than_there_was() -> None:
    await refused(answering({"taken": 2}), lambda guest: guest.write_stdin("a", source(b"x")))


async def test_a_file_that_is_not_as_long_as_told() -> None:
    for size in (0, 2, 4):
        await refused(answering({"size": size}, b"abc"), lambda guest: every(guest.open_file(b"/x", 0, None)))
    await refused(answering({"size": 3}, b"abc"), lambda guest: every(guest.open_file(b"/x", 0, 2)))


async def test_a_directory_that_is_none() -> None:
    await refused(answering({"entry": ENTRY}), lambda guest: guest.make_directory(b"/workspace/d", 0o755))


@pytest.mark.parametrize(
    "call",
    [
        lambda guest: guest.stat(b"/x"),
        lambda guest: guest.sync(),
        lambda guest: guest.forget_exec("a"),
        lambda guest: guest.store_file(b"/workspace/x", source(b"x"), 0o644),
        lambda guest: guest.import_tar(b"/workspace", source(b"x"), 10),
        lambda guest: guest.write_stdin("a", source(b"x")),
    ],
)
@pytest.mark.parametrize("channel", [1, 2, 4])
async def test_data_where_none_belongs(call: Call, channel: int) -> None:
    async with asyncio.timeout(10):
        await refused(flooding(channel, b"\x80"), call)


@pytest.mark.parametrize("channel", [2, 4])
async def test_data_on_another_channel(channel: int) -> None:
    liar = flooding(channel, b"\x80")
    await refused(liar, lambda guest: guest.read_file(b"/x", 10))
    await refused(liar, lambda guest: guest.list_execs())
    await refused(liar, lambda guest: every(guest.open_file(b"/x", 0, None)))


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
        async with aclosing(events), asyncio.timeout(10):
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
            for _ in range(30):
                await daemon.raw(wire.encode_frame(wire.Kind.CREDIT, event.stream, b"\0\0\0\1"))
                await asyncio.sleep(0.05)

    calls: list[tuple[Call, type[SandboxError]]] = [
        (lambda guest: guest.stat(b"/x"), BackendError),
        (lambda guest: guest.remove_file(b"/workspace/x"), BackendError),
        (lambda guest: guest.start_exec(PROGRAM), BackendError),
        (lambda guest: guest.list_execs(), BackendError),
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
                async with asyncio.timeout(1.2):
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
        async with asyncio.timeout(5):
            await call(guest)
    assert 0.25 < loop.time() - started < 1.5
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
