"""Cuts and pages: whole, within their bounds, the same for the same list, and little changed by a local edit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.store import chunks, walk
from agent_sandbox.store.objects import (
    MAX_CANONICAL,
    MAX_CHUNK,
    MAX_ENTRIES,
    MAX_TREE_PAGE,
    Entry,
    Extent,
    Kind,
    Type,
    decode_page,
    decode_tree,
    identity,
)
from tests.unit.store import strategies, vectors
from tests.unit.store.memory import MemoryObjects

MIB = 1 << 20
DATA = vectors.stream("test", MIB)
EXTENTS = vectors.extents_of({"seed": "test", "count": 2_000, "hole_every": 0})
ENTRIES = vectors.entries_of({"prefix": "test", "count": 5_000, "type": "file", "length": 0, "target": 0})


def pieces(data: bytes) -> list[bytes]:
    return [data[start:end] for start, end in chunks.cuts(data)]


OLD_PIECES = set(pieces(DATA))


# ---- chunks --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(0, MIB - 1), st.integers(0, 100_000), st.binary(max_size=3))
def test_chunks_are_the_data_within_bounds(start: int, length: int, more: bytes) -> None:
    data = DATA[start : start + length] + more * 10_000
    found = pieces(data)
    assert b"".join(found) == data
    assert all(chunks.MIN_CHUNK < len(piece) <= MAX_CHUNK for piece in found[:-1]) or len(found) == 1
    assert all(0 < len(piece) <= MAX_CHUNK for piece in found)


def test_no_data_has_no_chunk() -> None:
    assert list(chunks.cuts(b"")) == []


@settings(deadline=None, max_examples=60)
@given(st.integers(0, MIB - MAX_CHUNK), st.integers(MAX_CHUNK, 3 * MAX_CHUNK))
def test_a_cut_needs_32_kib_to_be_seen_and_nothing_before(start: int, length: int) -> None:
    """So a writer may hold a window of the run, and a run may be cut from any of its chunks on."""
    end = min(start + length, MIB)
    whole = chunks.cut(DATA, start, end) - start
    window = memoryview(DATA)[start : min(start + MAX_CHUNK, end)]
    assert chunks.cut(window, 0, len(window)) == whole or end - start < MAX_CHUNK


def test_random_data_has_chunks_of_about_21_000_bytes() -> None:
    """From the masks: 22 % end between 8 and 16 KiB (one byte in 2^15), the others after 2^13 more in the mean, but
    at 32 KiB at the latest."""
    assert 19_000 < MIB / len(pieces(DATA)) < 23_000


@pytest.mark.parametrize("at", [0, 1, 8_192, 100_000, MIB // 2, MIB - 1])
@pytest.mark.parametrize("edit", ["insert", "overwrite", "remove"])
def test_a_local_edit_changes_few_chunks(at: int, edit: str) -> None:
    new = {"insert": b"0123456789", "overwrite": b"0123456789", "remove": b""}[edit]
    kept = at if edit == "insert" else at + 10
    changed = set(pieces(DATA[:at] + new + DATA[kept:])) - OLD_PIECES
    assert len(changed) <= 3


# ---- pages ---------------------------------------------------------------------------------------------------------


class Pages(MemoryObjects):
    """Keeps every page put, by id."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[bytes, bytes] = {}

    def put(self, kind: Kind, canonical: bytes, base: bytes | None = None) -> bytes:
        id = super().put(kind, canonical, base)
        self.pages[id] = canonical
        return id


def file_of(extents: list[Extent], store: MemoryObjects) -> Entry:
    size = sum(extent.length for extent in extents)
    return Entry(b"f", Type.FILE, 0o644, 0, size=size, content=chunks.put_pages(extents, store.put), paged=True)


def directory_of(entries: list[Entry], store: MemoryObjects) -> Entry:
    return Entry(b"", Type.DIRECTORY, 0o755, 0, content=chunks.put_tree(entries, store.put))


@settings(deadline=None)
@given(strategies.extents(400))
def test_a_list_of_chunks_comes_back(extents: list[Extent]) -> None:
    store = Pages()
    assert list(walk.extents(store, file_of(extents, store))) == extents


@settings(deadline=None)
@given(strategies.listings(200))
def test_a_directory_comes_back(entries: list[Entry]) -> None:
    store = Pages()
    assert list(walk.entries(store, directory_of(entries, store))) == entries


def pages_of(items: Sequence[Any]) -> dict[bytes, bytes]:
    store = Pages()
    (chunks.put_pages if isinstance(items[0], Extent) else chunks.put_tree)(items, store.put)
    return store.pages


def edited(items: Sequence[Any], how: str, at: int) -> Sequence[Any]:
    before, item, after = items[:at], items[at], items[at + 1 :]
    other = bytes((at % 251,)) * 32
    new = Extent(5, other) if isinstance(item, Extent) else replace(item, content=other)
    match how:
        case "change":
            return [*before, new, *after]
        case "insert":
            second = new if isinstance(new, Extent) else replace(new, name=new.name + b"x")
            return [*before, item, second, *after]
        case _:
            return [*before, *after]


@pytest.mark.parametrize("how", ["change", "insert", "remove"])
@pytest.mark.parametrize("items", [EXTENTS, ENTRIES], ids=["extents", "entries"])
def test_a_local_edit_changes_few_pages(items: Sequence[Any], how: str) -> None:
    """Two levels: the page that holds it and the root, and where the edit moved a cut, up to two neighbours."""
    old = pages_of(items)
    assert len(old) > 20
    rng = random.Random(how)
    for at in [0, len(items) - 1, *(rng.randrange(len(items)) for _ in range(8))]:
        new = pages_of(edited(items, how, at))
        assert 1 <= len(new.keys() - old.keys()) <= 4


def test_the_content_of_an_entry_moves_no_cut_between_names() -> None:
    ends: list[list[int]] = [
        [len(decode_tree(page)[1]) for page in pages_of(entries).values() if page[0] == 0]
        for entries in (ENTRIES, [replace(entry, mode=0o600, content=bytes(32)) for entry in ENTRIES])
    ]
    assert len(ends[0]) > 20
    assert ends[0] == ends[1]


@pytest.mark.parametrize("items", [EXTENTS, ENTRIES], ids=["extents", "entries"])
def test_pages_have_32_to_256_entries_but_for_the_last_of_a_level(items: Sequence[Any]) -> None:
    decode: Any = decode_page if isinstance(items[0], Extent) else decode_tree
    short: dict[int, int] = {}
    for canonical in pages_of(items).values():
        level, found = decode(canonical)
        assert len(found) <= MAX_ENTRIES
        if len(found) < 32:
            short[level] = short.get(level, 0) + 1
    assert all(count == 1 for count in short.values())


def test_the_largest_pages_are_within_what_a_reader_takes() -> None:
    entries = [
        Entry(
            b"%04d" % number + b"n" * 251,
            Type.SYMLINK,
            0o777,
            -(1 << 63) * 1_000_000_000 + 999_999_999,
            ((1 << 32) - 2, (1 << 32) - 2),
            None,
            bytes(16),
            target=b"t" * 4_095,
        )
        for number in range(30)
    ]
    sizes = [len(page) for page in pages_of(entries).values()]
    assert MAX_TREE_PAGE < max(sizes) <= MAX_CANONICAL[Kind.TREE]
    hole, chunk = Extent(1 << 50, None), Extent(MAX_CHUNK, b"\x01" * 32)
    assert max(map(len, pages_of([hole, chunk] * 200).values())) <= MAX_CANONICAL[Kind.PAGE]


# ---- lists that no state has ---------------------------------------------------------------------------------------

CHUNK, HOLE = Extent(10_000, bytes(32)), Extent(4_096, None)


@pytest.mark.parametrize(
    "extents",
    [[], [HOLE, HOLE], [CHUNK, HOLE, HOLE], [Extent(1 << 62, None), CHUNK, Extent(1 << 62, None)]],
    ids=["none", "two holes", "two holes at the end", "2^63 bytes"],
)
def test_a_list_of_chunks_that_no_file_has(extents: list[Extent]) -> None:
    with pytest.raises(ValueError):
        chunks.put_pages(extents, identity)


@pytest.mark.parametrize("names", [[b"b", b"a"], [b"a", b"a"], [b"\xff", b"a"]])
def test_entries_out_of_order(names: list[bytes]) -> None:
    with pytest.raises(ValueError, match="out of order"):
        chunks.put_tree([Entry(name, Type.FIFO, 0o600, 0) for name in names], identity)


def test_two_holes_at_the_border_of_a_page() -> None:
    with pytest.raises(ValueError, match="holes"):
        chunks.put_pages([CHUNK] * 255 + [HOLE, HOLE], identity)
