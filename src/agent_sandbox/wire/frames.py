"""Frames: cutting a byte stream into ``length ‖ kind ‖ stream ‖ payload`` and back. See ``spec/wire.md``.

The decoder copies each payload once and holds at most one unfinished frame (64 KiB and nine bytes): a length above the
cap is refused as soon as its four bytes are there.

When changing this: the bytes are fixed by ``spec/vectors/wire``; a new kind is a new generation.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

MAX_PAYLOAD = 65_536
HEADER = struct.Struct(">IBI")


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    OPEN = 2
    DATA = 3
    EOF = 4
    CREDIT = 5
    END = 6
    RESET = 7
    PING = 8
    PONG = 9
    GOAWAY = 10


KINDS = {int(kind): kind for kind in Kind}
CONNECTION_KINDS = frozenset({Kind.HELLO, Kind.PING, Kind.PONG, Kind.GOAWAY})


class ProtocolError(Exception):
    """The other side sent what the protocol does not allow. The connection cannot go on; commands do."""

    def __init__(self, message: str, code: str = "protocol") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it was cut from the stream; only header and size have been checked."""

    kind: Kind
    stream: int
    payload: bytes


def encode_frame(kind: Kind, stream: int, payload: bytes) -> bytes:
    """Return the bytes of one frame. Raises ``ValueError`` above the largest payload: the caller has to cut."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a payload of {len(payload)} bytes does not fit into a frame")
    return HEADER.pack(len(payload), kind, stream) + payload


class FrameDecoder:
    """Cuts bytes into frames, however they arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.limit = MAX_PAYLOAD
        """The largest payload accepted now; the connection lowers it until the hello is over."""

    def feed(self, data: bytes) -> None:
        """Take bytes from the stream."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or ``None`` until more bytes come. Raises :class:`ProtocolError`."""
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        length = int.from_bytes(buffer[:4], "big")
        if length > self.limit:
            raise ProtocolError(f"a payload of {length} bytes is above the limit of {self.limit}")
        if len(buffer) < HEADER.size:
            return None
        _, number, stream = HEADER.unpack_from(buffer)
        kind = KINDS.get(number)
        if kind is None:
            raise ProtocolError(f"unknown kind {number}")
        if (kind in CONNECTION_KINDS) != (stream == 0):
            raise ProtocolError(f"{kind.name} on stream {stream}")
        end = HEADER.size + length
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            payload = bytes(view[HEADER.size : end])
        del buffer[:end]
        return Frame(kind, stream, payload)
