"""How a connection begins on a channel that outlives its clients (``spec/wire.md``, "Channels without connections").

A machine's serial port is one stream of bytes for the machine's whole life: behind what an earlier client had half sent
comes what the next one sends, and the daemon may still be sending what nobody wants any more. So a connection begins
with a magic number and a fresh nonce, and what comes before the daemon's echo of both is thrown away. The magic means a
beginning wherever the daemon meets it; so where later bytes look like its first 15, one more is put behind them, which
the daemon takes out. No I/O here; the daemon's side is trusted with nothing: what comes before an echo is bounded, and
kept nowhere.
"""

from __future__ import annotations

import enum
import secrets

from agent_sandbox.wire import ProtocolError

MAGIC = b"\xf5sandboxd-begin\n"
"""16 bytes. None but the first is 0xF5, so an occurrence overlaps no other."""
NONCE_SIZE = 16
MAX_NOISE = 64 * 1024 * 1024
"""What may come before an echo: the daemon's queue (4 MiB), the kernels' and the monitor's buffers, many times over."""
_PREFIX = MAGIC[:-1]
_STUFF = b"\0"


class Carrier(enum.Enum):
    """What a connection to a daemon goes over."""

    SOCKET = "a socket of the host's"
    PORT = "a machine's serial port, which outlives its clients"
    VSOCK = "a socket into a machine"


class Channel:
    """One connection's beginning, and the client's bytes behind it."""

    def __init__(self, *, nonce: bytes | None = None) -> None:
        self._nonce = secrets.token_bytes(NONCE_SIZE) if nonce is None else nonce
        self._echo = MAGIC + self._nonce
        self._noise = 0
        self._tail = b""
        self._matched = 0
        self.open = False

    def begin(self) -> bytes:
        """What is sent first. Nothing else is sent before the channel is ``open``."""
        return MAGIC + self._stuffed(self._nonce)

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the daemon; return those of the connection.

        :class:`ProtocolError` when there is more before the echo than anything could have left there.
        """
        if self.open:
            return data
        data = self._tail + data
        at = data.find(self._echo)
        if at >= 0:
            self.open, self._tail = True, b""
            return data[at + len(self._echo) :]
        kept = min(len(data), len(self._echo) - 1)
        self._noise += len(data) - kept
        self._tail = data[len(data) - kept :]
        if self._noise > MAX_NOISE:
            raise ProtocolError("the daemon does not answer the beginning of a connection and sends other bytes")
        return b""

    def send(self, buffers: list[bytes]) -> list[bytes]:
        """The same bytes as the daemon takes them."""
        return [self._stuffed(buffer) for buffer in buffers]

    def _stuffed(self, data: bytes) -> bytes:
        """Put one byte behind whatever completes the first 15 of the magic, also over the borders of pieces."""
        head = b""
        if self._matched and data:
            missing = _PREFIX[self._matched :]
            if data.startswith(missing):
                head, data, self._matched = missing + _STUFF, data[len(missing) :], 0
            elif missing.startswith(data):
                self._matched += len(data)
                return data
            else:
                self._matched = 0
        if MAGIC[0] not in data[-len(_PREFIX) + 1 :]:
            return head + data.replace(_PREFIX, _PREFIX + _STUFF)
        whole = data.replace(_PREFIX, _PREFIX + _STUFF)
        last = data.rfind(MAGIC[:1])
        if len(data) - last < len(_PREFIX) and _PREFIX.startswith(data[last:]):
            self._matched = len(data) - last
        return head + whole
