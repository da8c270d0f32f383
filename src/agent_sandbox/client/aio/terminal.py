"""A terminal in a sandbox, with coroutines: as :mod:`agent_sandbox.client.terminal`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from agent_sandbox import models
from agent_sandbox.client.http import AsyncHttp
from agent_sandbox.client.terminal import (
    FRAME_BYTES,
    Frames,
    connection_options,
    needs_extra,
    resize_frame,
    translated,
)

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection


class AsyncTerminal:
    """A command on a terminal. One task may read while another writes; as a context manager it is closed at the end.

    ``exit`` is the ``exit`` event once :meth:`read` has returned nothing.
    """

    def __init__(self, socket: ClientConnection, address: str, held: AsyncExitStack) -> None:
        self._socket = socket
        self._address = address
        self._held = held
        self._frames = Frames()

    @classmethod
    async def open(cls, http: AsyncHttp, path: str) -> Self:
        """Connect to a terminal's path."""
        try:
            from websockets.asyncio.client import connect, unix_connect
        except ModuleNotFoundError as error:
            raise needs_extra(error) from error

        target, uri, options = connection_options(http.target, path)
        with translated(target.address):
            async with AsyncExitStack() as stack:
                made = connect(uri, **options) if target.uds is None else unix_connect(target.uds, uri, **options)
                socket = await stack.enter_async_context(made)
                return cls(socket, target.address, stack.pop_all())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def id(self) -> str:
        """The id of the command, once the server has told it; empty before."""
        return self._frames.id

    @property
    def exit(self) -> models.ExecOutputEvent | None:
        """How the command ended, or ``None`` while that is not known."""
        return self._frames.exit

    @property
    def missed(self) -> int:
        """How many bytes of output an attached terminal was too slow to get."""
        return self._frames.missed

    async def read(self) -> bytes:
        """Return the next output; nothing at the end. Raises the server's reason, or :class:`ReplyLostError`."""
        from websockets.exceptions import ConnectionClosed

        while True:
            try:
                frame = await self._socket.recv()
            except ConnectionClosed as error:
                self._frames.closed(self._address, error)
                return b""
            if data := self._frames.take(frame):
                return data

    async def write(self, data: bytes) -> None:
        """Type bytes: byte 3 interrupts, byte 4 ends input. :class:`ReplyLostError` when the terminal has gone."""
        with translated(self._address):
            for at in range(0, len(data), FRAME_BYTES):
                await self._socket.send(data[at : at + FRAME_BYTES])

    async def resize(self, rows: int, cols: int) -> None:
        """Change the terminal's size."""
        with translated(self._address):
            await self._socket.send(resize_frame(rows, cols))

    async def close(self) -> None:
        """Close the connection. A command that was started with it ends."""
        await self._held.aclose()
