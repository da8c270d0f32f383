"""What a path held in the state before: only to store what replaces it as a patch.

Nothing is opened until an object is really new, so a capture that changes nothing reads nothing here. A base that is
damaged or gone means no patch, never a failed capture: the workspace may be the only copy of what is in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.objects import Child, Entry, Extent, Kind, Type, decode_page, decode_tree
from agent_sandbox.store.ports import Objects


@dataclass(frozen=True, slots=True)
class _Page:
    """One decoded page, and where it begins: in bytes (files; directories: 0)."""

    id: bytes
    level: int
    start: int
    items: list[Entry] | list[Extent] | list[Child]


class _Pages:
    """Goes from a root page to the one that covers a key; keeps the last page of each level."""

    def __init__(self, objects: Objects, kind: Kind, root: bytes) -> None:
        self._objects = objects
        self._kind = kind
        self._root = root
        self._last: dict[int, _Page] = {}

    def _open(self, id: bytes, depth: int, start: int) -> _Page:
        page = self._last.get(depth)
        if page is None or page.id != id or page.start != start:
            canonical = self._objects.read(id, self._kind)
            level, items = decode_tree(canonical) if self._kind is Kind.TREE else decode_page(canonical)
            page = self._last[depth] = _Page(id, level, start, items)
        return page

    def covering(self, level: int, key: bytes | int) -> _Page | None:
        """Return the page of ``level`` that covers a name (directory) or an offset (file)."""
        page = self._open(self._root, 0, 0)
        depth = 0
        while page.level > level:
            below = _child(page, key)
            if below is None:
                return None
            depth += 1
            above, page = page, self._open(below[0].id, depth, below[1])
            if page.level != above.level - 1:
                raise StoreDamagedError("a damaged page: of a wrong level")
        return page if page.level == level else None


def _child(page: _Page, key: bytes | int) -> tuple[Child, int] | None:
    start, child = page.start, None
    for child in page.items:
        assert isinstance(child, Child), "above level 0"
        if isinstance(key, bytes):
            if key <= child.last:
                return child, 0
        elif key < start + child.weight:
            return child, start
        else:
            start += child.weight
    # A name after the last one is appended to the last page; an offset after the end replaces nothing.
    return (child, 0) if isinstance(key, bytes) and isinstance(child, Child) else None


class PastFile:
    """A file as it was."""

    def __init__(self, objects: Objects, entry: Entry) -> None:
        self._entry = entry
        self._pages = _Pages(objects, Kind.PAGE, entry.content) if entry.paged and entry.content else None

    def chunk(self, offset: int) -> bytes | None:
        """Return the id of the blob that covers ``offset``."""
        if self._pages is None:
            return self._entry.content if offset < self._entry.size else None
        try:
            page = self._pages.covering(0, offset)
        except StoreDamagedError:
            return None
        if page is not None:
            start = page.start
            for extent in page.items:
                assert isinstance(extent, Extent), "level 0"
                start += extent.length
                if offset < start:
                    return extent.id
        return None

    def page(self, level: int, offset: int) -> bytes | None:
        """Return the id of the page of ``level`` that covers ``offset``."""
        try:
            page = self._pages.covering(level, offset) if self._pages else None
        except StoreDamagedError:
            return None
        return page.id if page else None


class PastDirectory:
    """A directory as it was, or nothing: every answer is None where there was none."""

    def __init__(self, objects: Objects, entry: Entry | None, above: PastDirectory | None = None, name: bytes = b""):
        """From its entry, or from the directory above and its name there, which is looked up when needed."""
        self._objects = objects
        self._above = above
        self._name = name
        self._pages: _Pages | None = None
        self._sought = above is None
        if entry is not None:
            self._set(entry)

    def _set(self, entry: Entry | None) -> None:
        if entry is not None and entry.type is Type.DIRECTORY and entry.content is not None:
            self._pages = _Pages(self._objects, Kind.TREE, entry.content)

    def child(self, name: bytes) -> PastDirectory:
        """Return the directory ``name`` in it."""
        return PastDirectory(self._objects, None, self, name)

    def _covering(self, level: int, name: bytes) -> _Page | None:
        seek = []
        place: PastDirectory | None = self
        while place is not None and not place._sought:
            seek.append(place)
            place = place._above
        for place in reversed(seek):  # not recursive: a tree may be 1,000 directories deep
            place._sought = True
            assert place._above is not None, "only a root has none"
            place._set(place._above.find(place._name))
        try:
            return self._pages.covering(level, name) if self._pages else None
        except StoreDamagedError:
            return None

    def find(self, name: bytes) -> Entry | None:
        """Return the entry ``name``."""
        page = self._covering(0, name)
        for entry in page.items if page else ():
            assert isinstance(entry, Entry), "level 0"
            if entry.name == name:
                return entry
        return None

    def file(self, name: bytes) -> PastFile | None:
        """Return the file ``name``."""
        entry = self.find(name)
        return PastFile(self._objects, entry) if entry is not None and entry.type is Type.FILE else None

    def page(self, level: int, name: bytes) -> bytes | None:
        """Return the id of the page of ``level`` that covers ``name``."""
        page = self._covering(level, name)
        return page.id if page else None
