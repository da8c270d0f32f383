"""Three small tools of asynchronous order: work that cancellation cannot split, tracked tasks, and a gate.

``asyncio`` may cancel at every await. What must not be half done (a commit and the memory that mirrors it, the removal
after a failure) runs under :func:`uninterrupted`: it ends first, then the cancellation goes on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from agent_sandbox.errors import ConflictError

log = logging.getLogger(__name__)

_T = TypeVar("_T")


async def uninterrupted(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` to its end, also when the caller is cancelled meanwhile; the cancellation is raised afterwards.

    ``work`` must be bounded in time. Its own error wins over a cancellation.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result


class Tasks:
    """Tasks that outlive the call that started them; none is forgotten, none fails in silence."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        """Start ``work``; a failure that nobody awaits is logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("%s: %s", task.get_name(), error)

    async def own(self, work: Coroutine[Any, Any, _T], name: str) -> _T:
        """Await ``work`` in a task of its own. A caller's cancellation cancels it and waits until it has cleaned up."""
        return await self.join(self.spawn(work, name))

    async def join(self, task: asyncio.Task[_T]) -> _T:
        """Await a task of :meth:`spawn` as :meth:`own` does."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            raise

    async def settle(self, seconds: float | None = None) -> bool:
        """Wait until no task is left, new ones included. ``False`` when ``seconds`` were not enough."""
        loop = asyncio.get_running_loop()
        end = None if seconds is None else loop.time() + seconds
        while self._tasks:
            left = None if end is None else end - loop.time()
            if left is not None and left <= 0:
                return False
            await asyncio.wait(set(self._tasks), timeout=left)
        return True

    def cancel(self) -> None:
        """Cancel every task; their cleanup still runs."""
        for task in set(self._tasks):
            task.cancel()


class Gate:
    """Many may pass at once, or one holds it closed: writes through the API pass, a snapshot's reading closes.

    Closing waits ``patience`` seconds for those inside and then ends them, because a client decides how long an upload
    takes; who comes while it is closed, or about to be, waits in front. Not reentrant.
    """

    def __init__(self, patience: float = 10.0) -> None:
        self._patience = patience
        self._inside: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Hold the gate open for one write. :class:`ConflictError` when it took too long for who wants to close."""
        while self._closed:
            await self._open.wait()
        task = asyncio.current_task()
        assert task is not None
        self._inside.add(task)
        self._empty.clear()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._cut or task.uncancel() > 0:
                raise
            raise ConflictError(
                "a snapshot, rollback or stop of the sandbox began and did not wait any longer; send this again"
            ) from None
        finally:
            self._cut.discard(task)
            self._inside.discard(task)
            if not self._inside:
                self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Keep writes out. One closer at a time: the sandbox's lock sees to that."""
        if self._closed:
            raise AssertionError("the gate is closed twice")
        self._closed = True
        self._open.clear()
        try:
            try:
                async with asyncio.timeout(self._patience):
                    await self._empty.wait()
            except TimeoutError:
                for task in self._inside:
                    self._cut.add(task)
                    task.cancel()
                await self._empty.wait()
            yield
        finally:
            self._closed = False
            self._open.set()
