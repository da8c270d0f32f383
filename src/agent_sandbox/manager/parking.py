"""Automatic snapshots: what a rollback replaced is kept in the background, so that the rollback can be undone.

A sandbox has at most one, of its last rollback. The order::

    the rollback's transaction    the environment that it replaces is ``parked`` in the record, in place of an earlier
    behind the caller's back      it is held still and read as for any snapshot; a pin; the row takes the place of the
                                  earlier one's; the record lets go of the environment, which is removed

* Killed anywhere: the next start finds ``parked`` in the record and does it again, starting the environment where the
  host was rebooted meanwhile. The rest is as for any snapshot: a pin without a row goes, and so does an environment
  without a record.
* Another rollback meanwhile: what that replaces is parked, the reading of the earlier one is given up, and it goes.
* What cannot be kept (more than MAX_SNAPSHOT_BYTES, a full disk) leaves a line in the log and no automatic snapshot: an
  older one would pass for it.
* It goes with its sandbox.

The rollback itself waits for nothing of this. Processes of the replaced environment stand still while it is read, where
the backend can hold it; they end with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from agent_sandbox.backends.base import Backend
from agent_sandbox.config import Settings
from agent_sandbox.errors import SandboxError
from agent_sandbox.manager.entries import Entry
from agent_sandbox.manager.keeping import keeping
from agent_sandbox.manager.records import SnapshotRecord, new_id
from agent_sandbox.manager.state import StateStore
from agent_sandbox.manager.tasks import Tasks, uninterrupted
from agent_sandbox.manager.workspaces import Workspaces

log = logging.getLogger(__name__)


class Parking:
    """Keeps what rollbacks replaced. ``retire`` removes an environment in the background."""

    def __init__(
        self,
        settings: Settings,
        state: StateStore,
        workspaces: Workspaces,
        tasks: Tasks,
        *,
        backend: Callable[[str], Backend],
        retire: Callable[[Entry, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._state = state
        self._workspaces = workspaces
        self._tasks = tasks
        self._backend = backend
        self._retire = retire
        self._clock = clock

    def begin(self, entry: Entry) -> None:
        """Keep the environment that is parked now, in place of what was parked before."""
        parked, earlier = entry.record.parked, entry.parking
        assert parked is not None, "nothing is parked"
        if earlier is not None:
            earlier.cancel()

        def ended(_: asyncio.Task[None]) -> None:
            if entry.record.parked != parked:
                self._retire(entry, parked)

        entry.parking = self._tasks.spawn(self._keep(entry, parked, earlier), f"keep {parked}")
        entry.parking.add_done_callback(ended)

    async def settled(self, entry: Entry) -> None:
        """Wait until the automatic snapshot of a sandbox is there, or was given up."""
        while (task := entry.parking) is not None and not task.done():
            await asyncio.wait([task])

    async def end(self, entry: Entry) -> None:
        """Give up what is under way and remove what is parked and what was kept: the sandbox is destroyed."""
        if entry.parking is not None and not entry.parking.done():
            entry.parking.cancel()
            await asyncio.wait([entry.parking])
        if entry.record.parked is not None:
            self._retire(entry, entry.record.parked)
        await self._remove(entry.record.id)

    async def sweep(self, sandboxes: set[str]) -> None:
        """Remove the automatic snapshots of sandboxes that are no more. At start."""
        for snapshot in await self._state.list_snapshots(None):
            if snapshot.auto and snapshot.sandbox_id not in sandboxes:
                await self._forget(snapshot)

    async def _keep(self, entry: Entry, env_id: str, earlier: asyncio.Task[None] | None) -> None:
        try:
            if earlier is not None and not earlier.done():  # also when this is given up: a third one waits for both
                await uninterrupted(asyncio.wait([earlier]))
            await self._take(entry, env_id)
        except SandboxError as error:
            if entry.closing:
                return  # the next start goes on
            log.warning("sandbox %s: what its rollback replaced could not be kept: %s", entry.record.id, error)
            await uninterrupted(self._remove(entry.record.id))
        try:
            await uninterrupted(entry.unpark(self._state, env_id))
        except SandboxError as error:
            log.warning("sandbox %s: the next start removes environment %s: %s", entry.record.id, env_id, error)

    async def _take(self, entry: Entry, env_id: str) -> None:
        record, created_at = entry.record, self._clock()
        backend = self._backend(record.backend)
        kept = keeping(backend, self._workspaces)
        if not await backend.is_running(env_id):  # the sandbox was stopped, or the host was
            await kept.restart(env_id, record.spec)
        id, limit = new_id("snap"), self._settings.max_snapshot_bytes
        try:
            async with kept.held(env_id, limit) as workspace:
                taken = await self._workspaces.take(env_id, id, workspace, limit)
            snapshot = SnapshotRecord(
                id=id,
                sandbox_id=record.id,
                name=f"before rollback to {record.source_snapshot_id}",
                backend=record.backend,
                spec=record.spec,
                size_bytes=taken.report.bytes,
                stored_bytes=taken.report.stored,
                created_at=created_at,
                skipped=taken.skipped(),
                skipped_total=taken.skipped_total,
                commit=taken.commit,
                auto=True,
            )
            await uninterrupted(self._put(snapshot))
        except BaseException:
            if not await uninterrupted(self._is_there(id)):
                await uninterrupted(self._drop(id))
            raise

    async def _put(self, snapshot: SnapshotRecord) -> None:
        for gone in await self._state.put_automatic(snapshot):
            await self._drop(gone.id)

    async def _is_there(self, id: str) -> bool:
        return id in await self._state.snapshot_ids()

    async def _remove(self, sandbox_id: str) -> None:
        try:
            for snapshot in await self._state.list_snapshots(sandbox_id):
                if snapshot.auto:
                    await self._forget(snapshot)
        except SandboxError as error:
            log.warning("the automatic snapshot of sandbox %s stays until the next start: %s", sandbox_id, error)

    async def _forget(self, snapshot: SnapshotRecord) -> None:
        await self._state.delete_snapshot(snapshot.id)
        await self._drop(snapshot.id)

    async def _drop(self, id: str) -> None:
        try:
            await self._workspaces.drop(id)
        except SandboxError as error:
            log.warning("the state of snapshot %s stays until the next start: %s", id, error)
