"""Connections on a port that outlives its clients: beginnings, noise, stalls and floods."""

import asyncio
import itertools
import json
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox import wire
from agent_sandbox.errors import BackendError
from agent_sandbox.guest import Carrier, Guest, channel
from agent_sandbox.guest.channel import MAGIC, Channel

VECTORS = pathlib.Path(__file__).parents[2] / "spec" / "vectors" / "wire"
GOLDEN = json.loads((VECTORS / "channel.json").read_text())
KEY = os.urandom(32)
INFO = {"version": "9", "pid": 1, "uid": 1000, "gid": 1000, "execs": 0, "uptime_ms": 5}


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    for start, end in itertools.pairwise([0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]):
        yield data[start:end]


def stuffed(data: bytes) -> bytes:
    """What a client sends for these bytes, written from the page alone."""
    sent = bytearray()
    for byte in data:
        sent.append(byte)
        if sent.endswith(MAGIC[:15]):
            sent.append(0)
    return bytes(sent)


class Port:
    """A daemon behind a port, as simple as it can be: everything received is looked through from its start."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = bytearray()
        self.begun = 0
        self.wire: wire.Connection | None = None
        self.fed = 0
        self.proof: dict[str, Any] = {}

    async def nonce(self) -> bytes:
        """Wait for the next beginning."""
        while (at := self.received.find(MAGIC, self.begun)) < 0 or len(self.received) < at + 32:
            self.received += await asyncio.get_running_loop().sock_recv(self.sock, 4_096)
        self.begun = at + 32
        return bytes(self.received[at + 16 : at + 32])

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def serve(self) -> None:
        """Answer `sys.info` on the connection that has begun, until it is closed."""
        daemon = wire.Connection("daemon", KEY)
        data = bytes(self.received[self.begun :])
        while True:
            for event in daemon.receive(data.replace(MAGIC[:15] + b"\0", MAGIC[:15])):
                if isinstance(event, wire.Opened):
                    daemon.end(event.stream, INFO)
            for piece in daemon.data_to_send():
                await self.say(piece)
            if not (data := await asyncio.get_running_loop().sock_recv(self.sock, 65_536)):
                return
            if not daemon.ready:
                fields = msgspec.msgpack.decode(data[9 : 9 + int.from_bytes(data[:4], "big")])
                self.proof = fields if "proof" in fields else {}


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Port]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    yield ours, Port(theirs)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("case", GOLDEN["channel"], ids=lambda case: case["name"])
@pytest.mark.parametrize("step", [1, 3, 4_096])
def test_a_beginning_and_what_follows_are_the_golden_bytes(case: dict[str, str], step: int) -> None:
    assert bytes.fromhex(GOLDEN["magic_hex"]) == MAGIC
    begun = Channel(nonce=bytes.fromhex(case["nonce_hex"]))
    assert begun.begin().hex() == case["begin_hex"]
    assert begun.receive(bytes.fromhex(case["echo_hex"])) == b""
    assert begun.open
    data = bytes.fromhex(case["bytes_hex"])
    sent = begun.send([data[at : at + step] for at in range(0, len(data), step)])
    assert b"".join(sent).hex() == case["sent_hex"]


def test_the_hello_with_a_clock_is_the_golden_one() -> None:
    golden = json.loads((VECTORS / "hello.json").read_text())
    client = wire.Connection(
        "client",
        bytes.fromhex(golden["key_hex"]),
        nonce=bytes.fromhex(golden["nonce_client_hex"]),
        clock=lambda: golden["clock_ns"],
    )
    client.data_to_send()
    client.receive(bytes.fromhex(golden["daemon_hello_hex"]))
    assert b"".join(client.data_to_send()).hex() == golden["client_hello2_with_clock_hex"]


magical = st.lists(st.one_of(st.binary(max_size=9), st.sampled_from([MAGIC, MAGIC[:15], MAGIC[:9], MAGIC[9:]])))


@given(parts=magical, cuts=st.lists(st.integers(0, 500)))
def test_how_bytes_are_cut_changes_nothing_that_is_sent(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    begun = Channel(nonce=b"n" * 16)
    begun.begin()
    assert b"".join(begun.send(list(pieces(data, cuts)))) == stuffed(data)


@given(noise=magical, later=magical, cuts=st.lists(st.integers(0, 500)))
def test_what_comes_before_the_echo_is_thrown_away(noise: list[bytes], later: list[bytes], cuts: list[int]) -> None:
    begun = Channel(nonce=bytes(range(100, 116)))
    data = b"".join([*noise, begun.begin(), *later])
    assert b"".join(begun.receive(piece) for piece in pieces(data, cuts)) == b"".join(later)
    assert begun.open


async def test_a_connection_begins_behind_half_a_frame_and_an_older_echo(ends: tuple[socket.socket, Port]) -> None:
    ours, port = ends

    async def daemon() -> None:
        nonce = await port.nonce()
        assert len(port.received) == 32, "nothing is sent before the echo"
        await port.say(wire.encode_frame(wire.Kind.DATA, 1, b"\x01" + b"x" * 5_000)[:4_000])
        await port.say(MAGIC + b"o" * 16 + MAGIC[:7])
        await asyncio.sleep(0)
        await port.say((MAGIC + nonce)[:20])
        await asyncio.sleep(0)
        await port.say((MAGIC + nonce)[20:])
        await port.serve()

    before = time.time_ns()
    task = asyncio.create_task(daemon())
    guest = await Guest.connect(ours, KEY, carrier=Carrier.PORT)
    assert (await guest.info()).version == "9"
    guest.close()
    await task
    assert before <= port.proof["clock_ns"] <= time.time_ns()


async def test_a_socket_gets_neither_a_beginning_nor_a_clock(ends: tuple[socket.socket, Port]) -> None:
    ours, port = ends
    task = asyncio.create_task(port.serve())
    guest = await Guest.connect(ours, KEY)
    guest.close()
    await task
    assert list(port.proof) == ["proof"]
    assert not port.received


async def test_a_daemon_without_a_key_answers_nothing(ends: tuple[socket.socket, Port]) -> None:
    ours, port = ends
    with pytest.raises(BackendError, match=r"did not answer within 0\.05 s"):
        await Guest.connect(ours, KEY, carrier=Carrier.PORT, timeout=0.05)
    assert len(await port.nonce()) == 16


async def test_a_wrong_echo_is_no_echo(ends: tuple[socket.socket, Port]) -> None:
    ours, port = ends

    async def daemon() -> None:
        nonce = await port.nonce()
        await port.say(MAGIC + bytes(byte ^ 1 for byte in nonce))

    task = asyncio.create_task(daemon())
    with pytest.raises(BackendError, match="did not answer"):
        await Guest.connect(ours, KEY, carrier=Carrier.PORT, timeout=0.2)
    await task


async def test_a_flood_before_the_echo_ends_the_connection(
    ends: tuple[socket.socket, Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_NOISE", 1 << 20)
    ours, port = ends
    sent = 0

    async def daemon() -> None:
        nonlocal sent
        with pytest.raises(OSError):  # noqa: PT012 - until the other side has had enough
            while True:
                await port.say(MAGIC * 1_000)
                sent += 16_000

    task = asyncio.create_task(daemon())
    with pytest.raises(BackendError, match=r"refused the connection .*sends other bytes"):
        await Guest.connect(ours, KEY, carrier=Carrier.PORT, timeout=60)
    await task
    # Beyond the limit there is only what the sockets' buffers took.
    assert sent < 4 << 20


def test_noise_is_kept_nowhere() -> None:
    begun = Channel(nonce=b"n" * 16)
    for _ in range(1_000):
        assert begun.receive(MAGIC * 64) == b""
    assert len(begun._tail) < 32
