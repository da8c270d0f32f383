"""Removing what is left of ended environments, in the background, again and again until it is gone.

What cannot be removed now (a runtime that fails, a mount that is busy, a disk that is read-only) is tried again after
a pause that doubles, so that a long-lived server does not collect what one bad moment left. Whatever is left when the
server ends is found by the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Most of what is in the way passes in a moment; what does not costs one attempt a minute."""


class Removals:
    """The removals under way or to be tried again, by environment. Use it from one event loop."""

    def __init__(self, remove: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self._remove = remove
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_closed = False

    def __contains__(self, id: str) -> bool:
        return id in self._tasks or id in self._timers

    def begin(self, id: str) -> None:
        """Remove ``id`` now, also when it waits to be tried again. Nothing happens while a removal runs."""
        self._begin(id, FIRST_PAUSE_SECONDS)

    async def close(self, seconds: float) -> None:
        """Try nothing again, and wait so long for what is under way."""
        self._is_closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)

    def _begin(self, id: str, pause: float) -> None:
        if id in self._tasks:
            return
        timer = self._timers.pop(id, None)
        if timer is not None:
            timer.cancel()
        task = self._tasks[id] = asyncio.create_task(self._remove(id))
        task.add_done_callback(lambda done: self._ended(id, done, pause))

    def _ended(self, id: str, task: asyncio.Task[None], pause: float) -> None:
        del self._tasks[id]
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("environment %s could not be removed; it is tried again: %s", id, error)
        if not self._is_closed:
            longer = min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._timers[id] = asyncio.get_running_loop().call_later(pause, self._begin, id, longer)
