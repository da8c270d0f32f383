"""Numbers and byte strings of the stored format: one writer, and a reader that refuses what the writer would not write.

``spec/store.md`` ("Numbers") is the source. The reader never trusts a length: every read is checked against what is
left.
"""

from __future__ import annotations

from agent_sandbox.errors import StoreDamagedError

MAX_UVARINT = (1 << 64) - 1


def uvarint(value: int) -> bytes:
    """Encode ``0 ≤ value < 2**64`` as unsigned LEB128; raises :class:`ValueError` outside that."""
    if not 0 <= value <= MAX_UVARINT:
        raise ValueError(f"{value} does not fit 64 bits")
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def svarint(value: int) -> bytes:
    """Encode a signed 64-bit number, zigzag; raises :class:`ValueError` outside that."""
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value} does not fit 64 bits")
    return uvarint((value << 1) ^ (value >> 63))


def block(data: bytes) -> bytes:
    """Encode a byte string: its length, then its bytes."""
    return uvarint(len(data)) + data


class Reader:
    """Read one object's canonical bytes from front to back; every fault is a :class:`StoreDamagedError`."""

    __slots__ = ("_data", "_end", "_what", "at")

    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._end = len(data)
        self._what = what
        self.at = 0

    def damaged(self, why: str) -> StoreDamagedError:
        """The error for a fault found here, by name of what was read."""
        return StoreDamagedError(f"a damaged {self._what}: {why}")

    @property
    def left(self) -> int:
        """How many bytes were not read yet."""
        return self._end - self.at

    def take(self, length: int) -> bytes:
        """The next ``length`` bytes."""
        at = self.at
        if length > self._end - at:
            raise self.damaged("it ends too early")
        self.at = at = at + length
        return self._data[at - length : at]

    def u8(self) -> int:
        """One byte."""
        if self.at >= self._end:
            raise self.damaged("it ends too early")
        value = self._data[self.at]
        self.at += 1
        return value

    def uvarint(self, most: int = MAX_UVARINT) -> int:
        """An unsigned number of at most ``most``."""
        data, at, end = self._data, self.at, self._end
        value = shift = 0
        while True:
            if at >= end:
                raise self.damaged("it ends too early")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise self.damaged("a number is too long")
        self.at = at
        if byte == 0 and shift:
            raise self.damaged("a number is not in its shortest form")
        if value > most:
            raise self.damaged(f"a number is above {most}")
        return value

    def svarint(self) -> int:
        """A signed 64-bit number."""
        value = self.uvarint()
        return (value >> 1) ^ -(value & 1)

    def block(self, least: int, most: int) -> bytes:
        """A byte string of ``least`` to ``most`` bytes."""
        length = self.uvarint(most)
        if length < least:
            raise self.damaged("a name or value is too short")
        return self.take(length)

    def finish(self) -> None:
        """Refuse bytes that are left over."""
        if self.at != self._end:
            raise self.damaged("there are bytes left over")
