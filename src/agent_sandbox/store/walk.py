"""Reading states: directories entry by entry, files extent by extent, without loading more than one page of each level.

Pages come from the store and are verified, but a verified page may still be one that no writer would make (a
store can be
handed around): sums and order are checked across pages, and depth is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent_sandbox.errors import NotFoundError, StoreDamagedError
from agent_sandbox.store.objects import (
    Child,
    Commit,
    Entry,
    Extent,
    Kind,
    Type,
    decode_commit,
    decode_page,
    decode_tree,
)
from agent_sandbox.store.ports import Objects

MAX_DEPTH = 1_000
"""Directories inside each other; a deeper tree is refused when it is captured."""


def commit(objects: Objects, id: bytes) -> Commit:
    """Return the commit ``id``."""
    return decode_commit(objects.read(id, Kind.COMMIT))


def entries(objects: Objects, directory: Entry) -> Iterator[Entry]:
    """Yield the entries of a directory, sorted by name."""
    assert directory.content is not None, "not a directory"
    last = b""
    for entry in _tree(objects, directory.content, None):
        if entry.name <= last:
            raise StoreDamagedError("a damaged directory: names out of order across its pages")
        last = entry.name
        yield entry


def _tree(objects: Objects, id: bytes, level: int | None) -> Iterator[Entry]:
    found, items = decode_tree(objects.read(id, Kind.TREE))
    if level is not None and found != level:
        raise StoreDamagedError("a damaged directory: a page of a wrong level")
    for item in items:
        if isinstance(item, Child):
            yield from _tree(objects, item.id, found - 1)
        else:
            yield item


def lookup(objects: Objects, directory: Entry, name: bytes) -> Entry | None:
    """Return the entry called ``name``, or None; reads one page of each level."""
    assert directory.content is not None, "not a directory"
    id, level = directory.content, None
    while True:
        found, items = decode_tree(objects.read(id, Kind.TREE))
        if level is not None and found != level:
            raise StoreDamagedError("a damaged directory: a page of a wrong level")
        below = None
        for item in items:
            if isinstance(item, Child):
                if name <= item.last:
                    below = item
                    break
            elif item.name == name:
                return item
        if below is None:
            return None
        id, level = below.id, found - 1


def resolve(objects: Objects, root: Entry, path: bytes) -> Entry:
    """Return the entry at ``path`` (relative, ``/`` between names; empty is the root); raises
    :class:`NotFoundError`."""
    entry: Entry | None = root
    for name in path.split(b"/") if path else ():
        entry = lookup(objects, entry, name) if entry is not None and entry.type is Type.DIRECTORY else None
        if entry is None:
            raise NotFoundError(f"no such path in this state: {path.decode(errors='backslashreplace')}")
    assert entry is not None
    return entry


def extents(objects: Objects, file: Entry) -> Iterator[Extent]:
    """Yield the extents of a file in order; their lengths add up to its size. A small file is one extent."""
    if file.content is None:
        return
    if not file.paged:
        yield Extent(file.size, file.content)
        return
    yield from _page(objects, file.content, None, file.size)


def _page(objects: Objects, id: bytes, level: int | None, size: int) -> Iterator[Extent]:
    found, items = decode_page(objects.read(id, Kind.PAGE))
    total = 0
    if level is not None and found != level:
        raise StoreDamagedError("a damaged list of chunks: a page of a wrong level")
    for item in items:
        if isinstance(item, Child):
            total += item.weight
            if total <= size:
                yield from _page(objects, item.id, found - 1, item.weight)
        else:
            total += item.length
            if total <= size:
                yield item
    if total != size:
        raise StoreDamagedError("a damaged list of chunks: its lengths do not add up to the size")


def data(objects: Objects, file: Entry) -> Iterator[bytes]:
    """Yield the bytes of a file in order, holes as zeros of at most 1 MiB at a time."""
    for extent in extents(objects, file):
        if extent.id is not None:
            chunk = objects.read(extent.id, Kind.BLOB)
            if len(chunk) != extent.length:
                raise StoreDamagedError("a damaged list of chunks: a chunk of another length")
            yield chunk
            continue
        left = extent.length
        while left:
            piece = min(left, 1 << 20)
            yield bytes(piece)
            left -= piece


def walk(objects: Objects, root: Entry) -> Iterator[tuple[bytes, Entry]]:
    """Yield every path below ``root`` with its entry, a directory before what is in it, sorted by name."""
    stack: list[tuple[bytes, Iterator[Entry]]] = [(b"", entries(objects, root))]
    while stack:
        prefix, rest = stack[-1]
        entry = next(rest, None)
        if entry is None:
            stack.pop()
            continue
        path = prefix + entry.name
        yield path, entry
        if entry.type is Type.DIRECTORY:
            if len(stack) >= MAX_DEPTH:
                raise StoreDamagedError("a damaged directory: too deep")
            stack.append((path + b"/", entries(objects, entry)))
