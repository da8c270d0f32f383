"""Damage, and where it is to be seen: from a state's root to every path that leads to a damaged object.

For check, once it knows which objects are damaged. A walk here stops at nothing: what cannot be read is noted with its
path, and the rest of the directory goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.marks import Marks
from agent_sandbox.store.objects import Child, Entry, Kind, Type, decode_page
from agent_sandbox.store.ports import Objects
from agent_sandbox.store.walk import MAX_DEPTH, Above, extents, open_tree

MOST = 10_000
"""Damages that a report names; more are counted."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong.

    ``where`` is a reference (``project:name``, ``project@number``), ``pin NAME``, ``commit ID``, or ``object ID``, a
    pack's file name or ``index`` for what belongs to no state; ``path`` is inside the state, None for the state itself.
    """

    where: str
    path: bytes | None
    why: str


@dataclass(slots=True)
class Damages:
    """The first ones, and how many there are."""

    first: list[Damage] = field(default_factory=list)
    count: int = 0

    def add(self, damage: Damage) -> None:
        """Note one."""
        self.count += 1
        if len(self.first) < MOST:
            self.first.append(damage)


@dataclass(slots=True)
class _Directory:
    path: bytes
    tree: bytes
    rest: Iterator[Entry | _Fault]
    clean: bool = True


@dataclass(frozen=True, slots=True)
class _Fault:
    key: bytes
    why: str


class Finder:
    """Walks states; ``mark.bad`` holds what is damaged. Directories without damage are walked once for all states."""

    def __init__(self, objects: Objects, marks: Marks, damages: Damages) -> None:
        self._objects = objects
        self._marks = marks
        self._damages = damages
        marks.execute("CREATE TABLE mark.clean (id BLOB PRIMARY KEY NOT NULL) WITHOUT ROWID")
        marks.execute("CREATE TABLE mark.shown (id BLOB PRIMARY KEY NOT NULL) WITHOUT ROWID")

    def damaged(self, id: bytes, kind: Kind, size: int | None = None) -> str | None:
        """Return what is wrong where an object is said to be of this kind, and a blob of this size, if something is."""
        for why, *what in self._marks.execute("SELECT why, kind, length FROM mark.bad WHERE id = ?", (id,)).fetchall():
            if what[0] is None or what[0] != kind or (size is not None and what[1] != size):
                return str(why)
        return None

    def look(self, where: str, root: Entry, *, again: bool) -> bool:
        """Note every path of a state that leads to damage, and return whether there is one.

        ``again`` notes also what was noted for another state before.
        """
        assert root.content is not None
        found = False
        stack = [_Directory(b"", root.content, self._entries(root.content, None))]
        found |= self._note(where, b"", self._attributes(root), again)
        while stack:
            at = stack[-1]
            entry = next(at.rest, None)
            if entry is None:
                stack.pop()
                if at.clean:
                    self._marks.execute("INSERT OR IGNORE INTO mark.clean VALUES (?)", (at.tree,))
                elif stack:
                    stack[-1].clean = False
                continue
            if isinstance(entry, _Fault):
                self._note(where, at.path, [entry], again)
                at.clean, found = False, True
                continue
            path = at.path + b"/" + entry.name if at.path else entry.name
            if self._note(where, path, [*self._attributes(entry), *self._file(entry)], again):
                at.clean, found = False, True
            if entry.type is Type.DIRECTORY and entry.content is not None and not self._is_clean(entry.content):
                if len(stack) > MAX_DEPTH:
                    self._note(where, path, [_Fault(entry.content, "it lies too deep")], again)
                    at.clean, found = False, True
                    continue
                stack.append(_Directory(path, entry.content, self._entries(entry.content, None)))
        return found

    def rest(self) -> None:
        """Note what is damaged and was not seen from any state."""
        for id, why in self._marks.execute(
            "SELECT id, why FROM mark.bad WHERE id NOT IN (SELECT id FROM mark.shown) ORDER BY id"
        ).fetchall():
            self._damages.add(Damage(f"object {id.hex()}", None, why))

    def note(self, where: str, id: bytes, why: str) -> None:
        """Note that a whole state cannot be read because of object ``id``."""
        self._damages.add(Damage(where, None, why))
        self._show(id)

    def _note(self, where: str, path: bytes, faults: list[_Fault], again: bool) -> bool:
        for fault in faults:
            if again or not self._marks.execute("SELECT 1 FROM mark.shown WHERE id = ?", (fault.key,)).fetchone():
                self._damages.add(Damage(where, path, fault.why))
            self._show(fault.key)
        return bool(faults)

    def _show(self, id: bytes) -> None:
        self._marks.execute("INSERT OR IGNORE INTO mark.shown VALUES (?)", (id,))

    def _is_clean(self, id: bytes) -> bool:
        return bool(self._marks.execute("SELECT 1 FROM mark.clean WHERE id = ?", (id,)).fetchone())

    def _entries(self, id: bytes, above: Above | None) -> Iterator[Entry | _Fault]:
        bad = self.damaged(id, Kind.TREE)
        if bad is not None:
            yield _Fault(id, bad)
            return
        try:
            level, items = open_tree(self._objects, id, above)
        except StoreDamagedError as error:
            yield _Fault(id, error.message)
            return
        after = above.after if above is not None else b""
        for item in items:
            if isinstance(item, Child):
                yield from self._entries(item.id, Above(item, level - 1, after))
                after = item.last
            else:
                yield item

    def _attributes(self, entry: Entry) -> list[_Fault]:
        if entry.attrs is None:
            return []
        bad = self.damaged(entry.attrs, Kind.ATTRS)
        return [_Fault(entry.attrs, bad)] if bad is not None else []

    def _file(self, entry: Entry) -> list[_Fault]:
        if entry.type is not Type.FILE or entry.content is None:
            return []
        if not entry.paged:
            return list(self._blob(entry.content, entry.size))
        faults = list(self._page(entry.content))
        if not faults:
            try:
                deque(extents(self._objects, entry), maxlen=0)
            except StoreDamagedError as error:
                faults.append(_Fault(entry.content, error.message))
        return faults

    def _page(self, id: bytes, level: int | None = None) -> Iterator[_Fault]:
        bad = self.damaged(id, Kind.PAGE)
        if bad is not None:
            yield _Fault(id, bad)
            return
        try:
            found, items = decode_page(self._objects.read(id, Kind.PAGE))
        except StoreDamagedError as error:
            yield _Fault(id, error.message)
            return
        if level is not None and found != level:
            yield _Fault(id, "a page of a wrong level")
            return
        for item in items:
            if isinstance(item, Child):
                yield from self._page(item.id, found - 1)
            elif item.id is not None:
                yield from self._blob(item.id, item.length)

    def _blob(self, id: bytes, size: int) -> Iterator[_Fault]:
        bad = self.damaged(id, Kind.BLOB, size)
        if bad is not None:
            yield _Fault(id, bad)
