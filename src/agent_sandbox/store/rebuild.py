"""rebuild: a new index for packs whose own one is lost, damaged or older than they are.

Objects, commits and what they tell (files, parents, messages, authors, times) are in the packs: ``salvage.py``. Names
are in the index alone, so they come from where they can still be had, and only where their state stands:

1. the old index, as far as it can be read: projects, branches, tags, layers, pins, what was forgotten;
2. ``pins`` of the caller's, who may know from elsewhere which states have to stay; they win;
3. every other state that no later one came from becomes a layer of the project ``rebuilt``, the oldest first. These are
   what lost their names or their past, and what was removed and gc had not taken yet.

The new index is made beside the old one and takes its place at the end, when all of it is on the disk. Until then, and
when anything fails, the store is as it was, but for a pack that nobody needs. The old index stays as
``index.sqlite.old``, with its WAL, which would be no good to another index. A pack that does not begin as one of this
store stays under another name, out of gc's sight. Nothing is removed but stat caches: they may know of objects that are
gone.

Nobody may have the store open: an index that is replaced under a process would take what that writes with it. SQLite
holds a shared lock on an index in WAL mode for as long as a connection is open, which shows other processes; who hides
this one's index from them (it is lost) is kept out by the caller, as the server by its own lock.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agent_sandbox.errors import ConflictError, InvalidRequestError, NotFoundError
from agent_sandbox.store import refs
from agent_sandbox.store.catalog import Ref, RefKind
from agent_sandbox.store.directory import read_store
from agent_sandbox.store.index import Index, Transaction
from agent_sandbox.store.marks import Marks, marks
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Kind
from agent_sandbox.store.packs import failed, open_directory, pack_name
from agent_sandbox.store.ports import Progress
from agent_sandbox.store.salvage import Salvage, salvage
from agent_sandbox.store.sqlite import connect, translated
from agent_sandbox.store.walk import commit

REBUILT = "rebuilt"
"""The project whose layers are states that have no other name."""
_INDEX, _NEW, _OLD = "index.sqlite", "index.sqlite.new", "index.sqlite.old"
_BESIDE = ("", "-journal", "-wal", "-shm")
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
"""The bytes that SQLite locks shared (https://www.sqlite.org/src/file/src/os.h, "The following constant values")."""
MOST_LOST = 1_000
"""Names that a report tells of; more are counted."""
_MOST_PACKS = 10**10 - 1
"""What the name of a pack has room for."""


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What rebuild found and named."""

    packs: int
    objects: int
    damaged: int
    """Places in packs where no record can be read: an end that a crash left, or damage."""
    unread_packs: int
    """Packs that do not begin as one of this store; they stay under other names."""
    states: int
    """Commits whose state is whole."""
    incomplete: int
    """Commits whose state is not: something is damaged or missing, or gc had taken it; or whose past is lost."""
    without_past: int
    """Of these, how many lost their past alone: each state is kept by a new commit that has none."""
    names: int
    """Branches, tags, layers and pins of the old index that are there again."""
    pins: int
    """Those of the caller's."""
    unnamed: int
    """States that became layers of the project ``rebuilt``."""
    lost: tuple[str, ...]
    """Names whose state is not there any more, the first 1,000."""
    lost_count: int


def rebuild(
    path: Path,
    *,
    pins: Mapping[str, bytes] | None = None,
    wait_seconds: float = 10.0,
    progress: Progress | None = None,
) -> RebuildReport:
    """Make the index of the store in ``path`` anew; ``pins`` gives commits by the names that keep them.

    :class:`NotFoundError` and :class:`StoreVersionError` as of opening, :class:`ConflictError` when another process has
    the store open, :class:`StoreBusyError`, :class:`StoreFullError`. Every byte of the store is read.
    """
    store = read_store(path)
    alone = open_directory(path)
    try:
        _hold(alone, path)
        _unlink(path, _NEW)
        os.close(os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        os.close(os.open(path / _NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        Index.create(path / _NEW)
        database = ObjectDatabase(path, store, wait_seconds=wait_seconds, index=_NEW)
        try:
            with database.lock.exclusive(wait_seconds):
                _need_unused(path / _INDEX)
                report = _Rebuild(database, pins or {}, progress or (lambda *_: None)).run()
                _swap(database, report[1])
                return report[0]
        finally:
            database.close()
            _unlink(path, _NEW)
    except OSError as error:
        raise failed(f"rebuild the index of {path}", error) from error
    finally:
        os.close(alone)


def _hold(directory: int, path: Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConflictError(f"another process rebuilds the index of {path}; wait for it") from None


def _need_unused(index: Path) -> None:
    try:
        fd = os.open(index, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, _SHARED_SIZE, _SHARED_FIRST)
    except (BlockingIOError, PermissionError):
        raise ConflictError(f"another process has the store {index.parent} open; stop it first") from None
    finally:
        os.close(fd)


def _unlink(path: Path, name: str) -> None:
    for suffix in _BESIDE:
        (path / (name + suffix)).unlink(missing_ok=True)


def _swap(database: ObjectDatabase, found: Salvage) -> None:
    """Put the new index in the place of the old one; what belonged to that goes aside with it."""
    path = database.path
    database.index.checkpoint()
    database.index.close()
    for number in found.unread:
        (database.packs / pack_name(number)).rename(database.packs / f"{pack_name(number)}.unread")
    if (path / _INDEX).exists():
        _unlink(path, _OLD)
    for suffix in _BESIDE:
        with suppress(FileNotFoundError):
            (path / (_INDEX + suffix)).rename(path / (_OLD + suffix))
    (path / _NEW).rename(path / _INDEX)
    for directory in (database.packs, path):
        fd = open_directory(directory)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    for cache in (path / "cache").glob("stat-*"):
        cache.unlink(missing_ok=True)


class _Rebuild:
    def __init__(self, database: ObjectDatabase, pins: Mapping[str, bytes], progress: Progress) -> None:
        self._database = database
        self._pins = pins
        self._progress = progress
        self._names = 0
        self._lost: list[str] = []
        self._lost_count = 0

    def run(self) -> tuple[RebuildReport, Salvage]:
        database, pinned = self._database, 0
        with translated(database.index.path), marks(database) as live:
            found = salvage(database, live, self._progress)
            for name in (_INDEX, _OLD):
                if (database.path / name).exists():
                    self._old_names(database.path / name)
                    break
            with database.index.transaction() as change:
                for name, commit in self._pins.items():
                    if self._done(f"pin {name}", partial(change.set_pin, refs.check_name(name, "pin"), commit)):
                        pinned += 1
            unnamed = self._unnamed(live)
        report = RebuildReport(
            packs=found.packs,
            objects=found.objects,
            damaged=found.damaged,
            unread_packs=len(found.unread),
            states=found.states,
            incomplete=found.incomplete,
            without_past=found.rootless,
            names=self._names,
            pins=pinned,
            unnamed=unnamed,
            lost=tuple(self._lost),
            lost_count=self._lost_count,
        )
        return report, found

    # ---- names -----------------------------------------------------------------------------------------------------

    def _old_names(self, path: Path) -> None:
        """Take over from an old index what can be read of it and stands."""
        with ExitStack() as stack:
            try:
                old = stack.enter_context(closing(connect(path, self._database.wait_seconds)))
            except sqlite3.Error:
                return
            change = stack.enter_context(self._database.index.transaction())
            for name, created, owners in _rows(old, "SELECT name, created_ns, owners FROM projects", (str, int, int)):
                with suppress(ConflictError, InvalidRequestError):
                    change.add_project(refs.check_project(name), created, owners=bool(owners))
            for project, number, id in _rows(
                old, "SELECT project, number, commit_id FROM layers ORDER BY project, number", (str, int, bytes)
            ):
                self._names += self._done(f"{project}@{number}", partial(_add_layer, change, project, number, id))
            for project, name, kind, head, base in _rows(
                old, "SELECT project, name, kind, head, coalesce(base, -1) FROM refs", (str, str, int, bytes, int)
            ):
                made = partial(_add_ref, change, project, name, kind, head, None if base < 0 else base)
                self._names += self._done(f"{project}:{name}", made)
            for name, id in _rows(old, "SELECT name, commit_id FROM pins", (str, bytes)):
                if name not in self._pins:
                    self._names += self._done(f"pin {name}", partial(change.set_pin, name, id))
            for (id,) in _rows(old, "SELECT commit_id FROM forgotten", (bytes,)):
                if change.has_state(id):
                    change.forget(id)
            for (last,) in _rows(old, "SELECT seq FROM sqlite_sequence WHERE name = 'packs'", (int,)):
                if 0 < last < _MOST_PACKS:  # numbers that were given are not given again
                    change.change("INSERT OR IGNORE INTO packs (number, dead) VALUES (?, 1)", (last,))
                    change.change("DELETE FROM packs WHERE dead")

    def _done(self, what: str, make: Callable[[], object]) -> bool:
        try:
            make()
        except (ConflictError, NotFoundError, InvalidRequestError):
            self._lost_count += 1
            if len(self._lost) < MOST_LOST:
                self._lost.append(what)
            return False
        return True

    def _unnamed(self, live: Marks) -> int:
        """Make layers of states that no name is at and no later state came from."""
        live.execute("CREATE TABLE mark.tips (time_ns, id, PRIMARY KEY (time_ns, id)) WITHOUT ROWID")
        with live.transaction():
            for (id,) in live.execute(
                "SELECT id FROM mark.made JOIN objects USING (id) WHERE kind = ?"
                " AND id NOT IN (SELECT commit_id FROM forgotten)"
                " AND id NOT IN (SELECT parent FROM mark.follows WHERE child IN (SELECT id FROM objects))"
                " AND id NOT IN (SELECT head FROM refs UNION SELECT commit_id FROM layers"
                " UNION SELECT commit_id FROM pins)",
                (int(Kind.COMMIT),),
            ).fetchall():
                time_ns = commit(self._database, id).time_ns
                live.execute("INSERT INTO mark.tips VALUES (?, ?)", (str(time_ns), id))
        ids = [id for (id,) in live.execute("SELECT id FROM mark.tips ORDER BY CAST(time_ns AS REAL), id").fetchall()]
        if ids:
            with self._database.index.transaction() as change:
                if change.project(REBUILT) is None:
                    change.add_project(REBUILT, time.time_ns())
                for id in ids:
                    layer = change.add_layer(REBUILT, id)
                main = change.ref(REBUILT, refs.MAIN)
                if main is None:
                    change.add_ref(Ref(REBUILT, refs.MAIN, RefKind.BRANCH, ids[-1], layer.number))
        return len(ids)


def _rows(old: sqlite3.Connection, sql: str, types: tuple[type, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table as far as they can be read; those with other types are left out."""
    with suppress(sqlite3.Error):
        for row in old.execute(sql):
            if all(type(value) is kind for value, kind in zip(row, types, strict=True)):
                yield row


def _add_layer(change: Transaction, project: str, number: int, id: bytes) -> None:
    last = change.last_layer(project)
    if number != (0 if last is None else last.number + 1):
        raise NotFoundError(f"layer {number} of project {project!r} follows none")
    change.add_layer(project, id)


def _add_ref(change: Transaction, project: str, name: str, kind: int, head: bytes, base: int | None) -> None:
    if kind not in set(RefKind):
        raise NotFoundError(f"a name {name!r} of an unknown kind")
    change.add_ref(Ref(project, refs.check_name(name), RefKind(kind), head, base))
