"""A connection to a server inside, carried over one stream."""

from __future__ import annotations

from typing import Any, Self

from agent_sandbox import wire
from agent_sandbox.errors import BackendError, ConflictError, ConnectionLostError
from agent_sandbox.guest import replies
from agent_sandbox.guest.connection import Stream


class GuestTunnel:
    """The tunnel of ``net.dial``: see :class:`agent_sandbox.backends.base.Tunnel` for what it promises."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._received_all = False
        self._sent_all = False
        self._closed = False

    async def receive(self) -> bytes:
        """The next bytes; empty at the end of this direction."""
        while not self._received_all:
            try:
                event = await self._stream.next(None)
            except ConnectionLostError:
                if not self._closed:
                    raise
                break
            match event:
                case wire.Data(channel=wire.CHANNEL_OUT):
                    return event.data
                case wire.Data():
                    raise BackendError("the sandbox's daemon sent data of a tunnel on another channel")
                case wire.Eof(channel=wire.CHANNEL_OUT):
                    self._received_all = True
                case wire.Ended():
                    self._received_all = True
                    replies.result(event.result, dict[str, Any])
                case _:
                    pass
        return b""

    async def send(self, data: bytes) -> None:
        """Send all of it, as the server inside takes it."""
        if self._sent_all or self._closed or not await self._stream.send(wire.CHANNEL_IN, data, None):
            raise ConflictError("the connection to the server inside the sandbox is closed")

    async def send_eof(self) -> None:
        """End this side's direction."""
        if not self._sent_all and not self._closed:
            self._sent_all = True
            self._stream.send_eof(wire.CHANNEL_IN)

    def close(self) -> None:
        """Close both directions at once."""
        if not self._closed:
            self._closed = True
            self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
