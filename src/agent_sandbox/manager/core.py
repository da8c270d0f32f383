"""What every call on one sandbox goes through: find its environment, call the backend, say truly how it ended.

A call remembers the sandbox's *life*: its environment, and how often that was stopped. When the backend fails, or ends
a stream, and the sandbox lives another life by then, the caller is told so, whatever the guest said. When the backend
fails because the environment does not run any more, the caller is told that, with the remedy.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import TypeVar

from agent_sandbox.backends.base import Backend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, ConnectionLostError, SandboxError
from agent_sandbox.manager.entries import Entry, Life, stopped
from agent_sandbox.manager.fleet import Fleet
from agent_sandbox.manager.records import new_id as new_id

_T = TypeVar("_T")


class Core:
    """The fleet, and the way to one of its sandboxes. The parts of the manager are built on it."""

    def __init__(self, settings: Settings, backends: Mapping[str, Backend], clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._fleet = Fleet(settings, backends, clock)
        self._calls = 0
        self._last_active = time.monotonic()

    async def _on(self, id: str, call: Callable[[Backend, str], Awaitable[_T]]) -> _T:
        with self._active():
            entry, backend = self._fleet.usable(id)
            life = entry.life
            try:
                return await call(backend, life.env_id)
            except SandboxError as error:
                if (told := await self._explained(entry, backend, life, error)) is not error:
                    raise told from error
                raise

    async def _write(self, id: str, call: Callable[[Backend, str], Awaitable[_T]]) -> _T:
        """As :meth:`_on`, for what changes files: it waits while a snapshot, rollback or stop is under way."""
        entry, _ = self._fleet.usable(id)
        async with entry.gate.passing():
            return await self._on(id, call)

    async def _stream(
        self, id: str, open: Callable[[Backend, str], AsyncGenerator[_T, None]]
    ) -> AsyncGenerator[_T, None]:
        """As :meth:`_on`, for a backend's generator, which is closed with this one."""
        with self._active():
            entry, backend = self._fleet.usable(id)
            life = entry.life
            try:
                async with aclosing(open(backend, life.env_id)) as items:
                    async for item in items:
                        yield item
            except SandboxError as error:
                if (told := await self._explained(entry, backend, life, error)) is not error:
                    raise told from error
                raise

    async def _explained(self, entry: Entry, backend: Backend, life: Life, error: SandboxError) -> SandboxError:
        if (ended := entry.ended(life)) is not None:
            return ended
        if isinstance(error, BackendError):
            await self._fleet.observe(entry)
            if (ended := entry.ended(life)) is not None:
                return ended
            # What was under way when the wire broke has an unknown outcome; a stopped sandbox explains the rest.
            if not entry.record.running and not isinstance(error, ConnectionLostError):
                return stopped(entry.record.id)
        return error

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._last_active = time.monotonic()
