"""Replies that go out piece by piece: newline-delimited JSON, files, archives.

A stream's reply begins with its first piece, so that what fails before is an ordinary error with its status; when
nothing has come within a second, the headers of a stream of lines go out alone. Once they have, an error can no longer
be a status: lines end with one that says ``error``, and every stream is cut off without the end mark of its encoding.
So no client takes a broken stream for a finished one.

A client that goes away ends the stream: its generator is closed, or its coroutine cancelled. Pieces go out at the
client's speed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from agent_sandbox.errors import InvalidRequestError, SandboxError
from agent_sandbox.server.codec import encode

log = logging.getLogger("agent_sandbox.server")

_T = TypeVar("_T")

HEADERS_WITHIN_SECONDS = 1.0
"""How long a silent stream of lines may hold back the headers: start errors show well within it."""

BODY_STALL_SECONDS = 60.0
"""How long an upload may bring nothing: longer than networks fail and recover; no file is kept open for ever."""

BINARY: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
NDJSON: dict[str, Any] = {"application/x-ndjson": {"schema": {"type": "string"}}}


class Abandonment:
    """Cancel the body of a ``with`` when the client goes away; it then ends in :class:`ClientDisconnect`.

    The request must have been read to its end before.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = self._left = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.ensure_future(self._disconnect())
        self._watch.add_done_callback(self._notice)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._watch.cancel()
        if self._left and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            raise ClientDisconnect from None

    async def _disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _notice(self, watch: asyncio.Future[None]) -> None:
        if not self._over and not watch.cancelled():
            self._left = True
            self._task.cancel()


class Streamed(StreamingResponse):
    """A reply whose pieces :meth:`produce` sends; see the module for how it begins and ends."""

    def __init__(
        self, *, status: int = 200, media_type: str = "application/x-ndjson", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__((), status, headers, media_type)
        self._started = self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        with Abandonment(receive):
            try:
                await self.produce()
                if not self._ended:
                    await self.last(b"")
            except SandboxError as error:
                if not self._started:
                    raise
                log.warning("a stream broke: %s: %s", error.code, error.message)
                await self.broken(error)

    async def produce(self) -> None:
        """Send everything by :meth:`piece`."""
        raise NotImplementedError

    async def broken(self, error: SandboxError) -> None:
        """Say why the stream ends here, where its format can."""

    async def begin(self) -> None:
        """Send the headers, if they have not gone out yet."""
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def piece(self, data: bytes | memoryview) -> None:
        """Send a piece, behind the headers."""
        if not self._started:
            await self.begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def last(self, data: bytes) -> None:
        """Send the last piece; a stream that ends without it is ended by an empty one."""
        await self.begin()
        self._ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def first(self, items: AsyncGenerator[_T, None]) -> _T | None:
        """Wait for the first item; when it is late, the headers go out before it. ``None`` when there is none."""
        first = asyncio.ensure_future(anext(items, None))
        try:
            await asyncio.wait({first}, timeout=HEADERS_WITHIN_SECONDS)
            if not first.done():
                await self.begin()
            return await first
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait({first})


class LineStream(Streamed):
    """Lines of JSON, of which an ``error`` line is the last when the stream breaks."""

    async def broken(self, error: SandboxError) -> None:
        await self.piece(line({"type": "error", "code": error.code, "message": error.message}))


class PieceStream(Streamed):
    """The pieces of a generator as they come."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], *, media_type: str = "application/octet-stream", **options: Any
    ) -> None:
        super().__init__(media_type=media_type, **options)
        self._pieces = pieces

    async def produce(self) -> None:
        async with aclosing(self._pieces) as pieces:
            async for data in pieces:
                await self.piece(data)


def line(value: Mapping[str, Any]) -> bytes:
    """Encode one line."""
    # ASCII, since clients may split at what Unicode calls a line (U+0085, U+2028), which JSON allows within a string.
    data = encode(value)
    return (data if data.isascii() else json.dumps(value, separators=(",", ":")).encode("ascii")) + b"\n"


async def uploaded(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body as it comes. :class:`InvalidRequestError` when nothing comes for a minute.

    The gate bounds its size; a client that goes away raises :class:`ClientDisconnect`.
    """
    stream = request.stream()
    while True:
        async with _awake():
            data = await anext(stream, None)
        if data is None:
            return
        if data:
            yield data


async def whole(request: Request) -> bytes:
    """Read a body that is known to be small, within the time that :func:`uploaded` gives one piece."""
    async with _awake():
        return await request.body()


@asynccontextmanager
async def _awake() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(BODY_STALL_SECONDS):
            yield
    except TimeoutError:
        raise InvalidRequestError(f"the body brought nothing for {BODY_STALL_SECONDS:g} s; send it again") from None
