"""The snapshot files: durable before they are acknowledged, checked when read, bounded; failures leave nothing."""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import os
import resource
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import zstandard

from agent_sandbox.backends.base import ByteSink
from agent_sandbox.errors import BackendError, LimitExceededError, PayloadTooLargeError
from agent_sandbox.manager import snapshots
from agent_sandbox.manager.snapshots import MissingFileError, SnapshotStore, StoredSnapshot
from agent_sandbox.types import ExportReport

ID = "snap0123456789abcdef"
MIB = 1 << 20


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SnapshotStore]:
    store = SnapshotStore(tmp_path / "snapshots")
    await store.start([])
    yield store
    await store.close()


def exporter(*pieces: bytes, failure: BaseException | None = None) -> Callable[[ByteSink], object]:
    async def export(sink: ByteSink) -> ExportReport:
        for piece in pieces:
            await sink(piece)
        if failure is not None:
            raise failure
        return ExportReport(file_bytes=sum(map(len, pieces)), entries=len(pieces))

    return export


async def save(store: SnapshotStore, *pieces: bytes, max_bytes: int = MIB) -> StoredSnapshot:
    return await store.save(ID, exporter(*pieces), max_bytes)  # type: ignore[arg-type]


async def load(store: SnapshotStore, stored: StoredSnapshot) -> bytes:
    async with store.open(ID, stored.stored_bytes, stored.digest) as archive:
        data = b"".join([block async for block in archive.blocks()])
        await archive.verify()
        return data


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "snapshots").iterdir())


async def test_what_goes_in_comes_out(store: SnapshotStore, tmp_path: Path) -> None:
    noise = os.urandom(3 * MIB + 17)
    pieces = [b"", b"a", noise, b"\0" * 5 * MIB, noise[:1]]
    stored = await save(store, *pieces)
    assert await load(store, stored) == b"".join(pieces)
    path = tmp_path / "snapshots" / f"{ID}.tar.zst"
    raw = path.read_bytes()
    assert stored.stored_bytes == len(raw)
    assert stored.digest == hashlib.blake2b(raw, digest_size=32).hexdigest()
    assert stored.report == ExportReport(file_bytes=8 * MIB + 19, entries=5)
    assert zstandard.ZstdDecompressor().decompressobj().decompress(raw) == b"".join(pieces)  # a plain zstd file
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_an_empty_archive(store: SnapshotStore) -> None:
    assert await load(store, await save(store)) == b""


async def test_the_order_on_disk(store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are synced before they have their name, and the name before the caller is told."""
    steps: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(fd: int) -> None:
        steps.append("sync " + Path(f"/proc/self/fd/{fd}").readlink().name)
        real_fsync(fd)

    def rename(path: Path, target: Path) -> Path:
        steps.append(f"rename {path.name}")
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    await save(store, b"data")
    assert steps == [f"sync {ID}.tar.zst.tmp", f"rename {ID}.tar.zst.tmp", "sync snapshots"]


@pytest.mark.parametrize("failing", ["open", "write", "fsync file", "rename", "fsync directory"])
async def test_a_failure_at_any_step_leaves_nothing(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    real_fsync, real_rename, real_open, real_put = os.fsync, Path.rename, os.open, snapshots._Writer._put
    full = OSError(errno.ENOSPC, "No space left on device")

    def fsync(fd: int) -> None:
        is_directory = Path(f"/proc/self/fd/{fd}").is_dir()
        if failing == ("fsync directory" if is_directory else "fsync file"):
            raise full
        real_fsync(fd)

    def rename(path: Path, target: Path) -> Path:
        if failing == "rename":
            raise full
        return real_rename(path, target)

    def open_file(path: Path, flags: int, mode: int = 0o777) -> int:
        if failing == "open" and flags & os.O_CREAT:
            raise full
        return real_open(path, flags, mode)

    def put(writer: snapshots._Writer, data: bytes) -> None:
        if failing == "write":
            raise full
        real_put(writer, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        patched.setattr(Path, "rename", rename)
        patched.setattr(os, "open", open_file)
        patched.setattr(snapshots._Writer, "_put", put)
        with pytest.raises(LimitExceededError, match="full"):
            await save(store, os.urandom(3 * MIB))
    assert files(tmp_path) == []
    assert await load(store, await save(store, b"then it works again")) == b"then it works again"


async def test_a_file_system_that_is_really_full(store: SnapshotStore, tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse the write; Python ignores its signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
    try:
        with pytest.raises(LimitExceededError, match="full"):
            await save(store, *[os.urandom(MIB) for _ in range(4)], max_bytes=10 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == []


@pytest.mark.parametrize("failure", [BackendError("the guest is gone"), asyncio.CancelledError()])
async def test_a_failed_export_leaves_nothing(store: SnapshotStore, tmp_path: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)):
        await store.save(ID, exporter(os.urandom(3 * MIB), failure=failure), MIB)  # type: ignore[arg-type]
    assert files(tmp_path) == []


async def test_cancelling_leaves_nothing(store: SnapshotStore, tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def export(sink: ByteSink) -> ExportReport:
        await sink(os.urandom(2 * MIB))
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(store.save(ID, export, 10 * MIB))
    await reached.wait()
    assert files(tmp_path) == [f"{ID}.tar.zst.tmp"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert files(tmp_path) == []


async def test_a_guest_that_never_stops_is_stopped(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_STREAM_SLACK", MIB)
    sent = 0

    async def export(sink: ByteSink) -> ExportReport:
        nonlocal sent
        while True:
            await sink(b"\0" * 65_536)
            sent += 65_536

    with pytest.raises(PayloadTooLargeError):
        await store.save(ID, export, 2 * MIB)
    assert 5 * MIB <= sent <= 7 * MIB
    assert files(tmp_path) == []


async def test_start_removes_what_was_never_acknowledged(tmp_path: Path) -> None:
    directory = tmp_path / "snapshots"
    directory.mkdir(mode=0o700)
    for name in ("snapkept.tar.zst", "snaplost.tar.zst", "snaphalf.tar.zst.tmp", "snapkept.tar.zst.tmp", "README"):
        (directory / name).write_bytes(b"x")
    store = SnapshotStore(directory)
    await store.start({"snapkept"})
    await store.close()
    assert files(tmp_path) == ["README", "snapkept.tar.zst"]


def flip(data: bytearray, at: int) -> None:
    data[at] ^= 1


def cut(data: bytearray, at: int) -> None:
    del data[at:]


def extend(data: bytearray, at: int) -> None:
    data += b"more"


@pytest.mark.parametrize("damage", [flip, cut, extend])
@pytest.mark.parametrize("at", [0, 4, 100, 1_000_000, -1])
async def test_damage_is_noticed(
    store: SnapshotStore, tmp_path: Path, damage: Callable[[bytearray, int], None], at: int
) -> None:
    stored = await save(store, os.urandom(2 * MIB))
    path = tmp_path / "snapshots" / f"{ID}.tar.zst"
    data = bytearray(path.read_bytes())
    damage(data, at)
    path.write_bytes(data)
    with pytest.raises(BackendError, match="damaged"):
        await load(store, stored)


async def test_an_importer_that_stops_early_does_not_escape_the_check(store: SnapshotStore, tmp_path: Path) -> None:
    stored = await save(store, os.urandom(4 * MIB))
    path = tmp_path / "snapshots" / f"{ID}.tar.zst"
    data = bytearray(path.read_bytes())
    flip(data, -10)
    path.write_bytes(data)
    async with store.open(ID, stored.stored_bytes, stored.digest) as archive:
        async for _ in archive.blocks():
            break
        with pytest.raises(BackendError, match="damaged"):
            await archive.verify()


async def test_a_missing_file(store: SnapshotStore) -> None:
    with pytest.raises(MissingFileError, match=ID):
        async with store.open(ID, 1, "00"):
            raise AssertionError


@pytest.mark.parametrize("blocks", [0, 1, 100])
async def test_reading_leaves_nothing_in_memory(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    taps: list[weakref.ref[object]] = []

    class Watched(snapshots._Tap):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            taps.append(weakref.ref(self))

    monkeypatch.setattr(snapshots, "_Tap", Watched)
    stored = await save(store, os.urandom(3 * MIB), max_bytes=4 * MIB)
    for _ in range(3):
        async with store.open(ID, stored.stored_bytes, stored.digest) as archive, aclosing(archive.blocks()) as pieces:
            for _ in range(blocks):
                if await anext(pieces, None) is None:
                    break
    del archive, pieces
    for _ in range(100):  # a thread lets go of its last piece of work a little after its result is known
        gc.collect()
        if not any(tap() for tap in taps):
            break
        await asyncio.sleep(0.02)
    assert [tap() for tap in taps] == [None] * 3


async def test_deleting_while_reading(store: SnapshotStore, tmp_path: Path) -> None:
    noise = os.urandom(3 * MIB)
    stored = await save(store, noise)
    async with store.open(ID, stored.stored_bytes, stored.digest) as archive:
        await store.delete(ID)
        assert files(tmp_path) == []
        assert b"".join([block async for block in archive.blocks()]) == noise
        await archive.verify()
    await store.delete(ID)  # twice is fine


async def test_what_cannot_be_removed_holds_up_neither_the_caller_nor_the_start(
    store: SnapshotStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await save(store, b"x" * 10)
    (name,) = files(tmp_path)
    path = tmp_path / "snapshots" / name
    path.unlink()
    path.mkdir()
    await store.delete(ID)
    assert f"{ID} stays until the next start" in caplog.text
    again = SnapshotStore(tmp_path / "snapshots")
    await again.start([])
    stored = await again.save("snapother", exporter(b"y" * 10), MIB)  # type: ignore[arg-type]
    assert stored.report.file_bytes == 10
    await again.close()
    assert "cannot be removed" in caplog.text


async def test_memory_does_not_grow_with_what_an_archive_expands_to(store: SnapshotStore) -> None:
    block = b"\0" * MIB
    stored = await save(store, *[block] * 256, max_bytes=256 * MIB)
    assert stored.stored_bytes < MIB
    tracemalloc.start()
    try:
        size = 0
        async with store.open(ID, stored.stored_bytes, stored.digest) as archive:
            async for piece in archive.blocks():
                assert len(piece) <= MIB
                size += len(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == 256 * MIB
    assert peak < 16 * MIB


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "snapshots")
    await store.start([])
    await store.close()
    with pytest.raises(BackendError, match="shutting down"):
        await save(store, b"x")


async def test_an_opening_that_is_cancelled_closes_what_it_opened(store: SnapshotStore) -> None:
    stored = await save(store, b"a")

    def descriptors() -> list[str]:
        links = (str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
        return [link for link in links if link.endswith(f"{ID}.tar.zst")]

    async def open_it() -> None:
        async with store.open(ID, stored.stored_bytes, stored.digest):
            raise AssertionError("it was cancelled before")

    for turns in range(3):
        opening = asyncio.create_task(open_it())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert descriptors() == []
