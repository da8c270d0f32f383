"""What differs between two states, path by path, reading only what differs.

Two directories with the same id are equal and never opened; neither is a page that both hold. A page's id covers its
names and entries, and names ascend through a directory, so a page that occurs on both sides covers the same names on
both: it can be dropped from both before the rest is compared. In memory is the list of the differing pages of each
directory on the way down. A page is checked against what is told of it above, and the last names told there ascend, so
no page occurs twice in a directory: a store made by somebody else cannot make this list longer than the store is.

Renames are not detected: they are a path removed and a path added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.objects import Child, Entry, Type
from agent_sandbox.store.ports import Objects
from agent_sandbox.store.walk import MAX_DEPTH, Above, open_tree


class ChangeKind(StrEnum):
    """What happened to a path."""

    ADDED = "added"
    REMOVED = "removed"
    MODIFIED = "modified"
    """Another content, or another target of a symlink; whatever else changed as well."""
    TYPE = "type"
    METADATA = "metadata"
    """Mode, mtime, owner, attributes, or which names are one file; the content is the same."""


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs. The root has the empty path."""

    path: bytes
    kind: ChangeKind
    old: Entry | None
    new: Entry | None


def diff(objects: Objects, old: Entry, new: Entry, *, whole: bool = False) -> Iterator[Change]:
    """Yield every path that differs between two directories, a directory before what is in it, names as bytes.

    Everything below a directory that was added, removed, or is one on one side only, is told too, unless ``whole`` says
    that its own path is enough: then it is not opened. A directory is not modified by what is in it, but its mtime
    mostly differs then (``metadata``).
    Raises :class:`StoreDamagedError` for what no writer would have made.
    """
    if kind := change_kind(old, new):
        yield Change(b"", kind, old, new)
    stack = [(b"", differing(objects, old, new))]
    while stack:
        prefix, pairs = stack[-1]
        pair = next(pairs, None)
        if pair is None:
            stack.pop()
            continue
        before, after = pair
        path = prefix + _either(before, after).name
        if kind := change_kind(before, after):
            yield Change(path, kind, before, after)
        directories = [entry if entry and entry.type is Type.DIRECTORY else None for entry in pair]
        if all(directories) if whole else any(directories):
            if len(stack) > MAX_DEPTH:
                raise StoreDamagedError("a damaged directory: too deep")
            stack.append((path + b"/", differing(objects, directories[0], directories[1])))


def change_kind(old: Entry | None, new: Entry | None) -> ChangeKind | None:
    """Return how two entries of one path differ, what is in a directory not counted; None when they do not."""
    if old is None or new is None:
        return None if old is new else ChangeKind.ADDED if old is None else ChangeKind.REMOVED
    if old.type is not new.type:
        return ChangeKind.TYPE
    if old.type is Type.DIRECTORY:
        return None if replace(old, content=new.content) == new else ChangeKind.METADATA
    if content(old) != content(new):
        return ChangeKind.MODIFIED
    return None if old == new else ChangeKind.METADATA


def content(entry: Entry) -> tuple[int, bytes | None, bool, bytes]:
    """Return what makes the content of a file or symlink, to be compared."""
    return entry.size, entry.content, entry.paged, entry.target


def differing(objects: Objects, old: Entry | None, new: Entry | None) -> Iterator[tuple[Entry | None, Entry | None]]:
    """Yield the entries of two directories (None: an empty one) that are not equal, paired by name, in order."""
    if old and new and old.content == new.content:
        return
    left, right = _differing_pages(objects, old, new)
    before, after = next(left, None), next(right, None)
    while before or after:
        if after is None or (before and before.name < after.name):
            yield before, None
            before = next(left, None)
        elif before is None or after.name < before.name:
            yield None, after
            after = next(right, None)
        else:
            if before != after:
                yield before, after
            before, after = next(left, None), next(right, None)


def _either(old: Entry | None, new: Entry | None) -> Entry:
    entry = old or new
    assert entry is not None, "a pair of nothing"
    return entry


def _differing_pages(objects: Objects, old: Entry | None, new: Entry | None) -> list[Iterator[Entry]]:
    """The names of two directories, without those on pages that both have."""
    sides = (_Pages(objects, old), _Pages(objects, new))
    while True:
        if sides[0].level == sides[1].level:
            common = sides[0].ids() & sides[1].ids()
            for side in sides:
                side.drop(common)
            if sides[0].level == 0:
                return [side.names() for side in sides]
        level = max(side.level for side in sides)
        for side in sides:
            if side.level == level:
                side.descend()


class _Pages:
    """Some pages of one directory, in order, all of one level; at first its root alone."""

    def __init__(self, objects: Objects, directory: Entry | None) -> None:
        self._objects = objects
        self._pages: list[Above] = []
        self.level = 0
        if directory is not None:
            assert directory.content is not None, "not a directory"
            self._root = open_tree(objects, directory.content, None)
            self.level = self._root[0]
            self._pages = [Above(Child(0, directory.content), self.level, b"")]

    def ids(self) -> set[bytes]:
        return {page.child.id for page in self._pages}

    def drop(self, ids: set[bytes]) -> None:
        self._pages = [page for page in self._pages if page.child.id not in ids]

    def descend(self) -> None:
        """Go on with the pages of the level below."""
        below = []
        for page in self._pages:
            after = page.after
            for item in self._open(page):
                if isinstance(item, Child):
                    below.append(Above(item, self.level - 1, after))
                    after = item.last
        self._pages = below
        self.level -= 1

    def names(self) -> Iterator[Entry]:
        """Yield the entries of pages of level 0, one page in memory at a time."""
        for page in self._pages:
            for item in self._open(page):
                if isinstance(item, Entry):
                    yield item

    def _open(self, page: Above) -> list[Entry] | list[Child]:
        if not page.child.weight:
            return self._root[1]
        return open_tree(self._objects, page.child.id, page)[1]
