"""The stat cache: what it remembers is true or not remembered; whatever is wrong with the file is no cache."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.store.ports import Engine
from agent_sandbox.store.statcache import HEADER, MARGIN_NS, RECORD, CacheWriter, Remembered, StatCache
from tests.unit.store.engines import capture, each_engine, each_pair, memory
from tests.unit.store.trees import scratch

ROOT = b"r" * 32
SECOND = 10**9


def about(
    inode: int, *, device: int = 7, size: int = 100, mtime: int = -5 * SECOND - 1, ctime: int = 3 * SECOND
) -> os.stat_result:
    """Make a ``stat_result``: the ten numbers, three times in seconds as floats, and in nanoseconds as numbers."""
    known = {
        "st_atime": 0.0, "st_mtime": 0.0, "st_ctime": 0.0,
        "st_atime_ns": 0, "st_mtime_ns": mtime, "st_ctime_ns": ctime,
    }  # fmt: skip
    return os.stat_result((0o100644, inode, device, 1, 0, 0, size, 0, 0, 0), known)


def written(place: Path, *records: tuple[os.stat_result, Remembered], run: int = 65_536) -> Path:
    path = place / "cache"
    cache = CacheWriter(path, 7, 1_000 * SECOND, run=run)
    for record in records:
        cache.remember(*record)
    cache.replace(ROOT)
    cache.close()
    return path


def find(path: Path, what: os.stat_result) -> Remembered | None:
    cache = StatCache.open(path)
    assert cache is not None
    try:
        return cache.find(what)
    finally:
        cache.close()


def content(byte: int, *, paged: bool = False, attrs: bytes | None = None) -> Remembered:
    return Remembered(bytes([byte]) * 32, paged, 90, attrs)


def test_the_bytes_are_those_of_the_page(tmp_path: Path) -> None:
    path = written(
        tmp_path, (about(2), content(1, attrs=b"a" * 32)), (about(1, size=0), Remembered(None, False, 0, None))
    )
    expected = struct.pack("<8sQ32sQII", b"ASBSTAT1", 7, ROOT, 2, 1, 0)
    times = (-6, 3, 999_999_999, 0)
    expected += struct.pack("<QQQqqIIB3xI32s", 1, 0, 0, *times, 0, 0, bytes(32))
    expected += struct.pack("<QQQqqIIB3xI32s", 2, 100, 90, *times, 1, 1, bytes([1]) * 32)
    expected += b"a" * 32
    assert path.read_bytes() == expected + blake3(expected).digest()


def test_what_was_remembered_is_found(tmp_path: Path) -> None:
    empty = Remembered(None, False, 0, None)
    path = written(tmp_path, (about(1, size=0), empty), (about(2**64 - 1), content(2, paged=True, attrs=b"a" * 32)))
    assert find(path, about(1, size=0)) == empty
    assert find(path, about(2**64 - 1)) == content(2, paged=True, attrs=b"a" * 32)
    assert find(path, about(2)) is None


@pytest.mark.parametrize(
    "other",
    [about(1, device=8), about(1, size=101), about(1, mtime=0), about(1, ctime=3 * SECOND + 1), about(2), about(0)],
    ids=["device", "size", "mtime", "ctime", "inode", "smaller inode"],
)
def test_a_file_that_differs_in_anything_is_not_found(tmp_path: Path, other: os.stat_result) -> None:
    path = written(tmp_path, (about(1), content(1)))
    assert find(path, about(1)) == content(1)
    assert find(path, other) is None


@given(inodes=st.lists(st.integers(0, 2**64 - 1), max_size=400), run=st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_any_number_in_any_order_is_found(inodes: list[int], run: int) -> None:
    with scratch() as place:
        path = written(place, *((about(inode), content(inode % 251)) for inode in inodes), run=run)
        cache = StatCache.open(path)
        assert cache is not None
        for inode in inodes:
            assert cache.find(about(inode)) == content(inode % 251)
            if inode + 1 not in inodes:
                assert cache.find(about(inode + 1)) is None
        cache.close()
        assert path.stat().st_size == HEADER.size + len(set(inodes)) * RECORD.size + 32


def test_what_changed_within_the_margin_is_not_remembered(tmp_path: Path) -> None:
    start = 1_000 * SECOND
    before, within = about(1, ctime=start - MARGIN_NS - 1), about(2, ctime=start - MARGIN_NS)
    path = written(tmp_path, (before, content(1)), (within, content(2)))
    assert find(path, before) == content(1)
    assert find(path, within) is None


def test_a_record_of_a_directory_is_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path, (about(1), content(1)))
    data = bytearray(path.read_bytes())
    data[HEADER.size + 48] = 3
    path.write_bytes(data[:-32] + blake3(data[:-32]).digest())
    assert find(path, about(1)) is None


def test_every_damage_is_no_cache(tmp_path: Path) -> None:
    path = written(tmp_path, (about(1), content(1, attrs=b"a" * 32)), (about(2), content(2)))
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert StatCache.open(path) is None, at
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert StatCache.open(path) is None, length
    path.write_bytes(good + b"x")
    assert StatCache.open(path) is None


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<8sQ32sQII", b"ASBSTAT2", 7, ROOT, 0, 0, 0),
        struct.pack("<8sQ32sQII", b"ASBSTAT1", 7, ROOT, 2**60, 0, 0),
        struct.pack("<8sQ32sQII", b"ASBSTAT1", 7, ROOT, 0, 0, 1),
    ],
    ids=["version", "count", "reserved"],
)
def test_what_is_not_understood_is_no_cache(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "cache"
    path.write_bytes(head + blake3(head).digest())
    assert StatCache.open(path) is None


def test_a_missing_cache_is_none_and_one_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    assert StatCache.open(tmp_path / "none") is None
    assert StatCache.open(tmp_path) is None
    path = written(tmp_path, (about(1), content(1)))
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()
    assert written(tmp_path, (about(1), content(1))).is_dir()
    assert [item.name for item in tmp_path.iterdir()] == ["cache"]


# ---- in a capture --------------------------------------------------------------------------------------------------


@each_pair
def test_what_did_not_change_is_not_read_again(writer: Engine, reader: Engine) -> None:
    with scratch() as place:
        tree = place / "tree"
        tree.mkdir()
        for name in ("same", "rewritten", "dressed", "moved", "replaced"):
            (tree / name).write_bytes(name.ljust(100).encode())
        time.sleep(0.06)
        store = memory(place)
        old = capture(writer, tree, store, cache=place / "cache")
        assert old.report.read == 500
        before = (tree / "rewritten").stat()
        (tree / "rewritten").write_bytes(b"x" * 100)
        os.utime(tree / "rewritten", ns=(before.st_atime_ns, before.st_mtime_ns))
        os.setxattr(tree / "dressed", "user.a", b"1")
        (tree / "moved").rename(tree / "elsewhere")
        (tree / "new").write_bytes(b"y" * 100)
        (tree / "new").rename(tree / "replaced")
        new = capture(reader, tree, store, cache=place / "cache", base=old.root)
        assert new.report.bytes == 500
        # A rename changes the ctime on most file systems, so "elsewhere" may be read again.
        assert new.report.read in (300, 400)
        fresh = place / "fresh"
        fresh.mkdir()
        assert capture(writer, tree, memory(fresh)).root == new.root


@each_engine
def test_a_file_that_was_just_written_is_read_again(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        (place / "tree" / "file").write_bytes(b"x" * 100)
        store = memory(place)
        first = capture(engine, place / "tree", store, cache=place / "cache")
        assert capture(engine, place / "tree", store, cache=place / "cache", base=first.root).report.read == 100


@each_pair
def test_a_cache_of_another_store_costs_no_content(writer: Engine, reader: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        (place / "tree" / "file").write_bytes(b"x" * 100)
        os.setxattr(place / "tree" / "file", "user.a", b"1")
        time.sleep(0.06)
        root = capture(writer, place / "tree", memory(place), cache=place / "cache").root
        (place / "other").mkdir()
        store = memory(place / "other")
        captured = capture(reader, place / "tree", store, cache=place / "cache")
        assert captured.root == root
        assert captured.report.read == 100
        assert capture(reader, place / "tree", store, cache=place / "cache").report.read == 0


@each_engine
def test_a_damaged_cache_costs_only_time(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        (place / "tree" / "file").write_bytes(b"x" * 100)
        time.sleep(0.06)
        (place / "cache").write_bytes(os.urandom(1_000))
        store = memory(place)
        assert capture(engine, place / "tree", store, cache=place / "cache").report.read == 100
        assert capture(engine, place / "tree", store, cache=place / "cache").report.read == 0
        assert capture(engine, place / "tree", store, cache=place / "no" / "such" / "place").report.read == 100
