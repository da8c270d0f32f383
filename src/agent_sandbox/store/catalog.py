"""The names of a store: projects, layers, branches and tags, pins, forgotten commits.

:class:`Names` reads them, over any connection of the index; :class:`~agent_sandbox.store.index.Transaction` adds
:class:`NameChanges`. Whoever moves a name checks in the same transaction that the commit is there, so gc, which takes
commits whole, can never have taken what a name leads to. The grammar of names is in ``refs.py``; any text is taken
here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from agent_sandbox.errors import ConflictError, NotFoundError, StoreDamagedError
from agent_sandbox.store.objects import ID_BYTES

_PAGE = 500
"""Rows of a listing that are held at a time."""


class RefKind(IntEnum):
    """Kinds of names in a project; the number is stored."""

    BRANCH = 1
    TAG = 2


@dataclass(frozen=True, slots=True)
class Project:
    """A project; ``created_ns`` is nanoseconds since the epoch, ``owners`` whether uid and gid are recorded."""

    name: str
    created_ns: int
    owners: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """A published state; layers of a project are numbered from 0 without gaps."""

    project: str
    number: int
    commit: bytes


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch or tag: its head, and the number of the layer that it stands on."""

    project: str
    name: str
    kind: RefKind
    head: bytes
    base: int | None


@dataclass(frozen=True, slots=True)
class Pin:
    """A commit that stays although no branch or tag leads there."""

    name: str
    commit: bytes


class Names:
    """Reads names. Iterators read a page at a time; each page is one look at the store, not all of them together."""

    def query(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of one query; for the classes that have a connection."""
        raise NotImplementedError

    def project(self, name: str) -> Project | None:
        """Return the project, or None."""
        rows = self.query("SELECT name, created_ns, owners FROM projects WHERE name = ?", (name,))
        return Project(rows[0][0], rows[0][1], bool(rows[0][2])) if rows else None

    def projects(self) -> Iterator[Project]:
        """Yield every project by name."""
        last = ""
        while rows := self.query(
            "SELECT name, created_ns, owners FROM projects WHERE name > ? ORDER BY name LIMIT ?", (last, _PAGE)
        ):
            yield from (Project(name, created, bool(owners)) for name, created, owners in rows)
            last = rows[-1][0]

    def layer(self, project: str, number: int) -> Layer | None:
        """Return the layer, or None."""
        rows = self.query("SELECT commit_id FROM layers WHERE project = ? AND number = ?", (project, number))
        return Layer(project, number, _id(rows[0][0])) if rows else None

    def last_layer(self, project: str) -> Layer | None:
        """Return the newest layer of the project, or None."""
        rows = self.query(
            "SELECT number, commit_id FROM layers WHERE project = ? ORDER BY number DESC LIMIT 1", (project,)
        )
        return Layer(project, rows[0][0], _id(rows[0][1])) if rows else None

    def layers(self, project: str) -> Iterator[Layer]:
        """Yield the layers of the project, oldest first."""
        last = -1
        while rows := self.query(
            "SELECT number, commit_id FROM layers WHERE project = ? AND number > ? ORDER BY number LIMIT ?",
            (project, last, _PAGE),
        ):
            yield from (Layer(project, number, _id(commit)) for number, commit in rows)
            last = rows[-1][0]

    def ref(self, project: str, name: str) -> Ref | None:
        """Return the branch or tag, or None."""
        rows = self.query("SELECT name, kind, head, base FROM refs WHERE project = ? AND name = ?", (project, name))
        return _ref(project, rows[0]) if rows else None

    def refs(self, project: str) -> Iterator[Ref]:
        """Yield the branches and tags of the project by name."""
        last = ""
        while rows := self.query(
            "SELECT name, kind, head, base FROM refs WHERE project = ? AND name > ? ORDER BY name LIMIT ?",
            (project, last, _PAGE),
        ):
            yield from (_ref(project, row) for row in rows)
            last = rows[-1][0]

    def pin(self, name: str) -> Pin | None:
        """Return the pin, or None."""
        rows = self.query("SELECT commit_id FROM pins WHERE name = ?", (name,))
        return Pin(name, _id(rows[0][0])) if rows else None

    def pins(self) -> Iterator[Pin]:
        """Yield every pin by name."""
        last = ""
        while rows := self.query(
            "SELECT name, commit_id FROM pins WHERE name > ? ORDER BY name LIMIT ?", (last, _PAGE)
        ):
            yield from (Pin(name, _id(commit)) for name, commit in rows)
            last = rows[-1][0]

    def is_forgotten(self, commit: bytes) -> bool:
        """Return whether gc may take the tree of the commit, or has."""
        return bool(self.query("SELECT 1 FROM forgotten WHERE commit_id = ?", (commit,)))

    def find(self, prefix: str, limit: int = 16) -> list[bytes]:
        """Return up to ``limit`` ids of objects, of every kind, whose hex form begins with ``prefix`` (lower case)."""
        least = bytes.fromhex(prefix.ljust(2 * ID_BYTES, "0"))
        most = bytes.fromhex(prefix.ljust(2 * ID_BYTES, "f"))
        rows = self.query("SELECT id FROM objects WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?", (least, most, limit))
        return [_id(row[0]) for row in rows]

    def has_state(self, commit: bytes) -> bool:
        """Return whether the commit is there with its tree: known, and not one that was forgotten."""
        if not self.query("SELECT 1 FROM objects WHERE id = ?", (commit,)):
            return False
        return not self.is_forgotten(commit) or bool(
            self.query(
                "SELECT 1 FROM refs WHERE head = ?1 UNION ALL SELECT 1 FROM layers WHERE commit_id = ?1"
                " UNION ALL SELECT 1 FROM pins WHERE commit_id = ?1 LIMIT 1",
                (commit,),
            )
        )


class NameChanges(Names):
    """Changes names inside one transaction; what was read in it stays true until it ends."""

    def change(self, sql: str, parameters: tuple[Any, ...] = ()) -> int:
        """Make one change and return how many rows it met; for the class that has a connection."""
        raise NotImplementedError

    def add_project(self, name: str, created_ns: int, *, owners: bool = False) -> None:
        """Add an empty project; :class:`ConflictError` when the name is taken."""
        try:
            self.change("INSERT INTO projects (name, created_ns, owners) VALUES (?, ?, ?)", (name, created_ns, owners))
        except sqlite3.IntegrityError:
            raise ConflictError(f"there is a project {name!r} already") from None

    def remove_project(self, name: str) -> bool:
        """Remove a project with its layers, branches and tags; returns whether there was one."""
        return bool(self.change("DELETE FROM projects WHERE name = ?", (name,)))

    def add_layer(self, project: str, commit: bytes) -> Layer:
        """Publish a commit as the project's next layer; :class:`NotFoundError` when one of both is not there."""
        self._need(project, commit)
        last = self.last_layer(project)
        layer = Layer(project, 0 if last is None else last.number + 1, commit)
        self.change("INSERT INTO layers (project, number, commit_id) VALUES (?, ?, ?)", (project, layer.number, commit))
        return layer

    def add_ref(self, ref: Ref) -> None:
        """Add a branch or tag; :class:`ConflictError` when the name is taken, :class:`NotFoundError` without its
        commit."""
        self._need(ref.project, ref.head)
        try:
            self.change(
                "INSERT INTO refs (project, name, kind, head, base) VALUES (?, ?, ?, ?, ?)",
                (ref.project, ref.name, int(ref.kind), ref.head, ref.base),
            )
        except sqlite3.IntegrityError:
            raise ConflictError(f"there is a name {ref.name!r} in project {ref.project!r} already") from None

    def move_ref(self, project: str, name: str, head: bytes, *, expected: bytes, base: int | None = None) -> bool:
        """Move a branch from ``expected`` to ``head``; returns False when it is somewhere else, or gone, or a tag.

        ``base`` is the layer that it stands on from now; None leaves that as it is.
        """
        self._need(project, head)
        return bool(
            self.change(
                "UPDATE refs SET head = ?, base = coalesce(?, base)"
                " WHERE project = ? AND name = ? AND kind = ? AND head = ?",
                (head, base, project, name, int(RefKind.BRANCH), expected),
            )
        )

    def remove_ref(self, project: str, name: str) -> bool:
        """Remove a branch or tag; returns whether there was one."""
        return bool(self.change("DELETE FROM refs WHERE project = ? AND name = ?", (project, name)))

    def set_pin(self, name: str, commit: bytes) -> None:
        """Pin a commit, or move the pin; :class:`NotFoundError` when the commit is not there."""
        self._need(None, commit)
        self.change(
            "INSERT INTO pins (name, commit_id) VALUES (?, ?) ON CONFLICT DO UPDATE SET commit_id = excluded.commit_id",
            (name, commit),
        )

    def remove_pin(self, name: str) -> bool:
        """Remove a pin; returns whether there was one."""
        return bool(self.change("DELETE FROM pins WHERE name = ?", (name,)))

    def forget(self, commit: bytes) -> None:
        """Let gc take the commit's tree once no branch, tag, layer or pin is at it."""
        self.change("INSERT OR IGNORE INTO forgotten (commit_id) VALUES (?)", (commit,))

    def _need(self, project: str | None, commit: bytes) -> None:
        if project is not None and self.project(project) is None:
            raise NotFoundError(f"there is no project {project!r}")
        if not self.has_state(commit):
            raise NotFoundError(f"commit {commit.hex()} is not in the store")


def _id(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) != ID_BYTES:
        raise StoreDamagedError("a damaged index: an id of a wrong length")
    return value


def _ref(project: str, row: tuple[Any, ...]) -> Ref:
    name, kind, head, base = row
    try:
        return Ref(project, name, RefKind(kind), _id(head), base)
    except ValueError:
        raise StoreDamagedError("a damaged index: a name of an unknown kind") from None
