"""Bringing the work of a fork back: a three-way merge of a workspace with a snapshot.

The order: hold the workspace still, keep it aside, merge in the store, name both states as snapshots, build the new
environment, let the old one go on, put the new one in its place. Until that last step nothing of the sandbox is
touched, so conflicts and failures change nothing; what they had kept goes again. The processes of the old environment
stand still until the new one is ready, so that next to nothing which they write is missed, and end with the swap; where
a backend cannot hold them, what they write after their workspace was read ends with them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Literal

from agent_sandbox.backends.base import Backend
from agent_sandbox.errors import BackendError, PayloadTooLargeError, SandboxError
from agent_sandbox.manager.core import new_id
from agent_sandbox.manager.entries import Entry, stopped
from agent_sandbox.manager.keeping import keeping
from agent_sandbox.manager.records import SandboxRecord, SnapshotRecord
from agent_sandbox.manager.references import References
from agent_sandbox.manager.taken import Aside
from agent_sandbox.manager.tasks import uninterrupted
from agent_sandbox.store import Conflict, Conflicts, HeadMoved, UpToDate

log = logging.getLogger(__name__)

MAX_CONFLICTS = 1_000
"""Conflicts that are listed; all are counted."""


@dataclass(frozen=True)
class Merge:
    """How a merge ended. ``before`` and ``after`` are the snapshots of the workspace as it was and as it is now.

    Both are None unless it was ``merged``; ``conflicts`` are the first 1,000 of ``conflict_count``.
    """

    outcome: Literal["merged", "up_to_date", "conflicts"]
    record: SandboxRecord
    before: str | None = None
    after: str | None = None
    conflicts: tuple[Conflict, ...] = ()
    conflict_count: int = 0


class Merging(References):
    """The call that merges."""

    async def merge(self, id: str, snapshot_id: str) -> Merge:
        """Bring what a snapshot changed since both had a common state into a sandbox, whose processes end.

        Any reference to a state will do in place of the snapshot's id.

        Conflicts change nothing, nor does a snapshot that is in the workspace's history already; then processes go on.
        :class:`ConflictError` where there is no common state, or its files are gone; else errors as of a rollback.
        """
        with self._active():
            entry = self._fleet.find(id)
            backend = self._fleet.backend(entry.record.backend)
            origin = await self.origin(snapshot_id)
            return await self._fleet.tasks.own(self._merge(entry, backend, origin.text, origin.commit), f"merge {id}")

    async def _merge(self, entry: Entry, backend: Backend, name: str, theirs: str) -> Merge:
        limit = self._settings.max_snapshot_bytes
        async with entry.exclusive("rollback"), entry.gate.closed(), AsyncExitStack() as kept:
            if not entry.record.running:
                raise stopped(entry.record.id)
            base = await self._base(entry)
            async with AsyncExitStack() as still:
                source = keeping(backend, self._fleet.workspaces).held(entry.record.env_id, limit)
                workspace = await still.enter_async_context(source)
                aside = self._fleet.workspaces.aside(entry.record.env_id, base, workspace, limit)
                ours = await kept.enter_async_context(aside)
                result = await self._fleet.workspaces.ask(lambda store: store.merge(ours.branch, theirs))
                if isinstance(result, UpToDate):
                    return Merge("up_to_date", entry.record)
                if isinstance(result, Conflicts):
                    return Merge("conflicts", entry.record, None, None, result.conflicts[:MAX_CONFLICTS], result.count)
                if isinstance(result, HeadMoved):
                    raise BackendError("the state that was merged into was moved by somebody else; do it again")
                made = result.commit.hex()
                known = (ours.taken.commit, ours.taken.report.bytes)
                size = await self._fleet.workspaces.ask(lambda store: store.data_bytes(made, known))
                if size > limit:
                    raise PayloadTooLargeError(f"the files of the merged workspace hold more than {limit} bytes")
                before = self._before(entry, name, ours)
                after = replace(
                    before,
                    id=new_id("snap"),
                    name=f"merge of {name}",
                    size_bytes=size,
                    stored_bytes=0,
                    commit=made,
                    skipped=(),
                    skipped_total=0,
                )
                try:
                    for record in (before, after):
                        await self._fleet.workspaces.pin(record.id, record.commit or "")
                        await uninterrupted(self._keep(record))
                    await self._swap(entry, after, still.aclose)
                except BaseException:
                    if entry.record.source_snapshot_id != after.id:
                        await uninterrupted(self._unkeep_both(before, after))
                    raise
            return Merge("merged", entry.record, before.id, after.id)

    def _before(self, entry: Entry, name: str, ours: Aside) -> SnapshotRecord:
        record, report = entry.record, ours.taken.report
        return SnapshotRecord(
            id=new_id("snap"),
            sandbox_id=record.id,
            name=f"before merge of {name}",
            backend=record.backend,
            spec=record.spec,
            size_bytes=report.bytes,
            stored_bytes=report.stored,
            created_at=self._clock(),
            skipped=ours.taken.skipped(),
            skipped_total=ours.taken.skipped_total,
            commit=ours.taken.commit,
        )

    async def _unkeep_both(self, *snapshots: SnapshotRecord) -> None:
        """Remove what a merge that failed had kept; whatever cannot go is told, and the caller of the merge why."""
        for snapshot in snapshots:
            try:
                await self._unkeep(snapshot)
            except SandboxError as error:
                log.warning("snapshot %s of a merge that failed stays: %s", snapshot.id, error)

    async def _swap(self, entry: Entry, snapshot: SnapshotRecord, ready: Callable[[], Awaitable[None]]) -> None:
        raise NotImplementedError

    async def _keep(self, snapshot: SnapshotRecord) -> None:
        raise NotImplementedError

    async def _unkeep(self, snapshot: SnapshotRecord) -> None:
        raise NotImplementedError
