"""Snapshots as files: one tar stream each, compressed, in ``DATA_DIR/snapshots/<id>.tar.zst``.

Durability
----------
Saving writes ``<id>.tar.zst.tmp``, syncs it, renames it, syncs the directory. Then the caller commits the row, then
the user is told. A crash leaves, at any step, either a row with its file or a file without a row, which
:meth:`SnapshotStore.start` removes; never a row without a file. Deleting goes the other way: row first, then the
file. A reader that has the file open keeps it.

Integrity
---------
The row holds size and BLAKE2b-256 of the stored bytes. Reading computes it on the way, and :meth:`Archive.verify`
compares before anything that was built from the stream is used. The archive comes from a guest and is never looked
into here.

Bounds
------
Memory: one block being filled and one being compressed, for each stream; decompression gives at most one block at a
time, whatever the archive expands to. The raw stream may be at most twice ``max_bytes`` plus 256 MiB, because a guest
that has taken its daemon over could send headers for ever; an honest archive needs about 2.5 KiB for each entry
beside its file bytes. Threads: ``_THREADS`` for all streams together, so that a slow disk holds up no more than
snapshots.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar, cast

import zstandard

from agent_sandbox.backends.base import ByteSink
from agent_sandbox.errors import BackendError, LimitExceededError, PayloadTooLargeError, SandboxError
from agent_sandbox.manager.tasks import uninterrupted
from agent_sandbox.types import ExportReport

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class _Run(Protocol):
    async def __call__(self, work: Callable[[], _T], /) -> _T: ...


_SUFFIX = ".tar.zst"
_LEVEL = 3
_BLOCK = 1 << 20
_STREAM_SLACK = 256 << 20
_THREADS = 4


class MissingFileError(BackendError):
    """A snapshot has no file: it was deleted a moment ago, or somebody removed the file."""


@dataclass(frozen=True)
class StoredSnapshot:
    """What :meth:`SnapshotStore.save` wrote: bytes on the disk, their BLAKE2b-256, and the exporter's report."""

    stored_bytes: int
    digest: str
    report: ExportReport


class SnapshotStore:
    """The files of all snapshots."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot")

    async def start(self, known: Collection[str]) -> None:
        """Create the directory; remove what a crash left: unfinished files, and those whose id is not in ``known``."""
        await self._run(lambda: self._sweep(known))

    async def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False)

    async def save(
        self, id: str, export: Callable[[ByteSink], Awaitable[ExportReport]], max_bytes: int
    ) -> StoredSnapshot:
        """Store what ``export`` writes and make it durable.

        :class:`PayloadTooLargeError` above the bound; :class:`LimitExceededError` when the disk is full. On failure and
        cancellation nothing is left. On success the caller commits the row, or calls :meth:`delete`.
        """
        path = self._path(id)
        writer = _Writer(path.with_name(path.name + ".tmp"), 2 * max_bytes + _STREAM_SLACK)
        buffer = bytearray()
        under_way: asyncio.Task[None] | None = None

        async def flush() -> None:
            nonlocal under_way
            if under_way is not None:
                before, under_way = under_way, None
                await before
            block = bytes(buffer)
            buffer.clear()
            under_way = asyncio.create_task(self._run(lambda: writer.write(block)))

        async def sink(data: bytes) -> None:
            buffer.extend(data)
            if len(buffer) >= _BLOCK:
                await flush()

        try:
            await self._run(writer.open)
            report = await export(sink)
            await flush()
            if under_way is not None:
                await under_way
            stored = await self._run(lambda: writer.finish(path))
        except BaseException:
            await uninterrupted(self._abandon(writer, under_way))
            raise
        return StoredSnapshot(stored, writer.digest(), report)

    @asynccontextmanager
    async def open(self, id: str, stored_bytes: int, digest: str) -> AsyncIterator[Archive]:
        """Open a snapshot to read it once. :class:`MissingFileError`. Deleting it meanwhile does not disturb."""
        opened: list[_Reader] = []  # known here also when the caller is cancelled while it is being opened
        try:
            await self._run(lambda: opened.append(_Reader(self._path(id))))
            yield Archive(id, opened[0], self._run, (stored_bytes, digest))
        finally:
            for reader in opened:
                await uninterrupted(self._run(reader.close))

    def path(self, id: str) -> Path:
        """Where the file of a snapshot is."""
        return self._path(id)

    async def delete(self, id: str) -> None:
        """Remove the file of a snapshot that has no row any more. Where that fails, the next start does it."""

        def remove() -> None:
            try:
                self._path(id).unlink(missing_ok=True)
            except OSError as error:
                log.warning("the file of deleted snapshot %s stays until the next start: %s", id, error.strerror)

        await self._run(remove)

    async def _abandon(self, writer: _Writer, under_way: asyncio.Task[None] | None) -> None:
        if under_way is not None:
            await asyncio.wait([under_way])
            if not under_way.cancelled():
                under_way.exception()  # what matters is being raised already
        await self._run(writer.abort)

    def _path(self, id: str) -> Path:
        return self._directory / (id + _SUFFIX)

    async def _run(self, work: Callable[[], _T]) -> _T:
        """Do ``work`` in a thread; being cancelled waits for it, so that no file is used by two threads."""

        async def run() -> _T:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

        try:
            return await uninterrupted(run())
        except zstandard.ZstdError as error:
            raise BackendError(f"a snapshot is damaged on disk: {error}") from error
        except OSError as error:
            raise _translate(error) from error
        except RuntimeError as error:  # the executor was shut down
            raise BackendError("the server is shutting down") from error

    def _sweep(self, known: Collection[str]) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in self._directory.iterdir():
            if path.name.endswith(_SUFFIX + ".tmp") or (
                path.name.endswith(_SUFFIX) and path.name.removesuffix(_SUFFIX) not in known
            ):
                log.warning("removing %s: it was never acknowledged", path.name)
                try:
                    path.unlink()
                except OSError as error:
                    log.warning("%s cannot be removed: %s", path.name, error.strerror)


class Archive:
    """One snapshot being read. What was built from :meth:`blocks` counts once :meth:`verify` has returned."""

    def __init__(self, id: str, reader: _Reader, run: _Run, expected: tuple[int, str]) -> None:
        self._id = id
        self._reader = reader
        self._run = run
        self._expected = expected

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """Yield the archive. Raises :class:`BackendError` where it cannot be decompressed."""
        while block := await self._run(self._reader.read):
            yield block

    async def verify(self) -> None:
        """Read what is left of the file; raise :class:`BackendError` unless all of it is what was stored."""
        if await self._run(self._reader.finish) != self._expected:
            raise BackendError(f"snapshot {self._id} is damaged on disk: its checksum differs; it cannot be used")


class _Writer:
    """The blocking half of saving. Used by one thread at a time."""

    def __init__(self, temporary: Path, max_stream: int) -> None:
        self._temporary = temporary
        self._left = max_stream
        self._file: BinaryIO | None = None
        self._hash = hashlib.blake2b(digest_size=32)
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
        self._stored = 0
        self._final: Path | None = None

    def open(self) -> None:
        fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(fd, "wb", buffering=0)

    def write(self, block: bytes) -> None:
        self._left -= len(block)
        if self._left < 0:
            raise PayloadTooLargeError("the archive of the workspace is far larger than its files may be")
        self._put(self._compressor.compress(block))

    def finish(self, path: Path) -> int:
        assert self._file is not None
        self._put(self._compressor.flush())
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.rename(path)
        self._final = path
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return self._stored

    def digest(self) -> str:
        return self._hash.hexdigest()

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
        self._temporary.unlink(missing_ok=True)
        if self._final is not None:
            self._final.unlink(missing_ok=True)

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        self._hash.update(data)
        self._stored += len(data)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]


class _Reader:
    """The blocking half of loading: hashes what it reads, gives blocks of bounded size. One thread at a time."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise MissingFileError(
                f"the file of snapshot {path.name.removesuffix(_SUFFIX)} is missing on disk"
            ) from error
        self._tap = _Tap(self._file)
        self._stream = zstandard.ZstdDecompressor().stream_reader(cast(BinaryIO, self._tap), read_size=_BLOCK)

    def read(self) -> bytes:
        return self._stream.read(_BLOCK)

    def finish(self) -> tuple[int, str]:
        while self._tap.read(_BLOCK):
            pass
        return self._tap.stored, self._tap.hash.hexdigest()

    def close(self) -> None:
        self._file.close()


class _Tap:
    """What the decompressor reads from: a file, hashed on the way.

    It must not know its :class:`_Reader`: the decompressor is no object that the garbage collector can look into, so a
    circle through it would keep some megabytes for good.
    """

    def __init__(self, file: BinaryIO | io.RawIOBase) -> None:
        self._file = file
        self.hash = hashlib.blake2b(digest_size=32)
        self.stored = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size) or b""
        self.hash.update(data)
        self.stored += len(data)
        return data


def _translate(error: OSError) -> SandboxError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return LimitExceededError("the server's disk is full; delete snapshots")
    return BackendError(f"a snapshot's file cannot be used: {error.strerror or error}")
