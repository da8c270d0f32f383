"""Where content is cut: files into chunks by FastCDC, lists of chunks and directories into pages.

``spec/store.md`` ("File content", "Directories") is the source. Pure: bytes and entries in, cuts and canonical bytes
out. The engine does the same in Rust with the crate ``fastcdc``; ``spec/vectors/store/chunks.json`` holds both to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from blake3 import blake3

from agent_sandbox.store.objects import (
    CUT_MASK,
    MAX_CHUNK,
    MAX_ENTRIES,
    MAX_SIZE,
    MAX_TREE_PAGE,
    MIN_ENTRIES,
    Child,
    Entry,
    Extent,
    Kind,
    encode_entry,
    encode_extent,
    encode_page,
    encode_page_child,
    encode_tree,
    encode_tree_child,
)

MIN_CHUNK = 8_192
TARGET_CHUNK = 16_384
MASK_SMALL = 0x0000D90F03530000
MASK_LARGE = 0x0000D90303530000
GEAR = tuple(
    int.from_bytes(hashlib.md5(bytes((b,)) * 64, usedforsecurity=False).digest()[:8], "big") for b in range(256)
)

T = TypeVar("T")

Put = Callable[[Kind, bytes], bytes]
"""Keep an object of a kind with these canonical bytes, and return its id."""


def cut(data: bytes | memoryview, start: int, end: int) -> int:
    """Return where the chunk that begins at ``start`` ends, ``end`` being where the run of data ends.

    A caller that holds only part of the run gives at least 32,768 bytes after ``start``.
    """
    length = end - start
    if length <= MIN_CHUNK:
        return end
    length = min(length, MAX_CHUNK)
    centre = min(length, TARGET_CHUNK)
    value = 0
    gear = GEAR
    for at in range(start + MIN_CHUNK, start + centre // 2 * 2):
        value = (value << 1) + gear[data[at]] & 0xFFFFFFFFFFFFFFFF
        if not value & MASK_SMALL:
            return at
    for at in range(start + centre // 2 * 2, start + length // 2 * 2):
        value = (value << 1) + gear[data[at]] & 0xFFFFFFFFFFFFFFFF
        if not value & MASK_LARGE:
            return at
    return start + length


def cuts(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield start and end of each chunk of one whole run of data."""
    at = 0
    while at < len(data):
        end = cut(data, at, len(data))
        yield at, end
        at = end


def _in_order(entries: Iterable[Entry]) -> Iterator[Entry]:
    last = b""
    for entry in entries:
        if entry.name <= last:
            raise ValueError(f"names out of order: {entry.name!r} after {last!r}")
        last = entry.name
        yield entry


def _in_one(extents: Iterable[Extent]) -> Iterator[Extent]:
    size, hole = 0, False
    for extent in extents:
        size += extent.length
        if size > MAX_SIZE or (hole and extent.id is None):
            raise ValueError("two holes in a row, or more bytes than a file can have")
        hole = extent.id is None
        yield extent
    if not size:
        raise ValueError("a list of chunks without any")


def _pages(
    entries: Iterable[T], encode: Callable[[T], bytes], mark: Callable[[T], int | None], most_bytes: int
) -> Iterator[tuple[list[T], list[bytes]]]:
    page: list[T] = []
    encoded: list[bytes] = []
    size = 1
    for entry in entries:
        data = encode(entry)
        page.append(entry)
        encoded.append(data)
        size += len(data)
        if len(page) < MAX_ENTRIES and size < most_bytes:
            if len(page) < MIN_ENTRIES:
                continue
            last = mark(entry)
            if last is None or last & CUT_MASK:
                continue
        yield page, encoded
        page, encoded, size = [], [], 1
    if page:
        yield page, encoded


def _name_mark(entry: Entry) -> int:
    return blake3(entry.name).digest()[-1]


def put_pages(extents: Iterable[Extent], put: Put) -> bytes:
    """Keep the list of chunks of one file, from its extents in order (at least one), and return its root's id.

    Raises :class:`ValueError` for a list that no file has.
    """
    unlimited = 1 << 62
    children = [
        Child(sum(extent.length for extent in page), put(Kind.PAGE, encode_page(0, encoded)))
        for page, encoded in _pages(_in_one(extents), encode_extent, lambda e: e.id[-1] if e.id else None, unlimited)
    ]
    level = 0
    while len(children) > 1:
        level += 1
        children = [
            Child(sum(child.weight for child in page), put(Kind.PAGE, encode_page(level, encoded)))
            for page, encoded in _pages(children, encode_page_child, lambda c: c.id[-1], unlimited)
        ]
    return children[0].id


def put_tree(entries: Iterable[Entry], put: Put) -> bytes:
    """Keep one directory, from its entries sorted by name, and return its root's id.

    Raises :class:`ValueError` for entries that are out of order or that no directory can have.
    """
    children = [
        Child(len(page), put(Kind.TREE, encode_tree(0, encoded)), page[-1].name)
        for page, encoded in _pages(_in_order(entries), encode_entry, _name_mark, MAX_TREE_PAGE)
    ]
    if not children:
        return put(Kind.TREE, encode_tree(0, ()))
    level = 0
    while len(children) > 1:
        level += 1
        children = [
            Child(sum(child.weight for child in page), put(Kind.TREE, encode_tree(level, encoded)), page[-1].last)
            for page, encoded in _pages(children, encode_tree_child, lambda c: c.id[-1], MAX_TREE_PAGE)
        ]
    return children[0].id
