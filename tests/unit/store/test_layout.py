"""Laying states out: users without rights, hostile states, file systems that cannot hold them."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.errors import (
    ConflictError,
    ForbiddenError,
    SandboxError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
)
from agent_sandbox.store.objects import (
    Entry,
    Extent,
    Kind,
    Type,
    encode_attrs,
    encode_extent,
    encode_page,
    encode_tree,
    link_id,
)
from agent_sandbox.store.ports import Engine, Options
from tests.unit.store.engines import capture, checkout, difference, each_engine, memory, opened, state, unprivileged
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.trees import Data, Looks, Make, build, scratch, state_of


def file(store: MemoryObjects, name: bytes, data: bytes = b"data", **other: object) -> Entry:
    entry = Entry(name, Type.FILE, 0o644, 0, size=len(data), content=store.put(Kind.BLOB, data))
    return replace(entry, **other)  # type: ignore[arg-type]


@contextmanager
def umask(value: int) -> Iterator[None]:
    old = os.umask(value)
    try:
        yield
    finally:
        os.umask(old)


@contextmanager
def tmpfs(at: Path, options: str) -> Iterator[Path]:
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


# ---- rights --------------------------------------------------------------------------------------------------------


@pytest.mark.real
@each_engine
@pytest.mark.parametrize("mask", [0o022, 0o277, 0o777, 0])
def test_an_unprivileged_user_can_lay_out_what_is_locked(engine: Engine, mask: int) -> None:
    # Root gives its rights up for it, and then looks at what that user has locked.
    with scratch() as place:
        with unprivileged(place):
            store = memory(place)
            inside = [
                file(store, b"file", mode=0, attrs=store.put(Kind.ATTRS, encode_attrs([(b"user.a", b"1")]))),
                file(store, b"set", mode=0o4711),
                file(store, b"linked", link=link_id(b"0/linked"), mode=0o400),
                Entry(b"pipe", Type.FIFO, 0o200, 1),
                Entry(b"link", Type.SYMLINK, 0o777, 2, target=b"nowhere"),
            ]
            directories = []
            for mode in (0, 0o100, 0o400, 0o500, 0o1777, 0o2700):
                tree = state(store, inside).content
                directories.append(Entry(b"%o" % mode, Type.DIRECTORY, mode, mode, content=tree))
            root = replace(state(store, directories), mode=0o500)
            (place / "copy").mkdir()
            with opened(place / "copy") as fd, umask(mask):
                engine.checkout(root, fd, store)
        found = state_of(place / "copy")
        assert found[b""].mode == 0o500
        for entry in directories:
            about = found[entry.name]
            assert (about.mode, about.mtime_ns) == (entry.mode, entry.mtime_ns)
            for one in inside:
                path = entry.name + b"/" + one.name
                assert (found[path].mode, found[path].mtime_ns) == (one.mode, one.mtime_ns)
            assert found[entry.name + b"/file"].attributes == (("user.a", b"1"),)
        assert found[b"0/linked"].names == {entry.name + b"/linked" for entry in directories}


@pytest.mark.real
@each_engine
def test_owners_are_applied_only_when_asked_for(engine: Engine) -> None:
    with scratch() as place:
        store = memory(place)
        owner = (1_234, 5_678)
        entries = [
            file(store, b"file", owner=owner, mode=0o6755),
            Entry(b"directory", Type.DIRECTORY, 0o2755, 0, owner, content=state(store, []).content),
            Entry(b"link", Type.SYMLINK, 0o777, 0, owner, target=b"x"),
            Entry(b"pipe", Type.FIFO, 0o644, 0, owner),
        ]
        root = replace(state(store, entries), owner=owner)
        checkout(engine, root, place / "plain", store)
        checkout(engine, root, place / "owned", store, options=Options(owners=True))
        assert {one.owner for one in state_of(place / "plain", owners=True).values()} == {(0, 0)}
        owned = state_of(place / "owned", owners=True)
        assert {one.owner for one in owned.values()} == {owner}
        assert (owned[b"file"].mode, owned[b"directory"].mode) == (0o6755, 0o2755)
        assert capture(engine, place / "owned", store, options=Options(owners=True)).root == root


@pytest.mark.real
@each_engine
@pytest.mark.parametrize("owners", [False, True])
def test_one_owner_for_all_that_have_none(engine: Engine, owners: bool) -> None:
    with scratch() as place:
        store = memory(place)
        link = link_id(b"directory/linked")
        inside = [file(store, b"linked", link=link), file(store, b"recorded", owner=(1, 2), mode=0o6755)]
        entries = [
            Entry(b"directory", Type.DIRECTORY, 0o2755, 0, content=state(store, inside).content),
            file(store, b"file", mode=0o4711),
            file(store, b"linked", link=link),
            Entry(b"link", Type.SYMLINK, 0o777, 0, target=b"x"),
            Entry(b"pipe", Type.FIFO, 0o644, 0),
        ]
        root = state(store, entries)
        options = Options(owners=owners, owner=(1_234, 5_678))
        checkout(engine, root, place / "copy", store, options=options)
        difference(engine, state(store, []), root, place / "layer", store, options=options)
        for name in ("copy", "layer"):
            found = state_of(place / name, owners=True)
            recorded = found.pop(b"directory/recorded")
            assert recorded.owner == ((1, 2) if owners else (1_234, 5_678))
            assert {one.owner for one in found.values()} == {(1_234, 5_678)}
            assert (recorded.mode, found[b"file"].mode, found[b"directory"].mode) == (0o6755, 0o4711, 0o2755)
            assert found[b"linked"].names == {b"linked", b"directory/linked"}


@each_engine
def test_one_owner_needs_root(engine: Engine) -> None:
    with scratch() as place:
        store = memory(place)
        root = state(store, [file(store, b"file")])
        (place / "copy").mkdir()
        with opened(place / "copy") as fd, unprivileged(place / "copy"), pytest.raises(ForbiddenError):
            engine.checkout(root, fd, store, options=Options(owner=(1_234, 5_678)))


@each_engine
def test_whiteouts_need_root(engine: Engine) -> None:
    with scratch() as place:
        store = memory(place)
        old = state(store, [Entry(b"a", Type.FIFO, 0o644, 0)])
        new = state(store, [Entry(b"a", Type.DIRECTORY, 0o755, 0, content=state(store, []).content)])
        (place / "layer").mkdir()
        with opened(place / "layer") as fd, unprivileged(place / "layer"), pytest.raises(ForbiddenError):
            engine.difference(old, new, fd, store)


@each_engine
def test_the_directory_must_be_empty(engine: Engine) -> None:
    with scratch() as place:
        store = memory(place)
        (place / "copy").mkdir()
        (place / "copy" / "file").write_text("mine")
        with opened(place / "copy") as fd, pytest.raises(ConflictError, match="not empty"):
            engine.checkout(state(store, []), fd, store)
        assert (place / "copy" / "file").read_text() == "mine"


# ---- what is made --------------------------------------------------------------------------------------------------


@each_engine
def test_the_root_gets_what_it_had_last(engine: Engine) -> None:
    with scratch() as place:
        store = memory(place)
        attrs = store.put(Kind.ATTRS, encode_attrs([(b"user.a", b"1")]))
        root = replace(state(store, [file(store, b"file")]), mode=0o1751, mtime_ns=-7, attrs=attrs)
        checkout(engine, root, place / "copy", store)
        found = state_of(place / "copy")[b""]
        assert (found.mode, found.mtime_ns, found.attributes) == (0o1751, -7, (("user.a", b"1"),))


@each_engine
def test_progress_ends_with_all(engine: Engine) -> None:
    with scratch() as place:
        looks = Looks(0o644, 0)
        build(place / "tree", [Make(0, b"a", Data(200_000), False, looks), Make(0, b"b", Data(5), False, looks)])
        store = memory(place)
        root = capture(engine, place / "tree", store).root
        told: list[tuple[int, int, int, int]] = []
        checkout(engine, root, place / "copy", store, progress=lambda *numbers: told.append(numbers))
        files, all_files, done, total = told[-1]
        assert (files, done) == (2, 200_005)
        assert (all_files, total) in ((2, 200_005), (0, 0))


@each_engine
def test_as_many_links_as_the_file_system_allows(engine: Engine) -> None:
    with scratch() as place:
        store = memory(place)
        limit = os.pathconf(place, "PC_LINK_MAX")  # 65,000 on ext4; a smaller, wrong number where libc knows no better
        one = file(store, b"0", link=link_id(b"0"))
        names = sorted(b"%d" % number for number in range(limit + 1))
        checkout(engine, state(store, [replace(one, name=name) for name in names[:-1]]), place / "copy", store)
        assert (place / "copy" / "0").stat().st_nlink == limit
        assert len(list((place / "copy").iterdir())) == limit
        if limit == 65_000:
            with pytest.raises(StoreError):
                checkout(engine, state(store, [replace(one, name=name) for name in names]), place / "more", store)


# ---- hostile states ------------------------------------------------------------------------------------------------


def disagreeing(store: MemoryObjects) -> Entry:
    link = link_id(b"a")
    return state(store, [file(store, b"a", link=link), file(store, b"b", b"other", link=link)])


def disagreeing_types(store: MemoryObjects) -> Entry:
    link = link_id(b"a")
    return state(store, [file(store, b"a", link=link), Entry(b"b", Type.FIFO, 0o644, 0, link=link)])


def disagreeing_modes(store: MemoryObjects) -> Entry:
    link = link_id(b"a")
    return state(store, [file(store, b"a", link=link), file(store, b"b", link=link, mode=0o4755)])


def too_deep(store: MemoryObjects) -> Entry:
    root = state(store, [])
    for _ in range(1_001):
        root = state(store, [Entry(b"d", Type.DIRECTORY, 0o755, 0, content=root.content)])
    return root


def other_length(store: MemoryObjects) -> Entry:
    return state(store, [file(store, b"a", b"data", size=5)])


def other_chunk_length(store: MemoryObjects) -> Entry:
    blob = store.put(Kind.BLOB, b"data")
    page = store.put(Kind.PAGE, encode_page(0, [encode_extent(Extent(5, blob))]))
    return state(store, [Entry(b"a", Type.FILE, 0o644, 0, size=5, content=page, paged=True)])


def longer_pages(store: MemoryObjects) -> Entry:
    blob = store.put(Kind.BLOB, b"data")
    page = store.put(Kind.PAGE, encode_page(0, [encode_extent(Extent(4, blob)), encode_extent(Extent(4, None))]))
    return state(store, [Entry(b"a", Type.FILE, 0o644, 0, size=6, content=page, paged=True)])


def missing_blob(store: MemoryObjects) -> Entry:
    return state(store, [Entry(b"a", Type.FILE, 0o644, 0, size=5, content=bytes(32))])


def wrong_kind(store: MemoryObjects) -> Entry:
    tree = store.put(Kind.TREE, encode_tree(0, ()))
    return state(store, [Entry(b"a", Type.FILE, 0o644, 0, size=1, content=tree)])


def wrong_attributes(store: MemoryObjects) -> Entry:
    return state(store, [file(store, b"a", attrs=store.put(Kind.BLOB, b"\x06user.a\x00"))])


def foreign_attributes(store: MemoryObjects) -> Entry:
    canonical = b"\x16trusted.overlay.opaque\x01y"
    return state(
        store, [Entry(b"d", Type.DIRECTORY, 0o755, 0, attrs=store.put(Kind.ATTRS, canonical), content=bytes(32))]
    )


@each_engine
@pytest.mark.parametrize(
    "make",
    [
        disagreeing,
        disagreeing_types,
        disagreeing_modes,
        too_deep,
        other_length,
        other_chunk_length,
        longer_pages,
        missing_blob,
        wrong_kind,
        wrong_attributes,
        foreign_attributes,
    ],
)
def test_a_state_that_cannot_be_is_damaged(engine: Engine, make: Callable[[MemoryObjects], Entry]) -> None:
    with scratch() as place:
        store = memory(place)
        root = make(store)
        store.flush()
        with pytest.raises(StoreDamagedError):
            checkout(engine, root, place / "copy", store)
        (place / "layer").mkdir()
        with opened(place / "layer") as fd, pytest.raises(StoreDamagedError):
            engine.difference(state(store, []), root, fd, store)


def huge(store: MemoryObjects) -> Entry:
    size = (1 << 63) - 1
    page = store.put(Kind.PAGE, encode_page(0, [encode_extent(Extent(size, None))]))
    return state(store, [Entry(b"a", Type.FILE, 0o644, 0, size=size, content=page, paged=True)])


def many_attributes(store: MemoryObjects) -> Entry:
    attributes = encode_attrs([(b"user.%d" % number, bytes(60_000)) for number in range(15)])
    return state(store, [file(store, b"a", attrs=store.put(Kind.ATTRS, attributes))])


def far_future(store: MemoryObjects) -> Entry:
    return state(store, [file(store, b"a", mtime_ns=((1 << 63) - 1) * 10**9)])


def far_past_of_a_link(store: MemoryObjects) -> Entry:
    return state(store, [Entry(b"a", Type.SYMLINK, 0o777, -(1 << 63) * 10**9, target=b"x")])


@each_engine
@pytest.mark.parametrize("make", [huge, many_attributes, far_future, far_past_of_a_link])
def test_what_the_file_system_cannot_hold_is_named(engine: Engine, make: Callable[[MemoryObjects], Entry]) -> None:
    # True for ext4, whose files end at 16 TiB, times in 2446, and attributes after a block. tmpfs holds them all, and
    # then the state must be there.
    with scratch() as place:
        store = memory(place)
        root = make(store)
        store.flush()
        refused: SandboxError | None = None
        try:
            checkout(engine, root, place / "copy", store)
        except SandboxError as error:
            refused = error
        if refused is None:
            assert capture(engine, place / "copy", store).root.content == root.content
        else:
            assert type(refused) is StoreError
            assert " a" in refused.message


@pytest.mark.real
@each_engine
def test_a_full_disk_is_told(engine: Engine) -> None:
    with scratch() as place, tmpfs(place / "small", "size=64k") as small:
        store = memory(place)
        root = state(store, [file(store, b"%d" % number, os.urandom(30_000)) for number in range(4)])
        with pytest.raises(StoreFullError):
            checkout(engine, root, small / "copy", store)


@pytest.mark.real
@each_engine
def test_a_read_only_file_system_is_told(engine: Engine) -> None:
    with scratch() as place, tmpfs(place / "ro", "ro,mode=755") as target:
        store = memory(place)
        with opened(target) as fd, pytest.raises(ForbiddenError):
            engine.checkout(state(store, [file(store, b"a")]), fd, store)


@each_engine
def test_nothing_that_is_laid_out_can_be_written_through_a_link(engine: Engine) -> None:
    with scratch() as place:
        (place / "outside").mkdir()
        store = memory(place)
        target = os.fsencode(place / "outside")
        entries = [Entry(b"a", Type.SYMLINK, 0o777, 0, target=target), file(store, b"b"), file(store, b"c")]
        checkout(engine, state(store, entries), place / "copy", store)
        assert list((place / "outside").iterdir()) == []
        assert stat.S_IMODE((place / "outside").stat().st_mode) == 0o755
