"""What is alive: walk from the names over every object, in a scratch table on disk, not in memory.

For gc, which removes the rest, and for check, which verifies all of it. Each object is opened once, however many states
share it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import (
    Child,
    Entry,
    Kind,
    Type,
    decode_attrs,
    decode_commit,
    decode_page,
    decode_tree,
)

_BATCH = 256
_SCHEMA = """
CREATE TABLE mark.live (
    id BLOB PRIMARY KEY NOT NULL,
    kind INTEGER NOT NULL,
    size INTEGER,
    weak INTEGER NOT NULL DEFAULT 0,
    todo INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX mark.todo ON live (todo) WHERE todo = 1;
"""
CONFLICT = -1
"""The size of an object of which not all that lead to it say the same kind and size."""


@dataclass(frozen=True, slots=True)
class Link:
    """An object that another one leads to; ``size`` is what it says of a blob's bytes, where it does."""

    id: bytes
    kind: Kind
    size: int | None = None


def below(kind: Kind, canonical: bytes, *, weak: bool = False) -> Iterator[Link]:
    """Yield what an object leads to. ``weak`` is a forgotten commit: its tree does not count, its parents do."""
    match kind:
        case Kind.COMMIT:
            commit = decode_commit(canonical)
            if not weak:
                yield from _entry(commit.root)
            yield from (Link(parent, Kind.COMMIT) for parent in commit.parents)
            if commit.base is not None:
                yield Link(commit.base, Kind.COMMIT)
        case Kind.TREE:
            for item in decode_tree(canonical)[1]:
                if isinstance(item, Child):
                    yield Link(item.id, Kind.TREE)
                else:
                    yield from _entry(item)
        case Kind.PAGE:
            for part in decode_page(canonical)[1]:
                if isinstance(part, Child):
                    yield Link(part.id, Kind.PAGE)
                elif part.id is not None:
                    yield Link(part.id, Kind.BLOB, part.length)
        case Kind.ATTRS:
            decode_attrs(canonical)
        case Kind.BLOB:
            pass


def _entry(entry: Entry) -> Iterator[Link]:
    if entry.attrs is not None:
        yield Link(entry.attrs, Kind.ATTRS)
    if entry.content is not None:
        if entry.type is Type.DIRECTORY:
            yield Link(entry.content, Kind.TREE)
        elif entry.paged:
            yield Link(entry.content, Kind.PAGE)
        else:
            yield Link(entry.content, Kind.BLOB, entry.size)


class Marks:
    """The scratch table ``mark.live`` beside the tables of the index, on a connection of its own. For one thread."""

    def __init__(self, database: ObjectDatabase, connection: sqlite3.Connection) -> None:
        self._database = database
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement."""
        return self._connection.execute(sql, parameters)

    def script(self, sql: str) -> None:
        """Run several statements, each by itself."""
        self._connection.executescript(sql)

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for many rows."""
        self._connection.executemany(sql, rows)

    @contextmanager
    def transaction(self, how: str = "DEFERRED") -> Iterator[None]:
        """Run statements together; ``IMMEDIATE`` where they change the index."""
        self._connection.execute(f"BEGIN {how}")
        try:
            yield
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def fill(self, damaged: Callable[[bytes, Kind, StoreDamagedError], None]) -> None:
        """Mark everything that names lead to; ``damaged`` is told of what cannot be opened, and may raise.

        Blobs are marked and not opened. Call it while the store is held.
        """
        with self.transaction():
            self.execute(
                "INSERT OR IGNORE INTO mark.live (id, kind, todo)"
                " SELECT head, ?1, 1 FROM refs UNION SELECT commit_id, ?1, 1 FROM layers"
                " UNION SELECT commit_id, ?1, 1 FROM pins",
                (int(Kind.COMMIT),),
            )
        while batch := self.execute(
            "SELECT id, kind, size, weak FROM mark.live WHERE todo = 1 LIMIT ?", (_BATCH,)
        ).fetchall():
            links: list[Link] = []
            for id, number, size, weak in batch:
                kind = Kind(number)
                try:
                    header, canonical = self._database.load(id, None if size == CONFLICT else kind)
                    links += below(header.kind, canonical, weak=bool(weak))
                except StoreDamagedError as error:
                    damaged(id, kind, error)
            links.sort(key=lambda link: link.id)
            with self.transaction():
                self.executemany("UPDATE mark.live SET todo = 0 WHERE id = ?", [(row[0],) for row in batch])
                self.executemany(
                    "INSERT INTO mark.live (id, kind, size, weak, todo)"
                    " VALUES (?1, ?2, ?3, ?2 = ?4 AND EXISTS (SELECT 1 FROM forgotten WHERE commit_id = ?1), ?2 != ?5)"
                    " ON CONFLICT DO UPDATE SET size = ?6, todo = 1"
                    " WHERE (size != excluded.size OR kind != excluded.kind) AND size IS NOT ?6",
                    [
                        (link.id, int(link.kind), link.size, int(Kind.COMMIT), int(Kind.BLOB), CONFLICT)
                        for link in links
                    ],
                )


@contextmanager
def marks(database: ObjectDatabase) -> Iterator[Marks]:
    """Make an empty scratch table beside the index; it goes when the block ends."""
    with database.index.attached() as connection:
        connection.executescript(_SCHEMA)
        yield Marks(database, connection)
