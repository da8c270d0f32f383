"""Objects: what was encoded comes back, other bytes are refused, and nothing is written that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import objects
from agent_sandbox.store.objects import Commit, Entry, Extent, Kind, Type
from tests.unit.store import strategies, vectors

ID = bytes(range(32))
FILE = Entry(b"f", Type.FILE, 0o644, 0, size=5, content=ID)
DIRECTORY = Entry(b"d", Type.DIRECTORY, 0o755, 0, content=ID)
SYMLINK = Entry(b"s", Type.SYMLINK, 0o777, 0, target=b"there")
ROOT = replace(DIRECTORY, name=b"")
COMMIT = Commit(ROOT, (), None, 0, "", "")


def tree(entries: list[Entry]) -> bytes:
    return objects.encode_tree(0, map(objects.encode_entry, entries))


def reencoded(kind: str, canonical: bytes) -> bytes:
    """What the decoder's values are encoded as."""
    match kind:
        case "attrs":
            return objects.encode_attrs(objects.decode_attrs(canonical))
        case "commit":
            return objects.encode_commit(objects.decode_commit(canonical))
        case "root":
            return objects.encode_root(objects.decode_root(canonical))
    level, items = (objects.decode_page if kind == "page" else objects.decode_tree)(canonical)
    encode: Any = {
        "page0": objects.encode_extent,
        "page1": objects.encode_page_child,
        "tree0": objects.encode_entry,
        "tree1": objects.encode_tree_child,
    }[f"{kind}{min(level, 1)}"]
    return (objects.encode_page if kind == "page" else objects.encode_tree)(level, map(encode, items))


# ---- what was encoded comes back -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(strategies.listings())
def test_a_directory_comes_back(entries: list[Entry]) -> None:
    canonical = tree(entries)
    assert objects.decode_tree(canonical) == (0, entries)
    assert reencoded("tree", canonical) == canonical


@settings(deadline=None)
@given(strategies.extents())
def test_a_list_of_chunks_comes_back(extents: list[Extent]) -> None:
    canonical = objects.encode_page(0, map(objects.encode_extent, extents))
    assert objects.decode_page(canonical) == (0, extents)
    assert reencoded("page", canonical) == canonical


@settings(deadline=None)
@given(strategies.levels, strategies.page_children, strategies.tree_children)
def test_pages_above_come_back(level: int, pages: list[objects.Child], trees: list[objects.Child]) -> None:
    canonical = objects.encode_page(level, map(objects.encode_page_child, pages))
    assert objects.decode_page(canonical) == (level, pages)
    canonical = objects.encode_tree(level, map(objects.encode_tree_child, trees))
    assert objects.decode_tree(canonical) == (level, trees)


@settings(deadline=None)
@given(strategies.attributes)
def test_attributes_come_back_sorted(attributes: list[tuple[bytes, bytes]]) -> None:
    assert objects.decode_attrs(objects.encode_attrs(attributes[::-1])) == attributes


@settings(deadline=None)
@given(strategies.commits)
def test_a_commit_comes_back(commit: Commit) -> None:
    canonical = objects.encode_commit(commit)
    assert objects.decode_commit(canonical) == commit
    assert objects.decode_root(objects.encode_root(commit.root)) == commit.root
    assert objects.encode_root(commit.root) in canonical


# ---- other bytes are refused, or are the only ones for their value -------------------------------------------------

GOOD = [
    (kind, canonical)
    for kind, canonical in (
        (vector["kind"], vectors.unhex(vector["hex"])) for vector in vectors.load("objects")["objects"]
    )
    if kind != "blob" and len(canonical) < 2_000
] + [("root", objects.encode_root(ROOT))]


def only_form(kind: str, data: bytes) -> None:
    """The property: bytes are refused, or what they say is encoded as the same bytes."""
    try:
        again = reencoded(kind, data)
    except StoreDamagedError:
        return
    assert again == data


@settings(deadline=None)
@given(st.sampled_from(["page", "tree", "attrs", "commit", "root"]), st.binary(max_size=200))
@example("tree", b"\x00")
def test_any_bytes_are_refused_or_the_only_form(kind: str, data: bytes) -> None:
    only_form(kind, data)


@settings(deadline=None, max_examples=1_000)
@given(st.sampled_from(GOOD), st.data())
def test_damaged_objects_are_refused_or_the_only_form(good: tuple[str, bytes], data: st.DataObject) -> None:
    kind, canonical = good
    damaged = bytearray(canonical)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        how = data.draw(st.sampled_from(["set", "remove", "insert", "repeat"]))
        if how == "set":
            damaged[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
        elif how == "remove":
            del damaged[at : at + data.draw(st.integers(1, 40))]
        elif how == "insert":
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        else:
            damaged[at:at] = damaged[at : at + data.draw(st.integers(1, 60))]
    only_form(kind, bytes(damaged))


@pytest.mark.parametrize(("kind", "canonical"), GOOD, ids=lambda value: value if isinstance(value, str) else "")
def test_no_object_may_be_cut_or_go_on(kind: str, canonical: bytes) -> None:
    """A page is entries to its end, so it may end after any of them; nowhere else."""
    ends = {len(canonical)}
    for at in range(len(canonical)):
        try:
            reencoded(kind, canonical[:at])
        except StoreDamagedError:
            continue
        ends.add(at)
    count = len(objects.decode_page(canonical)[1]) if kind == "page" else 0
    count = len(objects.decode_tree(canonical)[1]) if kind == "tree" else count
    count = len(objects.decode_attrs(canonical)) if kind == "attrs" else count
    empty = kind == "tree" and canonical[0] == 0
    assert len(ends) == max(1, count + empty)


# ---- ids -----------------------------------------------------------------------------------------------------------


def test_the_same_bytes_of_two_kinds_have_two_ids() -> None:
    assert len({objects.identity(kind, b"\x00") for kind in Kind}) == len(Kind)


def test_an_id_is_no_link_id() -> None:
    assert objects.link_id(b"x") not in {objects.identity(kind, b"x")[:16] for kind in Kind}


# ---- what cannot be read is not written ----------------------------------------------------------------------------

PARENTS = tuple(bytes(31) + bytes((number,)) for number in range(9))

UNFIT: list[tuple[str, Callable[[], bytes]]] = [
    ("no name", lambda: tree([replace(FILE, name=b"")])),
    ("a name of 256 bytes", lambda: tree([replace(FILE, name=b"n" * 256)])),
    ("a name with a slash", lambda: tree([replace(FILE, name=b"a/b")])),
    ("the name ..", lambda: tree([replace(FILE, name=b"..")])),
    ("a mode of thirteen bits", lambda: tree([replace(FILE, mode=0o10000)])),
    ("a negative mode", lambda: tree([replace(FILE, mode=-1)])),
    ("an owner of 2^32 - 1", lambda: tree([replace(FILE, owner=(0, (1 << 32) - 1))])),
    ("a time beyond 64 bits", lambda: tree([replace(FILE, mtime_ns=(1 << 63) * 1_000_000_000)])),
    ("a size without content", lambda: tree([replace(FILE, content=None)])),
    ("content without a size", lambda: tree([replace(FILE, size=0)])),
    ("pages without content", lambda: tree([replace(FILE, size=0, content=None, paged=True)])),
    ("a large file that is one blob", lambda: tree([replace(FILE, size=131_072)])),
    ("a file of 2^63 bytes", lambda: tree([replace(FILE, size=1 << 63, paged=True)])),
    ("a file with a target", lambda: tree([replace(FILE, target=b"there")])),
    ("an id of 31 bytes", lambda: tree([replace(FILE, content=ID[:31])])),
    ("a link id of 17 bytes", lambda: tree([replace(FILE, link=bytes(17))])),
    ("a directory without a tree", lambda: tree([replace(DIRECTORY, content=None)])),
    ("a directory with a size", lambda: tree([replace(DIRECTORY, size=1)])),
    ("a linked directory", lambda: tree([replace(DIRECTORY, link=bytes(16))])),
    ("a symlink to nowhere", lambda: tree([replace(SYMLINK, target=b"")])),
    ("a target of 4,096 bytes", lambda: tree([replace(SYMLINK, target=b"t" * 4_096)])),
    ("a target with NUL", lambda: tree([replace(SYMLINK, target=b"a\0b")])),
    ("a symlink of another mode", lambda: tree([replace(SYMLINK, mode=0o755)])),
    ("attributes of a symlink", lambda: tree([replace(SYMLINK, attrs=ID)])),
    ("attributes of a FIFO", lambda: tree([Entry(b"p", Type.FIFO, 0o600, 0, attrs=ID)])),
    ("a root with a name", lambda: objects.encode_root(DIRECTORY)),
    ("a root that is a file", lambda: objects.encode_root(replace(FILE, name=b""))),
    ("a chunk of no bytes", lambda: objects.encode_extent(Extent(0, ID))),
    ("a chunk of 32,769 bytes", lambda: objects.encode_extent(Extent(32_769, ID))),
    ("a hole of no bytes", lambda: objects.encode_extent(Extent(0, None))),
    ("a hole of 2^63 bytes", lambda: objects.encode_extent(Extent(1 << 63, None))),
    ("no attributes", lambda: objects.encode_attrs([])),
    ("an attribute outside user.", lambda: objects.encode_attrs([(b"security.capability", b"")])),
    ("an attribute twice", lambda: objects.encode_attrs([(b"user.a", b"1"), (b"user.a", b"2")])),
    ("a value of 65,537 bytes", lambda: objects.encode_attrs([(b"user.a", bytes(65_537))])),
    ("more than 1 MiB", lambda: objects.encode_attrs([(b"user.%d" % n, bytes(65_536)) for n in range(16)])),
    ("nine parents", lambda: objects.encode_commit(replace(COMMIT, parents=PARENTS))),
    ("a parent twice", lambda: objects.encode_commit(replace(COMMIT, parents=(ID, ID)))),
    ("a commit's root with a name", lambda: objects.encode_commit(replace(COMMIT, root=DIRECTORY))),
    ("an author of 1,025 bytes", lambda: objects.encode_commit(replace(COMMIT, author="é" * 512 + "a"))),
    ("a message of 65,537 bytes", lambda: objects.encode_commit(replace(COMMIT, message="m" * 65_537))),
    ("a message that is no text", lambda: objects.encode_commit(replace(COMMIT, message="\udcff"))),
]  # fmt: skip


@pytest.mark.parametrize("encode", [encode for _, encode in UNFIT], ids=[name for name, _ in UNFIT])
def test_what_cannot_be_read_is_not_written(encode: Callable[[], bytes]) -> None:
    with pytest.raises(ValueError):
        encode()


def test_the_borders_of_a_commit_are_written() -> None:
    commit = replace(COMMIT, author="é" * 512, message="m" * 65_536, parents=PARENTS[:8])
    assert objects.decode_commit(objects.encode_commit(commit)) == commit
