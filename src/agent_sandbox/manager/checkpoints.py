"""Checkpoints: what the processes of a sandbox had in memory, beside the snapshot of its workspace.

::

    DATA_DIR/checkpoints/<snapshot id>/        0700
        manifest.json                          which snapshot, commit and backend, and how many bytes
        state/                                 the backend's own; nothing here looks into it
    DATA_DIR/checkpoints/.new-<snapshot id>/   one that is being written

The rules
---------
* Built aside, synced, renamed, its directory synced; then the caller commits the row. Removing goes the other way: the
  row first. So a crash leaves a checkpoint without a row at most, which the next start removes, and never a row whose
  checkpoint was not whole.
* It belongs to one state of the workspace: :meth:`Checkpoints.use` compares the commit with the snapshot's.
* What is wrong with a checkpoint is a :class:`ConflictError` that names the remedy: the workspace does not hang on it.
* Who restores from one holds it. A snapshot that is deleted meanwhile takes its checkpoint with it when the last lets
  go.

Bounds: a checkpoint may take the sandbox's ``memory_mb``, which its control group holds, and ``_SLACK`` for what the
runtime writes of its own; and ``disk_mb``, where the backend keeps the workspace in it (:func:`size_of`). So much must
be free on the disk before the first byte, beyond the floor that is kept for the sandboxes that run (MIN_FREE_MB).
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import stat
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from agent_sandbox.backends.base import Backend
from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError, SandboxError
from agent_sandbox.manager.records import SnapshotRecord
from agent_sandbox.manager.tasks import uninterrupted
from agent_sandbox.types import SandboxSpec

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MANIFEST_VERSION = 1
_NEW = ".new-"
_SLACK = 128 << 20
_MANIFEST_BYTES = 4 << 10
_MAX_FILES = 10_000
_BLOCK = 512
"""What stat(2) counts in, whatever the file system."""
_THREADS = 2


def unusable(id: str, why: str) -> ConflictError:
    """Say that a snapshot's processes cannot be resumed, and that its workspace can be used all the same."""
    return ConflictError(
        f"the processes of snapshot {id} cannot be resumed: {why}; its workspace alone can be used with memory: false"
        " (--no-memory)",
        details={"memory": False},
    )


def resumes(snapshot: SnapshotRecord, asked: bool | None) -> bool:
    """Tell whether a snapshot's processes are to go on: as ``asked``, and where it has them when nothing is asked.

    :class:`ConflictError` when they are asked for and were not kept.
    """
    if asked and snapshot.memory_bytes is None:
        raise ConflictError(f"snapshot {snapshot.id} was taken without memory: it has no processes to resume")
    return snapshot.memory_bytes is not None if asked is None else asked


def require_resumable(snapshot: SnapshotRecord, backend: Backend, spec: SandboxSpec) -> None:
    """Raise :func:`unusable` where the processes of a snapshot cannot be those of an environment with this spec.

    They keep what they were started with, so what they can see of it must be the same; memory may be more.
    """
    had = snapshot.spec
    if backend.name != snapshot.backend:
        raise unusable(snapshot.id, f"they are of backend {snapshot.backend!r}, not {backend.name!r}")
    if not backend.capabilities.checkpoint:
        raise unusable(snapshot.id, backend.capabilities.notes.get("checkpoint", "the backend has no checkpoints"))
    if (had.image, had.image_digest) != (spec.image, spec.image_digest):
        raise unusable(snapshot.id, f"they run on image {had.image!r} ({had.image_digest or 'not pinned'})")
    for name in ("network", "read_only_rootfs", "uid", "gid"):
        if getattr(had, name) != getattr(spec, name):
            raise unusable(snapshot.id, f"they were started with {name} {getattr(had, name)!r}")
    if spec.memory_mb < had.memory_mb:
        raise unusable(snapshot.id, f"they may need the {had.memory_mb} MiB of memory_mb that they were started with")


def size_of(spec: SandboxSpec, backend: Backend) -> int:
    """What a checkpoint may take, in MiB, beside the runtime's own: memory, and the disk where it is the guest's."""
    on_host = backend.capabilities.layered_workspace and backend.projection != "disk"
    return spec.memory_mb + (0 if on_host else spec.disk_mb)


class Making:
    """A checkpoint that is being written: the backend fills ``state``, then :meth:`keep` makes it count."""

    def __init__(self, home: Path, final: Path, limit: int) -> None:
        self.state = str(home / "state")
        self._home = home
        self._final = final
        self._limit = limit

    def keep(self, backend: str, commit: str) -> int:
        """Make it durable under its snapshot's id and give what it takes of the disk, in bytes. Blocks."""
        length, taken = _measure(Path(self.state), sync=True)
        if length > self._limit:
            raise LimitExceededError(
                f"the memory of the sandbox takes {length} bytes, more than its own limit and {_SLACK} bytes"
            )
        table = {
            "version": MANIFEST_VERSION,
            "snapshot": self._final.name,
            "backend": backend,
            "commit": commit,
            "bytes": taken,
            "length": length,
        }
        with (self._home / "manifest.json").open("xb") as file:
            file.write(json.dumps(table).encode())
            file.flush()
            os.fsync(file.fileno())
        _sync(self._home)
        self._home.rename(self._final)
        _sync(self._final.parent)
        return taken


class Checkpoints:
    """The checkpoints of one DATA_DIR."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint")
        self._users: Counter[str] = Counter()
        self._doomed: set[str] = set()

    async def start(self, known: Collection[str]) -> None:
        """Create the directory; remove what a crash left: every checkpoint whose snapshot is not in ``known``."""
        await self._run(lambda: self._sweep(known))

    async def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False)

    @asynccontextmanager
    async def making(self, id: str, size_mb: int, floor_mb: int) -> AsyncIterator[Making]:
        """Give an empty place for a snapshot's checkpoint; when the block fails, nothing is left of it.

        :class:`LimitExceededError` before anything is done where the disk has too little room for ``size_mb``, which
        :func:`size_of` tells.
        """
        limit = (size_mb << 20) + _SLACK
        making = Making(self._directory / (_NEW + id), self._directory / id, limit)
        try:
            await self._run(lambda: self._begin(making, limit, floor_mb))
            yield making
        except BaseException:
            await uninterrupted(self._run(lambda: self._remove(id)))
            raise

    async def keep(self, making: Making, backend: str, commit: str) -> int:
        """Make what :meth:`making` gave durable, inside its block; give its size in bytes."""
        return await self._run(lambda: making.keep(backend, commit))

    @asynccontextmanager
    async def use(self, snapshot: SnapshotRecord) -> AsyncIterator[str]:
        """Give the directory to restore a snapshot's processes from; it stays while the block runs.

        :class:`ConflictError`, with the remedy, when it is not there or not what was written.
        """
        self._users[snapshot.id] += 1
        try:
            yield await self._run(lambda: self._check(snapshot))
        finally:
            self._users[snapshot.id] -= 1
            if not self._users[snapshot.id]:
                del self._users[snapshot.id]
                if snapshot.id in self._doomed:
                    self._doomed.discard(snapshot.id)
                    await uninterrupted(self.delete(snapshot.id))

    async def delete(self, id: str) -> None:
        """Remove the checkpoint of a snapshot that has no row any more; nothing happens when there is none.

        While somebody restores from it, that waits. Where it fails, the next start does it.
        """
        if self._users[id]:
            self._doomed.add(id)
            return
        try:
            await self._run(lambda: self._remove(id))
        except SandboxError as error:
            log.warning("the memory of deleted snapshot %s stays until the next start: %s", id, error)

    def _begin(self, making: Making, limit: int, floor_mb: int) -> None:
        room = os.statvfs(self._directory)
        free = room.f_bavail * room.f_frsize
        if free < limit + (floor_mb << 20):
            raise LimitExceededError(
                f"the memory of this sandbox may take {limit >> 20} MiB, and the server's disk has {free >> 20} MiB"
                f" free, of which it keeps {floor_mb} (AGENT_SANDBOX_MIN_FREE_MB); remove snapshots, or take this one"
                " without memory",
                details={"free_mb": free >> 20, "needed_mb": limit >> 20},
            )
        for path in (Path(making.state).parent, Path(making.state)):
            path.mkdir(mode=0o700)

    def _check(self, snapshot: SnapshotRecord) -> str:
        home = self._directory / snapshot.id
        try:
            with (home / "manifest.json").open("rb") as file:
                table = json.loads(file.read(_MANIFEST_BYTES))
            if table["version"] != MANIFEST_VERSION:
                raise unusable(snapshot.id, "another version of the server wrote its memory")
            if (table["snapshot"], table["commit"]) != (snapshot.id, snapshot.commit):
                raise unusable(snapshot.id, "its memory belongs to another state of the workspace")
            if table["backend"] != snapshot.backend:
                raise unusable(snapshot.id, f"its memory is of backend {table['backend']!r}")
            length, _ = _measure(home / "state", sync=False)
            # Files with holes are longer than what they take; manifests without a length are of files without.
            if table["bytes"] != snapshot.memory_bytes or table.get("length", table["bytes"]) != length:
                raise unusable(snapshot.id, "its memory is damaged on disk")
        except FileNotFoundError:
            raise unusable(snapshot.id, "its memory is missing on disk") from None
        except (ValueError, KeyError, TypeError) as error:
            raise unusable(snapshot.id, "what describes its memory is damaged on disk") from error
        return str(home / "state")

    def _sweep(self, known: Collection[str]) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in self._directory.iterdir():
            if path.name in known:
                continue
            log.warning("removing the memory %s: it was never acknowledged, or its snapshot is gone", path.name)
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.warning("%s cannot be removed: %s", path.name, error.strerror)

    def _remove(self, id: str) -> None:
        for path in (self._directory / (_NEW + id), self._directory / id):
            if path.exists():
                shutil.rmtree(path)

    async def _run(self, work: Callable[[], _T]) -> _T:
        """Do ``work`` in a thread and see it through."""

        async def run() -> _T:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

        try:
            return await uninterrupted(run())
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise LimitExceededError("the server's disk is full; delete snapshots") from error
            raise BackendError(f"a checkpoint cannot be used: {error.strerror or error}") from error
        except RuntimeError as error:  # the executor was shut down
            raise BackendError("the server is shutting down") from error


def _measure(directory: Path, *, sync: bool) -> tuple[int, int]:
    """The length of the files below a directory, and what they take: less, where they have holes.

    With ``sync`` everything is on the disk before that is asked.
    """
    length = taken = count = 0
    for place, _, names in os.walk(directory, onerror=_raise):
        for name in names:
            path = Path(place, name)
            info = path.lstat()
            count += 1
            if not stat.S_ISREG(info.st_mode) or count > _MAX_FILES:
                raise BackendError("the backend wrote a checkpoint that is not made of a few plain files")
            if sync:
                _sync(path)
                info = path.lstat()
            length += info.st_size
            taken += min(info.st_blocks * _BLOCK, info.st_size)
        if sync:
            _sync(Path(place))
    return length, taken


def _raise(error: OSError) -> None:
    raise error


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
