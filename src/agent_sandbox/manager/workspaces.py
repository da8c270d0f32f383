"""Workspaces with history: snapshots as commits of the store, and the layers that new environments begin with.

::

    DATA_DIR/store/        every state, once (spec/store.md); the project ``sandboxes`` has a branch for each sandbox
    DATA_DIR/checkouts/    layers that workspaces are mounted over: a cache (store/checkouts.py)

The rules
---------
* A snapshot is a pin with the snapshot's id on a commit. The commit and the pin are on the disk before the caller
  commits the row; a pin without a row goes at the next start, a row without a pin cannot be.
* A sandbox's branch is where its next commit begins: only history and the size of patches hang on it, no content.
* Reading a workspace happens while the backend holds it still; nothing else here waits for a guest.
* Everything that blocks runs in ``_THREADS`` threads, and is seen through when its caller is cancelled. A capture that
  nobody waits for any more ends at its next progress report.
* gc runs behind everybody's back, at most every ``_GC_SECONDS``, after something was removed.
* Archives go at their reader's speed, so they have threads of their own, and a reader that takes nothing for
  ``_STALL_SECONDS`` loses his. So have comparisons, which take as long as a sandbox's files make them, and workspaces
  that a sandbox sends by itself: no snapshot of a held workspace waits for any of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from agent_sandbox.errors import (
    BackendError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    PayloadTooLargeError,
    SandboxError,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from agent_sandbox.manager.tasks import uninterrupted
from agent_sandbox.store import Created, HeadMoved, Report, Store, UpToDate
from agent_sandbox.store.checkouts import Checkouts
from agent_sandbox.store.ports import Progress
from agent_sandbox.types import ExportReport, PreparedWorkspace

log = logging.getLogger(__name__)

_T = TypeVar("_T")

PROJECT = "sandboxes"
_THREADS = 4
_GC_SECONDS = 60.0
_SYNC_SECONDS = 2.0
_ASK_SECONDS = 30.0
_ARCHIVE_BLOCKS = 8
_BLOCK = 1 << 18
_STALL_SECONDS = 60.0
EMPTY = f"{PROJECT}@0"
"""The state that a sandbox of no snapshot begins with."""
MAX_SKIPPED = 100
"""Paths that a snapshot's record names; it counts all of them."""
_SKIPPED_BYTES = 48 << 10
"""Of these paths together: each may have 250 KiB, and the records of all snapshots are read for a list of them."""


Outcome = tuple[Created | UpToDate | HeadMoved, ExportReport | None]


@dataclass(frozen=True)
class Source:
    """A workspace that can be read once: ``read`` makes it the next commit of a branch, in a thread.

    Beside the store's outcome it gives what the backend left out before the store saw it. ``paced``: the sandbox
    decides how long that takes.
    """

    read: Callable[[Store, str, Progress], Outcome]
    paced: bool = False


@dataclass(frozen=True)
class Taken:
    """A state that was kept: its commit in hexadecimal digits, what the capture saw, and what never came to it."""

    commit: str
    report: Report
    exported: ExportReport | None = None

    def skipped(self) -> tuple[tuple[str, str], ...]:
        """The first paths that were left out, with why."""
        room, named = _SKIPPED_BYTES, []
        left = [(os.fsdecode(item.path), item.why.value) for item in self.report.left_out[:MAX_SKIPPED]]
        for path, why in [*(self.exported.skipped if self.exported else ()), *left][:MAX_SKIPPED]:
            room -= len(os.fsencode(path))
            if room < 0:
                break
            named.append((path, why))
        return tuple(named)

    @property
    def skipped_total(self) -> int:
        """How many paths were left out."""
        return self.report.left_out_count + (self.exported.skipped_total if self.exported else 0)


@dataclass(frozen=True)
class Aside:
    """A state that is kept for the moment: ``branch`` names it, and may be moved."""

    branch: str
    taken: Taken


class Workspaces:
    """The store and the checkouts of one DATA_DIR. ``in_use`` gives the layers that environments stand on."""

    def __init__(
        self, data_dir: Path, max_checkout_bytes: int, in_use: Callable[[], Coroutine[Any, Any, set[str]]]
    ) -> None:
        self._path = data_dir / "store"
        self._checkouts_path = data_dir / "checkouts"
        self._max_checkout_bytes = max_checkout_bytes
        self._layers_in_use = in_use
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="store")
        self._archives = ThreadPoolExecutor(_THREADS, thread_name_prefix="archive")
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="history")
        self._paced = ThreadPoolExecutor(_THREADS, thread_name_prefix="export")
        self._store: Store | None = None
        self._checkouts: Checkouts | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._syncing: asyncio.Task[None] | None = None
        self._garbage = False
        self._collected = 0.0

    @property
    def exists(self) -> bool:
        """Whether there is a store."""
        return self._path.exists()

    async def start(self, snapshots: Collection[str], sandboxes: Collection[str]) -> None:
        """Open the store, making it when there is none, and drop what rows no longer lead to; find earlier layers.

        ``snapshots`` and ``sandboxes`` are the ids of all that there are; the backends are up. A second call does
        nothing. Errors as of :class:`Store`.
        """
        if self._loop is None:
            await self._run(lambda: self._open(snapshots, sandboxes))
            self._loop = asyncio.get_running_loop()
            await self._run(self._open_checkouts)

    async def close(self) -> None:
        """End captures under way and close the store."""
        self._stopping.set()
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.wait([self._syncing])
        if self._store is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._store.close)
        self._threads.shutdown(wait=False)
        self._archives.shutdown(wait=False)
        self._readers.shutdown(wait=False)
        self._paced.shutdown(wait=False)

    # ---- snapshots -------------------------------------------------------------------------------------------------

    async def take(self, sandbox_id: str, snapshot_id: str, source: str | None, workspace: Source, limit: int) -> Taken:
        """Keep a workspace under a snapshot's id, as the next commit of its sandbox.

        ``source`` is the commit that the sandbox began with. When it returns, the state survives ``kill -9`` and a
        power loss. :class:`PayloadTooLargeError` above ``limit`` bytes of files, :class:`LimitExceededError` on a full
        disk.
        """

        def keep(taken: Taken) -> None:
            self._opened().pin(snapshot_id, taken.commit)

        return await self._capture(lambda: self._branch(sandbox_id, source), workspace, limit, keep)

    async def adopt(self, snapshot_id: str, file: Path, digest: str) -> str:
        """Keep a snapshot's file, a compressed tar, as a commit under the snapshot's id; return the commit.

        ``digest`` is the BLAKE2b-256 that the file must have: :class:`BackendError` else, and for an archive that
        cannot be read. Nothing is left then.
        """

        def progress(*_: int) -> None:
            if self._stopping.is_set():
                raise BackendError("the server is shutting down")

        def take() -> str:
            store = self._opened()
            with _file_of(snapshot_id, file) as archive:
                if hashlib.file_digest(archive, lambda: hashlib.blake2b(digest_size=32)).hexdigest() != digest:
                    raise BackendError(f"snapshot {snapshot_id} is damaged on disk: its checksum differs")
                archive.seek(0)
                branch = self._branch(f"from-file-{snapshot_id}", None)
                try:
                    made = store.import_tar(branch, archive, progress=progress)
                except InvalidRequestError as error:  # a sandbox made the archive, not who asks for it now
                    raise BackendError(f"snapshot {snapshot_id} cannot be restored: {error.message}") from error
                else:
                    if isinstance(made, HeadMoved):
                        raise BackendError("two servers take the same snapshot over")
                    store.pin(snapshot_id, made.commit.hex())
                finally:
                    store.delete(branch)
            return made.commit.hex()

        return await self._run(take)

    async def drop(self, snapshot_id: str) -> None:
        """Remove a snapshot; what nothing else leads to goes with the next gc."""

        def drop() -> None:
            store = self._opened()
            commit = next((pin.commit for pin in store.pins() if pin.name == snapshot_id), None)
            if commit is not None:
                store.unpin(snapshot_id)
                store.forget(commit.hex())
                self._garbage = True

        await self._run(drop)

    async def moved(self, sandbox_id: str, commit: str) -> None:
        """Note that a sandbox's workspace was put back to a commit. That it was does not hang on this."""
        try:
            await self._run(lambda: self._opened().reset(self._branch(sandbox_id, commit), commit))
        except SandboxError as error:
            log.warning("sandbox %s was put back; its history still names what it had: %s", sandbox_id, error)

    async def gone(self, sandbox_id: str) -> None:
        """Note that a sandbox is no more; its snapshots stay."""

        store = self._store
        if store is None:
            return

        def remove() -> None:
            with suppress(NotFoundError):
                store.delete(f"{PROJECT}:{sandbox_id}")
                self._garbage = True

        try:
            await self._run(remove)
        except SandboxError as error:
            log.warning("the history of sandbox %s goes with the next start: %s", sandbox_id, error)

    # ---- history ---------------------------------------------------------------------------------------------------

    async def ask(self, work: Callable[[Store], _T]) -> _T:
        """Do ``work`` with the store in a thread. It is seen through, so it must be bounded in time."""
        return await self._run(lambda: work(self._opened()))

    async def study(self, work: Callable[[Store], _T]) -> _T:
        """As :meth:`ask`, for reading that may take seconds."""
        return await self._run(lambda: work(self._opened()), self._readers)

    async def pin(self, snapshot_id: str, commit: str) -> None:
        """Keep a state under a snapshot's id, as :meth:`take` does."""
        await self.ask(lambda store: store.pin(snapshot_id, commit))

    async def head(self, sandbox_id: str) -> str | None:
        """Give the state that a sandbox was last kept as or put back to; None where neither happened yet."""

        def head(store: Store) -> str | None:
            return next((ref.head.hex() for ref in store.refs(PROJECT) if ref.name == sandbox_id), None)

        return await self.ask(head)

    @asynccontextmanager
    async def aside(self, sandbox_id: str, base: str, workspace: Source, limit: int) -> AsyncIterator[Aside]:
        """Keep a workspace while the block runs, beside the history of its sandbox; errors as of :meth:`take`.

        ``base`` is the state that it came from.
        """
        name = f"{PROJECT}:{sandbox_id}.{secrets.token_hex(8)}"

        def begin() -> str:
            self._opened().fork(base, name)
            return name

        def end() -> None:
            self._garbage = True
            with suppress(NotFoundError):
                self._opened().delete(name)

        try:
            yield Aside(name, await self._capture(begin, workspace, limit, lambda _: None))
        finally:
            await uninterrupted(self._run(end))

    # ---- layers ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def prepared(self, commit: str, uid: int, gid: int) -> AsyncIterator[PreparedWorkspace]:
        """Give the layers that show a commit, whose files belong to ``uid`` and ``gid``, building what is missing.

        They stay while the block runs; afterwards it is the environment that keeps them.
        """
        held = ExitStack()

        def lease() -> tuple[Path, ...]:
            assert self._checkouts is not None
            return held.enter_context(self._checkouts.lease(bytes.fromhex(commit), (uid, gid)))

        try:
            layers = await self._run(lease)
            yield PreparedWorkspace(tuple(str(layer) for layer in layers))
        finally:
            await uninterrupted(self._run(held.close))
        if self._syncing is None and self._checkouts is not None and self._checkouts.unsynced:
            self._syncing = asyncio.create_task(self._sync_soon(), name="sync checkouts")

    async def _sync_soon(self) -> None:
        """Sync new layers a moment later, many at once: until then a power loss takes them from who stands on them."""
        try:
            await asyncio.sleep(_SYNC_SECONDS)
            await self.tidy()
        except SandboxError as error:
            log.warning("new checkouts were not synced: %s", error)
        finally:
            self._syncing = None

    async def archive(self, commit: str) -> AsyncGenerator[bytes, None]:
        """Yield a state as a tar archive, in pieces; nothing holds it whole."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()
        room = threading.Semaphore(_ARCHIVE_BLOCKS)
        ended = threading.Event()

        def put(piece: bytes | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def write() -> None:
            out = _Pieces(put, room, ended)
            try:
                self._opened().export_tar(commit, out)
                out.flush()
            finally:
                put(None)

        work = asyncio.ensure_future(self._run(write, self._archives))
        try:
            while (piece := await pieces.get()) is not None:
                room.release()
    def copied(self, commit: str) -> PreparedWorkspace:
        """Give what lays a commit out in a directory of somebody else's. Errors as of the store, while it does."""

        def fill(directory: int, owner: tuple[int, int], unwanted: Callable[[], bool]) -> None:
            def progress(*_: int) -> None:
                if unwanted() or self._stopping.is_set():
                    raise BackendError("nobody waits for the workspace any more")

            self._opened().lay_out(commit, directory, owner=owner, progress=progress)

        return PreparedWorkspace(fill=fill)

                yield piece
            await work
        finally:
            ended.set()
            with suppress(Exception):
                await uninterrupted(_ended(work))

    # ---- care ------------------------------------------------------------------------------------------------------

    async def tidy(self) -> None:
        """Sync new layers, evict old ones, collect garbage where there is some. A sweep calls it."""
        if self._store is None:
            return
        if self._checkouts is not None:
            try:
                await self._run(self._checkouts.tidy)
            except BackendError as error:
                log.warning("no checkout is removed: %s", error)
        if self._garbage and time.monotonic() - self._collected > _GC_SECONDS:
            self._garbage, self._collected = False, time.monotonic()
            try:
                report = await self._run(lambda: self._opened().gc(wait_seconds=1.0))
                log.debug("gc freed %d bytes of the store", report.freed)
            except StoreBusyError:
                self._garbage = True

    # ---- within ----------------------------------------------------------------------------------------------------

    def _open(self, snapshots: Collection[str], sandboxes: Collection[str]) -> None:
        store = self._store = Store.open(self._path) if self._path.exists() else Store.create(self._path)
        if PROJECT not in {project.name for project in store.projects()}:
            store.init(PROJECT)
        for pin in list(store.pins()):
            if pin.name not in snapshots:
                log.warning("removing snapshot %s: it was never acknowledged", pin.name)
                store.unpin(pin.name)
                self._garbage = True
        for ref in list(store.refs(PROJECT)):
            if ref.name != "main" and ref.name not in sandboxes:
                store.delete(f"{PROJECT}:{ref.name}")
                self._garbage = True

    def _open_checkouts(self) -> None:
        checkouts = self._opened().checkouts(
            self._checkouts_path, max_bytes=self._max_checkout_bytes, in_use=self._known_layers
        )
        checkouts.start()
        self._checkouts = checkouts

    def _branch(self, sandbox_id: str, source: str | None) -> str:
        store, branch = self._opened(), f"{PROJECT}:{sandbox_id}"
        if sandbox_id not in {ref.name for ref in store.refs(PROJECT)}:
            try:
                store.fork(source or EMPTY, branch)
            except NotFoundError:  # removed a moment ago, or with the store: a workspace needs no past to be kept
                store.fork(EMPTY, branch)
        return branch

    def _known_layers(self) -> set[str]:
        assert self._loop is not None, "the checkouts were not started"
        asked = asyncio.run_coroutine_threadsafe(self._layers_in_use(), self._loop)
        try:
            return asked.result(_ASK_SECONDS)
        except TimeoutError:
            asked.cancel()
            raise BackendError("the backends do not say which layers are in use") from None

    def _opened(self) -> Store:
        if self._store is None:
            raise BackendError("the store was not opened")
        return self._store

    async def _capture(
        self, branch: Callable[[], str], workspace: Source, limit: int, keep: Callable[[Taken], None]
    ) -> Taken:
        """Commit a workspace to what ``branch`` gives, and ``keep`` the commit before anything else happens."""
        given_up = threading.Event()

        def progress(*_: int) -> None:
            if given_up.is_set() or self._stopping.is_set():
                raise BackendError("the snapshot was given up")

        def commit() -> Taken:
            store, where = self._opened(), branch()
            before = store.resolve(where)
            result, exported = workspace.read(store, where, progress)
            if isinstance(result, HeadMoved):
                raise BackendError("two snapshots of one sandbox were taken at once")
            if result.report.bytes > limit:  # known at the end alone: what a sparse file holds is seen by reading it
                store.reset(where, before.hex())
                self._garbage = True
                raise PayloadTooLargeError(f"the files of the workspace hold more than {limit} bytes")
            taken = Taken(result.commit.hex(), result.report, exported)
            keep(taken)
            return taken

        work = asyncio.ensure_future(self._run(commit, self._paced if workspace.paced else None))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            given_up.set()
            with suppress(Exception):
                await uninterrupted(_ended(work))
            raise

    async def _run(self, work: Callable[[], _T], threads: ThreadPoolExecutor | None = None) -> _T:
        async def run() -> _T:
            try:
                working = asyncio.get_running_loop().run_in_executor(threads or self._threads, work)
            except RuntimeError as error:  # the executor was shut down
                raise BackendError("the server is shutting down") from error
            return await working

        try:
            return await uninterrupted(run())
        except StoreFullError as error:
            raise LimitExceededError("the server's disk is full; delete snapshots") from error
        except StoreError:
            raise
        except OSError as error:
            raise BackendError(f"the store cannot be used: {error.strerror or error}") from error


class _Pieces:
    """What an archive is written to: pieces of some size for another thread, until nobody wants them any more."""

    def __init__(self, put: Callable[[bytes], None], room: threading.Semaphore, ended: threading.Event) -> None:
        self._put = put
        self._room = room
        self._ended = ended
        self._buffer = bytearray()

    def write(self, data: bytes) -> int:
        self._buffer += data
        if len(self._buffer) >= _BLOCK:
            self.flush()
        return len(data)

    def flush(self) -> None:
        if not self._buffer:
            return
        latest = time.monotonic() + _STALL_SECONDS
        while not self._room.acquire(timeout=0.5):
            if self._ended.is_set() or time.monotonic() > latest:
                raise BackendError("nobody reads the archive any more")
        self._put(bytes(self._buffer))
        self._buffer.clear()


async def _ended(task: asyncio.Future[_T]) -> None:
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


def _file_of(snapshot_id: str, file: Path) -> BufferedReader:
    try:
        return file.open("rb")
    except FileNotFoundError as error:
        raise BackendError(f"the file of snapshot {snapshot_id} is missing on disk") from error
