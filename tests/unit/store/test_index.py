"""The index: versions, transactions, what SQLite's failures become, and the names."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import (
    ConflictError,
    NotFoundError,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
    StoreVersionError,
)
from agent_sandbox.store.catalog import Layer, Pin, Project, Ref, RefKind
from agent_sandbox.store.index import Index, Known, Transaction, probe
from agent_sandbox.store.ports import Location


def id_of(number: int) -> bytes:
    return struct.pack(">28xI", number)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "index.sqlite"
    Index.create(path)
    return path


@pytest.fixture
def index(path: Path) -> Iterator[Index]:
    index = Index(path, wait_seconds=0.1)
    yield index
    index.close()


def known(number: int, **rest: object) -> Known:
    return Known(id_of(number), Location(1, 32 + number * 100, 100), **rest)  # type: ignore[arg-type]


def files(path: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.parent.iterdir()}


def set_header(path: Path, offset: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack(">I", value))


# ---- versions ------------------------------------------------------------------------------------------------------


def test_header_says_what_the_format_page_says(path: Path) -> None:
    header = path.read_bytes()[:100]
    assert header[68:72] == bytes.fromhex("41534253")
    assert header[60:64] == bytes((0, 0, 0, 1))
    assert header[18:20] == b"\x02\x02"  # WAL for reading and writing: sqlite.org/fileformat2.html


@pytest.mark.parametrize("version", [0, 2, 1 << 30])
def test_newer_index_is_refused_and_nothing_is_written(path: Path, version: int) -> None:
    set_header(path, 60, version)
    before = files(path)
    with pytest.raises(StoreVersionError, match=str(version)):
        probe(path)
    assert files(path) == before


def test_database_of_another_program_is_refused(path: Path) -> None:
    set_header(path, 68, 0)
    with pytest.raises(StoreVersionError):
        probe(path)


def test_newer_version_that_is_only_in_the_wal_is_refused(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    newer = sqlite3.connect(path, isolation_level=None)
    newer.execute("PRAGMA user_version = 2")
    for name in ("index.sqlite", "index.sqlite-wal"):
        shutil.copy(path.with_name(name), copy / name)
    newer.close()
    probe(copy / "index.sqlite")
    with pytest.raises(StoreVersionError):
        Index(copy / "index.sqlite")


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", bytes(4096), b"no database at all" * 100])
def test_what_is_no_database_is_damage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index.sqlite"
    path.write_bytes(content)
    with pytest.raises(StoreDamagedError):
        probe(path)


def test_missing_linked_and_special_files_are_damage(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreDamagedError):
        probe(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(StoreDamagedError):
        probe(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StoreDamagedError):
        probe(tmp_path / "fifo")


def test_overwritten_pages_are_damage(path: Path) -> None:
    with Index(path).transaction() as change:
        change.add_objects(known(number) for number in range(1000))
    opened = Index(path)
    opened.checkpoint()
    opened.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    damaged = Index(path)
    with pytest.raises(StoreDamagedError):
        damaged.locate([id_of(1)])
    damaged.close()


def test_truncated_database_is_damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(StoreDamagedError):
        Index(path).locate([id_of(1)])


def test_places_that_cannot_be_are_damage(index: Index) -> None:
    with index.transaction() as change:
        change.add_objects(
            [
                Known(id_of(1), Location(0, 32, 100)),
                Known(id_of(2), Location(1, 31, 100)),
                Known(id_of(3), Location(1, 32, 5)),
            ]
        )
    for number in (1, 2, 3):
        with pytest.raises(StoreDamagedError):
            index.locate([id_of(number)])


# ---- objects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 16, 17, 128, 129, 512, 513, 1500])
def test_locate_answers_in_order_with_none_for_the_unknown(index: Index, count: int) -> None:
    with index.transaction() as change:
        change.add_objects(known(number) for number in range(0, 1500, 2))
    ids = [id_of(number * 7919 % 1500) for number in range(count)]
    expected = [
        Location(1, 32 + number * 100, 100) if number % 2 == 0 else None
        for number in (number * 7919 % 1500 for number in range(count))
    ]
    assert index.locate(ids) == expected


def test_same_id_twice_in_one_question(index: Index) -> None:
    with index.transaction() as change:
        change.add_objects([known(1)])
    assert index.locate([id_of(1), id_of(2), id_of(1)]) == [Location(1, 132, 100), None, Location(1, 132, 100)]


def test_first_of_two_writers_of_an_object_counts_with_its_form(index: Index) -> None:
    with index.transaction() as change:
        change.add_objects([known(1), known(2, base=id_of(1), depth=1)])
    with index.transaction() as change:
        change.add_objects(
            [
                Known(id_of(1), Location(2, 32, 90), id_of(2), 2),
                Known(id_of(2), Location(2, 132, 100)),
            ]
        )
    assert index.locate([id_of(1), id_of(2)]) == [Location(1, 132, 100), Location(1, 232, 100)]
    assert index.query("SELECT id, base, depth FROM patches") == [(id_of(2), id_of(1), 1)]


def test_pack_numbers_are_never_used_again(index: Index) -> None:
    with index.transaction() as change:
        first = change.add_pack()
        change.change("UPDATE packs SET dead = 1")
    with index.transaction() as change:
        change.remove_packs([first])
        assert change.add_pack() > first


# ---- transactions --------------------------------------------------------------------------------------------------


def test_transaction_is_all_or_nothing(index: Index) -> None:
    with pytest.raises(ConflictError), index.transaction() as change:  # noqa: PT012
        change.add_objects([known(1)])
        change.add_project("p", 1)
        change.add_project("p", 1)
    assert index.locate([id_of(1)]) == [None]
    assert index.project("p") is None


def test_rollback_is_no_error(index: Index) -> None:
    tried: list[str] = []
    with index.transaction(lambda: tried.append("commit")) as change:
        change.add_project("p", 1)
        change.rollback()
    assert index.project("p") is None
    assert tried == []


def test_reader_sees_the_last_committed_state(index: Index) -> None:
    with index.transaction() as change:
        change.add_project("p", 1)
        assert index.project("p") is None
        assert change.project("p") == Project("p", 1, False)
    assert index.project("p") == Project("p", 1, False)


def test_committed_is_there_for_another_process_at_once(index: Index, path: Path) -> None:
    with index.transaction() as change:
        change.add_project("p", 1, owners=True)
    other = Index(path)
    assert list(other.projects()) == [Project("p", 1, True)]
    other.close()


def test_writer_that_waits_too_long_is_busy(index: Index, path: Path) -> None:
    other = Index(path)
    with other.transaction(), pytest.raises(StoreBusyError), index.transaction():
        pass
    other.close()
    with index.transaction() as change:
        change.add_project("p", 1)


def test_full_disk_is_told_and_nothing_is_lost(index: Index) -> None:
    with index.transaction() as change:
        change.add_project("p", 1)
    (pages,) = index.query("PRAGMA page_count")[0]
    with pytest.raises(StoreFullError), index.transaction() as change:  # noqa: PT012
        change.query(f"PRAGMA max_page_count = {pages}")
        change.add_objects(known(number) for number in range(10_000))
    assert index.locate([id_of(1)]) == [None]
    assert index.project("p") is not None


def test_attached_scratch_is_beside_the_index(index: Index, tmp_path: Path) -> None:
    with index.transaction() as change:
        change.add_objects([known(1)])
    before = sorted(tmp_path.iterdir())
    with index.attached() as connection:
        connection.execute("CREATE TABLE mark.live (id)")
        connection.execute("INSERT INTO mark.live SELECT id FROM objects")
        assert connection.execute("SELECT count(*) FROM mark.live").fetchone() == (1,)
        assert sorted(tmp_path.iterdir()) == before


def test_shrink_gives_back_what_is_empty(index: Index, path: Path) -> None:
    with index.transaction() as change:
        change.add_objects(known(number) for number in range(20_000))
    index.checkpoint()
    large = path.stat().st_size
    with index.transaction() as change:
        change.change("DELETE FROM objects WHERE id > ?", (id_of(100),))
    index.shrink()
    index.checkpoint()
    assert path.stat().st_size < large / 4
    assert index.locate([id_of(100), id_of(101)]) == [Location(1, 10_032, 100), None]


# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def change(index: Index) -> Iterator[Transaction]:
    with index.transaction() as change:
        change.add_objects(known(number) for number in range(20))
        change.add_project("p", 7)
        yield change


def test_projects_are_listed_by_name_also_beyond_one_page(change: Transaction) -> None:
    for number in range(1200):
        change.add_project(f"q{number:04}", number)
    assert [project.name for project in change.projects()] == ["p", *(f"q{number:04}" for number in range(1200))]


def test_name_of_a_project_is_taken_once(change: Transaction) -> None:
    with pytest.raises(ConflictError):
        change.add_project("p", 8)
    assert change.project("p") == Project("p", 7, False)


def test_project_goes_with_its_names(change: Transaction) -> None:
    change.add_layer("p", id_of(1))
    change.add_ref(Ref("p", "main", RefKind.BRANCH, id_of(1), 0))
    assert change.remove_project("p")
    assert not change.remove_project("p")
    assert list(change.refs("p")) == []
    assert list(change.layers("p")) == []


def test_layers_are_a_line(change: Transaction) -> None:
    assert change.last_layer("p") is None
    assert change.add_layer("p", id_of(1)) == Layer("p", 0, id_of(1))
    assert change.add_layer("p", id_of(2)) == Layer("p", 1, id_of(2))
    assert change.last_layer("p") == change.layer("p", 1) == Layer("p", 1, id_of(2))
    assert change.layer("p", 2) is None
    assert [layer.number for layer in change.layers("p")] == [0, 1]


def test_branches_and_tags_share_names(change: Transaction) -> None:
    change.add_ref(Ref("p", "main", RefKind.BRANCH, id_of(1), None))
    with pytest.raises(ConflictError):
        change.add_ref(Ref("p", "main", RefKind.TAG, id_of(2), None))
    assert change.ref("p", "main") == Ref("p", "main", RefKind.BRANCH, id_of(1), None)
    assert change.ref("p", "other") is None
    assert change.ref("q", "main") is None


def test_names_without_their_commit_or_project_are_refused(change: Transaction) -> None:
    with pytest.raises(NotFoundError):
        change.add_ref(Ref("q", "main", RefKind.BRANCH, id_of(1), None))
    with pytest.raises(NotFoundError):
        change.add_ref(Ref("p", "main", RefKind.BRANCH, id_of(99), None))
    with pytest.raises(NotFoundError):
        change.add_layer("p", id_of(99))
    with pytest.raises(NotFoundError):
        change.set_pin("x", id_of(99))


def test_branch_moves_only_from_where_it_is_expected(change: Transaction) -> None:
    change.add_ref(Ref("p", "main", RefKind.BRANCH, id_of(1), 0))
    assert not change.move_ref("p", "main", id_of(3), expected=id_of(2))
    assert change.move_ref("p", "main", id_of(3), expected=id_of(1))
    assert change.ref("p", "main") == Ref("p", "main", RefKind.BRANCH, id_of(3), 0)
    assert change.move_ref("p", "main", id_of(4), expected=id_of(3), base=1)
    assert change.ref("p", "main") == Ref("p", "main", RefKind.BRANCH, id_of(4), 1)
    assert not change.move_ref("p", "gone", id_of(3), expected=id_of(2))


def test_tag_does_not_move(change: Transaction) -> None:
    change.add_ref(Ref("p", "v1", RefKind.TAG, id_of(1), None))
    assert not change.move_ref("p", "v1", id_of(2), expected=id_of(1))
    assert change.remove_ref("p", "v1")
    assert not change.remove_ref("p", "v1")


def test_pins_are_set_moved_and_removed(change: Transaction) -> None:
    change.set_pin("snap-1", id_of(1))
    change.set_pin("snap-1", id_of(2))
    assert list(change.pins()) == [Pin("snap-1", id_of(2))]
    assert change.remove_pin("snap-1")
    assert not change.remove_pin("snap-1")
    assert change.pin("snap-1") is None


def test_forgotten_commit_counts_while_a_name_is_at_it(change: Transaction) -> None:
    change.add_ref(Ref("p", "main", RefKind.BRANCH, id_of(1), None))
    change.forget(id_of(1))
    assert change.is_forgotten(id_of(1))
    assert change.has_state(id_of(1))
    change.set_pin("keeps", id_of(1))
    change.remove_ref("p", "main")
    assert change.has_state(id_of(1))
    change.remove_pin("keeps")
    assert not change.has_state(id_of(1))
    with pytest.raises(NotFoundError):
        change.set_pin("late", id_of(1))


def test_ids_are_found_by_their_beginning(change: Transaction) -> None:
    change.add_objects(
        [
            Known(bytes.fromhex("abcdef01" + "00" * 28), Location(1, 32, 100)),
            Known(bytes.fromhex("abcdef02" + "ff" * 28), Location(1, 32, 100)),
        ]
    )
    assert [id.hex()[:8] for id in change.find("abcdef0")] == ["abcdef01", "abcdef02"]
    assert change.find("abcdef02" + "ff" * 28) == [bytes.fromhex("abcdef02" + "ff" * 28)]
    assert change.find("abcdef03") == []
    assert len(change.find("", limit=3)) == 3
