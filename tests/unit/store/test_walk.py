"""Reading states, also those that no writer would make: every lie of a page about another ends in a typed error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from agent_sandbox.errors import NotFoundError, StoreDamagedError
from agent_sandbox.store import chunks, objects, walk
from agent_sandbox.store.objects import Child, Commit, Entry, Extent, Kind, Type
from tests.unit.store import vectors
from tests.unit.store.memory import MemoryObjects

ENTRIES = vectors.entries_of({"prefix": "w", "count": 600, "type": "file", "length": 0, "target": 0})


def directory(name: bytes, content: bytes) -> Entry:
    return Entry(name, Type.DIRECTORY, 0o755, 0, content=content)


def tree(store: MemoryObjects, entries: list[Entry]) -> Entry:
    return directory(b"", chunks.put_tree(entries, store.put))


def raw_tree(store: MemoryObjects, level: int, items: list[bytes]) -> bytes:
    return store.put(Kind.TREE, objects.encode_tree(level, items))


def page_of(store: MemoryObjects, entries: list[Entry]) -> bytes:
    return raw_tree(store, 0, [objects.encode_entry(entry) for entry in entries])


# ---- directories ---------------------------------------------------------------------------------------------------


def test_a_directory_is_listed_and_looked_up() -> None:
    store = MemoryObjects()
    root = tree(store, ENTRIES)
    assert objects.decode_tree(store.read(root.content or b"", Kind.TREE))[0] == 1
    assert list(walk.entries(store, root)) == ENTRIES
    for entry in ENTRIES[::37]:
        assert walk.lookup(store, root, entry.name) == entry
        for other in (entry.name[:-1], entry.name + b"\x00", entry.name + b"\xff"):
            assert walk.lookup(store, root, other) is None


def test_an_empty_directory_has_nothing() -> None:
    store = MemoryObjects()
    root = tree(store, [])
    assert list(walk.entries(store, root)) == []
    assert walk.lookup(store, root, b"x") is None


def hostile(store: MemoryObjects, name: str) -> bytes:
    """The root page of a directory in which one page lies about another."""
    first, second = ENTRIES[:40], ENTRIES[40:80]
    one, two = page_of(store, first), page_of(store, second)
    good = [Child(40, one, first[-1].name), Child(40, two, second[-1].name)]
    match name:
        case "more names":
            children = [replace(good[0], weight=41), good[1]]
        case "fewer names":
            children = [good[0], replace(good[1], weight=39)]
        case "another last name, before":
            children = [replace(good[0], last=first[-2].name), good[1]]
        case "another last name, after":
            children = [replace(good[0], last=first[-1].name + b"x"), good[1]]
        case "the same page twice":
            children = [good[0], Child(40, one, second[-1].name)]
        case "names that begin too early":
            children = [good[0], Child(41, page_of(store, [first[-1], *second]), second[-1].name)]
        case "names that begin too early, a level below":
            early = Child(41, page_of(store, [first[-1], *second]), second[-1].name)
            children = [
                Child(40, raw_tree(store, 1, [objects.encode_tree_child(good[0])]), good[0].last),
                Child(41, raw_tree(store, 1, [objects.encode_tree_child(early)]), early.last),
            ]
            return raw_tree(store, 2, [objects.encode_tree_child(child) for child in children])
        case "a level left out":
            return raw_tree(store, 2, [objects.encode_tree_child(child) for child in good])
        case "a level too many":
            above = Child(40, raw_tree(store, 1, [objects.encode_tree_child(good[1])]), good[1].last)
            children = [good[0], above]
        case "an empty page":
            children = [good[0], Child(1, raw_tree(store, 0, []), second[-1].name)]
        case "a page that is a list of chunks":
            chunk = store.put(Kind.PAGE, objects.encode_page(0, [objects.encode_extent(Extent(1, bytes(32)))]))
            children = [good[0], replace(good[1], id=chunk)]
        case "a page that is missing":
            children = [good[0], replace(good[1], id=bytes(32))]
        case _:
            raise AssertionError(name)
    return raw_tree(store, 1, [objects.encode_tree_child(child) for child in children])


LIES = [
    "more names", "fewer names", "another last name, before", "another last name, after", "the same page twice",
    "names that begin too early", "names that begin too early, a level below", "a level left out", "a level too many",
    "an empty page", "a page that is a list of chunks", "a page that is missing",
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_directory_whose_pages_lie(lie: str) -> None:
    """To list it fails. To look a name up fails where the lie is on the way to it; no other entry is ever found."""
    store = MemoryObjects()
    root = directory(b"", hostile(store, lie))
    with pytest.raises(StoreDamagedError):
        list(walk.entries(store, root))
    failed = 0
    for entry in ENTRIES[:80]:
        try:
            assert walk.lookup(store, root, entry.name) in (entry, None)
        except StoreDamagedError:
            failed += 1
    assert failed >= 39


def test_the_pages_of_the_lies_are_good_without_them() -> None:
    store = MemoryObjects()
    one, two = page_of(store, ENTRIES[:40]), page_of(store, ENTRIES[40:80])
    children = [Child(40, one, ENTRIES[39].name), Child(40, two, ENTRIES[79].name)]
    root = directory(b"", raw_tree(store, 1, [objects.encode_tree_child(child) for child in children]))
    assert list(walk.entries(store, root)) == ENTRIES[:80]


def nested(store: MemoryObjects, depth: int) -> Entry:
    root = tree(store, [])
    for _ in range(depth):
        root = tree(store, [replace(root, name=b"d")])
    return root


def test_directories_may_be_1_000_deep() -> None:
    store = MemoryObjects()
    paths = list(walk.walk(store, nested(store, 1_000)))
    assert len(paths) == 1_000
    assert paths[-1][0] == b"/".join([b"d"] * 1_000)


def test_deeper_directories_are_refused() -> None:
    store = MemoryObjects()
    with pytest.raises(StoreDamagedError, match="too deep"):
        list(walk.walk(store, nested(store, 1_001)))


def small_state(store: MemoryObjects) -> Entry:
    file = Entry(b"b", Type.FILE, 0o644, 0)
    below = tree(store, [file])
    link = Entry(b"s", Type.SYMLINK, 0o777, 0, target=b"a")
    return tree(store, [replace(below, name=b"a"), replace(file, name=b"a.b"), link])


def test_a_walk_goes_into_a_directory_before_its_next_sibling() -> None:
    store = MemoryObjects()
    assert [path for path, _ in walk.walk(store, small_state(store))] == [b"a", b"a/b", b"a.b", b"s"]


@pytest.mark.parametrize("path", [b"x", b"a/x", b"a/b/c", b"s/b", b"/a", b"a/", b"a//b", b".", b"a/.."])
def test_a_path_that_is_not_there(path: bytes) -> None:
    store = MemoryObjects()
    with pytest.raises(NotFoundError, match="no such path"):
        walk.resolve(store, small_state(store), path)


def test_a_path_is_resolved() -> None:
    store = MemoryObjects()
    root = small_state(store)
    assert walk.resolve(store, root, b"") == root
    assert walk.resolve(store, root, b"a/b").name == b"b"
    assert walk.resolve(store, root, b"s").target == b"a"


def test_a_commit_is_read() -> None:
    store = MemoryObjects()
    commit = Commit(small_state(store), (), None, 5, "a", "m")
    assert walk.commit(store, store.put(Kind.COMMIT, objects.encode_commit(commit))) == commit


# ---- files ---------------------------------------------------------------------------------------------------------


def stored(store: MemoryObjects, *parts: bytes | int) -> Entry:
    """A file of chunks and holes (their length)."""
    extents = [Extent(p, None) if isinstance(p, int) else Extent(len(p), store.put(Kind.BLOB, p)) for p in parts]
    size = sum(extent.length for extent in extents)
    return Entry(b"f", Type.FILE, 0o644, 0, size=size, content=chunks.put_pages(extents, store.put), paged=True)


def test_the_data_of_files() -> None:
    store = MemoryObjects()
    assert list(walk.data(store, Entry(b"f", Type.FILE, 0o644, 0))) == []
    small = Entry(b"f", Type.FILE, 0o644, 0, size=3, content=store.put(Kind.BLOB, b"abc"))
    assert list(walk.data(store, small)) == [b"abc"]
    sparse = stored(store, b"abc", 5, b"d", (1 << 20) + 1)
    found = list(walk.data(store, sparse))
    assert b"".join(found) == b"abc" + bytes(5) + b"d" + bytes((1 << 20) + 1)
    assert max(map(len, found)) == 1 << 20
    assert [extent.length for extent in walk.extents(store, sparse)] == [3, 5, 1, (1 << 20) + 1]


def test_a_hole_of_terabytes_is_read_piece_by_piece() -> None:
    store = MemoryObjects()
    pieces = walk.data(store, stored(store, 1 << 50, b"x"))
    assert len(next(pieces)) == 1 << 20


def pages(store: MemoryObjects, *lists: list[Extent]) -> list[Child]:
    return [
        Child(
            sum(extent.length for extent in extents),
            store.put(Kind.PAGE, objects.encode_page(0, map(objects.encode_extent, extents))),
        )
        for extents in lists
    ]


def above(store: MemoryObjects, level: int, children: list[Child]) -> bytes:
    return store.put(Kind.PAGE, objects.encode_page(level, map(objects.encode_page_child, children)))


CHUNK, HOLE = Extent(3, objects.identity(Kind.BLOB, b"abc")), Extent(4, None)
WRONG_FILES: list[tuple[str, int, Callable[[MemoryObjects, list[Child]], bytes]]] = [
    ("a size that is larger", 7, lambda store, good: above(store, 1, good)),
    ("a size that is smaller", 5, lambda store, good: above(store, 1, good)),
    ("a page of more bytes", 7, lambda store, good: above(store, 1, [good[0], replace(good[1], weight=4)])),
    ("a page of fewer bytes", 5, lambda store, good: above(store, 1, [good[0], replace(good[1], weight=2)])),
    ("a level left out", 6, lambda store, good: above(store, 2, good)),
    ("a level too many", 6, lambda store, good: above(store, 1, [good[0], Child(3, above(store, 1, [good[1]]))])),
    ("two holes across pages", 8, lambda store, good: above(store, 1, pages(store, [HOLE], [Extent(4, None)]))),
    ("a page that is a blob", 6, lambda store, good: CHUNK.id or b""),
    ("a page that is missing", 6, lambda store, good: above(store, 1, [good[0], Child(3, bytes(32))])),
    ("a chunk that is longer", 4, lambda store, good: pages(store, [CHUNK, Extent(1, CHUNK.id)])[0].id),
    ("a chunk that is shorter", 7, lambda store, good: pages(store, [CHUNK, Extent(4, CHUNK.id)])[0].id),
    ("a chunk that is missing", 4, lambda store, good: pages(store, [CHUNK, Extent(1, bytes(32))])[0].id),
    ("a chunk that is a page", 6, lambda store, good: pages(store, [CHUNK, Extent(3, good[0].id)])[0].id),
]


@pytest.mark.parametrize(("size", "make"), [case[1:] for case in WRONG_FILES], ids=[case[0] for case in WRONG_FILES])
def test_a_file_whose_pages_lie(size: int, make: Callable[[MemoryObjects, list[Child]], bytes]) -> None:
    store = MemoryObjects()
    store.put(Kind.BLOB, b"abc")
    content = make(store, pages(store, [CHUNK], [CHUNK]))
    file = Entry(b"f", Type.FILE, 0o644, 0, size=size, content=content, paged=True)
    with pytest.raises(StoreDamagedError):
        list(walk.data(store, file))


def test_the_pages_of_those_files_are_good_without_the_lie() -> None:
    store = MemoryObjects()
    store.put(Kind.BLOB, b"abc")
    content = above(store, 1, pages(store, [CHUNK], [CHUNK]))
    file = Entry(b"f", Type.FILE, 0o644, 0, size=6, content=content, paged=True)
    assert b"".join(walk.data(store, file)) == b"abcabc"


def test_a_small_file_of_another_length() -> None:
    store = MemoryObjects()
    file = Entry(b"f", Type.FILE, 0o644, 0, size=4, content=store.put(Kind.BLOB, b"abc"))
    with pytest.raises(StoreDamagedError, match="another length"):
        list(walk.data(store, file))
