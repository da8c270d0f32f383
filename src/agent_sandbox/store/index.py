"""``index.sqlite``: where every object is, and every name.

The rules
---------
* WAL with ``synchronous=FULL``: a transaction that was committed is on the disk. A commit that failed may still turn up
  after a crash (its frames may have reached the disk), so whoever writes packs never takes back bytes that a
  transaction which was *tried* leads to.
* One connection reads and one writes, each behind its own mutex: readers see the last committed state and never wait
  for a writer. Transactions begin ``IMMEDIATE``: two writers wait for each other instead of failing half-way.
* Rows of objects go in sorted by id, so that a large transaction touches each page once.
* What SQLite says is translated (``sqlite.py``); nothing above sees an ``sqlite3.Error``.
* Numbers of packs are never used again (``AUTOINCREMENT``): a process may still hold the old one open.

When changing the schema: it is the stored format. Read "How do I change the stored format" in CONTRIBUTING.md first.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_sandbox.errors import StoreDamagedError, StoreVersionError
from agent_sandbox.store.catalog import NameChanges, Names
from agent_sandbox.store.ports import Location
from agent_sandbox.store.records import MAX_RECORD, MIN_HEADER, PACK_HEADER
from agent_sandbox.store.sqlite import (
    CACHE_KIB,
    PAGE_BYTES,
    allocate_shared_memory,
    connect,
    has_small_blocks,
    translated,
)

APPLICATION_ID = 0x41534253  # "ASBS"
VERSION = 1
_BATCHES = (1, 16, 128, 512)
"""Numbers of ids in one query: few shapes, so that each is prepared once."""
_HEADER_BYTES = 100

_SCHEMA = """
CREATE TABLE packs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    closed INTEGER NOT NULL DEFAULT 0,
    dead INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE objects (
    id BLOB PRIMARY KEY NOT NULL,
    pack INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    length INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE patches (
    id BLOB PRIMARY KEY NOT NULL,
    base BLOB NOT NULL,
    depth INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE projects (
    name TEXT PRIMARY KEY NOT NULL,
    created_ns INTEGER NOT NULL,
    owners INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE layers (
    project TEXT NOT NULL REFERENCES projects ON DELETE CASCADE,
    number INTEGER NOT NULL,
    commit_id BLOB NOT NULL,
    PRIMARY KEY (project, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE refs (
    project TEXT NOT NULL REFERENCES projects ON DELETE CASCADE,
    name TEXT NOT NULL,
    kind INTEGER NOT NULL,
    head BLOB NOT NULL,
    base INTEGER,
    PRIMARY KEY (project, name)
) STRICT, WITHOUT ROWID;
CREATE TABLE pins (name TEXT PRIMARY KEY NOT NULL, commit_id BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE forgotten (commit_id BLOB PRIMARY KEY NOT NULL) STRICT, WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Known:
    """An object that a transaction makes known: where its record is, and its base if it is a patch."""

    id: bytes
    location: Location
    base: bytes | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class PackRow:
    """A pack: ``closed`` when nobody appends any more, ``dead`` when it is to be unlinked."""

    number: int
    closed: bool
    dead: bool


class Transaction(NameChanges):
    """One change of the index, begun ``IMMEDIATE``; made by :meth:`Index.transaction`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.rolled_back = False

    def query(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, parameters).fetchall()

    def change(self, sql: str, parameters: tuple[Any, ...] = ()) -> int:
        return self._connection.execute(sql, parameters).rowcount

    def rollback(self) -> None:
        """Undo everything when the block ends; for an outcome that is no error (a moved head)."""
        self.rolled_back = True

    def add_objects(self, known: Iterable[Known]) -> None:
        """Make objects known. One that another writer made known meanwhile stays where that one has it."""
        full: list[tuple[bytes, int, int, int]] = []
        patches: list[Known] = []
        for item in sorted(known, key=lambda item: item.id):
            if item.base is None:
                full.append((item.id, item.location.pack, item.location.offset, item.location.length))
            else:
                patches.append(item)
        insert = "INSERT OR IGNORE INTO objects (id, pack, offset, length) VALUES (?, ?, ?, ?)"
        self._connection.executemany(insert, full)
        for item in patches:
            place = (item.id, item.location.pack, item.location.offset, item.location.length)
            if self.change(insert, place):
                self.change(
                    "INSERT OR REPLACE INTO patches (id, base, depth) VALUES (?, ?, ?)",
                    (item.id, item.base, item.depth),
                )

    def add_pack(self) -> int:
        """Reserve the number of a new pack."""
        number = self._connection.execute("INSERT INTO packs DEFAULT VALUES").lastrowid
        assert number is not None
        return number

    def close_packs(self, numbers: Sequence[int]) -> None:
        """Mark packs as ones that nobody appends to any more."""
        self._connection.executemany("UPDATE packs SET closed = 1 WHERE number = ?", [(n,) for n in numbers])

    def remove_packs(self, numbers: Sequence[int]) -> None:
        """Remove the rows of packs whose files are gone."""
        self._connection.executemany("DELETE FROM packs WHERE number = ?", [(n,) for n in numbers])


class Index(Names):
    """The open index. Safe for threads."""

    def __init__(self, path: Path, *, wait_seconds: float = 10.0) -> None:
        """Open ``path``; call :func:`probe` before. The errors of :func:`translated`."""
        self.path = path
        self._wait_seconds = wait_seconds
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        small = has_small_blocks(path)
        with translated(path):
            self._reader = connect(path, wait_seconds)
            try:
                self._check_version()
                if small:
                    allocate_shared_memory(path)
                self._reader.execute("PRAGMA query_only = ON")
                self._writer = connect(path, wait_seconds)
            except BaseException:
                self._reader.close()
                raise

    @classmethod
    def create(cls, path: Path) -> None:
        """Write an empty index to ``path``, which does not exist."""
        has_small_blocks(path)
        with translated(path):
            connection = sqlite3.connect(path, isolation_level=None)
            try:
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.executescript(
                    f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id = {APPLICATION_ID};"
                    f" PRAGMA user_version = {VERSION}; COMMIT;"
                )
            finally:
                connection.close()

    def query(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._reading, translated(self.path):
            return self._reader.execute(sql, parameters).fetchall()

    def locate(self, ids: Sequence[bytes]) -> list[Location | None]:
        """Return where each object is, or None."""
        found: dict[bytes, Location] = {}
        for start in range(0, len(ids), _BATCHES[-1]):
            batch = tuple(ids[start : start + _BATCHES[-1]])
            size = next(size for size in _BATCHES if size >= len(batch))
            marks = ",".join("?" * size)
            padded = batch + batch[-1:] * (size - len(batch))
            for id, pack, offset, length in self.query(
                f"SELECT id, pack, offset, length FROM objects WHERE id IN ({marks})",  # noqa: S608 (only marks)
                padded,
            ):
                found[id] = location(pack, offset, length)
        return [found.get(id) for id in ids]

    def pack(self, number: int) -> PackRow | None:
        """Return the row of a pack, or None."""
        rows = self.query("SELECT number, closed, dead FROM packs WHERE number = ?", (number,))
        return PackRow(rows[0][0], bool(rows[0][1]), bool(rows[0][2])) if rows else None

    def packs(self) -> list[PackRow]:
        """Return every pack by number."""
        rows = self.query("SELECT number, closed, dead FROM packs ORDER BY number")
        return [PackRow(number, bool(closed), bool(dead)) for number, closed, dead in rows]

    def last_number(self) -> int:
        """Return the highest number that a pack was ever given; 0 before the first."""
        rows = self.query("SELECT seq FROM sqlite_sequence WHERE name = 'packs'")
        if rows and not isinstance(rows[0][0], int):
            raise StoreDamagedError(f"a damaged index {self.path}: the count of packs is no number")
        return rows[0][0] if rows else 0

    @contextmanager
    def transaction(self, before_commit: Callable[[], None] = lambda: None) -> Iterator[Transaction]:
        """Change the index: all of it when the block ends well, nothing when it raises or asked for a rollback.

        ``before_commit`` is called when the commit is about to be tried.
        """
        with self._writing, translated(self.path):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                transaction = Transaction(self._writer)
                yield transaction
                if not transaction.rolled_back:
                    before_commit()
                    self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def quick_check(self) -> None:
        """Raise :class:`StoreDamagedError` when pages or rows are not what SQLite, or the schema, wants them to be."""
        for (line,) in self.query("PRAGMA quick_check(1)"):
            if line != "ok":
                raise StoreDamagedError(f"a damaged index {self.path}: {line}; run check")

    @contextmanager
    def attached(self) -> Iterator[sqlite3.Connection]:
        """Open one more connection, with an empty database ``mark`` beside the index.

        It is SQLite's own temporary one: in memory while it is small, then in an unlinked file where ``SQLITE_TMPDIR``
        or ``TMPDIR`` says, so a store on a full disk can be collected. Errors are the caller's to translate.
        """
        connection = connect(self.path, self._wait_seconds)
        try:
            connection.execute("ATTACH '' AS mark")
            for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}"):
                connection.execute(f"PRAGMA mark.{pragma}").fetchall()
            yield connection
        finally:
            connection.close()

    def shrink(self) -> None:
        """Write the index anew where a quarter of its pages is empty."""
        with self._writing, translated(self.path):
            (pages,) = self._writer.execute("PRAGMA page_count").fetchone()
            (free,) = self._writer.execute("PRAGMA freelist_count").fetchone()
            if free * 4 > pages:
                self._writer.execute("VACUUM")

    def checkpoint(self) -> None:
        """Write the WAL back into the index and empty it, unless another process reads there just now."""
        with self._writing, translated(self.path):
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close both connections; the last one of all processes removes the WAL."""
        with self._reading, self._writing, translated(self.path):
            self._reader.close()
            self._writer.close()

    def _check_version(self) -> None:
        """Look again through SQLite: a WAL may hold a newer first page than the file that :func:`probe` saw."""
        (application,) = self._reader.execute("PRAGMA application_id").fetchone()
        (version,) = self._reader.execute("PRAGMA user_version").fetchone()
        _accept(self.path, application, version)


def probe(path: Path) -> None:
    """Refuse an index that is newer or foreign, without SQLite: nothing is written, not even beside it.

    :class:`StoreVersionError` or :class:`StoreDamagedError`. Bytes 60 and 68 of the header are ``user_version`` and
    ``application_id`` (https://www.sqlite.org/fileformat2.html#the_database_header).
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StoreDamagedError(f"a damaged store: {path} is no regular file")
            header = os.pread(fd, _HEADER_BYTES, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreDamagedError(
            f"a damaged store: {path} cannot be read: {error.strerror}; put it back from a backup, or run rebuild"
        ) from error
    if len(header) < _HEADER_BYTES or not header.startswith(b"SQLite format 3\0"):
        raise StoreDamagedError(
            f"a damaged index {path}: it is no SQLite database; put it back from a backup, or run rebuild"
        )
    _accept(path, int.from_bytes(header[68:72], "big"), int.from_bytes(header[60:64], "big"))


def _accept(path: Path, application: int, version: int) -> None:
    if application != APPLICATION_ID:
        raise StoreVersionError(f"{path} is no index of a store")
    if version != VERSION:
        raise StoreVersionError(f"the index {path} has version {version}, this program knows {VERSION}; update it")


def location(pack: object, offset: object, length: object) -> Location:
    """Return the place that a row gives; :class:`StoreDamagedError` when no record can be there."""
    if not (isinstance(pack, int) and isinstance(offset, int) and isinstance(length, int)) or not (
        pack >= 1 and offset >= PACK_HEADER.size and MIN_HEADER <= length <= MAX_RECORD
    ):
        raise StoreDamagedError("a damaged index: a record where none can be")
    return Location(pack, offset, length)
