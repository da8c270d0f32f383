"""check: what is damaged is found, all of it, with the names and paths that lead there.

More than 400 lines: a list of cases, each of which reads alone.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.catalog import Ref, RefKind
from agent_sandbox.store.check import CheckReport, check
from agent_sandbox.store.gc import collect
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import (
    Child,
    Commit,
    Entry,
    Extent,
    Kind,
    Type,
    encode_commit,
    encode_entry,
    encode_extent,
    encode_page,
    encode_tree,
    encode_tree_child,
    identity,
)
from agent_sandbox.store.packs import pack_name
from agent_sandbox.store.ports import Location
from agent_sandbox.store.stats import Stats, stats
from agent_sandbox.store.walk import commit, entries, extents, resolve
from tests.unit.store.handmade import Linked, WithAttrs, keep

RNG = random.Random(1)
LARGE = RNG.randbytes(300_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def database(path: Path) -> Iterator[ObjectDatabase]:
    with ObjectDatabase.create(path) as database:
        yield database


def place_of(database: ObjectDatabase, id: bytes) -> Location:
    (place,) = database.locate([id])
    assert place is not None
    return place


def flip(database: ObjectDatabase, id: bytes) -> None:
    """Change the last byte of an object's record."""
    place = place_of(database, id)
    with (database.packs / pack_name(place.pack)).open("r+b") as file:
        file.seek(place.offset + place.length - 1)
        (last,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes((last ^ 1,)))


def forget(database: ObjectDatabase, id: bytes) -> None:
    with database.index.transaction() as change:
        assert change.change("DELETE FROM objects WHERE id = ?", (id,)) == 1


def found(report: CheckReport) -> set[tuple[str, bytes | None]]:
    assert report.damage_count == len(report.damages)
    return {(damage.where, damage.path) for damage in report.damages}


def entry_at(database: ObjectDatabase, head: bytes, path: bytes) -> Entry:
    return resolve(database, commit(database, head).root, path)


def content_at(database: ObjectDatabase, head: bytes, path: bytes) -> bytes:
    id = entry_at(database, head, path).content
    assert id is not None
    return id


def keep_root(database: ObjectDatabase, root: Entry, objects: list[tuple[Kind, bytes]]) -> bytes:
    """Keep a state that no writer would make, as tag ``forged``."""
    with database.writer() as writer:
        for kind, canonical in objects:
            writer.put(kind, canonical)
        id = writer.put(Kind.COMMIT, encode_commit(Commit(root, (), None, 0, "", "")))
        writer.seal()
        with database.transaction(writer) as change:
            if change.project("p") is None:
                change.add_project("p", 0)
            change.add_ref(Ref("p", "forged", RefKind.TAG, id, None))
    return id


# ---- clean ---------------------------------------------------------------------------------------------------------


def test_empty_store_is_clean(database: ObjectDatabase) -> None:
    report = check(database)
    assert report.clean
    assert (report.states, report.objects, report.bytes, report.unreachable) == (0, 0, 0, 0)


def test_clean_store_says_what_was_seen(database: ObjectDatabase) -> None:
    keep(database, {b"a": b"1", b"d": {b"b": b"2"}})
    keep(database, {b"a": b"1", b"d": {b"b": b"3"}})
    calls: list[tuple[int, int, int, int]] = []
    report = check(database, progress=lambda *numbers: calls.append(numbers))
    assert report.damages == ()
    assert report.states == 2
    assert report.objects == 9  # two commits, two trees each, three blobs
    assert calls[-1] == (9, 9, report.bytes, report.bytes)
    assert report.bytes == stats(database).records


def test_everything_that_a_state_may_hold_is_clean(database: ObjectDatabase) -> None:
    keep(
        database,
        {
            b"attrs": WithAttrs(b"x", {b"user.a": b"1", b"user.b": b"2"}),
            b"empty": b"",
            b"large": LARGE,
            b"one": Linked(b"one", b"shared"),
            b"two": Linked(b"one", b"shared"),
            b"many": {b"%05d" % number: b"%d" % number for number in range(1_000)},
        },
    )
    assert check(database, threads=3).damages == ()


def test_unreachable_objects_are_counted_and_are_no_damage(database: ObjectDatabase) -> None:
    keep(database, {b"a": b"1"})
    keep(database, {b"b": b"unreachable"}, "gone")
    with database.transaction() as change:
        change.remove_ref("p", "gone")
    report = check(database)
    assert report.clean
    assert report.unreachable == 3
    assert report.unreachable_bytes == stats(database).records - report.bytes


def test_state_of_a_forgotten_commit_is_not_missed(database: ObjectDatabase) -> None:
    first = keep(database, {b"a": b"1"})
    tree = commit(database, first).root.content
    keep(database, {b"a": b"2"})
    with database.transaction() as change:
        change.forget(first)
    assert tree is not None
    forget(database, tree)
    assert check(database).damages == ()


def test_check_changes_nothing(database: ObjectDatabase, path: Path) -> None:
    keep(database, {b"a": b"1"})
    database.index.checkpoint()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    check(database)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


# ---- damaged objects -----------------------------------------------------------------------------------------------


def test_damaged_blob_is_reported_for_every_name_and_path(database: ObjectDatabase) -> None:
    head = keep(database, {b"a": b"damaged", b"d": {b"e": {b"f": b"damaged"}, b"ok": b"ok"}})
    other = keep(database, {b"g": b"damaged", b"h": b"fine"}, "other")
    with database.transaction() as change:
        change.add_layer("p", head)
        change.set_pin("kept", other)
    flip(database, content_at(database, head, b"a"))
    report = check(database)
    assert not report.clean
    assert found(report) == {
        ("p:main", b"a"),
        ("p:main", b"d/e/f"),
        ("p@0", b"a"),
        ("p@0", b"d/e/f"),
        ("p:other", b"g"),
        ("pin kept", b"g"),
    }


def test_every_damage_is_reported_not_only_the_first(database: ObjectDatabase) -> None:
    head = keep(database, {b"%03d" % number: b"content %d" % number for number in range(200)})
    paths = {b"%03d" % number for number in range(0, 200, 7)}
    for path in paths:
        flip(database, content_at(database, head, path))
    assert found(check(database)) == {("p:main", path) for path in paths}


def test_damage_in_an_older_state_alone_names_its_commit(database: ObjectDatabase) -> None:
    first = keep(database, {b"a": b"old", b"same": b"same"})
    second = keep(database, {b"a": b"new", b"same": b"same"})
    flip(database, content_at(database, first, b"a"))
    flip(database, content_at(database, second, b"same"))
    assert found(check(database)) == {("p:main", b"same"), (f"commit {first.hex()}", b"a")}


def test_chunk_page_and_attributes_are_reported_by_their_file(database: ObjectDatabase) -> None:
    head = keep(
        database,
        {
            b"chunk": LARGE,
            b"page": RNG.randbytes(200_000),
            b"attrs": WithAttrs(b"x", {b"user.a": b"1"}),
            b"ok": RNG.randbytes(200_000),
        },
    )
    chunks = list(extents(database, entry_at(database, head, b"chunk")))
    assert chunks[3].id is not None
    flip(database, chunks[3].id)
    flip(database, content_at(database, head, b"page"))
    attrs = entry_at(database, head, b"attrs").attrs
    assert attrs is not None
    flip(database, attrs)
    assert found(check(database)) == {("p:main", b"chunk"), ("p:main", b"page"), ("p:main", b"attrs")}


def test_damaged_directory_is_reported_and_the_rest_is_looked_at(database: ObjectDatabase) -> None:
    head = keep(database, {b"bad": {b"x": b"1"}, b"later": {b"y": b"2"}})
    flip(database, content_at(database, head, b"bad"))
    flip(database, content_at(database, head, b"later/y"))
    assert found(check(database)) == {("p:main", b"bad"), ("p:main", b"later/y")}


def test_damaged_page_of_a_directory_hides_no_other_page(database: ObjectDatabase) -> None:
    head = keep(database, {b"%05d" % number: b"%d" % number for number in range(1_000)})
    root = commit(database, head).root
    assert root.content is not None
    names = [entry.name for entry in entries(database, root)]
    flip(database, content_at(database, head, names[-1]))
    page = next(
        id
        for (id,) in database.index.query("SELECT id FROM objects")
        if (names[500] + b"\xa4\x03") in whole(database, id)
    )
    flip(database, page)
    assert found(check(database)) == {("p:main", b""), ("p:main", names[-1])}


def whole(database: ObjectDatabase, id: bytes) -> bytes:
    header, canonical = database.load(id)
    return canonical if header.kind is Kind.TREE and canonical[0] == 0 else b""


def test_missing_objects_of_each_kind(database: ObjectDatabase) -> None:
    head = keep(database, {b"d": {b"x": b"1"}, b"f": b"2", b"large": LARGE})
    older = keep(database, {b"g": b"3"})
    assert older != head
    forget(database, content_at(database, head, b"d"))
    forget(database, content_at(database, older, b"g"))
    forget(database, content_at(database, head, b"large"))
    report = check(database)
    assert found(report) == {
        ("p:main", b"g"),
        (f"commit {head.hex()}", b"d"),
        (f"commit {head.hex()}", b"large"),
    }
    assert all("missing" in damage.why for damage in report.damages)


def test_damaged_commit_is_reported_by_the_name_that_is_at_it_and_older_ones_by_themselves(
    database: ObjectDatabase,
) -> None:
    first = keep(database, {b"a": b"1"})
    second = keep(database, {b"a": b"2"})
    flip(database, first)
    assert found(check(database)) == {(f"commit {first.hex()}", None)}
    flip(database, second)
    assert ("p:main", None) in found(check(database))


def test_damage_of_a_base_is_met_in_what_stands_on_it(database: ObjectDatabase) -> None:
    text = RNG.randbytes(50_000)
    first = keep(database, {b"a": text})
    second = keep(database, {b"a": text + b"!"})
    flip(database, content_at(database, first, b"a"))
    assert found(check(database)) == {("p:main", b"a"), (f"commit {first.hex()}", b"a")}
    assert content_at(database, second, b"a") != content_at(database, first, b"a")


def test_damages_are_counted_beyond_those_that_are_named(
    database: ObjectDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_sandbox.store.damage.MOST", 5)
    head = keep(database, {b"%03d" % number: b"same" for number in range(20)})
    flip(database, content_at(database, head, b"000"))
    report = check(database)
    assert (len(report.damages), report.damage_count) == (5, 20)


# ---- damaged packs and index ---------------------------------------------------------------------------------------


def test_missing_pack_is_reported_with_all_that_was_in_it(database: ObjectDatabase, path: Path) -> None:
    keep(database, {b"a": b"1"})
    with ObjectDatabase.open(path) as other:
        keep(other, {b"b": b"2"}, "other")
    (database.packs / pack_name(2)).unlink()
    assert found(check(database)) == {("0000000002.pack", None), ("p:other", None)}


def test_short_pack_and_foreign_header_are_reported(database: ObjectDatabase) -> None:
    head = keep(database, {b"a": b"1"})
    pack = database.packs / pack_name(1)
    content = pack.read_bytes()
    pack.write_bytes(content[:8] + bytes(16) + content[24:])
    assert found(check(database)) == {("0000000001.pack", None)}
    pack.write_bytes(content[:-1])
    report = check(database)
    assert found(report) == {("0000000001.pack", None), ("p:main", None)}
    assert place_of(database, head).offset + place_of(database, head).length == len(content)


@pytest.mark.parametrize("sql", ["UPDATE packs SET dead = 1", "DELETE FROM packs"])
def test_pack_that_is_not_in_use_is_reported(database: ObjectDatabase, sql: str) -> None:
    keep(database, {b"a": b"1"})
    with database.index.transaction() as change:
        change.change(sql)
    assert found(check(database)) == {("0000000001.pack", None)}


@pytest.mark.parametrize("sql", ["DELETE FROM patches", "UPDATE patches SET base = id", "UPDATE patches SET depth = 3"])
def test_patches_that_the_index_does_not_tell_right_are_reported(database: ObjectDatabase, sql: str) -> None:
    """gc would take the base of a patch that it does not know."""
    text = RNG.randbytes(50_000)
    keep(database, {b"a": text})
    keep(database, {b"a": text + b"!"})
    with database.index.transaction() as change:
        assert change.change(sql) == 1
    assert ("p:main", b"a") in found(check(database))


def test_names_without_their_project_are_reported(database: ObjectDatabase, path: Path) -> None:
    keep(database, {b"a": b"1"})
    connection = sqlite3.connect(path / "index.sqlite", isolation_level=None)
    connection.execute("DELETE FROM projects")
    connection.close()
    assert found(check(database)) == {("index", None)}


def test_rows_that_sqlite_finds_out_of_order_are_reported(path: Path) -> None:
    with ObjectDatabase.create(path) as database:
        keep(database, {b"a": b"1"})
    content = (path / "index.sqlite").read_bytes()
    with ObjectDatabase.open(path) as database:
        ids = sorted(id for (id,) in database.index.query("SELECT id FROM objects"))
    # The least id becomes the greatest, where it stands.
    (path / "index.sqlite").write_bytes(content.replace(ids[0], b"\xff" * 32))
    with ObjectDatabase.open(path) as database:
        assert ("index", None) in found(check(database))
        with pytest.raises(StoreDamagedError, match="run check"):
            collect(database, wait_seconds=1)


# ---- states that no writer would make ------------------------------------------------------------------------------


def directory(items: list[Entry]) -> tuple[Entry, tuple[Kind, bytes]]:
    canonical = encode_tree(0, [encode_entry(item) for item in items])
    root = Entry(b"", Type.DIRECTORY, 0o755, 0, content=identity(Kind.TREE, canonical))
    return root, (Kind.TREE, canonical)


def file(database: ObjectDatabase, name: bytes, data: bytes, **rest: object) -> tuple[Entry, tuple[Kind, bytes]]:
    entry = Entry(name, Type.FILE, 0o644, 0, size=len(data), content=identity(Kind.BLOB, data))
    return replace(entry, **rest), (Kind.BLOB, data)  # type: ignore[arg-type]


def test_small_file_of_another_size_is_reported(database: ObjectDatabase) -> None:
    good, blob = file(database, b"good", b"12345")
    bad, _ = file(database, b"bad", b"12345", size=6)
    root, tree = directory([bad, good])
    keep_root(database, root, [blob, tree])
    assert found(check(database)) == {("p:forged", b"bad")}


def test_chunk_of_another_length_is_reported(database: ObjectDatabase) -> None:
    blob = RNG.randbytes(20_000)
    page = encode_page(0, [encode_extent(Extent(length, identity(Kind.BLOB, blob))) for length in (20_000, 19_000)] * 4)
    root, tree = directory(
        [Entry(b"f", Type.FILE, 0o644, 0, size=4 * 39_000, content=identity(Kind.PAGE, page), paged=True)]
    )
    keep_root(database, root, [(Kind.BLOB, blob), (Kind.PAGE, page), tree])
    assert {damage.path for damage in check(database).damages} == {b"f"}


@pytest.mark.parametrize("names", [(b"directory", b"file"), (b"zdirectory", b"file")])
def test_object_that_is_said_to_be_of_two_kinds_is_reported_where_that_is_wrong(
    database: ObjectDatabase, names: tuple[bytes, bytes]
) -> None:
    """Whichever is met first: gc must not take what is below it, nor go on."""
    head = keep(database, {b"inside": b"1"})
    tree = commit(database, head).root.content
    assert tree is not None
    root, forged = directory(
        sorted(
            [
                Entry(names[0], Type.DIRECTORY, 0o755, 0, content=tree),
                Entry(names[1], Type.FILE, 0o644, 0, size=len(database.read(tree, Kind.TREE)), content=tree),
            ]
        )
    )
    keep_root(database, root, [forged])
    with database.transaction() as change:
        change.remove_ref("p", "main")
    assert found(check(database)) == {("p:forged", b"file")}
    objects = stats(database).objects
    with pytest.raises(StoreDamagedError, match="run check"):
        collect(database, wait_seconds=1)
    assert stats(database).objects == objects


def test_object_of_another_kind_than_is_said_is_reported(database: ObjectDatabase) -> None:
    good, blob = file(database, b"good", b"12345")
    assert good.content is not None
    root, tree = directory([Entry(b"bad", Type.DIRECTORY, 0o755, 0, content=good.content), good])
    keep_root(database, root, [blob, tree])
    assert found(check(database)) == {("p:forged", b"bad")}
    alone, other = directory([Entry(b"bad", Type.DIRECTORY, 0o755, 0, content=good.content)])
    with database.transaction() as change:
        change.remove_ref("p", "forged")
    keep_root(database, alone, [other])
    assert found(check(database)) == {("p:forged", b"bad")}


def test_list_whose_lengths_do_not_add_up_is_reported(database: ObjectDatabase) -> None:
    head = keep(database, {b"large": LARGE, b"ok": b"1"})
    large, ok = entries(database, commit(database, head).root)
    root, tree = directory([replace(large, size=large.size + 1), ok])
    keep_root(database, root, [tree])
    assert found(check(database)) == {("p:forged", b"large")}


def test_linked_names_that_disagree_are_reported(database: ObjectDatabase) -> None:
    head = keep(database, {b"one": Linked(b"one", b"shared"), b"two": Linked(b"one", b"shared")})
    one, two = entries(database, commit(database, head).root)
    root, tree = directory([one, replace(two, mode=0o600)])
    keep_root(database, root, [tree])
    assert found(check(database)) == {("p:forged", b"two")}


def test_directory_that_is_not_in_order_across_its_pages_is_reported(database: ObjectDatabase) -> None:
    low, blob = file(database, b"aaa", b"1")
    high, _ = file(database, b"zzz", b"1")
    pages = [encode_tree(0, [encode_entry(item)]) for item in (high, low)]
    children = [Child(1, identity(Kind.TREE, page), b"zzz") for page in pages]
    children[0] = replace(children[0], last=b"bbb")
    above = encode_tree(1, [encode_tree_child(child) for child in children])
    root = Entry(b"", Type.DIRECTORY, 0o755, 0, content=identity(Kind.TREE, above))
    keep_root(database, root, [blob, *((Kind.TREE, page) for page in [*pages, above])])
    assert {(where, path) for where, path in found(check(database))} == {("p:forged", b"")}


def test_misshapen_state_is_reported(database: ObjectDatabase) -> None:
    lone, blob = file(database, b"lone", b"1", link=bytes(16))
    root, tree = directory([lone])
    keep_root(database, root, [blob, tree])
    assert found(check(database)) == {("p:forged", b"lone")}


# ---- stats ---------------------------------------------------------------------------------------------------------


def test_stats_count_what_is_there(database: ObjectDatabase, path: Path) -> None:
    text = RNG.randbytes(50_000)
    head = keep(database, {b"a": text})
    keep(database, {b"a": text + b"!"})
    with database.transaction() as change:
        change.add_ref(Ref("p", "v1", RefKind.TAG, head, None))
        change.add_layer("p", head)
        change.set_pin("kept", head)
    counted = stats(database)
    assert counted == Stats(
        projects=1,
        branches=1,
        tags=1,
        layers=1,
        pins=1,
        objects=6,
        patches=1,
        records=(path / "packs" / "0000000001.pack").stat().st_size - 32,
        pack_files=1,
        packs=(path / "packs" / "0000000001.pack").stat().st_size,
        index=sum((path / name).stat().st_size for name in ("index.sqlite", "index.sqlite-wal")),
    )
