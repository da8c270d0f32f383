"""Reading states: directories entry by entry, files extent by extent, holding no more than one page of each level.

Pages come from the store and are verified, but a verified page may still be one that no writer would make (a store can
be handed around). So whoever opens a child page checks it against what its parent says of it: level, number of names
and last name, or number of bytes; and against what came before it. What one page shows by itself ``objects.py``
refuses; ``spec/store.md`` ("Who refuses what") has the whole table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
"""Names in the path of a directory; a deeper tree is refused when it is captured."""


def commit(objects: Objects, id: bytes) -> Commit:
    """Return the commit ``id``."""
    return decode_commit(objects.read(id, Kind.COMMIT))


# ---- directories ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Above:
    """What is known of a page before it is read: its parent's entry, its level, and the last name before it."""

    child: Child
    level: int
    after: bytes


def open_tree(objects: Objects, id: bytes, above: Above | None) -> tuple[int, list[Entry] | list[Child]]:
    """Return level and items of one page of a directory; ``above`` is None for its root.

    Raises :class:`StoreDamagedError` when the page is not what is known of it.
    """
    level, items = decode_tree(objects.read(id, Kind.TREE))
    if above is None:
        return level, items
    last, weight, first = b"", 0, above.after
    for item in items:
        if isinstance(item, Child):
            last, weight = item.last, weight + item.weight
        else:
            last, weight, first = item.name, weight + 1, first if weight else item.name
    if level != above.level:
        raise StoreDamagedError("a damaged directory: a page of a wrong level")
    if last != above.child.last or weight != above.child.weight:
        raise StoreDamagedError("a damaged directory: a page that is not what the one above it says")
    if level == 0 and first <= above.after:
        raise StoreDamagedError("a damaged directory: names out of order across its pages")
    return level, items


def entries(objects: Objects, directory: Entry) -> Iterator[Entry]:
    """Yield the entries of a directory, sorted by name."""
    assert directory.content is not None, "not a directory"
    return _tree(objects, directory.content, None)


def _tree(objects: Objects, id: bytes, above: Above | None) -> Iterator[Entry]:
    level, items = open_tree(objects, id, above)
    after = above.after if above is not None else b""
    for item in items:
        if isinstance(item, Child):
            yield from _tree(objects, item.id, Above(item, level - 1, after))
            after = item.last
        else:
            yield item


def lookup(objects: Objects, directory: Entry, name: bytes) -> Entry | None:
    """Return the entry called ``name``, or None; reads one page of each level."""
    assert directory.content is not None, "not a directory"
    id: bytes | None = directory.content
    above: Above | None = None
    while id is not None:
        level, items = open_tree(objects, id, above)
        after = above.after if above is not None else b""
        id = None
        for item in items:
            if isinstance(item, Child):
                if name <= item.last:
                    id, above = item.id, Above(item, level - 1, after)
                    break
                after = item.last
            elif item.name == name:
                return item
    return None


def resolve(objects: Objects, root: Entry, path: bytes) -> Entry:
    """Return the entry at ``path``, relative with ``/`` between names; empty is the root.

    Raises :class:`NotFoundError`, also where a name before the last is no directory.
    """
    entry: Entry | None = root
    for name in path.split(b"/") if path else ():
        entry = lookup(objects, entry, name) if entry is not None and entry.type is Type.DIRECTORY else None
        if entry is None:
            raise NotFoundError(f"no such path in this state: {path.decode(errors='backslashreplace')}")
    assert entry is not None
    return entry


def walk(objects: Objects, root: Entry) -> Iterator[tuple[bytes, Entry]]:
    """Yield every path below ``root`` with its entry, a directory before what is in it, siblings sorted by name.

    That is not the order of the paths as bytes: ``a/b`` comes before ``a.b``.
    """
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
            if len(stack) > MAX_DEPTH:
                raise StoreDamagedError("a damaged directory: too deep")
            stack.append((path + b"/", entries(objects, entry)))


# ---- files ---------------------------------------------------------------------------------------------------------


def extents(objects: Objects, file: Entry) -> Iterator[Extent]:
    """Yield the extents of a file in order; their lengths add up to its size. A small file is one extent."""
    if file.content is None:
        return
    if not file.paged:
        yield Extent(file.size, file.content)
        return
    hole = False
    for extent in _page(objects, file.content, None, file.size):
        if hole and extent.id is None:
            raise StoreDamagedError("a damaged list of chunks: two holes in a row")
        hole = extent.id is None
        yield extent


def open_page(objects: Objects, id: bytes, level: int | None, size: int) -> tuple[int, list[Extent] | list[Child]]:
    """Return level and items of one page of a file, which has ``size`` bytes; ``level`` is None for its root."""
    found, items = decode_page(objects.read(id, Kind.PAGE))
    if level is not None and found != level:
        raise StoreDamagedError("a damaged list of chunks: a page of a wrong level")
    if sum(item.weight if isinstance(item, Child) else item.length for item in items) != size:
        raise StoreDamagedError("a damaged list of chunks: its lengths do not add up to the size")
    return found, items


def _page(objects: Objects, id: bytes, level: int | None, size: int) -> Iterator[Extent]:
    found, items = open_page(objects, id, level, size)
    for item in items:
        if isinstance(item, Child):
            yield from _page(objects, item.id, found - 1, item.weight)
        else:
            yield item


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
