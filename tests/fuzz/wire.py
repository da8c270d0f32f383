"""Feed the server's side of the wire with broken bytes: ``python -m tests.fuzz.wire --seconds 30 --seed 1``.

Each round has its own random numbers, from the seed and its number, so ``--only N`` repeats one that failed. A round is

* **connection**: golden frames, some of them mutated, in one go and in pieces, into both roles of the state machine.
  It never raises, says the same either way, holds no more than its limits, and is silent after a violation;
* **replies**: golden and made-up maps, mutated, into every check of a reply. Only typed errors come out;
* **guest**: a daemon that speaks the protocol but lies in maps and, at times, in bytes, under a whole
  :class:`~agent_sandbox.guest.Guest` with many operations. Each ends in time, with a result or a typed error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Literal

import msgspec

from agent_sandbox import wire
from agent_sandbox.errors import SandboxError
from agent_sandbox.guest import Guest, Program, replies
from agent_sandbox.types import TerminalSize
from agent_sandbox.wire.connection import MAX_STREAMS, WINDOW

KEY = bytes(32)
VECTORS = pathlib.Path(__file__).parents[2] / "spec" / "vectors" / "wire"
FRAMES = [
    bytes.fromhex(vector["frame_hex"])
    for vector in json.loads((VECTORS / "frames.json").read_text())["frames"]
    if len(vector["frame_hex"]) < 4_000
]
REJECTED = [
    bytes.fromhex(vector["hex"])
    for vector in json.loads((VECTORS / "reject.json").read_text())["reject"]
    if len(vector["hex"]) < 4_000
]
MAPS: list[dict[str, Any]] = [
    msgspec.msgpack.decode(frame[9:]) for frame in FRAMES if frame[4] in (wire.Kind.END, wire.Kind.OPEN)
]
DATA = [frame[9:] for frame in FRAMES if frame[4] == wire.Kind.DATA]
NOTES: list[dict[str, Any]] = [msgspec.msgpack.decode(data[1:]) for data in DATA if data[0] == wire.CHANNEL_NOTE]
LISTS: list[Any] = [msgspec.msgpack.decode(data[1:]) for data in DATA if data[0] == 1 and data[1] & 0xF0 == 0x90]
ENTRY: dict[str, Any] = next(fields["entry"] for fields in MAPS if "entry" in fields)
NUMBERS = [0, 1, -1, 127, 128, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
EDGES = bytes([0, 1, 2, 3, 4, 5, 9, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC7, 0xD4, 0xD9, 0xDD, 0xDF, 0xFF])


class Finding(Exception):
    """What must not be."""


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few small things wrong."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(8):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.choice(EDGES)
            case 2:
                del out[at : at + rng.randrange(1, 9)]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                other = rng.choice(FRAMES)
                out[at:] = other[rng.randrange(len(other)) :]
            case 5:
                out[at:at] = out[at : at + rng.randrange(1, 64)]
            case 6 if len(out) >= 9:
                out[:4] = rng.choice(NUMBERS[:11]).to_bytes(5, "big", signed=True)[1:]
            case 7 if len(out) >= 9:
                out[5:9] = rng.choice((0, 1, 2, 3, 5, 7, 9, 2**32 - 1)).to_bytes(4, "big")
    return bytes(out)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Some MessagePack value."""
    match rng.randrange(12 if depth < 4 else 8):
        case 0:
            return rng.choice(NUMBERS)
        case 1:
            return rng.choice((True, False, None))
        case 2:
            return rng.choice((0.0, -1.5, float("nan"), float("inf")))
        case 3:
            return rng.randbytes(rng.choice((0, 1, 20, 300)))
        case 4:
            return rng.choice(("", "a", "code", "..", "/", "\0", "ä" * 300, "x" * 65))
        case 5:
            return msgspec.msgpack.Ext(rng.randrange(-1, 100), rng.randbytes(rng.choice((0, 4, 8, 12))))
        case 6:
            return rng.choice((b"/workspace/../x", b"/etc/passwd", b"..", b"a/b", b"/workspace"))
        case 7:
            return rng.choice(MAPS)
        case 8 | 9:
            return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            return {rng.choice(("code", "pid", "exit", "entry", "error", "x")): value(rng, depth + 1) for _ in range(3)}


def lying(rng: random.Random, told: Any) -> Any:
    """The value with a field missing, added, or with another value, somewhere in it."""
    if isinstance(told, dict) and told and rng.random() < 0.9:
        name = rng.choice(list(told))
        match rng.randrange(4):
            case 0:
                return {key: item for key, item in told.items() if key != name}
            case 1:
                return told | {rng.choice(("error", "exit", "id", "overflow", "gap")): value(rng)}
            case _:
                return told | {name: lying(rng, told[name])}
    if isinstance(told, list) and told and rng.random() < 0.9:
        at = rng.randrange(len(told))
        return [*told[:at], lying(rng, told[at]), *told[at + rng.randrange(2) :]]
    return value(rng)


# -- connection -------------------------------------------------------------------------


def opened(role: Literal["client", "daemon"]) -> wire.Connection:
    """One side behind its hello, with operations under way in both directions."""
    client, daemon = (wire.Connection(side, KEY, nonce=bytes(32)) for side in ("client", "daemon"))
    daemon.receive(b"".join(client.data_to_send()))
    client.receive(b"".join(daemon.data_to_send()))
    for number in range(4):
        client.open("exec.start", {"number": number})
    daemon.receive(b"".join(client.data_to_send()))
    side = client if role == "client" else daemon
    side.data_to_send()
    return side


def connection_round(rng: random.Random) -> None:
    role: Literal["client", "daemon"] = rng.choice(("client", "daemon"))
    parts = [rng.choice(FRAMES if rng.random() < 0.8 else REJECTED) for _ in range(rng.randrange(1, 12))]
    data = b"".join(mutated(rng, part) if rng.random() < 0.3 else part for part in parts)
    fresh = rng.random() < 0.1
    whole, cut = (wire.Connection(role, KEY, nonce=bytes(32)) if fresh else opened(role) for _ in range(2))
    events = whole.receive(data)
    pieces: list[wire.Event] = []
    at = 0
    while at < len(data):
        step = rng.choice((1, 1, 2, 9, 100, 1_000))
        pieces += cut.receive(data[at : at + step])
        at += step
    if events != pieces or whole.data_to_send() != cut.data_to_send():
        raise Finding("cut into pieces it means something else")
    check(whole, events)
    for event in events:
        if isinstance(event, wire.Data):
            whole.consumed(event.stream, len(event.data) + 1)
    for number in range(8):
        whole.send(number, 1, b"x")
        whole.end(number, {})
        whole.reset(number, "over")
    if whole.closed and whole.receive(data):
        raise Finding("something came after the end")


def check(connection: wire.Connection, events: list[wire.Event]) -> None:
    """The limits of one side."""
    violations = [event for event in events if isinstance(event, wire.Violation | wire.GoAway)]
    if violations and (violations != events[-1:] or not connection.closed):
        raise Finding("it goes on after the end")
    if len(connection._decoder._buffer) > 65_536 + 9 and not connection.closed:
        raise Finding("more than one frame is held")
    if len(connection._streams) > 2 * MAX_STREAMS:
        raise Finding("too many streams")
    sizes: dict[int, int] = {}
    for event in events:
        if isinstance(event, wire.Data):
            sizes[event.stream] = sizes.get(event.stream, 0) + len(event.data) + 1
            if not event.data or sizes[event.stream] > WINDOW:
                raise Finding("data beyond the credit")


# -- replies ------------------------------------------------------------------------------

SHAPES: list[Any] = [
    replies.Attached, replies.Counted, replies.Detached, replies.EntryResult, replies.Exit, replies.Exported,
    replies.Gap, replies.GuestInfo, replies.Removed, replies.Sent, replies.Signalled, replies.Started, replies.Stats,
    replies.Taken,
]  # fmt: skip


def replies_round(rng: random.Random) -> None:
    told = rng.choice(MAPS + NOTES)
    for _ in range(rng.randrange(3)):
        told = lying(rng, told)
    packed = msgspec.msgpack.encode(told)
    listed: Any = rng.choice([*LISTS, [ENTRY]])
    for _ in range(rng.randrange(3)):
        listed = lying(rng, listed)
    array = msgspec.msgpack.encode(listed)
    if rng.random() < 0.3:
        packed, array = mutated(rng, packed), mutated(rng, array)
    checks: list[Callable[[], object]] = [
        lambda: replies.note(packed, rng.choice(SHAPES)),
        lambda: replies.listing_of(array, b"/workspace"),
        lambda: replies.statuses_of(array),
        lambda: _inside(replies.changes_of(array, b"/workspace")),
    ]
    if isinstance(told, dict) and all(isinstance(key, str) for key in told):
        checks.append(lambda: _used(replies.result(told, rng.choice(SHAPES))))
    for one in checks:
        try:
            one()
        except SandboxError:
            pass


def _used(told: Any) -> None:
    match told:
        case replies.Exit():
            replies.exit_of(told)
        case replies.EntryResult():
            entry = replies.entry_of(told.entry, b"/workspace/x")
            if entry.path != "/workspace/x" or entry.size < 0:
                raise Finding("an entry of the daemon's own choice")
        case replies.Exported():
            if len(replies.export_of(told, 10).skipped) > 100:
                raise Finding("a report without a limit")


def _inside(changes: list[Any]) -> None:
    for path in (getattr(change, name, None) for change in changes for name in ("path", "to")):
        if path is not None and (not (path + "/").startswith("/workspace/") or ".." in path.split("/")):
            raise Finding(f"a change outside: {path!r}")


# -- guest ---------------------------------------------------------------------------------


class Wire(asyncio.Transport):
    """A transport whose other end is this program."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closing = False

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.sent += map(bytes, list_of_data)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def take(self) -> bytes:
        data, self.sent = b"".join(self.sent), []
        return data


async def source() -> AsyncIterator[bytes]:
    yield b"x" * 100
    yield b"y" * 300_000


async def sink(data: bytes) -> None:
    pass


async def drained(events: Any) -> None:
    async for _ in events:
        pass


async def tunnelled(guest: Guest) -> None:
    async with await guest.dial(port=80) as tunnel:
        await tunnel.send(b"x")
        await tunnel.send_eof()
        while await tunnel.receive():
            pass


PROGRAM = Program([b"sh"], [], b"/", 60.0, "build-1")
OPERATIONS: list[Callable[[Guest], Coroutine[Any, Any, Any]]] = [
    lambda guest: drained(guest.exec([b"sh"], [(b"A", b"b")], b"/", 60.0)),
    lambda guest: drained(guest.open_exec(PROGRAM)),
    lambda guest: guest.start_exec(PROGRAM),
    lambda guest: drained(guest.attach_exec("build-1", 0, True)),
    lambda guest: drained(guest.attach_exec("build-1", 0, False)),
    lambda guest: guest.list_execs(),
    lambda guest: guest.exec_status("build-1"),
    lambda guest: guest.write_stdin("build-1", source()),
    lambda guest: guest.close_stdin("build-1"),
    lambda guest: guest.signal_exec("build-1", 9),
    lambda guest: guest.resize_exec("build-1", TerminalSize(1, 1)),
    lambda guest: guest.forget_exec("build-1"),
    lambda guest: guest.stat(b"/workspace/x"),
    lambda guest: guest.list_files(b"/workspace"),
    lambda guest: guest.read_file(b"/workspace/x", 1_000),
    lambda guest: drained(guest.open_file(b"/workspace/x", 0, None)),
    lambda guest: guest.store_file(b"/workspace/x", source(), 0o644),
    lambda guest: guest.make_directory(b"/workspace/x", 0o755),
    lambda guest: guest.remove_file(b"/workspace/x"),
    lambda guest: drained(guest.watch(b"/workspace")),
    lambda guest: guest.export_tar(b"/workspace", sink, 1_000),
    lambda guest: guest.import_tar(b"/workspace", source(), 1_000),
    tunnelled,
    lambda guest: guest.info(),
    lambda guest: guest.stats(),
    lambda guest: guest.sync(),
]


async def guest_round(rng: random.Random) -> None:
    guest, link = Guest(KEY), Wire()
    daemon = wire.Connection("daemon", KEY)
    guest.connection_made(link)
    daemon.receive(link.take())
    guest.data_received(b"".join(daemon.data_to_send()))
    daemon.receive(link.take())
    tasks = [asyncio.create_task(rng.choice(OPERATIONS)(guest)) for _ in range(rng.randrange(1, 8))]
    for _ in range(rng.randrange(1, 12)):
        await asyncio.sleep(0)
        daemon.receive(link.take())
        for number in list(daemon._streams):
            _answer(rng, daemon, number)
        data = b"".join(daemon.data_to_send())
        guest.data_received(mutated(rng, data) if data and rng.random() < 0.1 else data)
    guest.connection_lost(None)
    _, pending = await asyncio.wait(tasks, timeout=5)
    if pending:
        raise Finding(f"{len(pending)} operations wait for a connection that is gone")
    for task in tasks:
        error = task.exception()
        if error is not None and not isinstance(error, SandboxError):
            raise Finding(f"an error without a type: {error!r}") from error
    if guest._streams:
        raise Finding("streams are left")


def _answer(rng: random.Random, daemon: wire.Connection, number: int) -> None:
    """One thing that a daemon may do, true or not."""
    match rng.randrange(8):
        case 0 | 1:
            told = rng.choice(NOTES)
            daemon.send(number, 4, wire.pack_note(told if rng.random() < 0.7 else {"x": value(rng)}))
        case 2:
            daemon.send(number, rng.choice((1, 1, 1, 2)), rng.randbytes(rng.choice((1, 100, 3_000))))
        case 3:
            listed = rng.choice([*LISTS, [ENTRY]])
            daemon.send(number, 1, msgspec.msgpack.encode(listed if rng.random() < 0.5 else lying(rng, listed)))
        case 4:
            daemon.send_eof(number, rng.choice((1, 2, 4)))
        case 5 | 6:
            told = rng.choice(MAPS)
            told = lying(rng, told) if rng.random() < 0.3 else told
            daemon.end(number, told if isinstance(told, dict) else {"told": told})
        case _:
            daemon.consumed(number, rng.choice((1, 131_072)))


# -- rounds ------------------------------------------------------------------------------------


async def one(seed: str, number: int) -> str:
    """Run one round and return its kind."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choice(("connection", "connection", "replies", "replies", "guest"))
    if kind == "connection":
        connection_round(rng)
    elif kind == "replies":
        replies_round(rng)
    else:
        await guest_round(rng)
    return kind


async def main() -> int:
    """Run rounds until the time is over, or one alone; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", default=str(time.time_ns()))
    parser.add_argument("--only", type=int, help="run this round alone")
    options = parser.parse_args()
    counts: dict[str, int] = {}
    end, number = time.monotonic() + options.seconds, options.only or 0
    while True:
        try:
            kind = await one(options.seed, number)
        except Exception as error:  # whatever it is, it is the finding
            error.add_note(f"again with: python -m tests.fuzz.wire --seed {options.seed} --only {number}")
            raise
        counts[kind] = counts.get(kind, 0) + 1
        number += 1
        if options.only is not None or time.monotonic() > end:
            break
    print(f"seed {options.seed}: {number} rounds, {counts}, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
