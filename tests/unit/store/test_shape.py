"""What is readable but not as a writer would store it: told by ``check``, once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import chunks, objects
from agent_sandbox.store.objects import Child, Entry, Extent, Kind, Type, link_id
from agent_sandbox.store.shape import Misshapen, Shapes
from tests.unit.store import states, vectors
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.test_walk import above, directory, nested, page_of, pages, raw_tree, tree

ENTRIES = vectors.entries_of({"prefix": "w", "count": 600, "type": "file", "length": 0, "target": 0})
CHUNK = Extent(3, bytes(range(32)))
FIFO = Entry(b"p", Type.FIFO, 0o600, 0)


def faults(store: MemoryObjects, *roots: Entry) -> list[Misshapen]:
    shapes = Shapes(store)
    return [fault for root in roots for fault in shapes.faults(root)]


@settings(deadline=None)
@given(states.states())
def test_a_state_by_the_rule_has_no_fault(state: states.Tree) -> None:
    store = MemoryObjects()
    plain = {path: replace(node, holes=False) for path, node in state.items()}
    assert faults(store, states.build(store, plain)) == []


def test_a_large_directory_and_file_by_the_rule_have_no_fault() -> None:
    store = MemoryObjects()
    extents = vectors.extents_of({"seed": "shape", "count": 600, "hole_every": 9})
    size = sum(extent.length for extent in extents)
    file = Entry(b"large", Type.FILE, 0o644, 0, size=size, content=chunks.put_pages(extents, store.put), paged=True)
    sparse = Entry(b"sparse", Type.FILE, 0o644, 0, size=4, content=pages(store, [Extent(4, None)])[0].id, paged=True)
    assert faults(store, tree(store, [file, sparse, *ENTRIES])) == []


def test_a_directory_cut_elsewhere() -> None:
    store = MemoryObjects()
    children = [
        Child(len(part), page_of(store, part), part[-1].name)
        for part in (ENTRIES[:40], ENTRIES[40:90], ENTRIES[90:150])
    ]
    wrong = directory(b"d", raw_tree(store, 1, [objects.encode_tree_child(child) for child in children]))
    root = tree(store, [wrong])
    found = [Misshapen(b"d", "a directory whose pages are cut elsewhere than the rule says")]
    assert faults(store, root) == found
    assert faults(store, root, tree(store, [replace(wrong, name=b"e")])) == found, "each tree is told once"
    assert faults(store, replace(wrong, name=b"")) == [replace(found[0], path=b"")]


def test_a_root_with_one_page_below() -> None:
    store = MemoryObjects()
    page = Child(2, page_of(store, ENTRIES[:2]), ENTRIES[1].name)
    root = directory(b"", raw_tree(store, 1, [objects.encode_tree_child(page)]))
    assert [fault.path for fault in faults(store, root)] == [b""]
    chunk = pages(store, [replace(CHUNK, length=32_768)] * 4)
    file = Entry(b"f", Type.FILE, 0o644, 0, size=131_072, content=above(store, 1, chunk), paged=True)
    assert faults(store, tree(store, [file])) == [
        Misshapen(b"f", "a file whose pages are cut elsewhere than the rule says")
    ]


def test_a_small_file_without_holes_as_pages() -> None:
    store = MemoryObjects()
    file = Entry(b"f", Type.FILE, 0o644, 0, size=3, content=pages(store, [CHUNK])[0].id, paged=True)
    assert faults(store, tree(store, [file])) == [
        Misshapen(b"f", "a small file without holes that is stored as a list of chunks")
    ]


def linked(store: MemoryObjects, link: bytes, **changes: Entry) -> Entry:
    """``a.b``, ``a/b`` and ``c`` as one FIFO, of which the first is ``a.b``."""
    entries = {name: replace(FIFO, link=link) for name in ("a.b", "b", "c")} | changes
    below = tree(store, [replace(entries["b"], name=b"b")])
    return tree(
        store,
        [replace(below, name=b"a"), replace(entries["a.b"], name=b"a.b"), replace(entries["c"], name=b"c")],
    )


def test_the_first_name_is_by_whole_paths() -> None:
    store = MemoryObjects()
    assert faults(store, linked(store, link_id(b"a.b"))) == []
    assert faults(store, linked(store, link_id(b"a/b"))) == [
        Misshapen(b"a.b", "a link id that is not that of its first name")
    ]


def test_a_lone_name_that_is_marked_as_linked() -> None:
    store = MemoryObjects()
    root = tree(store, [replace(FIFO, link=link_id(b"p"))])
    assert faults(store, root) == [Misshapen(b"p", "marked as linked, with no other name")]


def test_links_are_looked_at_in_every_state_that_shares_their_tree() -> None:
    """The same subtree is right in one state, and in another its link leads nowhere."""
    store = MemoryObjects()
    below = tree(store, [replace(FIFO, link=link_id(b"a/p"))])
    both = [replace(below, name=b"a"), replace(below, name=b"b")]
    assert faults(store, tree(store, both)) == []
    assert [fault.path for fault in faults(store, tree(store, both), tree(store, both[:1]))] == [b"a/p"]


@pytest.mark.parametrize("change", [{"mode": 0o644}, {"mtime_ns": 1}, {"type": Type.FILE}])
def test_linked_names_that_do_not_agree(change: dict[str, object]) -> None:
    store = MemoryObjects()
    link = link_id(b"a.b")
    root = linked(store, link, c=replace(FIFO, link=link, **change))  # type: ignore[arg-type]
    assert faults(store, root) == [Misshapen(b"c", "linked with an entry that is not the same")]


def test_the_same_pages_under_another_size_are_not_taken_for_seen() -> None:
    store = MemoryObjects()
    content = pages(store, [Extent(4, None)])[0].id
    files = [
        Entry(name, Type.FILE, 0o644, 0, size=size, content=content, paged=True)
        for name, size in ((b"a", 4), (b"b", 5))
    ]
    with pytest.raises(StoreDamagedError, match="add up"):
        faults(store, tree(store, files))


def test_what_cannot_be_read_is_an_error() -> None:
    store = MemoryObjects()
    missing = Entry(b"d", Type.DIRECTORY, 0o755, 0, content=bytes(32))
    with pytest.raises(StoreDamagedError, match="missing"):
        faults(store, tree(store, [missing]))
    with pytest.raises(StoreDamagedError, match="too deep"):
        faults(store, nested(store, 1_001))
    assert faults(store, nested(store, 1_000)) == []
    file = store.put(Kind.BLOB, b"abc")
    with pytest.raises(StoreDamagedError):
        faults(store, tree(store, [Entry(b"f", Type.FILE, 0o644, 0, size=3, content=file, paged=True)]))
