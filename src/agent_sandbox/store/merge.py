"""Merging two states that have a common ancestor, entry by entry.

``threeway.py`` has the rules for one path, ``links.py`` those for files with several names. Here is the walk: three
directories side by side, going down only where both sides changed a directory (or where a linked file in it changes its
link id). What one side left alone is taken from the other without being opened. Only directories that are new are
written, each after all that is in it; from the first conflict on nothing is.

The result is what a capture of that tree would give: pages are cut by the same code, link ids are those of first names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import links, walk
from agent_sandbox.store.chunks import put_tree
from agent_sandbox.store.objects import Entry, Kind, Type, identity
from agent_sandbox.store.outcomes import Conflict, ConflictKind
from agent_sandbox.store.ports import Objects, Writer
from agent_sandbox.store.threeway import choose, lost

MAX_CONFLICTS = 10_000
"""Conflicts that are listed; the others are counted."""

_Three = tuple[Entry | None, Entry | None, Entry | None]


@dataclass(frozen=True, slots=True)
class Merged:
    """The root of the result, or None where there are conflicts: the first 10,000 of ``count``, sorted as a walk is."""

    root: Entry | None
    conflicts: tuple[Conflict, ...] = ()
    count: int = 0


@dataclass(slots=True)
class _Directory:
    """One that is being merged. ``entry`` is what it becomes, without what is in it."""

    prefix: bytes
    entry: Entry
    resembles: bytes | None
    rest: Iterator[_Three]
    out: list[Entry] = field(default_factory=list)


def merge(objects: Objects, writer: Writer, base: Entry, left: Entry, right: Entry) -> Merged:
    """Merge what two sides made of the root ``base``; the order of the sides does not matter.

    Raises :class:`LimitExceededError` where more than 100,000 names of linked files changed.
    """
    return _Merge(objects, writer, links.plan(objects, base, left, right)).run(base, left, right)


class _Merge:
    def __init__(self, objects: Objects, writer: Writer, plan: links.Plan) -> None:
        self._objects = objects
        self._writer = writer
        self._plan = plan
        self._conflicts: list[Conflict] = []
        self._count = 0

    def run(self, base: Entry, left: Entry, right: Entry) -> Merged:
        """Go through the trees without recursion: they are deeper than Python's stack."""
        done = self._path(b"", (base, left, right))
        stack = [done] if isinstance(done, _Directory) else []
        while stack:
            directory = stack[-1]
            three = next(directory.rest, None)
            if three is None:
                done = self._finished(stack.pop())
            else:
                name = next(entry.name for entry in three if entry is not None)
                done = self._path(directory.prefix + name, three)
            if isinstance(done, _Directory):
                if len(stack) > walk.MAX_DEPTH:
                    raise StoreDamagedError("a damaged directory: too deep")
                stack.append(done)
            elif done is not None and stack:
                stack[-1].out.append(done)
        assert isinstance(done, Entry), "a root stays a root"
        return Merged(None if self._count else done, tuple(self._conflicts), self._count)

    def _path(self, path: bytes, three: _Three) -> Entry | _Directory | None:
        """Decide on one path: what it becomes, or the directory that has to be gone through."""
        base, left, right = three
        choice = self._plan.choices.get(path)
        if choice is None:
            match base, left or right:
                case (Entry(type=Type.DIRECTORY), Entry(type=Type.DIRECTORY) as kept) if None in (left, right):
                    self._lost(path, base, kept)
                    return None
            choice = choose(self._objects, base, left, right)
        if choice.kinds:
            self._conflict(path, choice.kinds)
        entry = choice.entry
        if entry is None or entry.type is not Type.DIRECTORY:
            return entry
        if entry.content is not None and path not in self._plan.above:
            return entry
        base, left, right = (e if e is not None and e.type is Type.DIRECTORY else None for e in three)
        resembles = next((side.content for side in (left, right) if side is not None), None)
        rest = _aligned(self._objects, (base, left, right))
        return _Directory(path + b"/" if path else b"", entry, resembles, rest)

    def _lost(self, path: bytes, base: Entry, kept: Entry) -> None:
        """A directory that one side removed: what the other one did in it would be lost."""
        for below in lost(self._objects, base, kept):
            self._conflict(path + b"/" + below if below else path, (ConflictKind.DELETED_CHANGED,))

    def _conflict(self, path: bytes, kinds: tuple[ConflictKind, ...]) -> None:
        self._count += 1
        if self._count <= MAX_CONFLICTS:
            self._conflicts.append(Conflict(path, kinds))

    def _finished(self, directory: _Directory) -> Entry:
        def put(kind: Kind, canonical: bytes) -> bytes:
            if self._count:
                return identity(kind, canonical)
            return self._writer.put(kind, canonical, directory.resembles)

        return replace(directory.entry, content=put_tree(directory.out, put))


def _aligned(objects: Objects, directories: _Three) -> Iterator[_Three]:
    """The entries of three directories (None: an empty one) by name."""
    sides = [iter(()) if one is None else walk.entries(objects, one) for one in directories]
    heads = [next(side, None) for side in sides]
    while names := [head.name for head in heads if head is not None]:
        name = min(names)
        base, left, right = (head if head is not None and head.name == name else None for head in heads)
        yield base, left, right
        for number, head in enumerate(heads):
            if head is not None and head.name == name:
                heads[number] = next(sides[number], None)
