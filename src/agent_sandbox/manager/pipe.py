"""A byte stream from the event loop to a thread: bounded, and never waited for longer than its sender earns.

The sender is a sandbox, which may stop in the middle, or send a byte a minute and so keep a thread, a connection and
the store's garbage for as long as it likes. So the reader counts how long it waited in all, and gives up beyond
``PATIENCE_SECONDS`` and what the bytes that came are worth at ``SLOWEST``. Waiting looks every half second whether
anybody still wants the result.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

from agent_sandbox.errors import BackendError
from agent_sandbox.store.ports import Progress

PATIENCE_SECONDS = 120.0
SLOWEST = 1 << 18
"""Bytes in a second: what every sandbox manages on a busy machine."""
_ROOM = 4 << 20
_LOOK_SECONDS = 0.5


class Pipe:
    """One stream. :meth:`write` and :meth:`end` are the event loop's; :meth:`reader` is one thread's."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._room = asyncio.Event()
        self._waits = False
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None

    async def write(self, data: bytes) -> None:
        """Take the next piece; waits while there is no room. :class:`BackendError` once nobody reads any more."""
        while True:
            with self._changed:
                if self._closed:
                    raise BackendError("nobody reads the workspace any more")
                if self._size < _ROOM:
                    if data:
                        self._pieces.append(data)
                        self._size += len(data)
                        self._changed.notify()
                    return
                self._room.clear()
                self._waits = True
            await self._room.wait()

    def end(self, error: BaseException | None = None) -> None:
        """Say that no more comes; the reader gets ``error`` in place of an end."""
        with self._changed:
            self._ended = True
            if isinstance(error, asyncio.CancelledError):
                error = BackendError("the reading of the workspace was given up")
            self._error = error
            self._changed.notify()

    def close(self) -> None:
        """Let the writer go, and the reader when nothing more can come."""
        with self._changed:
            self._closed = True
            self._wake()

    def reader(self, progress: Progress) -> PipeReader:
        """Give the end that a thread reads. ``progress`` is called while it waits, and may raise to end that."""
        return PipeReader(self, progress)

    def _wake(self) -> None:
        if self._waits:
            self._waits = False
            self._loop.call_soon_threadsafe(self._room.set)


class PipeReader:
    """The stream as the store reads it (:class:`agent_sandbox.store.tarread.Stream`)."""

    def __init__(self, pipe: Pipe, progress: Progress) -> None:
        self._pipe = pipe
        self._progress = progress
        self._waited = 0.0
        self._taken = 0

    def read(self, size: int, /) -> bytes:
        """Return some bytes, at most ``size``; none at the end. Raises what :meth:`Pipe.end` was given."""
        pipe = self._pipe
        with pipe._changed:
            while not pipe._pieces and not pipe._ended:
                self._wait()
            if not pipe._pieces:
                if pipe._error is not None:
                    raise pipe._error
                return b""
            piece = pipe._pieces.popleft()
            if len(piece) > size:
                pipe._pieces.appendleft(piece[size:])
                piece = piece[:size]
            pipe._size -= len(piece)
            pipe._wake()
        self._taken += len(piece)
        return piece

    def _wait(self) -> None:
        self._progress(0, 0, 0, 0)
        if self._waited > PATIENCE_SECONDS + self._taken / SLOWEST:
            raise BackendError("the sandbox sends its workspace too slowly, or not at all")
        begun = time.monotonic()
        self._pipe._changed.wait(_LOOK_SECONDS)
        self._waited += time.monotonic() - begun
