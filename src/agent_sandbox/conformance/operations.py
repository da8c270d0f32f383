"""Files in full: everything beside reading, writing and listing. Numbers are the fault list's.

:class:`FileOperationSuite` needs ``sh``, ``echo``, ``mkdir`` and ``rm`` of the guest, :class:`LargeFileSuite` a
real disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import pathlib
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.conformance.box import MAX_BYTES, Box
from agent_sandbox.conformance.execs import pieces
from agent_sandbox.conformance.suite import SuiteBase
from agent_sandbox.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    PayloadTooLargeError,
)
from agent_sandbox.types import WORKSPACE, ChangesLost, FileChange

NAMES = ["a b", "q\"'", "new\nline", "100%2F", "\N{PARTY POPPER}", os.fsdecode(b"\xff\xfe"), "-rf", "x" * 255]
Changes = AsyncGenerator[FileChange | ChangesLost, None]


async def read(box: Box, name: str, offset: int = 0, length: int | None = None) -> bytes:
    """A file of the workspace, or a part of it, as a stream gives it."""
    events = box.backend.open_file(box.id, f"{WORKSPACE}/{name}", offset=offset, length=length)
    async with aclosing(events):
        return b"".join([piece async for piece in events])


@asynccontextmanager
async def watching(box: Box, path: str = WORKSPACE, *, recursive: bool = True) -> AsyncIterator[Changes]:
    """A watch that sees every change from here on."""
    ready = asyncio.Event()
    changes = box.backend.watch(box.id, path, recursive=recursive, ready=ready)
    first: asyncio.Task[FileChange | ChangesLost] = asyncio.ensure_future(anext(changes))
    waiting = asyncio.ensure_future(ready.wait())
    await asyncio.wait([first, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=10)
    waiting.cancel()
    if not ready.is_set():
        await first

    async def all_of_them() -> Changes:
        yield await first
        async for change in changes:
            yield change

    try:
        yield all_of_them()
    finally:
        first.cancel()
        await asyncio.wait([first])
        await changes.aclose()


async def seen(changes: Changes, wanted: Callable[[FileChange], bool], seconds: float = 10.0) -> list[FileChange]:
    """The changes up to the wanted one."""
    found: list[FileChange] = []
    async with asyncio.timeout(seconds):
        async for change in changes:
            assert isinstance(change, FileChange)
            found.append(change)
            if wanted(change):
                return found
    raise AssertionError("the watch ended")


class FileOperationSuite(SuiteBase):
    """The rest of the file methods."""

    async def test_stat(self, box: Box) -> None:
        written = await box.backend.write_file(box.id, f"{WORKSPACE}/d/f", b"12345", 0o640)
        assert await box.backend.stat_file(box.id, f"{WORKSPACE}/d/f") == written
        entry = await box.backend.stat_file(box.id, f"{WORKSPACE}/d")
        assert (entry.name, entry.path, entry.type) == ("d", f"{WORKSPACE}/d", "directory")
        assert (await box.backend.stat_file(box.id, WORKSPACE)).type == "directory"
        with pytest.raises(NotFoundError):
            await box.backend.stat_file(box.id, f"{WORKSPACE}/none")

    async def test_make_directory(self, box: Box) -> None:
        made = await box.backend.make_directory(box.id, f"{WORKSPACE}/a/b/c", 0o750)
        assert (made.path, made.type, made.mode) == (f"{WORKSPACE}/a/b/c", "directory", 0o750)
        again = await box.backend.make_directory(box.id, f"{WORKSPACE}/a/b/c", 0o700)
        assert again.type == "directory"
        with pytest.raises(ConflictError):
            await box.backend.make_directory(box.id, f"{WORKSPACE}/a/b/c", 0o700, parents=False)
        with pytest.raises(NotFoundError):
            await box.backend.make_directory(box.id, f"{WORKSPACE}/none/x", 0o700, parents=False)
        await box.put("f", b"")
        with pytest.raises(ConflictError):
            await box.backend.make_directory(box.id, f"{WORKSPACE}/f", 0o700)
        with pytest.raises((ConflictError, InvalidRequestError)):
            await box.backend.make_directory(box.id, f"{WORKSPACE}/f/x", 0o700)

    async def test_move(self, box: Box) -> None:
        await box.put("a/f", b"1")
        moved = await box.backend.move_file(box.id, f"{WORKSPACE}/a/f", f"{WORKSPACE}/g")
        assert (moved.name, moved.path, moved.size) == ("g", f"{WORKSPACE}/g", 1)
        assert await box.get("g") == b"1"
        with pytest.raises(NotFoundError):
            await box.get("a/f")
        await box.put("h", b"22")
        with pytest.raises(ConflictError):
            await box.backend.move_file(box.id, f"{WORKSPACE}/g", f"{WORKSPACE}/h", replace=False)
        assert await box.get("h") == b"22"
        await box.backend.move_file(box.id, f"{WORKSPACE}/g", f"{WORKSPACE}/h")
        assert await box.get("h") == b"1"
        with pytest.raises(NotFoundError):
            await box.backend.move_file(box.id, f"{WORKSPACE}/none", f"{WORKSPACE}/x")

    async def test_move_a_directory(self, box: Box) -> None:
        await box.put("a/b/f", b"1")
        await box.put("full/x", b"2")
        await box.backend.make_directory(box.id, f"{WORKSPACE}/empty", 0o755)
        with pytest.raises(ConflictError):
            await box.backend.move_file(box.id, f"{WORKSPACE}/a", f"{WORKSPACE}/full")
        with pytest.raises(InvalidRequestError):
            await box.backend.move_file(box.id, f"{WORKSPACE}/a", f"{WORKSPACE}/a/b/c")
        moved = await box.backend.move_file(box.id, f"{WORKSPACE}/a", f"{WORKSPACE}/empty")
        assert moved.type == "directory"
        assert await box.get("empty/b/f") == b"1"

    async def test_remove(self, box: Box) -> None:
        await box.put("d/e/f", b"1")
        await box.put("d/g", b"2")
        with pytest.raises(ConflictError):
            await box.backend.remove_file(box.id, f"{WORKSPACE}/d")
        assert await box.backend.remove_file(box.id, f"{WORKSPACE}/d/g") == 1
        assert await box.backend.remove_file(box.id, f"{WORKSPACE}/d", recursive=True) == 3
        assert await box.backend.list_files(box.id, WORKSPACE) == []
        with pytest.raises(NotFoundError):
            await box.backend.remove_file(box.id, f"{WORKSPACE}/d")

    async def test_change_mode(self, box: Box) -> None:
        await box.put("f", b"1", 0o600)
        assert (await box.backend.change_mode(box.id, f"{WORKSPACE}/f", 0o4755)).mode == 0o4755
        assert (await box.backend.stat_file(box.id, f"{WORKSPACE}/f")).mode == 0o4755
        with pytest.raises(NotFoundError):
            await box.backend.change_mode(box.id, f"{WORKSPACE}/none", 0o600)

    @pytest.mark.parametrize("path", [WORKSPACE, "/etc", "/etc/passwd", "/tmp/x", "/", "/workspace/../etc/x"])
    async def test_only_the_workspace_is_changed(self, box: Box, path: str) -> None:
        await box.put("f", b"1")
        inside = f"{WORKSPACE}/f"
        for wrong in (
            box.backend.move_file(box.id, inside, path),
            box.backend.move_file(box.id, path, f"{WORKSPACE}/g"),
            box.backend.remove_file(box.id, path, recursive=True),
            box.backend.store_file(box.id, path, pieces(b"x"), 0o644),
        ):
            with pytest.raises((InvalidRequestError, ForbiddenError)):
                await wrong
        if path != WORKSPACE:
            for also_wrong in (
                box.backend.make_directory(box.id, path, 0o755),
                box.backend.change_mode(box.id, path, 0o755),
                box.backend.import_directory(box.id, path, pieces(bytes(10_240)), MAX_BYTES),
            ):
                with pytest.raises((InvalidRequestError, ForbiddenError)):
                    await also_wrong
        assert await box.get("f") == b"1"

    async def test_f17_names_are_bytes_in_every_operation(self, box: Box) -> None:
        for name in NAMES:
            await box.backend.make_directory(box.id, f"{WORKSPACE}/{name}", 0o755)
            await box.put(f"{name}/f", b"1")
            await box.backend.move_file(box.id, f"{WORKSPACE}/{name}/f", f"{WORKSPACE}/{name}/{name}")
            path = f"{WORKSPACE}/{name}/{name}"
            assert (await box.backend.change_mode(box.id, path, 0o600)).name == name
            assert (await box.backend.stat_file(box.id, path)).path == path
            assert await read(box, f"{name}/{name}") == b"1"
        assert sorted(e.name for e in await box.backend.list_files(box.id, WORKSPACE)) == sorted(NAMES)
        async with watching(box) as changes:
            for name in NAMES:
                await box.backend.remove_file(box.id, f"{WORKSPACE}/{name}/{name}")
                path = f"{WORKSPACE}/{name}/{name}"
                await seen(changes, lambda change, path=path: (change.kind, change.path) == ("removed", path))  # type: ignore[misc]

    async def test_ranges(self, box: Box) -> None:
        data = bytes(range(256)) * 1_000
        await box.put("f", data)
        for offset, length in (
            (0, None),
            (5, 10),
            (255_990, None),
            (255_990, 100),
            (256_000, None),
            (0, 0),
            (300_000, 5),
        ):
            end = None if length is None else offset + length
            assert await read(box, "f", offset, length) == data[offset:end]

    async def test_what_cannot_be_streamed(self, box: Box) -> None:
        for name, kind in (("none", NotFoundError), (".", InvalidRequestError)):
            with pytest.raises(kind):
                await read(box, name)

    async def test_a_stream_is_stored_whole_or_not_at_all(self, box: Box) -> None:
        stored = await box.backend.store_file(box.id, f"{WORKSPACE}/d/f", pieces(b"one", b"", b"two"), 0o700)
        assert (stored.size, stored.mode, stored.path) == (6, 0o700, f"{WORKSPACE}/d/f")
        assert await box.get("d/f") == b"onetwo"

        async def broken() -> AsyncIterator[bytes]:
            yield b"x" * 1_000_000
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await box.backend.store_file(box.id, f"{WORKSPACE}/d/f", broken(), 0o600)
        with pytest.raises(ZeroDivisionError):
            await box.backend.store_file(box.id, f"{WORKSPACE}/d/g", broken(), 0o600)
        await box.put("later", b"")
        assert await box.get("d/f") == b"onetwo"
        assert [entry.name for entry in await box.backend.list_files(box.id, f"{WORKSPACE}/d")] == ["f"]

    async def test_a_directory_is_exported_and_imported(self, backend: Backend, box: Box) -> None:
        await box.put("outside", b"no")
        await box.put("d/e/f", b"yes", 0o755)
        archive: list[bytes] = []

        async def keep(data: bytes) -> None:
            archive.append(data)

        report = await backend.export_directory(box.id, f"{WORKSPACE}/d", keep, MAX_BYTES)
        assert (report.file_bytes, report.entries, report.skipped_total) == (3, 3, 0)
        with tarfile.open(fileobj=io.BytesIO(b"".join(archive))) as tar:
            assert {info.name.removesuffix("/") for info in tar} == {".", "e", "e/f"}
        other = await self.new_box(backend)
        await other.put("new/place/e/f", b"old")
        await other.put("new/place/kept", b"kept")
        await backend.import_directory(other.id, f"{WORKSPACE}/new/place", pieces(*archive), MAX_BYTES)
        await backend.import_directory(other.id, f"{WORKSPACE}/not/there", pieces(*archive), MAX_BYTES)
        for place in ("new/place", "not/there"):
            assert await other.get(f"{place}/e/f") == b"yes"
            assert (await backend.stat_file(other.id, f"{WORKSPACE}/{place}/e/f")).mode == 0o755
        assert await other.get("new/place/kept") == b"kept"
        for path, kind in ((f"{WORKSPACE}/none", NotFoundError), (f"{WORKSPACE}/outside", InvalidRequestError)):
            with pytest.raises(kind):
                await backend.export_directory(box.id, path, keep, MAX_BYTES)
        with pytest.raises(PayloadTooLargeError):
            await backend.export_directory(box.id, f"{WORKSPACE}/d", keep, 2)

    async def test_a_watch_sees_what_changes(self, box: Box) -> None:
        await box.put("d/old", b"1")
        async with watching(box) as changes:
            for data, kind in ((b"1", "created"), (b"2", "modified")):
                await box.backend.write_file(box.id, f"{WORKSPACE}/d/new", data, 0o644)
                change = (await seen(changes, lambda change: True))[0]
                assert (change.kind, change.path, change.to, change.directory) == (
                    kind,
                    f"{WORKSPACE}/d/new",
                    None,
                    False,
                )
            await box.shell("echo more >> d/old")
            await seen(changes, lambda change: (change.kind, change.path) == ("modified", f"{WORKSPACE}/d/old"))
            await box.shell("mkdir sub")
            found = await seen(changes, lambda change: (change.kind, change.path) == ("created", f"{WORKSPACE}/sub"))
            assert found[-1].directory
            await box.backend.move_file(box.id, f"{WORKSPACE}/d/old", f"{WORKSPACE}/sub/name")
            found = await seen(changes, lambda change: change.kind == "moved" and change.path.endswith("/old"))
            assert (found[-1].path, found[-1].to) == (f"{WORKSPACE}/d/old", f"{WORKSPACE}/sub/name")
            await box.shell("rm sub/name")
            await seen(changes, lambda change: (change.kind, change.path) == ("removed", f"{WORKSPACE}/sub/name"))

    async def test_a_watch_follows_into_new_directories(self, box: Box) -> None:
        async with watching(box) as changes:
            await box.backend.make_directory(box.id, f"{WORKSPACE}/a/b/c", 0o755)
            await seen(changes, lambda change: change.path == f"{WORKSPACE}/a/b/c")
            await box.put("a/b/c/f", b"1")
            found = await seen(changes, lambda change: change.path == f"{WORKSPACE}/a/b/c/f")
            assert found[-1].kind == "created"  # a directory's mode, set after it was made, may be a change as well

    async def test_a_watch_of_one_directory_sees_only_that(self, box: Box) -> None:
        await box.put("d/e/f", b"1")
        async with watching(box, f"{WORKSPACE}/d", recursive=False) as changes:
            await box.put("d/e/g", b"1")
            await box.put("outside", b"1")
            await box.put("d/last", b"1")
            found = await seen(changes, lambda change: change.path == f"{WORKSPACE}/d/last")
        assert not [change for change in found if change.path in (f"{WORKSPACE}/d/e/g", f"{WORKSPACE}/outside")]

    async def test_a_watch_that_cannot_be(self, box: Box) -> None:
        await box.put("f", b"")
        for path, kind in ((f"{WORKSPACE}/none", NotFoundError), (f"{WORKSPACE}/f", InvalidRequestError)):
            with pytest.raises(kind):
                async with watching(box, path):
                    pass

    async def test_watches_are_counted_and_given_back(self, box: Box) -> None:
        for again in (False, True):
            watches: list[AbstractAsyncContextManager[Changes]] = []
            async with asyncio.timeout(60):
                while len(watches) < 16:
                    watch: AbstractAsyncContextManager[Changes] = watching(box)
                    try:
                        await watch.__aenter__()
                    except LimitExceededError:
                        assert again  # those of before are given back a little after their end
                        await asyncio.sleep(0.05)
                    else:
                        watches.append(watch)
            with pytest.raises(LimitExceededError):
                async with watching(box):
                    pass
            for each in watches:
                await each.__aexit__(None, None, None)

    async def test_sync(self, box: Box) -> None:
        await box.put("f", b"x" * 1_000_000)
        await box.backend.sync(box.id)

    async def test_stats_count(self, box: Box) -> None:
        before = await box.backend.guest_stats(box.id)
        task = asyncio.ensure_future(box.run("sleep 300", timeout=300))
        async with asyncio.timeout(60):
            while (await box.backend.guest_stats(box.id)).processes <= before.processes:
                await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])

    async def test_an_unknown_environment(self, backend: Backend) -> None:
        for wrong in (
            backend.stat_file("sbnever-1", WORKSPACE),
            backend.remove_file("sbnever-1", f"{WORKSPACE}/f"),
            backend.guest_stats("sbnever-1"),
            backend.sync("sbnever-1"),
            backend.list_execs("sbnever-1"),
            backend.dial("sbnever-1", port=80),
            anext(backend.watch("sbnever-1", WORKSPACE)),
            anext(backend.open_file("sbnever-1", f"{WORKSPACE}/f")),
        ):
            with pytest.raises(NotFoundError):
                await wrong


def _resident() -> int:
    """This process's resident memory in bytes."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class LargeFileSuite(SuiteBase):
    """Fault 22: what is larger than the sandbox's memory streams, and this process does not grow with it."""

    SIZE = 300 * 1024 * 1024
    GROWTH = 64 * 1024 * 1024

    async def test_f22_a_file_above_memory_size_goes_both_ways(self, backend: Backend) -> None:
        box = await self.new_box(backend, memory_mb=256, disk_mb=1024)
        block = os.urandom(1024 * 1024)
        before, most = _resident(), 0
        sent, received = hashlib.sha256(), hashlib.sha256()

        async def blocks() -> AsyncIterator[bytes]:
            nonlocal most
            for number in range(self.SIZE // len(block)):
                piece = number.to_bytes(8, "big") + block[8:]
                sent.update(piece)
                most = max(most, _resident())
                yield piece

        stored = await backend.store_file(box.id, f"{WORKSPACE}/big", blocks(), 0o600)
        assert stored.size == self.SIZE
        async with aclosing(backend.open_file(box.id, f"{WORKSPACE}/big")) as stream:
            async for piece in stream:
                received.update(piece)
                most = max(most, _resident())
        assert received.digest() == sent.digest()
        assert most - before < self.GROWTH

    async def test_f22_a_directory_above_memory_size_goes_both_ways(self, backend: Backend) -> None:
        box = await self.new_box(backend, memory_mb=256, disk_mb=1024)
        other = await self.new_box(backend, memory_mb=256, disk_mb=1024)
        await box.shell("mkdir d; for n in 1 2 3; do head -c 104857600 /dev/urandom > d/$n; done", timeout=60)
        before, most = _resident(), 0
        queue: asyncio.Queue[bytes] = asyncio.Queue(4)

        async def put(data: bytes) -> None:
            nonlocal most
            most = max(most, _resident())
            await queue.put(data)

        async def taken() -> AsyncIterator[bytes]:
            while data := await queue.get():
                yield data

        importing = asyncio.ensure_future(
            backend.import_directory(other.id, f"{WORKSPACE}/copy", taken(), 2 * self.SIZE)
        )
        report = await backend.export_directory(box.id, f"{WORKSPACE}/d", put, 2 * self.SIZE)
        await queue.put(b"")
        await importing
        assert report.file_bytes == self.SIZE
        sums = "cat {}/1 {}/2 {}/3 | sha256sum"
        assert await box.shell(sums.format(*["d"] * 3)) == await other.shell(sums.format(*["copy"] * 3))
        assert most - before < self.GROWTH
