"""Whether a state is stored in the one form that writers give it: what only ``check`` asks.

A reader serves a state rightly also where its pages were cut elsewhere than the rule says, or where a lone name is
marked as linked; refusing it would lose it. But such a state has another id than the same state by the rule, so it
was written by a faulty writer, and ``check`` says so. ``spec/store.md`` ("Who refuses what") has the table. Where a
file's data was cut into chunks is not looked at: that costs space alone, and finding it costs as much as importing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.chunks import put_pages, put_tree
from agent_sandbox.store.objects import SMALL_FILE, Entry, Extent, Type, identity, link_id
from agent_sandbox.store.ports import Objects
from agent_sandbox.store.walk import MAX_DEPTH, entries, extents


@dataclass(frozen=True, slots=True)
class Misshapen:
    """One path of a state that is not stored by the rule, and in what."""

    path: bytes
    why: str


@dataclass(slots=True)
class _Directory:
    prefix: bytes
    tree: bytes
    rest: Iterator[Entry]
    linked: bool = False
    """Whether a linked entry was seen in it or below."""


@dataclass(slots=True)
class _Inode:
    first: bytes
    entry: Entry
    names: int = 0


class Shapes:
    """Look at states one after the other; what two of them share is looked at once, unless something in it is linked.

    Remembers one id for every tree and every large file seen, and while one state is looked at its linked inodes.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._done: set[bytes] = set()

    def faults(self, root: Entry) -> Iterator[Misshapen]:
        """Yield what is not by the rule in the state with this root; raises :class:`StoreDamagedError` for what
        cannot be read."""
        inodes: dict[bytes, _Inode] = {}
        stack: list[_Directory] = []
        if root.content not in self._done:
            yield from self._directory(b"", root, stack)
        while stack:
            at = stack[-1]
            entry = next(at.rest, None)
            if entry is None:
                stack.pop()
                if not at.linked:
                    self._done.add(at.tree)
                elif stack:
                    stack[-1].linked = True
                continue
            path = at.prefix + entry.name
            if entry.link is not None:
                at.linked = True
                yield from _join(inodes, path, entry, entry.link)
            if entry.content is None or _key(entry) in self._done:
                continue
            if entry.type is Type.DIRECTORY:
                if len(stack) > MAX_DEPTH:
                    raise StoreDamagedError("a damaged directory: too deep")
                yield from self._directory(path, entry, stack)
            elif entry.paged:
                yield from self._file(path, entry)
        for link, inode in inodes.items():
            if inode.names == 1:
                yield Misshapen(inode.first, "marked as linked, with no other name")
            elif link != link_id(inode.first):
                yield Misshapen(inode.first, "a link id that is not that of its first name")

    def _directory(self, path: bytes, entry: Entry, stack: list[_Directory]) -> Iterator[Misshapen]:
        assert entry.content is not None
        stack.append(_Directory(path + b"/" if path else b"", entry.content, entries(self._objects, entry)))
        if put_tree(entries(self._objects, entry), identity) != entry.content:
            yield Misshapen(path, "a directory whose pages are cut elsewhere than the rule says")

    def _file(self, path: bytes, entry: Entry) -> Iterator[Misshapen]:
        assert entry.content is not None
        holes = 0

        def counted() -> Iterator[Extent]:
            nonlocal holes
            for extent in extents(self._objects, entry):
                holes += extent.id is None
                yield extent

        if put_pages(counted(), identity) != entry.content:
            yield Misshapen(path, "a file whose pages are cut elsewhere than the rule says")
        elif entry.size < SMALL_FILE and not holes:
            yield Misshapen(path, "a small file without holes that is stored as a list of chunks")
        self._done.add(_key(entry))


def _key(entry: Entry) -> bytes:
    """A tree's id, or a file's with its size, which only reading its pages can confirm."""
    return (entry.content or b"") + (entry.size.to_bytes(8, "little") if entry.type is Type.FILE else b"")


def _join(inodes: dict[bytes, _Inode], path: bytes, entry: Entry, link: bytes) -> Iterator[Misshapen]:
    nameless = replace(entry, name=b"")
    inode = inodes.setdefault(link, _Inode(path, nameless))
    inode.first = min(inode.first, path)
    inode.names += 1
    if inode.entry != nameless:
        yield Misshapen(path, "linked with an entry that is not the same")
