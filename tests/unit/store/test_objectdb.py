"""The object database: made, opened, refused; written by several at once.

More than 400 lines: a list of cases, each of which reads alone.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreVersionError,
)
from agent_sandbox.store import objectdb, writer
from agent_sandbox.store.catalog import Ref, RefKind
from agent_sandbox.store.chunks import cuts
from agent_sandbox.store.index import Index
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Kind, identity
from agent_sandbox.store.ports import Row
from agent_sandbox.store.walk import commit
from tests.unit.store.handmade import Chunked, Hand, contents, keep, put, recut


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def database(path: Path) -> Iterator[ObjectDatabase]:
    with ObjectDatabase.create(path, wait_seconds=0.2) as database:
        yield database


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def size(database: ObjectDatabase) -> int:
    database.index.checkpoint()
    return sum(file.stat().st_size for file in database.path.rglob("*") if not file.name.endswith("-shm"))


# ---- made and opened -----------------------------------------------------------------------------------------------


def test_directory_is_what_the_format_page_says(path: Path) -> None:
    with ObjectDatabase.create(path):
        text = (path / "STORE").read_text()
    assert text.startswith("agent-sandbox store\nformat 1\nid ")
    assert text.endswith("\n")
    assert len(text) == len("agent-sandbox store\nformat 1\nid \n") + 32
    assert sorted(file.name for file in path.iterdir()) == ["STORE", "index.sqlite", "lock", "packs"]
    assert {oct(file.stat().st_mode & 0o077) for file in [path, *path.iterdir()]} == {"0o0"}


def test_two_stores_have_different_ids(tmp_path: Path) -> None:
    with ObjectDatabase.create(tmp_path / "a") as a, ObjectDatabase.create(tmp_path / "b") as b:
        assert a.id != b.id


def test_store_is_made_once_and_only_in_an_empty_directory(path: Path, tmp_path: Path) -> None:
    ObjectDatabase.create(path).close()
    before = content(path)
    with pytest.raises(ConflictError):
        ObjectDatabase.create(path)
    assert content(path) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(InvalidRequestError):
        ObjectDatabase.create(tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == [tmp_path / "full" / "thesis.tex"]


def test_store_that_was_not_finished_is_made_again(path: Path) -> None:
    ObjectDatabase.create(path).close()
    (path / "STORE").rename(path / "STORE.new")
    with pytest.raises(NotFoundError):
        ObjectDatabase.open(path)
    ObjectDatabase.create(path).close()
    ObjectDatabase.open(path).close()


def test_packs_without_their_store_are_not_overwritten(path: Path) -> None:
    (path / "packs").mkdir(parents=True)
    (path / "packs" / "0000000001.pack").write_bytes(b"somebody's")
    with pytest.raises(InvalidRequestError):
        ObjectDatabase.create(path)
    assert (path / "packs" / "0000000001.pack").read_bytes() == b"somebody's"


def test_only_one_of_many_makes_the_store(path: Path) -> None:
    outcomes: list[object] = []

    def make() -> None:
        try:
            ObjectDatabase.create(path, wait_seconds=10).close()
            outcomes.append("made")
        except ConflictError:
            outcomes.append("refused")

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(map(str, outcomes)) == ["made"] + ["refused"] * 5


def test_no_store_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ObjectDatabase.open(tmp_path / "nowhere")
    with pytest.raises(NotFoundError):
        ObjectDatabase.open(tmp_path)
    (tmp_path / "STORE").write_text("Apple DS_Store\n")
    with pytest.raises(NotFoundError):
        ObjectDatabase.open(tmp_path)


@pytest.mark.parametrize("text", ["format 2\nid " + "0" * 32 + "\n", "format 10\nsomething new\n"])
def test_newer_store_is_refused_and_nothing_is_written(path: Path, text: str) -> None:
    ObjectDatabase.create(path).close()
    (path / "STORE").write_text("agent-sandbox store\n" + text)
    before = content(path)
    times = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    with pytest.raises(StoreVersionError):
        ObjectDatabase.open(path)
    assert content(path) == before
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == times


def test_newer_index_is_refused_and_nothing_is_written(path: Path) -> None:
    ObjectDatabase.create(path).close()
    with (path / "index.sqlite").open("r+b") as file:
        file.seek(60)
        file.write(b"\0\0\0\2")
    before = content(path)
    with pytest.raises(StoreVersionError):
        ObjectDatabase.open(path)
    assert content(path) == before


@pytest.mark.parametrize("text", ["format x\n", "", "format 1\nid 12\n", "format 1\nid " + "g" * 32 + "\n"])
def test_damaged_store_file_is_damage(path: Path, text: str) -> None:
    ObjectDatabase.create(path).close()
    (path / "STORE").write_text("agent-sandbox store\n" + text)
    with pytest.raises(StoreDamagedError):
        ObjectDatabase.open(path)


@pytest.mark.parametrize("name", ["index.sqlite", "packs"])
def test_missing_part_is_damage(path: Path, name: str) -> None:
    ObjectDatabase.create(path).close()
    (path / name).rename(path / "elsewhere")
    with pytest.raises(StoreDamagedError):
        ObjectDatabase.open(path)


def test_failed_opening_leaves_no_descriptor(path: Path) -> None:
    ObjectDatabase.create(path).close()
    with (path / "index.sqlite").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 3996)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StoreDamagedError), ObjectDatabase.open(path) as database:
        database.locate([bytes(32)])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ---- written and read ----------------------------------------------------------------------------------------------


def test_what_was_put_is_read_back_also_by_another(database: ObjectDatabase, path: Path) -> None:
    blobs = [b"x", b"y" * 100_000, random.Random(1).randbytes(100_000)]
    ids = put(database, *blobs)
    assert ids == [identity(Kind.BLOB, blob) for blob in blobs]
    with ObjectDatabase.open(path) as other:
        assert [other.read(id, Kind.BLOB) for id in ids] == blobs
    assert [database.read(id, Kind.BLOB) for id in ids] == blobs


def test_location_is_that_of_the_record_in_its_pack(database: ObjectDatabase) -> None:
    (id,) = put(database, b"hello")
    (place,) = database.locate([id])
    assert place is not None
    record = (database.packs / f"{place.pack:010d}.pack").read_bytes()[place.offset : place.offset + place.length]
    assert record[0] == 0xA7
    assert record[12:44] == id
    assert record.endswith(b"hello")


def test_object_is_kept_once(database: ObjectDatabase) -> None:
    random_bytes = random.Random(2).randbytes(50_000)
    put(database, random_bytes)
    before = size(database)
    put(database, random_bytes, random_bytes)
    assert size(database) == before


def test_nothing_to_write_makes_no_pack(database: ObjectDatabase) -> None:
    put(database)
    assert list(database.packs.iterdir()) == []


def test_unknown_object_and_other_kind_are_damage(database: ObjectDatabase) -> None:
    (id,) = put(database, b"hello")
    with pytest.raises(StoreDamagedError, match="missing"):
        database.read(bytes(32), Kind.BLOB)
    with pytest.raises(StoreDamagedError, match="BLOB, not a TREE"):
        database.read(id, Kind.TREE)


def test_has_knows_the_pending_at_once_and_locate_only_after_flush(database: ObjectDatabase) -> None:
    with database.writer() as writer:
        id = writer.put(Kind.BLOB, b"hello")
        assert writer.has([id, bytes(32)]) == [True, False]
        assert database.locate([id]) == [None]
        writer.flush()
        assert database.read(id, Kind.BLOB) == b"hello"


def test_abandoned_writer_leaves_nothing(database: ObjectDatabase, path: Path) -> None:
    put(database, b"before")
    before = content(path / "packs")
    with database.writer() as writer:
        id = writer.put(Kind.BLOB, b"hello")
    assert database.locate([id]) == [None]
    assert content(path / "packs") == before
    (after,) = put(database, b"after")
    assert database.read(after, Kind.BLOB) == b"after"


def test_sealed_writer_whose_transaction_was_rolled_back_leaves_nothing(database: ObjectDatabase, path: Path) -> None:
    put(database, b"before")
    before = content(path / "packs")
    with database.writer() as writer:
        id = writer.put(Kind.BLOB, b"hello")
        writer.seal()
        with database.transaction(writer) as change:
            change.rollback()
    assert database.locate([id]) == [None]
    assert content(path / "packs") == before


def test_writer_must_be_sealed_for_its_transaction_and_not_written_after(database: ObjectDatabase) -> None:
    with database.writer() as writer:
        writer.put(Kind.BLOB, b"one")
        with pytest.raises(ValueError, match="not sealed"), database.transaction(writer):
            pass
        writer.seal()
        with pytest.raises(ValueError, match="sealed"):
            writer.put(Kind.BLOB, b"two")
    with pytest.raises(StoreError):
        writer.put(Kind.BLOB, b"three")


def test_row_outside_its_records_is_refused(database: ObjectDatabase) -> None:
    with database.writer() as writer:
        for row in (Row(bytes(32), 0, 101), Row(bytes(32), -1, 10), Row(bytes(32), 0, 0)):
            with pytest.raises(ValueError, match="outside"):
                writer.append(bytes(100), [row])


def test_objects_and_branch_are_one_transaction(database: ObjectDatabase) -> None:
    first = keep(database, {b"a": b"1"})
    with database.writer() as writer:
        second = Hand(database, writer).commit({b"a": b"2"}, parents=(first,))
        writer.seal()
        with pytest.raises(ConflictError), database.transaction(writer) as change:  # noqa: PT012
            assert change.move_ref("p", "main", second, expected=first)
            change.add_project("p", 0)
    ref = database.index.ref("p", "main")
    assert ref is not None
    assert ref.head == first
    assert database.locate([second]) == [None]


def test_writer_goes_on_after_its_transaction(database: ObjectDatabase) -> None:
    with database.writer() as writer:
        for blob in (b"one", b"two"):
            id = writer.put(Kind.BLOB, blob)
            writer.seal()
            with database.transaction(writer):
                pass
            assert database.read(id, Kind.BLOB) == blob


def test_process_appends_to_one_pack_until_it_is_large(
    database: ObjectDatabase, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_PACK", 100_000)
    monkeypatch.setattr(objectdb, "MAX_PACK", 100_000)
    rng = random.Random(3)
    blobs = [rng.randbytes(20_000) for _ in range(20)]
    for blob in blobs[:3]:
        put(database, blob)
    assert len(list(database.packs.iterdir())) == 1
    ids = put(database, *blobs[3:])
    assert len(list(database.packs.iterdir())) == 4
    assert [database.read(id, Kind.BLOB) for id in ids] == blobs[3:]
    assert max(file.stat().st_size for file in database.packs.iterdir()) < 120_200


def test_writer_makes_its_objects_known_by_itself_when_they_are_many(
    database: ObjectDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_PENDING", 10)
    with database.writer() as held:
        ids = [held.put(Kind.BLOB, b"%d" % number) for number in range(25)]
        assert [place is not None for place in database.locate(ids)] == [True] * 20 + [False] * 5


def test_writers_of_one_process_have_their_own_packs(database: ObjectDatabase) -> None:
    with database.writer() as one, database.writer() as two:
        ids = [one.put(Kind.BLOB, b"one"), two.put(Kind.BLOB, b"two"), one.put(Kind.BLOB, b"three")]
        for held in (one, two):
            held.seal()
            with database.transaction(held):
                pass
    places = database.locate(ids)
    assert [place.pack for place in places if place] == [1, 2, 1]
    assert [database.read(id, Kind.BLOB) for id in ids] == [b"one", b"two", b"three"]


def test_same_object_from_two_writers_at_once(database: ObjectDatabase) -> None:
    (base,) = put(database, bytes(range(256)) * 100)
    similar = bytes(range(256)) * 100 + b"!"
    with database.writer() as one, database.writer() as two:
        id = one.put(Kind.BLOB, similar, base)
        assert two.put(Kind.BLOB, similar) == id
        for held in (two, one):
            held.seal()
            with database.transaction(held):
                pass
    assert database.read(id, Kind.BLOB) == similar
    assert database.index.query("SELECT * FROM patches") == []


def test_many_threads_write_and_read(database: ObjectDatabase) -> None:
    database.wait_seconds = 30
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            for number in range(8):
                blobs = [b"shared %d" % number, rng.randbytes(3_000)]
                ids = put(database, *blobs)
                assert [database.read(id, Kind.BLOB) for id in ids] == blobs
        except BaseException as error:  # noqa: BLE001 (given to the test)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert database.index.query("SELECT count(*) FROM objects") == [(8 + 6 * 8,)]


_WORKER = """
import sys
from pathlib import Path
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Kind
with ObjectDatabase.open(Path(sys.argv[1]), wait_seconds=30) as database:
    for number in range(10):
        with database.writer() as writer:
            writer.put(Kind.BLOB, b"shared %d" % number)
            writer.put(Kind.BLOB, (sys.argv[2] + str(number)).encode())
            writer.seal()
            with database.transaction(writer):
                pass
"""


def test_several_processes_write_to_one_store(database: ObjectDatabase, path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", _WORKER, str(path), name]) for name in "abc"]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert database.index.query("SELECT count(*) FROM objects") == [(40,)]
    assert len(list(database.packs.iterdir())) == 3
    assert all(row.closed for row in database.index.packs())
    assert database.read(identity(Kind.BLOB, b"b7"), Kind.BLOB) == b"b7"


def test_pack_that_another_process_closed_is_not_appended_to(database: ObjectDatabase) -> None:
    put(database, b"one")
    with database.index.transaction() as change:
        change.close_packs([1])
    (id,) = put(database, b"two")
    (place,) = database.locate([id])
    assert place is not None
    assert place.pack == 2


def test_pack_that_appears_under_an_open_store_is_left_alone(database: ObjectDatabase, path: Path) -> None:
    file = database.packs / "0000000001.pack"
    file.write_bytes(b"of another index")
    for _ in range(2):
        with pytest.raises(StoreDamagedError, match=file.name):
            put(database, b"hello")
    assert file.read_bytes() == b"of another index"
    assert database.index.packs() == [], "its number counts as never given"
    with pytest.raises(StoreDamagedError, match=file.name):
        ObjectDatabase.open(path)
    file.unlink()
    (id,) = put(database, b"hello")
    assert database.read(id, Kind.BLOB) == b"hello"


@pytest.mark.parametrize("older", ["empty", "before the last pack"])
def test_store_whose_index_is_older_than_its_packs_is_not_opened(path: Path, older: str) -> None:
    """gc would take the packs for leftovers, and a writer would go on in their numbers."""
    with ObjectDatabase.create(path) as database:
        put(database, b"first")
    index = path / "index.sqlite"
    before = index.read_bytes()
    with ObjectDatabase.open(path) as database:
        ids = put(database, b"second")
    after = index.read_bytes()
    packs = {file.name: file.read_bytes() for file in (path / "packs").iterdir()}
    assert sorted(packs) == ["0000000001.pack", "0000000002.pack"]
    index.unlink()
    if older == "empty":
        Index.create(index)
    else:
        index.write_bytes(before)
    for _ in range(2):
        with pytest.raises(StoreDamagedError, match=r"older than .*0000000002\.pack.*[Pp]ut back the index.*rebuild"):
            ObjectDatabase.open(path)
    assert {file.name: file.read_bytes() for file in (path / "packs").iterdir()} == packs
    index.write_bytes(after)
    with ObjectDatabase.open(path) as database:
        assert database.read(ids[0], Kind.BLOB) == b"second"


def test_error_about_foreign_packs_is_bounded(path: Path) -> None:
    ObjectDatabase.create(path).close()
    for number in range(1, 1_001):
        (path / "packs" / f"{number:010d}.pack").touch()
    with pytest.raises(StoreDamagedError, match="and 992 more") as raised:
        ObjectDatabase.open(path)
    assert len(str(raised.value)) < 1_000 + len(str(path))


def test_gc_keeps_operations_out_and_they_say_so(database: ObjectDatabase, path: Path) -> None:
    with ObjectDatabase.open(path) as other, other.lock.exclusive(1):
        with pytest.raises(StoreBusyError), database.reading():
            pass
        with pytest.raises(StoreBusyError), database.writer():
            pass
        with pytest.raises(StoreBusyError), database.transaction():
            pass
        with pytest.raises(StoreBusyError):
            database.read(bytes(32), Kind.BLOB)


# ---- what it costs -------------------------------------------------------------------------------------------------


def test_storage_promises(database: ObjectDatabase) -> None:
    rng = random.Random(5)
    large = bytearray(rng.randbytes(32 << 20))
    pieces = list(cuts(bytes(large)))
    keep(database, {b"large": Chunked(bytes(large), pieces)})
    first = size(database)
    assert first < 32.6 * (1 << 20)
    for number in range(16):
        at = rng.randrange(len(large) - 10)
        large[at : at + 10] = rng.randbytes(10)
        pieces = recut(bytes(large), pieces, at)
        keep(database, {b"large": Chunked(bytes(large), pieces)}, message=str(number))
    edited = size(database)
    assert edited - first < 0.10 * (1 << 20)
    large[:0] = rng.randbytes(10)
    pieces = recut(bytes(large), pieces, 0, 10)
    head = keep(database, {b"large": Chunked(bytes(large), pieces)})
    assert size(database) - edited < 24_000
    assert dict(contents(database, commit(database, head).root)) == {b"large": bytes(large)}


def test_close_writes_the_index_back(path: Path) -> None:
    with ObjectDatabase.create(path) as database:
        other = ObjectDatabase.open(path)
        put(database, *(b"%d" % number for number in range(1000)))
        assert (path / "index.sqlite-wal").stat().st_size > 50_000
    assert (path / "index.sqlite-wal").stat().st_size == 0
    other.close()
    assert not (path / "index.sqlite-wal").exists()


def test_branch_is_there_after_reopening(path: Path) -> None:
    with ObjectDatabase.create(path) as database:
        head = keep(database, {b"a": b"1", b"d": {b"b": b"2"}})
    with ObjectDatabase.open(path) as database:
        assert list(database.index.refs("p")) == [Ref("p", "main", RefKind.BRANCH, head, None)]
        assert dict(contents(database, commit(database, head).root)) == {b"a": b"1", b"d/b": b"2"}
