"""Lies of a daemon in every field of the operations on kept commands, files, watches and tunnels."""

import asyncio
from typing import Any

import msgspec
import pytest

from agent_sandbox import wire
from agent_sandbox.errors import BackendError, NotFoundError
from agent_sandbox.guest import Program
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
from tests.unit.guest_harness import (
    CHANGE,
    ENTRY,
    EXIT,
    FIRST,
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
    async with talking_to(answering({"exec": STATUS, "new": 1})) as guest:
        assert await guest.exec_status("a") == listed[1]
        with pytest.raises(BackendError, match="another"):
            await guest.exec_status("b")
        with pytest.raises(NotFoundError):
            await guest.exec_status("not/an/id")


async def test_what_killed_a_command_as_it_should_be() -> None:
    told = {**EXIT, "oom_killed": True, "signal": 9}
    del told["code"]
    async with talking_to(answering({"exec": {**STATUS, "exit": told}})) as guest:
        end = (await guest.exec_status("a")).exit
    assert end == ExecExit(None, 9, wall_seconds=5e-6, oom_killed=True)


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
        {**STATUS, "exit": {**EXIT, "oom_killed": 1}},
        *({n: v for n, v in STATUS.items() if n != name} for name in ("id", "argv", "pid", "started_ms", "cursor")),
    ],
)
async def test_a_command_that_cannot_be(lie: dict[str, Any]) -> None:
    await refused(answering({"count": 1}, msgspec.msgpack.encode([lie])), lambda guest: guest.list_execs())
    await refused(answering({"exec": lie}), lambda guest: guest.exec_status("a"))


@pytest.mark.parametrize("end", [{}, {"exec": None}, {"exec": [STATUS]}, STATUS])
async def test_a_status_that_is_none(end: dict[str, Any]) -> None:
    await refused(answering(end), lambda guest: guest.exec_status("a"))


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
