"""One change of an environment at a time, ended and awaited when it must give way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from agent_sandbox.backends.linux.waiting import ended
from agent_sandbox.errors import ConflictError


class Changes:
    """The changes under way, by environment. Use it from one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, id: str) -> bool:
        """Whether a change of ``id`` is under way."""
        return id in self._tasks

    async def alone(self, id: str, change: Coroutine[Any, Any, None]) -> None:
        """Make a change of environment ``id`` while there is no other; cancelling this ends and awaits it.

        :class:`ConflictError` while there is one, and when :meth:`end` ended this one.
        """
        if id in self._tasks:
            change.close()
            raise ConflictError(f"environment {id} is being changed")
        task = self._tasks[id] = asyncio.create_task(change)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and (current is None or not current.cancelling()):
                raise ConflictError(f"environment {id} was destroyed meanwhile") from None
            task.cancel()
            await ended(task)
            if not task.cancelled():
                task.exception()
            raise
        finally:
            self._tasks.pop(id, None)

    async def end(self, id: str) -> None:
        """Cancel the change of ``id`` where there is one, and wait until it has cleared up."""
        task = self._tasks.get(id)
        if task is not None:
            task.cancel()
            await ended(task)
