"""Differences of states, against the plain comparison of two dictionaries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import walk
from agent_sandbox.store.chunks import put_tree
from agent_sandbox.store.diff import Change, ChangeKind, diff
from agent_sandbox.store.objects import Child, Entry, Kind, Type, encode_tree, encode_tree_child
from tests.unit.store import states
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.states import DIRECTORY, Edit, Tree, build, file, symlink, tree


class Counting(MemoryObjects):
    """Remembers which objects were read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[bytes] = []

    def read(self, id: bytes, kind: Kind) -> bytes:
        self.reads.append(id)
        return super().read(id, kind)


def changes(old: Tree, new: Tree) -> dict[bytes, str]:
    objects = MemoryObjects()
    return {change.path: change.kind.value for change in diff(objects, build(objects, old), build(objects, new))}


def test_each_kind_of_change_is_told_by_path() -> None:
    old = tree(
        same=file(b"x"), gone=file(b"x"), edited=file(b"x"), moded=file(b"x"), typed=file(b"x"), d__in=file(),
        link=symlink(b"a"),
    )  # fmt: skip
    new = tree(
        same=file(b"x"), new=file(b"x"), edited=file(b"y", mtime_ns=5), moded=file(b"x", mode=0o600),
        typed=symlink(b"x"), d__in=file(), link=symlink(b"b"),
    )  # fmt: skip
    assert changes(old, new) == {
        b"edited": "modified",
        b"gone": "removed",
        b"link": "modified",
        b"moded": "metadata",
        b"new": "added",
        b"typed": "type",
    }


@pytest.mark.parametrize(
    "other",
    [
        file(b"x", mode=0o600),
        file(b"x", mtime_ns=1),
        file(b"x", owner=(1, 2)),
        file(b"x", attributes=((b"user.a", b""),)),
    ],
)
def test_what_is_not_content_is_metadata(other: states.Node) -> None:
    assert changes(tree(a=file(b"x")), tree(a=other)) == {b"a": "metadata"}


def test_a_new_name_of_a_file_is_told_as_metadata_of_the_old_one() -> None:
    old = tree(a=file(b"x"))
    new = tree(a=file(b"x", inode=1), b=file(b"x", inode=1))
    assert changes(old, new) == {b"a": "metadata", b"b": "added"}


def test_a_directory_that_became_a_file_takes_what_was_in_it_along() -> None:
    assert changes(tree(d__e__f=file(), z=file()), tree(d=file(b"x"), z=file())) == {
        b"d": "type",
        b"d/e": "removed",
        b"d/e/f": "removed",
    }
    assert changes(tree(d=file(b"x")), tree(d__f=file())) == {b"d": "type", b"d/f": "added"}


def test_whole_directories_can_be_told_by_their_own_path() -> None:
    objects = Counting()
    old = tree(gone__a__b=file(), typed__a=file(), both__a=file(), other=file(b"x"))
    new = tree(new__a__b=file(), typed=file(), both__a=file(b"x"), other__a=file())
    before, after = build(objects, old), build(objects, new)
    objects.reads.clear()
    found = [change.path for change in diff(objects, before, after, whole=True)]
    assert found == [b"both/a", b"gone", b"new", b"other", b"typed"]
    assert len(objects.reads) == 4  # root and both, of both


def test_the_root_has_the_empty_path_and_comes_first() -> None:
    objects = MemoryObjects()
    old, new = tree({b"": DIRECTORY}), tree({b"": replace(DIRECTORY, mode=0o700)}, a=file())
    found = list(diff(objects, build(objects, old), build(objects, new)))
    assert [(change.path, change.kind) for change in found] == [(b"", "metadata"), (b"a", "added")]
    assert found[0].old is not None
    assert found[0].old.mode == 0o755
    assert found[1] == Change(b"a", ChangeKind.ADDED, None, Entry(b"a", Type.FILE, 0o644, 0))


@given(states.states(), states.edits())
@settings(deadline=None)
def test_differences_are_those_of_the_dictionaries(old: Tree, edits: list[Edit]) -> None:
    objects = MemoryObjects()
    new = states.apply(old, edits)
    before, after = build(objects, old), build(objects, new)
    old, new = states.read(objects, before), states.read(objects, after)
    found = list(diff(objects, before, after))
    # numbers of inodes are the reader's; which names share one is what counts
    shared = [{path: frozenset(p for p, n in s.items() if n.inode == s[path].inode is not None) for path in s}
              for s in (old, new)]  # fmt: skip
    firsts = [{path: min(names) if names else None for path, names in groups.items()} for groups in shared]
    expected = {
        path
        for path in old.keys() | new.keys()
        if path not in old
        or path not in new
        or replace(old[path], inode=None) != replace(new[path], inode=None)
        or firsts[0][path] != firsts[1][path]
    }
    assert {change.path for change in found} == expected
    assert [change.path for change in found] == sorted(expected, key=lambda path: path.split(b"/"))
    for change in found:
        assert (change.old is None) == (change.path not in old) == (change.kind is ChangeKind.ADDED)
        assert (change.new is None) == (change.path not in new) == (change.kind is ChangeKind.REMOVED)
        if change.kind is ChangeKind.TYPE:
            assert old[change.path].type is not new[change.path].type
        if change.kind is ChangeKind.MODIFIED:
            assert old[change.path].data != new[change.path].data
        if change.kind is ChangeKind.METADATA:
            assert old[change.path].data == new[change.path].data
    assert list(diff(objects, after, after)) == []


def test_equal_directories_are_never_opened() -> None:
    objects = Counting()
    old = tree(a__b__c=file(b"x"), d__e=file(b"x"), same__deep__down=file(b"x"))
    new = old | {b"d/e": file(b"y")}
    before, after = build(objects, old), build(objects, new)
    objects.reads.clear()
    assert [change.path for change in diff(objects, before, after)] == [b"d/e"]
    assert len(objects.reads) == 4  # root and d, of both
    objects.reads.clear()
    assert list(diff(objects, before, before)) == []
    assert objects.reads == []


@pytest.mark.parametrize(
    ("keep", "more"), [(range(5_000), [2_345]), (range(100, 5_000), [2_345]), (range(5_000), []), (range(200), [7])]
)
def test_pages_that_both_have_are_never_opened(keep: range, more: list[int]) -> None:
    objects = Counting()
    old = [Entry(b"%05d" % number, Type.FILE, 0o644, 0) for number in range(5_000)]
    new = [replace(old[number], mtime_ns=int(number in more)) for number in keep]
    before = Entry(b"", Type.DIRECTORY, 0o755, 0, content=put_tree(old, objects.put))
    after = replace(before, content=put_tree(new, objects.put))
    pages = [set(tree_pages(objects, root)) for root in (before, after)]
    objects.reads.clear()
    found = list(diff(objects, before, after))
    expected = [b"%05d" % number for number in range(5_000) if number not in keep or number in more]
    assert [change.path for change in found] == expected
    assert not set(objects.reads) & pages[0] & pages[1]


def tree_pages(objects: MemoryObjects, directory: Entry) -> list[bytes]:
    """Every page of one directory, from the record of what was read while walking it."""
    assert isinstance(objects, Counting)
    objects.reads.clear()
    assert sum(1 for _ in walk.entries(objects, directory)) > 0
    return list(objects.reads)


def test_differences_come_lazily() -> None:
    objects = Counting()
    before = build(objects, tree())
    after = build(objects, tree({b"%d/%d" % (a, b): file(b"x") for a in range(50) for b in range(3)}))
    objects.reads.clear()
    stream = diff(objects, before, after)
    assert next(stream).path == b"0"
    assert len(objects.reads) <= 3


def test_deep_trees_do_not_exhaust_the_stack() -> None:
    objects = MemoryObjects()
    path = b"/".join([b"d"] * 1_000)
    found = list(diff(objects, build(objects, tree()), chain(objects, 1_000)))
    assert found[-1].path == path
    assert len(found) == 1_000


def chain(objects: MemoryObjects, depth: int) -> Entry:
    """Directories inside each other."""
    entry = Entry(b"d", Type.DIRECTORY, 0o755, 0, content=put_tree([], objects.put))
    for _ in range(depth):
        entry = replace(entry, content=put_tree([entry], objects.put))
    return replace(entry, name=b"")


def test_a_tree_deeper_than_any_may_be_is_damage() -> None:
    objects = MemoryObjects()
    with pytest.raises(StoreDamagedError, match="deep"):
        list(diff(objects, build(objects, tree()), chain(objects, 1_001)))


def test_a_page_that_occurs_twice_in_a_directory_is_damage() -> None:
    """Else a few pages could claim a directory of 256^12 names."""
    objects = MemoryObjects()
    leaf = objects.put(Kind.TREE, encode_tree(0, [b"\x01\x01a\x00\x00\x00\x00"]))
    children = [Child(1, leaf, b"a"), Child(1, leaf, b"b")]
    root = objects.put(Kind.TREE, encode_tree(1, map(encode_tree_child, children)))
    bomb = Entry(b"", Type.DIRECTORY, 0o755, 0, content=root)
    with pytest.raises(StoreDamagedError):
        list(diff(objects, build(objects, tree()), bomb))
