"""One side of a connection, without I/O: bytes in, events out; calls in, bytes out.

Strategy
--------
``receive`` feeds the decoder and turns each frame into at most one event, checking it against the tables below.
Everything to be sent is collected and taken by ``data_to_send``; the caller owns the socket, the clock and the locks.
What the other side may not do becomes one last :class:`Violation` event, with GOAWAY queued: the caller sends what is
there and closes.

::

    connection   hello ──(other side's proof is right)──► open ──GOAWAY, error──► closed

    stream       (opener)     open ──END received / RESET either way──► gone
                 (responder)  arguments ──whole──► open ──END sent / RESET either way──► gone

A stream that is gone is forgotten: its id is below the highest one seen from its opener, which is how late frames are
told (discarded) from frames for streams that never were (an error). So memory is bounded by the streams that are open,
1,024 for each side, with 4 MiB of arguments at most for one, and what the caller has not yet taken.

Credit, for each stream and direction: ``_send`` counts down what this side may still send, ``_receive`` what the other
side may. The caller says with :meth:`consumed` what it has taken; credit goes back at half of the window.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from agent_sandbox.wire.frames import Frame, FrameDecoder, Kind, ProtocolError, encode_frame

GENERATION = 1
WINDOW = 262_144
MAX_CREDIT = 2_147_483_647
MAX_STREAMS = 1_024
MAX_ARGS = 4_194_304
MAX_HELLO = 1_024
NONCE_SIZE = 32
MAX_DATA = 65_535
"""Most bytes of one DATA frame beside its channel."""
CHANNEL_IN, CHANNEL_OUT, CHANNEL_ERR, CHANNEL_ARGS, CHANNEL_NOTE = 0, 1, 2, 3, 4

Role = Literal["client", "daemon"]


@dataclass(frozen=True, slots=True)
class Ready:
    """The other side has proved the key; streams may be opened."""

    generation: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The other side started an operation on a new stream."""

    stream: int
    op: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes on a channel. The receiver calls ``consumed(stream, len(data) + 1)`` once it has taken them.

    A note (channel 4) stays packed until its reader calls :func:`unpack_note`: as objects, maps may be some hundred
    times larger than the credit that holds their sender back.
    """

    stream: int
    channel: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Eof:
    """No more data comes on this channel."""

    stream: int
    channel: int


@dataclass(frozen=True, slots=True)
class Credit:
    """More may be sent on the stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The operation is over; ``result`` is its END map."""

    stream: int
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reset:
    """The other side gave the stream up."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a PING, with its 8 bytes."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class GoAway:
    """The other side is about to close."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Violation:
    """The other side broke the protocol, or could not prove the key. The connection is over; commands go on."""

    code: str
    message: str


Event = Ready | Opened | Data | Eof | Credit | Ended | Reset | Pong | GoAway | Violation


@dataclass(slots=True)
class _Stream:
    mine: bool
    send_credit: int = WINDOW
    receive_credit: int = WINDOW
    owed: int = 0
    op: str = ""
    args_missing: int = 0
    args: bytearray = field(default_factory=bytearray)
    eofs: int = 0


class Connection:
    """The protocol's state machine. ``role`` is this side's; ``key`` the sandbox's 32 bytes."""

    def __init__(
        self, role: Role, key: bytes, *, nonce: bytes | None = None, clock: Callable[[], int] | None = None
    ) -> None:
        self.role: Role = role
        self._key = key
        self._clock = clock
        self._nonce = nonce if nonce is not None else os.urandom(NONCE_SIZE)
        self._decoder = FrameDecoder()
        self._decoder.limit = MAX_HELLO
        self._out: list[bytes] = []
        self._streams: dict[int, _Stream] = {}
        self._last_mine = -1 if role == "client" else 0
        self._last_theirs = 0
        self._open_mine = 0
        self._open_theirs = 0
        self._transcript = b""
        self.ready = False
        self.closed = False
        self.generation = GENERATION
        if role == "client":
            self._send_map(Kind.HELLO, 0, {"generation": GENERATION, "nonce": self._nonce})

    # -- what comes in ----------------------------------------------------

    def receive(self, data: bytes) -> list[Event]:
        """Take bytes from the other side and return what they mean, in order."""
        events: list[Event] = []
        if self.closed:
            return events
        try:
            self._decoder.feed(data)
            while not self.closed and (frame := self._decoder.next_frame()) is not None:
                event = self._frame(frame)
                if event is not None:
                    events.append(event)
        except ProtocolError as error:
            self.go_away(error.code, str(error))
            events.append(Violation(error.code, str(error)))
        return events

    def _frame(self, frame: Frame) -> Event | None:
        kind = frame.kind
        if kind is Kind.GOAWAY:
            fields = _decode_map(frame.payload)
            self.closed = True
            return GoAway(_text(fields, "code"), _text(fields, "message"))
        if not self.ready:
            if kind is not Kind.HELLO:
                raise ProtocolError(f"{kind.name} before the hello was over")
            return self._hello(_decode_map(frame.payload))
        if kind is Kind.HELLO:
            raise ProtocolError("a second hello")
        if kind is Kind.PING or kind is Kind.PONG:
            if len(frame.payload) != 8:
                raise ProtocolError(f"{kind.name} needs 8 bytes")
            if kind is Kind.PONG:
                return Pong(frame.payload)
            self._out.append(encode_frame(Kind.PONG, 0, frame.payload))
            return None
        if kind is Kind.OPEN:
            return self._opened(frame)
        stream = self._streams.get(frame.stream)
        if kind is Kind.DATA:
            return self._data(frame, stream)
        return self._control(frame, stream)

    def _control(self, frame: Frame, stream: _Stream | None) -> Event | None:
        kind, number, payload = frame.kind, frame.stream, frame.payload
        if kind is Kind.EOF:
            if len(payload) != 1:
                raise ProtocolError("EOF needs one byte")
            if stream is None:
                self._late(number)
                return None
            bit = 1 << _channel(payload[0], to_responder=not stream.mine, arguments=False)
            if stream.eofs & bit:
                raise ProtocolError("a second EOF on a channel")
            if stream.args_missing:
                raise ProtocolError("EOF before the arguments were whole")
            stream.eofs |= bit
            return Eof(number, payload[0])
        if kind is Kind.CREDIT:
            if len(payload) != 4 or payload == b"\0\0\0\0":
                raise ProtocolError("CREDIT needs four bytes and more than nothing")
            if stream is None:
                self._late(number)
                return None
            stream.send_credit += int.from_bytes(payload, "big")
            if stream.send_credit > MAX_CREDIT:
                raise ProtocolError("more credit than 2,147,483,647")
            return Credit(number)
        fields = _decode_map(payload)
        if stream is None:
            self._late(number)
            return None
        if kind is Kind.END:
            if not stream.mine:
                raise ProtocolError("END from the side that opened the stream")
            self._forget(number)
            return Ended(number, fields)
        announced = not stream.args_missing
        reason = _text(fields, "reason")
        self._forget(number)
        return Reset(number, reason) if announced else None

    def _opened(self, frame: Frame) -> Event | None:
        number = frame.stream
        if number % 2 != (1 if self.role == "daemon" else 0) or number <= self._last_theirs:
            raise ProtocolError(f"stream {number} cannot be opened")
        if self._open_theirs >= MAX_STREAMS:
            raise ProtocolError("more than 1,024 open streams")
        fields = _decode_map(frame.payload)
        op, args, length = _text(fields, "op"), fields.get("args"), fields.get("args_len")
        self._last_theirs = number
        self._open_theirs += 1
        stream = self._streams[number] = _Stream(mine=False, op=op)
        if length is None and isinstance(args, dict) and all(isinstance(key, str) for key in args):
            return Opened(number, op, args)
        if args is not None or not isinstance(length, int) or isinstance(length, bool) or not 0 < length <= MAX_ARGS:
            raise ProtocolError("OPEN needs args, or args_len up to 4,194,304")
        stream.args_missing = length
        return None

    def _data(self, frame: Frame, stream: _Stream | None) -> Event | None:
        payload = frame.payload
        if len(payload) < 2:
            raise ProtocolError("DATA needs a channel and at least one byte")
        if stream is None:
            self._late(frame.stream)
            return None
        stream.receive_credit -= len(payload)
        if stream.receive_credit < 0:
            raise ProtocolError("DATA beyond the credit")
        channel = _channel(payload[0], to_responder=not stream.mine, arguments=True)
        if (channel == CHANNEL_ARGS) != bool(stream.args_missing):
            raise ProtocolError("arguments come first, on channel 3, and once")
        if stream.eofs & (1 << channel):
            raise ProtocolError("DATA after EOF")
        if channel != CHANNEL_ARGS:
            return Data(frame.stream, channel, payload[1:])
        size = len(payload) - 1
        if size > stream.args_missing:
            raise ProtocolError("more arguments than announced")
        stream.args += memoryview(payload)[1:]
        stream.args_missing -= size
        self.consumed(frame.stream, len(payload))
        if stream.args_missing:
            return None
        args, stream.args = _decode_map(bytes(stream.args)), bytearray()
        return Opened(frame.stream, stream.op, args)

    def _late(self, number: int) -> None:
        mine = number % 2 == (1 if self.role == "client" else 0)
        if number > (self._last_mine if mine else self._last_theirs):
            raise ProtocolError(f"stream {number} was never opened")

    # -- hello -------------------------------------------------------------

    def _hello(self, fields: dict[str, Any]) -> Event | None:
        if self.role == "client":
            generation, nonce = _generation(fields), _nonce(fields)
            if generation > GENERATION or generation < max(1, GENERATION - 1):
                raise ProtocolError(f"the daemon chose generation {generation}", "generation")
            self._seal(generation, self._nonce, nonce)
            self._check_proof(fields, "daemon")
            time = {} if self._clock is None else {"clock_ns": self._clock()}
            self._send_map(Kind.HELLO, 0, {"proof": self._proof("client"), **time})
            return self._open_up()
        if not self._transcript:
            newest, nonce = _generation(fields), _nonce(fields)
            generation = min(newest, GENERATION)
            if generation < max(1, GENERATION - 1, newest - 1):
                raise ProtocolError(f"no common generation: {newest} and {GENERATION}", "generation")
            self._seal(generation, nonce, self._nonce)
            hello = {"generation": generation, "nonce": self._nonce, "proof": self._proof("daemon")}
            self._send_map(Kind.HELLO, 0, hello)
            return None
        self._check_proof(fields, "client")
        return self._open_up()

    def _seal(self, generation: int, nonce_client: bytes, nonce_daemon: bytes) -> None:
        self.generation = generation
        self._transcript = generation.to_bytes(4, "big") + nonce_client + nonce_daemon

    def _proof(self, role: Role) -> bytes:
        return hmac.digest(self._key, role.encode() + self._transcript, hashlib.sha256)

    def _check_proof(self, fields: dict[str, Any], role: Role) -> None:
        proof = fields.get("proof")
        if not isinstance(proof, bytes) or not hmac.compare_digest(proof, self._proof(role)):
            raise ProtocolError("the proof of the key is wrong", "unauthorized")

    def _open_up(self) -> Ready:
        self.ready = True
        self._decoder.limit = 65_536
        return Ready(self.generation)

    # -- what goes out -----------------------------------------------------

    def data_to_send(self) -> list[bytes]:
        """Take the buffers that are to be sent, in order."""
        out, self._out = self._out, []
        return out

    @property
    def has_output(self) -> bool:
        """Whether :meth:`data_to_send` would give anything."""
        return bool(self._out)

    def can_open(self) -> bool:
        """Whether another stream may be opened now."""
        return self.ready and not self.closed and self._open_mine < MAX_STREAMS

    def open(self, op: str, args: Mapping[str, Any]) -> int:
        """Start an operation and return its stream id.

        Arguments above one frame are announced only: the caller takes them from :meth:`pending_args` and sends them
        on channel 3 as credit allows, before anything else.
        """
        if not self.can_open():
            raise RuntimeError("open() needs can_open()")
        number = self._last_mine = self._last_mine + 2
        self._open_mine += 1
        stream = self._streams[number] = _Stream(mine=True)
        packed = _encode_map({"op": op, "args": args})
        if len(packed) <= MAX_DATA:
            self._out.append(encode_frame(Kind.OPEN, number, packed))
            return number
        stream.args = bytearray(_encode_map(args))
        self._send_map(Kind.OPEN, number, {"op": op, "args_len": len(stream.args)})
        return number

    def pending_args(self, number: int) -> bytes:
        """Take the arguments that did not fit into OPEN; empty for most streams."""
        stream = self._streams.get(number)
        if stream is None or not stream.args:
            return b""
        args, stream.args = bytes(stream.args), bytearray()
        return args

    def send(self, number: int, channel: int, data: bytes | memoryview) -> int:
        """Send what the credit allows of ``data``; return how many bytes that was (0 when the stream is gone)."""
        stream, sent = self._streams.get(number), 0
        if stream is None or self.closed:
            return 0
        view = memoryview(data)
        while sent < len(view) and stream.send_credit >= 2:
            piece = view[sent : sent + min(MAX_DATA, stream.send_credit - 1)]
            header = (len(piece) + 1).to_bytes(4, "big") + b"\x03" + number.to_bytes(4, "big") + bytes((channel,))
            self._out.append(header + piece)
            stream.send_credit -= len(piece) + 1
            sent += len(piece)
        return sent

    def is_open(self, number: int) -> bool:
        """Whether the stream is still open on this side."""
        return number in self._streams and not self.closed

    def send_eof(self, number: int, channel: int) -> None:
        """Say that no more comes on a channel."""
        if self.is_open(number):
            self._out.append(encode_frame(Kind.EOF, number, bytes((channel,))))

    def consumed(self, number: int, size: int) -> None:
        """Say that ``size`` payload bytes (channel byte included) were taken; gives credit back in large pieces."""
        stream = self._streams.get(number)
        if stream is None or self.closed:
            return
        stream.owed += size
        if stream.owed * 2 >= WINDOW:
            self._out.append(encode_frame(Kind.CREDIT, number, stream.owed.to_bytes(4, "big")))
            stream.receive_credit += stream.owed
            stream.owed = 0

    def end(self, number: int, result: Mapping[str, Any]) -> None:
        """End an operation that the other side started."""
        if self.is_open(number):
            self._send_map(Kind.END, number, result)
            self._forget(number)

    def reset(self, number: int, reason: str) -> None:
        """Give a stream up at once; what it was doing stops."""
        if self.is_open(number):
            self._send_map(Kind.RESET, number, {"reason": reason})
            self._forget(number)

    def ping(self, payload: bytes) -> None:
        """Ask for a PONG with the same 8 bytes."""
        self._out.append(encode_frame(Kind.PING, 0, payload))

    def go_away(self, code: str, message: str) -> None:
        """Say why this side is about to close. Nothing is received or sent after it."""
        if not self.closed:
            self._send_map(Kind.GOAWAY, 0, {"code": code, "message": message[:500]})
            self.closed = True

    def _send_map(self, kind: Kind, number: int, fields: Mapping[str, Any]) -> None:
        self._out.append(encode_frame(kind, number, _encode_map(fields)))

    def _forget(self, number: int) -> None:
        if self._streams.pop(number).mine:
            self._open_mine -= 1
        else:
            self._open_theirs -= 1


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def _encode_map(fields: Mapping[str, Any]) -> bytes:
    return _encoder.encode(fields)


def _decode_map(payload: bytes) -> dict[str, Any]:
    try:
        value = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise ProtocolError("a control payload is not one MessagePack value") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ProtocolError("a control payload is not a map with string keys")
    return value


def pack_note(fields: Mapping[str, Any]) -> bytes:
    """The bytes of one note, to be sent whole in one DATA frame on channel 4."""
    return _encode_map(fields)


def unpack_note(data: bytes) -> dict[str, Any]:
    """The map of one DATA frame on channel 4. Raises :class:`ProtocolError` when it is none."""
    return _decode_map(data)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise ProtocolError(f"{name} is not text")
    return value[:1_000]


def _generation(fields: dict[str, Any]) -> int:
    value = fields.get("generation")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**32:
        raise ProtocolError("the hello names no generation")
    return value


def _nonce(fields: dict[str, Any]) -> bytes:
    value = fields.get("nonce")
    if not isinstance(value, bytes) or len(value) != NONCE_SIZE:
        raise ProtocolError("the hello has no nonce of 32 bytes")
    return value


def _channel(channel: int, *, to_responder: bool, arguments: bool) -> int:
    allowed = (CHANNEL_IN, CHANNEL_ARGS) if to_responder else (CHANNEL_OUT, CHANNEL_ERR, CHANNEL_NOTE)
    if channel not in allowed or (channel == CHANNEL_ARGS and not arguments):
        raise ProtocolError(f"channel {channel} in this direction")
    return channel
