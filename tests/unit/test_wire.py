"""The wire against its golden bytes, and as a state machine."""

import json
import os
import pathlib
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox import wire
from agent_sandbox.wire import Connection, Kind
from agent_sandbox.wire.connection import MAX_STREAMS, WINDOW

VECTORS = pathlib.Path(__file__).parents[2] / "spec" / "vectors" / "wire"
KEY = bytes(range(32))


def load(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text())


def take(connection: Connection) -> bytes:
    return b"".join(connection.data_to_send())


def pair(**daemon_options: Any) -> tuple[Connection, Connection]:
    client = Connection("client", KEY)
    daemon = Connection("daemon", KEY)
    daemon.receive(take(client))
    assert client.receive(take(daemon)) == [wire.Ready(1)]
    assert daemon.receive(take(client)) == [wire.Ready(1)]
    return client, daemon


@pytest.mark.parametrize("vector", load("frames")["frames"], ids=lambda v: v["name"])
def test_frames_are_the_golden_bytes(vector: dict[str, Any]) -> None:
    payload, data = bytes.fromhex(vector["payload_hex"]), bytes.fromhex(vector["frame_hex"])
    assert wire.encode_frame(Kind(vector["kind"]), vector["stream"], payload) == data
    decoder = wire.FrameDecoder()
    step = 1 if len(data) < 1_000 else 997
    frames = []
    for start in range(0, len(data), step):
        decoder.feed(data[start : start + step])
        frames += [frame] if (frame := decoder.next_frame()) else []
    assert frames == [wire.Frame(Kind(vector["kind"]), vector["stream"], payload)]


def test_hello_is_the_golden_exchange() -> None:
    golden = load("hello")
    key = bytes.fromhex(golden["key_hex"])
    client = Connection("client", key, nonce=bytes.fromhex(golden["nonce_client_hex"]))
    daemon = Connection("daemon", key, nonce=bytes.fromhex(golden["nonce_daemon_hex"]))
    first = take(client)
    assert first.hex() == golden["client_hello1_hex"]
    assert daemon.receive(first) == []
    second = take(daemon)
    assert second.hex() == golden["daemon_hello_hex"]
    assert client.receive(second) == [wire.Ready(1)]
    third = take(client)
    assert third.hex() == golden["client_hello2_hex"]
    assert not daemon.ready
    assert daemon.receive(third) == [wire.Ready(1)]


@pytest.mark.parametrize("step", [None, 1], ids=["whole", "bytewise"])
@pytest.mark.parametrize("vector", load("reject")["reject"], ids=lambda v: v["name"])
def test_what_must_be_refused_ends_the_connection_alone(vector: dict[str, Any], step: int | None) -> None:
    data = bytes.fromhex(vector["hex"])
    step = step if step and len(data) < 5_000 else len(data)
    role: Literal["client", "daemon"] = vector["role"]
    if vector["after_hello"]:
        client, daemon = pair()
        if role == "client":
            assert client.open("exec.start", {}) == 1
        receiver = client if role == "client" else daemon
    else:
        receiver = Connection(role, KEY)
    take(receiver)
    events: list[wire.Event] = []
    for start in range(0, len(data), step):
        events += receiver.receive(data[start : start + step])
    assert isinstance(events[-1], wire.Violation)
    assert receiver.closed
    said = take(receiver)
    goaway = said[said.rindex(b"\x0a\0\0\0\0") + 5 :]
    assert msgspec.msgpack.decode(goaway)["code"] in {"protocol", "generation"}
    assert receiver.receive(b"x" * 100) == []


def test_a_wrong_key_is_refused_by_both_sides() -> None:
    client, daemon = Connection("client", b"a" * 32), Connection("daemon", b"b" * 32)
    daemon.receive(take(client))
    assert client.receive(take(daemon)) == [wire.Violation("unauthorized", "the proof of the key is wrong")]
    other = Connection("client", b"b" * 32)
    daemon = Connection("daemon", b"b" * 32)
    daemon.receive(take(other))
    take(daemon)
    bad = wire.encode_frame(Kind.HELLO, 0, msgspec.msgpack.encode({"proof": b"x" * 32}))
    assert daemon.receive(bad) == [wire.Violation("unauthorized", "the proof of the key is wrong")]


def test_a_proof_does_not_serve_the_other_role() -> None:
    client, daemon = Connection("client", KEY), Connection("daemon", KEY)
    daemon.receive(take(client))
    hello = take(daemon)
    proof = msgspec.msgpack.decode(hello[9:])["proof"]
    echoed = wire.encode_frame(Kind.HELLO, 0, msgspec.msgpack.encode({"proof": proof}))
    assert daemon.receive(echoed) == [wire.Violation("unauthorized", "the proof of the key is wrong")]


def test_a_newer_peer_gets_the_common_generation() -> None:
    daemon = Connection("daemon", KEY)
    hello = {"generation": 2, "nonce": b"n" * 32, "something": {"new": 1}}
    assert daemon.receive(wire.encode_frame(Kind.HELLO, 0, msgspec.msgpack.encode(hello))) == []
    assert msgspec.msgpack.decode(take(daemon)[9:])["generation"] == 1


def test_credit_holds_the_sender_until_the_receiver_has_taken() -> None:
    client, daemon = pair()
    number = client.open("fs.read", {"path": b"/x"})
    daemon.receive(take(client))
    data = os.urandom(1_000_000)
    sent = daemon.send(number, 1, data)
    assert WINDOW - 8 < sent < WINDOW
    assert daemon.send(number, 1, data[sent:]) == 0
    events = client.receive(take(daemon))
    got = b"".join(event.data for event in events if isinstance(event, wire.Data))
    assert got == data[:sent]
    assert not client.has_output
    for event in events:
        assert isinstance(event, wire.Data)
        client.consumed(number, len(event.data) + 1)
    assert wire.Credit(number) in daemon.receive(take(client))
    assert daemon.send(number, 1, data[sent:]) > 0


def test_one_blocked_stream_does_not_hold_another() -> None:
    client, daemon = pair()
    first, second = client.open("a", {}), client.open("b", {})
    daemon.receive(take(client))
    assert daemon.send(first, 1, b"x" * 1_000_000) < WINDOW
    assert daemon.send(second, 1, b"hello") == 5
    daemon.end(second, {"ok": True})
    events = client.receive(take(daemon))
    assert events[-2:] == [wire.Data(second, 1, b"hello"), wire.Ended(second, {"ok": True})]


def test_long_arguments_arrive_whole() -> None:
    client, daemon = pair()
    argv = [b"x" * 300_000, b"\xff" * 700_000]
    number = client.open("exec.start", {"argv": argv})
    args = client.pending_args(number)
    events: list[wire.Event] = []
    while args:
        args = args[client.send(number, 3, args) :]
        events += daemon.receive(take(client))
        client.receive(take(daemon))
    assert events == [wire.Opened(number, "exec.start", {"argv": argv})]
    assert daemon.send(number, 1, b"out") == 3


def test_frames_for_a_stream_that_is_over_are_discarded() -> None:
    client, daemon = pair()
    number = client.open("exec.start", {})
    daemon.receive(take(client))
    daemon.send(number, 1, b"late")
    daemon.end(number, {"code": 0})
    late = take(daemon)
    client.reset(number, "gone")
    assert client.receive(late) == []
    assert daemon.receive(take(client)) == []
    assert not client.closed
    assert not daemon.closed


def test_reset_tells_the_responder() -> None:
    client, daemon = pair()
    number = client.open("exec.start", {})
    client.reset(number, "the client went away")
    assert daemon.receive(take(client)) == [
        wire.Opened(number, "exec.start", {}),
        wire.Reset(number, "the client went away"),
    ]
    assert daemon.send(number, 1, b"x") == 0


def test_streams_are_limited_and_given_back() -> None:
    client, daemon = pair()
    numbers = [client.open("a", {}) for _ in range(MAX_STREAMS)]
    assert not client.can_open()
    assert len(daemon.receive(take(client))) == MAX_STREAMS
    one_more = wire.encode_frame(Kind.OPEN, numbers[-1] + 2, msgspec.msgpack.encode({"op": "a", "args": {}}))
    daemon.end(numbers[0], {})
    client.receive(take(daemon))
    assert client.can_open()
    assert daemon.receive(one_more) == [wire.Opened(numbers[-1] + 2, "a", {})]
    too_many = wire.encode_frame(Kind.OPEN, numbers[-1] + 4, msgspec.msgpack.encode({"op": "a", "args": {}}))
    assert isinstance(daemon.receive(too_many)[-1], wire.Violation)


def test_a_note_comes_between_two_pieces_of_output_and_costs_credit() -> None:
    client, daemon = pair()
    number = client.open("exec.attach", {"id": "a"})
    daemon.receive(take(client))
    note = wire.pack_note({"gap": 7})
    assert daemon.send(number, 1, b"one") == 3
    assert daemon.send(number, wire.CHANNEL_NOTE, note) == len(note)
    assert daemon.send(number, 2, b"two") == 3
    events = client.receive(take(daemon))
    assert events == [wire.Data(number, 1, b"one"), wire.Data(number, 4, note), wire.Data(number, 2, b"two")]
    assert wire.unpack_note(note) == {"gap": 7}
    left = daemon.send(number, 1, b"x" * WINDOW)
    assert left == WINDOW - 4 - (len(note) + 1) - 4 - -(-WINDOW // 65_536)


@pytest.mark.parametrize("note", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\x01\x02", b"\x80\x80", b"\x81\xa3gap"])
def test_a_note_that_is_not_one_map_is_refused(note: bytes) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.unpack_note(note)


def test_ping_is_answered_and_goaway_ends() -> None:
    client, daemon = pair()
    client.ping(b"abcdefgh")
    daemon.receive(take(client))
    assert client.receive(take(daemon)) == [wire.Pong(b"abcdefgh")]
    daemon.go_away("shutdown", "bye")
    assert client.receive(take(daemon)) == [wire.GoAway("shutdown", "bye")]
    assert client.closed
    assert not client.can_open()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.binary(max_size=2_000))
def test_cut_anywhere_gives_the_same_events(cuts: list[int], blob: bytes) -> None:
    client, daemon = pair()
    number = client.open("fs.write", {"path": b"/workspace/x", "mode": 0o644})
    client.send(number, 0, blob or b"-")
    client.send_eof(number, 0)
    client.ping(b"12345678")
    client.open("sys.info", {})
    data = take(client)
    whole_client, whole = pair()
    expected = whole.receive(data)
    events: list[wire.Event] = []
    position = index = 0
    while position < len(data):
        step = cuts[index % len(cuts)]
        events += daemon.receive(data[position : position + step])
        position, index = position + step, index + 1
    assert events == expected
    assert take(daemon) == take(whole)


@given(st.binary(max_size=4_000))
def test_noise_never_raises(noise: bytes) -> None:
    client, daemon = pair()
    client.open("exec.start", {})
    take(client)
    for receiver in (client, daemon, Connection("daemon", KEY), Connection("client", KEY)):
        receiver.receive(noise)
