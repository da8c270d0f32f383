"""The roads of environments that stand on a disk of this host: destroyed, undone, stopped, known, whoever runs them.

Strategy
--------
* One change of an environment at a time; ``destroy`` ends one that is under way.
* Destroying forgets the environment, ends its processes and replies; the rest goes in the background, again and again
  until it is gone (``removals.py``), by the same road as what a failed creation leaves.
* Blocking work runs on threads of the backend's own, and a step that began is waited for also when its caller is
  cancelled.

What a backend says for itself: how processes end (:meth:`DiskBackend._end_processes`), what is left to be removed
(:meth:`DiskBackend._clear`) and what a stop frees (:meth:`DiskBackend._halt`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from agent_sandbox.backends.guest_backend import GuestBackend
from agent_sandbox.backends.linux.changes import Changes
from agent_sandbox.backends.linux.environments import DiskPlaces
from agent_sandbox.backends.linux.failures import translated
from agent_sandbox.backends.linux.removals import Removals
from agent_sandbox.backends.linux.waiting import settled
from agent_sandbox.errors import NotFoundError, SandboxError

R = TypeVar("R")
T = TypeVar("T")

_log = logging.getLogger(__name__)

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_THREADS = 16
"""More than creations that make progress at once on common machines; waiting ones queue."""
_SYNC_SECONDS = 5.0
"""How long a daemon may take to sync before a stop; unmounting writes everything out in any case."""
_CLOSE_SECONDS = 10.0
"""How long closing waits for removals under way; what is left is found again by the next server."""


def is_id(id: str) -> bool:
    """Whether this can be an environment's id."""
    return _ID.fullmatch(id) is not None


class DiskBackend(GuestBackend, Generic[R]):
    """The parts of a backend that are the same on every road; ``R`` is what it records of an environment."""

    _places: DiskPlaces

    def __init__(self, threads: str) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix=threads)
        self._records: dict[str, R] = {}
        self._changes = Changes()
        self._removals = Removals(self._clear)

    async def close(self) -> None:
        await super().close()
        await self._removals.close(_CLOSE_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- what the backend says -----------------------------------------------------------

    @abc.abstractmethod
    async def _read_record(self, id: str) -> R:
        """Read what an environment was made from. :class:`NotFoundError` when there is none."""

    @abc.abstractmethod
    async def _end_processes(self, id: str) -> None:
        """End every process of an environment; return when none is left."""

    @abc.abstractmethod
    async def _clear(self, id: str) -> None:
        """End what still runs and remove everything. The directory goes last: by that it is listed."""

    @abc.abstractmethod
    async def _halt(self, id: str) -> None:
        """End every process and free all that a reboot would; the disk, the record and the key stay."""

    async def _is_there(self, id: str) -> bool:
        """Whether something is left of an environment."""
        return id in await self.list_ids()

    # -- the roads ------------------------------------------------------------------------

    async def destroy(self, id: str) -> None:
        if not is_id(id):
            return
        await self._changes.end(id)
        async with translated("destroying the sandbox"):
            await settled(asyncio.ensure_future(self._end(id)))
        if await self._is_there(id):
            self._removals.begin(id)

    async def _end(self, id: str) -> None:
        """End every process of the environment, which cannot be found from now on; return when none is left."""
        await self._forget(id)
        await self._end_processes(id)

    async def _forget(self, id: str) -> None:
        try:
            await self._thread(self._places.environment(id).forget)
        except OSError as error:
            # A damaged directory, or a disk that has become read-only, must not keep processes alive.
            _log.warning("environment %s: its record stays until it is removed: %s", id, error)
        self._records.pop(id, None)

    async def _undo(self, id: str) -> None:
        """Remove what is left of a creation that failed, now or in the background."""
        try:
            await self._clear(id)
        except (OSError, SandboxError):
            _log.exception("environment %s could not be removed after it failed", id)
            self._removals.begin(id)

    async def stop_environment(self, id: str) -> None:
        await self._known(id)
        async with translated("stopping the sandbox"):
            await self._changes.alone(id, self._stop(id))

    async def _stop(self, id: str) -> None:
        if await self.is_running(id):
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(_SYNC_SECONDS):
                    await self.sync(id)
        await self._halt(id)
        await self._thread(self._places.environment(id).disk.flush)

    async def layers_in_use(self) -> set[str]:
        async with translated("listing the layers in use"):
            return await self._thread(self._places.layers)

    # -- parts -----------------------------------------------------------------------------

    async def _known(self, id: str) -> R:
        """The record of an environment that is not being removed."""
        record = await self._record(id)
        if id in self._removals:
            raise NotFoundError(f"there is no environment {id}")
        return record

    async def _record(self, id: str) -> R:
        if not is_id(id):
            raise NotFoundError(f"there is no environment {id}")
        if id not in self._records:
            self._records[id] = await self._read_record(id)
        return self._records[id]

    async def _thread(self, work: Callable[..., T], *args: object) -> T:
        """Run blocking work on a thread and see it through, also when the caller is cancelled."""
        return await settled(asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args)))
