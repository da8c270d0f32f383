"""The object database reads only what was written: patches and their ends, forged and damaged records, memory."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import objectdb, packs, records
from agent_sandbox.store.index import Known
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Kind, encode_tree
from agent_sandbox.store.ports import Location, Row
from tests.unit.store.handmade import put


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def database(path: Path) -> Iterator[ObjectDatabase]:
    with ObjectDatabase.create(path) as database:
        yield database


# ---- patches -------------------------------------------------------------------------------------------------------


def versions(count: int) -> list[bytes]:
    data = bytearray(random.Random(4).randbytes(20_000))
    out = []
    for number in range(count):
        data[100 * number : 100 * number + 10] = b"0123456789"
        out.append(bytes(data))
    return out


def test_patches_are_small_and_at_most_four_deep(database: ObjectDatabase) -> None:
    made = versions(7)
    ids: list[bytes] = []
    for version in made:
        ids += put(database, version, base=ids[-1] if ids else None)
    assert [database.load(id)[0].depth for id in ids] == [0, 1, 2, 3, 4, 0, 1]
    assert [database.read(id, Kind.BLOB) for id in ids] == made
    (pack,) = database.packs.iterdir()
    assert pack.stat().st_size < 2 * 20_100 + 5 * 300


def test_base_is_taken_only_from_the_index(database: ObjectDatabase) -> None:
    one, two = versions(2)
    with database.writer() as writer:
        first = writer.put(Kind.BLOB, one)
        second = writer.put(Kind.BLOB, two, first)
        third = writer.put(Kind.BLOB, two + b"!", bytes(32))
        writer.seal()
        with database.transaction(writer):
            pass
    assert [database.load(id)[0].depth for id in (first, second, third)] == [0, 0, 0]


def test_damaged_base_only_costs_room(database: ObjectDatabase) -> None:
    one, two = versions(2)
    (base,) = put(database, one)
    (place,) = database.locate([base])
    assert place is not None
    overwrite(database, place, place.length - 5, b"\0\0\0")
    (id,) = put(database, two, base=base)
    assert database.read(id, Kind.BLOB) == two
    with pytest.raises(StoreDamagedError):
        database.read(base, Kind.BLOB)


def overwrite(database: ObjectDatabase, place: Location, offset: int, data: bytes) -> None:
    with (database.packs / packs.pack_name(place.pack)).open("r+b") as file:
        file.seek(place.offset + offset)
        file.write(data)


def forged_patch(id: bytes, base: bytes, depth: int) -> bytes:
    head = records._HEAD.pack(0xA7, Kind.BLOB, 2, depth, 10, 5, id) + base
    return head + zlib.crc32(head).to_bytes(4, "little") + b"hello"


def test_patches_in_a_ring_are_damage_and_not_followed_for_ever(database: ObjectDatabase) -> None:
    a, b = b"a" * 32, b"b" * 32
    one, two = forged_patch(a, b, 1), forged_patch(b, a, 1)
    with database.writer() as writer:
        writer.append(one + two, [Row(a, 0, len(one), b, 1), Row(b, len(one), len(two), a, 1)])
        writer.seal()
        with database.transaction(writer):
            pass
    with pytest.raises(StoreDamagedError, match="too deep"):
        database.read(a, Kind.BLOB)


def test_record_that_is_not_the_one_the_index_means_is_damage(database: ObjectDatabase) -> None:
    ids = put(database, b"one", b"two")
    places = database.locate(ids)
    assert places[0] is not None
    assert places[1] is not None
    with database.index.transaction() as change:
        change.change("DELETE FROM objects WHERE id = ?", (ids[1],))
        change.add_objects([Known(ids[1], places[0])])
    with pytest.raises(StoreDamagedError, match="not where the index says"):
        database.read(ids[1], Kind.BLOB)
    with database.index.transaction() as change:
        change.change("UPDATE objects SET length = 4000000000 WHERE id = ?", (ids[0],))
    with pytest.raises(StoreDamagedError, match="where none can be"):
        database.read(ids[0], Kind.BLOB)


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 8, 12, 20, 48, 60])
def test_every_flipped_byte_of_a_record_is_damage(database: ObjectDatabase, offset: int) -> None:
    (id,) = put(database, b"hello, this is a record")
    (place,) = database.locate([id])
    assert place is not None
    before = database.reader.read(place, offset, 1)
    overwrite(database, place, offset, bytes((before[0] ^ 0x40,)))
    with pytest.raises(StoreDamagedError):
        database.read(id, Kind.BLOB)


def test_missing_pack_is_damage(database: ObjectDatabase, path: Path) -> None:
    (id,) = put(database, b"hello")
    (database.packs / "0000000001.pack").unlink()
    with ObjectDatabase.open(path) as other, pytest.raises(StoreDamagedError, match=r"0000000001\.pack"):
        other.read(id, Kind.BLOB)


def test_directories_are_read_from_memory_the_second_time_and_memory_is_bounded(
    database: ObjectDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.writer() as writer:
        empty = writer.put(Kind.TREE, encode_tree(0, ()))
        writer.seal()
        with database.transaction(writer):
            pass
    assert database.read(empty, Kind.TREE) == b"\0"
    (database.packs / "0000000001.pack").unlink()
    database.reader.refresh()
    assert database.read(empty, Kind.TREE) == b"\0"
    cache = objectdb._Cache(1_000)
    for number in range(100):
        cache.put(number.to_bytes(32, "big"), Kind.TREE, bytes(100))
    assert [cache.get(number.to_bytes(32, "big"), Kind.TREE) is not None for number in (0, 89, 90, 99)] == [
        False,
        False,
        True,
        True,
    ]
    assert cache.get((99).to_bytes(32, "big"), Kind.PAGE) is None
