"""Many records verified at once: what each is, and what is damaged with whatever stands on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from agent_sandbox.errors import StoreError
from agent_sandbox.store import records
from agent_sandbox.store.native import Seen, verify
from agent_sandbox.store.objects import Kind, encode_attrs
from agent_sandbox.store.ports import Location
from tests.unit.store.engines import memory
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.vectors import stream


def rows_of(store: MemoryObjects, ids: list[bytes]) -> list[tuple[bytes, Location]]:
    return [(id, place) for id, place in zip(ids, store.locate(ids), strict=True) if place is not None]


def test_what_a_record_is_comes_back(tmp_path: Path) -> None:
    store = memory(tmp_path)
    noise = stream("verify", 20_000)
    base = store.put(Kind.BLOB, noise)
    patch = store.put(Kind.BLOB, noise[:9_000] + b"!" + noise[9_001:], base)
    attrs = store.put(Kind.ATTRS, encode_attrs([(b"user.a", b"1" * 5_000)]))
    store.seal()
    assert verify(store, rows_of(store, [base, patch, attrs])) == [
        Seen(Kind.BLOB, 20_000, None, 0),
        Seen(Kind.BLOB, 20_000, base, 1),
        Seen(Kind.ATTRS, 5_009, None, 0),
    ]
    assert verify(store, rows_of(store, [patch]), threads=1) == [Seen(Kind.BLOB, 20_000, base, 1)]
    assert verify(store, []) == []


def test_damage_is_told_by_record(tmp_path: Path) -> None:
    store = memory(tmp_path)
    noise = stream("verify", 20_000)
    base = store.put(Kind.BLOB, noise)
    patch = store.put(Kind.BLOB, noise[:-1], base)
    good = store.put(Kind.TREE, b"\0")
    shapeless = store.put(Kind.TREE, b"\xff is no directory")
    store.seal()
    pack = store.packs / f"{1:010}.pack"
    rows = rows_of(store, [base, patch, good, shapeless])
    data = bytearray(pack.read_bytes())
    data[rows[0][1].offset + records.MIN_HEADER + 7] ^= 1
    pack.write_bytes(data)
    rows.append((bytes(32), Location(2, 32, 100)))
    answers = verify(store, rows)
    assert [isinstance(answer, str) for answer in answers] == [True, True, False, True, True]
    assert base.hex() in str(answers[0])
    assert "number 2" in str(answers[4])


def test_progress_ends_with_all(tmp_path: Path) -> None:
    store = memory(tmp_path)
    ids = [store.put(Kind.BLOB, b"%d" % number) for number in range(600)]
    store.seal()
    told: list[tuple[int, int, int, int]] = []
    rows = rows_of(store, ids)
    verify(store, rows, progress=lambda *counts: told.append(counts))
    assert told[-1][0] == 600
    assert told[-1][2] == sum(place.length for _, place in rows)


class Broken(MemoryObjects):
    """Cannot say where an object alone is."""

    def locate(self, ids: Sequence[bytes]) -> list[Location | None]:
        if len(ids) == 1:
            raise StoreError("broken")
        return super().locate(ids)


def test_what_locate_raises_comes_out(tmp_path: Path) -> None:
    store = Broken(tmp_path)
    noise = stream("verify", 20_000)
    base = store.put(Kind.BLOB, noise)
    rows = rows_of(store, [base, store.put(Kind.BLOB, noise[:-1], base)])
    store.seal()
    assert all(isinstance(answer, Seen) for answer in verify(store, rows))
    with pytest.raises(StoreError, match="broken"):
        verify(store, rows[1:])
