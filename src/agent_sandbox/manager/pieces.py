"""An archive from a thread to the event loop, in pieces: bounded, and given up for a reader that takes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from agent_sandbox.errors import BackendError

ARCHIVE_BLOCKS = 8
"""Pieces that wait for their reader: 2 MiB of each archive."""
_BLOCK = 1 << 18
STALL_SECONDS = 60.0


class Pieces:
    """What an archive is written to: pieces of some size for another thread, until nobody wants them any more."""

    def __init__(self, put: Callable[[bytes], None], room: threading.Semaphore, ended: threading.Event) -> None:
        self._put = put
        self._room = room
        self._ended = ended
        self._buffer = bytearray()

    def write(self, data: bytes) -> int:
        self._buffer += data
        if len(self._buffer) >= _BLOCK:
            self.flush()
        return len(data)

    def flush(self) -> None:
        if not self._buffer:
            return
        latest = time.monotonic() + STALL_SECONDS
        while not self._room.acquire(timeout=0.5):
            if self._ended.is_set() or time.monotonic() > latest:
                raise BackendError("nobody reads the archive any more")
        self._put(bytes(self._buffer))
        self._buffer.clear()
