"""The bytes of a state's files: counted whole, against a plain model, and counted from another state, by each engine.

``stats.py`` is the reference of the engine in Rust: both are given the same states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import StoreDamagedError, StoreError
from agent_sandbox.store.chunks import put_pages, put_tree
from agent_sandbox.store.native import NativeEngine
from agent_sandbox.store.objects import Entry, Extent, Kind, Type
from agent_sandbox.store.ports import Engine, Location
from agent_sandbox.store.stats import data_bytes, data_bytes_after
from tests.unit.store.engines import ENGINES, each_engine, memory
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.states import Edit, Tree, apply, build, edits, file, states, tree
from tests.unit.store.trees import scratch


class Counting(MemoryObjects):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def read(self, id: bytes, kind: Kind) -> bytes:
        self.reads += 1
        return super().read(id, kind)


def modelled(state: Tree) -> int:
    """Bytes of data by the definition, from the dictionary: blocks of zeros are holes where there are any."""
    total, seen = 0, set[int]()
    for node in state.values():
        if node.type is not Type.FILE or node.inode in seen:
            continue
        if node.inode is not None:
            seen.add(node.inode)
        blocks = [node.data[at : at + 4_096] for at in range(0, len(node.data), 4_096)]
        total += sum(len(block) for block in blocks if any(block) or not node.holes)
    return total


@settings(deadline=None)
@given(states(), edits(8))
def test_counted_from_another_state_it_is_the_same(old: Tree, changes: list[Edit]) -> None:
    new = apply(old, changes)
    with scratch() as place:
        objects = memory(place)
        before, after = build(objects, old), build(objects, new)
        objects.seal()
        for engine in ENGINES:
            assert engine.data_bytes(after, objects) == modelled(new)
            assert engine.data_bytes(after, objects, known=(before, modelled(old))) == modelled(new)


@each_engine
def test_directories_of_many_pages(engine: Engine, tmp_path: Path) -> None:
    """Also one that grows, shrinks, comes and goes."""
    objects = memory(tmp_path)
    many = {f"d/f{n}".encode(): file(b"x" * (n % 90)) for n in range(3_000)}
    many[b"e"] = replace(many[b"d/f7"], type=Type.DIRECTORY, data=b"", mode=0o755)
    many |= {b"e/" + name[2:]: node for name, node in list(many.items()) if name.startswith(b"d/f1")}
    some = {name: node for name, node in many.items() if not name.startswith((b"d/f23", b"e"))}
    some[b"d/f5"] = file(b"other")
    versions = [tree(many), tree(some), tree({b"d": file(b"no directory")}), tree()]
    roots = [build(objects, version) for version in versions]
    objects.seal()
    for version, after in zip(versions, roots, strict=True):
        assert engine.data_bytes(after, objects) == modelled(version)
        for old, before in zip(versions, roots, strict=True):
            assert engine.data_bytes(after, objects, known=(before, modelled(old))) == modelled(version)


LINKED = tree(a=file(b"one", inode=1), b=file(b"one", inode=1), c=file(b"one", inode=1), d=file(b"four"))


@pytest.mark.parametrize(
    "new",
    [
        tree(a=file(b"one", inode=1), b=file(b"one", inode=1), d=file(b"four")),
        tree(b=file(b"one", inode=1), c=file(b"one", inode=1), d=file(b"four")),
        tree(c=file(b"one"), d=file(b"four")),
        tree(d=file(b"four")),
        tree({**LINKED, b"e": file(b"one", inode=1)}),
        tree({**LINKED, b"0": file(b"one", inode=1)}),
        tree({**LINKED, b"e": file(b"four", inode=2), b"d": file(b"four", inode=2)}),
        tree({**LINKED, b"e": file(b"seven..", inode=2), b"f": file(b"seven..", inode=2)}),
    ],
)
def test_names_of_one_file_come_and_go(new: Tree, tmp_path: Path) -> None:
    objects = memory(tmp_path)
    before, after = build(objects, LINKED), build(objects, new)
    objects.seal()
    for engine in ENGINES:
        counted = engine.data_bytes(after, objects, known=(before, 7))
        assert counted == engine.data_bytes(after, objects) == modelled(new)


def paged(objects: MemoryObjects, extents: list[Extent]) -> Entry:
    """A state of one large file."""
    size = sum(extent.length for extent in extents)
    entry = Entry(b"f", Type.FILE, 0o644, 0, size=size, content=put_pages(extents, objects.put), paged=True)
    return Entry(b"", Type.DIRECTORY, 0o755, 0, content=put_tree([entry], objects.put))


def filled(lengths: list[int]) -> list[Extent]:
    """Extents of data, and holes for negative lengths, two of which never follow each other."""
    out: list[Extent] = []
    for number, length in enumerate(lengths):
        if length > 0:
            out.append(Extent(length, bytes([length % 7, number % 3]) * 16))
        elif not out or out[-1].id is not None:
            out.append(Extent(-length, None))
    return out or [Extent(1, bytes(32))]


lengths = st.lists(st.integers(-50, 50).filter(bool), max_size=900)


@settings(max_examples=50, deadline=None)
@given(lengths, lengths, lengths, lengths)
def test_of_large_files_the_pages_that_differ_are_enough(
    first: list[int], old: list[int], new: list[int], last: list[int]
) -> None:
    with scratch() as place:
        objects = memory(place)
        before, after = (paged(objects, filled([*first, *middle, *last])) for middle in (old, new))
        objects.seal()
        counts = (data_bytes(objects, before), data_bytes(objects, after))
        for engine in ENGINES:
            assert engine.data_bytes(before, objects) == counts[0]
            assert engine.data_bytes(after, objects, known=(before, counts[0])) == counts[1]


def test_what_is_equal_is_not_read() -> None:
    objects = Counting()
    old = tree({f"d{n // 100}/f{n}".encode(): file(b"x" * n) for n in range(2_000)})
    new = tree({**old, b"d3/f300": file(b"y" * 50)})
    before, after = build(objects, old), build(objects, new)
    assert data_bytes_after(objects, before, modelled(old), after) == modelled(old) - 250
    assert objects.reads < 10
    extents = filled([n % 50 + 1 for n in range(20_000)])
    large, edited = paged(objects, extents), paged(objects, [*extents[:9_000], *extents[9_003:]])
    count = sum(extent.length for extent in extents)
    objects.reads = 0
    assert data_bytes_after(objects, large, count, edited) == count - sum(e.length for e in extents[9_000:9_003])
    assert objects.reads < 60


def test_a_file_that_only_its_times_changed_of_is_not_read() -> None:
    objects = Counting()
    root = paged(objects, filled([5, -9, 5]))
    entry = Entry(b"f", Type.FILE, 0o644, 9, size=19, content=put_pages(filled([5, -9, 5]), objects.put), paged=True)
    touched = replace(root, content=put_tree([entry], objects.put))
    objects.reads = 0
    assert data_bytes_after(objects, root, 10, touched) == 10
    assert objects.reads == 2


class Unwilling(MemoryObjects):
    """Cannot say where anything is."""

    def locate(self, ids: Sequence[bytes]) -> list[Location | None]:
        raise StoreError("not now")


def test_what_is_wrong_is_told_as_the_stores_errors(tmp_path: Path) -> None:
    native = NativeEngine()
    objects = memory(tmp_path)
    root = build(objects, tree(a=file(b"one")))
    objects.seal()
    with pytest.raises(StoreDamagedError, match="missing"):
        native.data_bytes(replace(root, content=bytes(32)), objects)
    with pytest.raises(StoreError, match="not now"):
        native.data_bytes(root, Unwilling(tmp_path))
