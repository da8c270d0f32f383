"""What happened to workspaces: differences between states, where a state comes from, states as archives.

States are commits of the store, whatever the backend. A snapshot that an earlier version kept as a file is taken over
when it is asked for (``fleet.py``), and its history begins there.

Bounds
------
A sandbox chooses what is in its files. So a comparison ends after ``MAX_CHANGES`` paths, 4 MiB of them, ``MAX_TEXT``
bytes of text or ``_SECONDS``, whichever comes first, and says that it did. A text goes in whole or not at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Literal

from agent_sandbox.errors import BackendError, ConflictError
from agent_sandbox.manager.core import Core
from agent_sandbox.manager.entries import Entry, stopped
from agent_sandbox.manager.keeping import keeping
from agent_sandbox.manager.records import SnapshotRecord
from agent_sandbox.manager.workspaces import EMPTY
from agent_sandbox.store import Change, ChangeKind, Store, Type
from agent_sandbox.store import Entry as StoredEntry
from agent_sandbox.types import WORKSPACE, FileType

MAX_CHANGES = 10_000
"""Paths in one comparison: what a person or a model can still use, and a few MiB of JSON."""
MAX_TEXT = 1 << 20
"""Bytes of text in one comparison, in UTF-8."""
MAX_LOG = 1_000
"""States in one log."""
_PATH_BYTES = 4 << 20
_SECONDS = 20.0
_TYPES: dict[Type, FileType] = {Type.FILE: "file", Type.DIRECTORY: "directory", Type.SYMLINK: "symlink"}

Kind = Literal["added", "removed", "modified", "type", "metadata"]
_KINDS: dict[ChangeKind, Kind] = {
    ChangeKind.ADDED: "added",
    ChangeKind.REMOVED: "removed",
    ChangeKind.MODIFIED: "modified",
    ChangeKind.TYPE: "type",
    ChangeKind.METADATA: "metadata",
}


@dataclass(frozen=True)
class PathChange:
    """One path that differs. Sizes are those of regular files in bytes; ``text`` is a unified difference.

    ``text`` is empty where there is none (directories, metadata), and None where it was not asked for or left out.
    """

    path: str
    kind: Kind
    old_type: FileType | None
    new_type: FileType | None
    old_size: int | None
    new_size: int | None
    text: str | None = None


@dataclass(frozen=True)
class Differences:
    """What differs, by path. ``truncated``: there are more; ``text_truncated``: a text was left out."""

    changes: tuple[PathChange, ...]
    truncated: bool
    text_truncated: bool


@dataclass(frozen=True)
class PastState:
    """A state that led to another: ``kept`` says whether its files are still there, ``snapshots`` which ones show it.

    ``created_at`` is in seconds since the epoch.
    """

    commit: str
    parents: tuple[str, ...]
    created_at: float
    kept: bool
    snapshots: tuple[str, ...]


class History(Core):
    """The calls that look back. Those on snapshots hold nothing up; :meth:`changes` is as a snapshot to its sandbox."""

    async def diff(self, old: str, new: str, *, limit: int, text: bool) -> Differences:
        """Compare two snapshots, of any sandboxes."""
        with self._active():
            before, after = [require_commit(await self._fleet.in_store(id)) for id in (old, new)]
            return await self._compare(before, after, limit, text)

    async def changes(self, id: str, *, limit: int, text: bool) -> Differences:
        """Compare a workspace with the sandbox's last snapshot, rollback or beginning, whichever was last.

        The workspace is read as for a snapshot. Errors as of one; :class:`ConflictError` where the state that it began
        with is no longer there.
        """
        with self._active():
            entry = self._fleet.find(id)
            return await self._fleet.tasks.own(self._changes(entry, limit, text), f"changes {id}")

    async def archive(self, snapshot_id: str) -> AsyncGenerator[bytes, None]:
        """Yield a snapshot as a tar, names relative to the workspace; its end says that it was whole."""
        with self._active():
            commit = require_commit(await self._fleet.in_store(snapshot_id))
            async with aclosing(self._fleet.workspaces.archive(commit)) as pieces:
                async for piece in pieces:
                    yield piece

    async def log(self, snapshot_id: str, *, limit: int) -> list[PastState]:
        """Give the state of a snapshot and those that led to it, newest first."""
        with self._active():
            commit = require_commit(await self._fleet.in_store(snapshot_id))
            named: dict[str, list[str]] = {}
            for record in await self._fleet.state.list_snapshots(None):
                if record.commit is not None:
                    named.setdefault(record.commit, []).append(record.id)
            entries = await self._fleet.workspaces.study(lambda store: list(store.log(commit, limit)))
            return [
                PastState(
                    commit=entry.id.hex(),
                    parents=tuple(parent.hex() for parent in entry.commit.parents),
                    created_at=entry.commit.time_ns / 1e9,
                    kept=not entry.forgotten,
                    snapshots=tuple(named.get(entry.id.hex(), ())),
                )
                for entry in entries
            ]

    async def _changes(self, entry: Entry, limit: int, text: bool) -> Differences:
        async with AsyncExitStack() as kept:
            async with entry.exclusive("use"), entry.gate.closed():
                record, backend = entry.record, self._fleet.backend(entry.record.backend)
                if not record.running:
                    raise stopped(record.id)
                base, most = await self._base(entry), self._settings.max_snapshot_bytes
                async with keeping(backend, self._fleet.workspaces).held(record.env_id, most) as workspace:
                    now = await kept.enter_async_context(
                        self._fleet.workspaces.aside(record.env_id, base, workspace, most)
                    )
            return await self._compare(base, now.taken.commit, limit, text)

    async def _base(self, entry: Entry) -> str:
        """The state that the workspace was last kept as, put back to, or began with; :class:`ConflictError`."""
        record = entry.record
        base = await self._fleet.workspaces.head(record.env_id) or record.commit
        if base is None and record.source_snapshot_id is not None:  # begun by an earlier version, and deleted since
            raise ConflictError(
                f"snapshot {record.source_snapshot_id}, which the workspace began with, is no longer there; take a"
                " snapshot: changes are told from then on"
            )
        return base or EMPTY

    async def _compare(self, old: str, new: str, limit: int, text: bool) -> Differences:
        return await self._fleet.workspaces.study(lambda store: compare(store, old, new, limit=limit, text=text))


def compare(
    store: Store,
    old: str,
    new: str,
    *,
    limit: int,
    text: bool,
    path_bytes: int = _PATH_BYTES,
    text_bytes: int = MAX_TEXT,
) -> Differences:
    """Compare two states within the bounds. A directory of which nothing but the time differs is left out."""
    found: list[PathChange] = []
    latest = time.monotonic() + _SECONDS
    text_truncated = False
    for change in store.diff(old, new):
        late = time.monotonic() > latest
        if not late and _is_time_of_directory(change):
            continue
        path_bytes -= len(change.path)
        if late or len(found) == limit or path_bytes < 0:
            return Differences(tuple(found), True, text_truncated)
        shown = None
        if text:
            shown = _within(store.hunks(change), text_bytes, latest)
            if shown is None:
                text_truncated = True
            else:
                text_bytes -= len(shown.encode())
        found.append(_shown(change, shown))
    return Differences(tuple(found), False, text_truncated)


def _within(lines: Iterator[str], room: int, latest: float) -> str | None:
    """The whole text, or None where it does not fit."""
    taken: list[str] = []
    if time.monotonic() > latest:
        return None
    for line in lines:
        room -= len(line.encode())
        if room < 0:
            return None
        taken.append(line)
    return "".join(taken)


def _is_time_of_directory(change: Change) -> bool:
    old, new = change.old, change.new
    if change.kind is not ChangeKind.METADATA or old is None or new is None or old.type is not Type.DIRECTORY:
        return False
    return replace(old, mtime_ns=new.mtime_ns, content=new.content) == new


def _shown(change: Change, text: str | None) -> PathChange:
    path = WORKSPACE + ("/" + os.fsdecode(change.path) if change.path else "")
    old, new = change.old, change.new
    return PathChange(path, _KINDS[change.kind], _type(old), _type(new), _size(old), _size(new), text)


def _type(entry: StoredEntry | None) -> FileType | None:
    return None if entry is None else _TYPES.get(entry.type, "other")


def _size(entry: StoredEntry | None) -> int | None:
    return entry.size if entry is not None and entry.type is Type.FILE else None


def require_commit(snapshot: SnapshotRecord) -> str:
    """Give the state of a snapshot that :meth:`~agent_sandbox.manager.fleet.Fleet.in_store` gave."""
    if snapshot.commit is None:
        raise BackendError(f"snapshot {snapshot.id} was not taken over into the store")
    return snapshot.commit
