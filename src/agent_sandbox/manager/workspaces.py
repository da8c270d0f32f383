"""Workspaces with history: snapshots as commits of the store, and the layers that new environments begin with.

::

    DATA_DIR/store/        every state, once (spec/store.md); in ``sandboxes`` a branch for each environment
    DATA_DIR/checkouts/    layers that workspaces are mounted over: a cache (store/checkouts.py)

The rules
---------
* A snapshot is a pin with the snapshot's id on a commit. The commit and the pin are on the disk before the caller
  commits the row; a pin without a row goes at the next start, a row without a pin cannot be.
* A pin with an environment's id is the state that it began with, from before it is made until it is gone: its layers
  can be built again, its upper directory says what differs from it, and a snapshot that was deleted takes nothing away.
* An environment's branch is where its next commit begins; there is none before the first. A rollback makes a new
  environment, so no branch can be at a state that the workspace was not kept as.
* Of an overlay the upper directory alone is read, where the sum of its bytes can be counted from a state whose sum is
  known (``know``); else the whole, as the store does by itself where the upper does not tell (``Store.commit``).
* Reading a workspace happens while the backend holds it still; nothing else here waits for a guest.
* Everything that blocks runs in ``_THREADS`` threads, and is seen through when its caller is cancelled. A capture that
  nobody waits for any more ends at its next progress report.
* gc runs behind everybody's back, at most every ``_GC_SECONDS``, after a start and after something was removed.
* Archives go at their reader's speed, so they have threads of their own, and a reader that takes nothing for long
  (``pieces.py``) loses his. So have archives that come, at their sender's, comparisons, which take as long as a
  sandbox's files make them, and workspaces that a sandbox sends by itself: no snapshot of a held workspace waits for
  any of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    PayloadTooLargeError,
    SandboxError,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from agent_sandbox.manager.pieces import ARCHIVE_BLOCKS, Pieces
from agent_sandbox.manager.taken import Aside, Source, Taken
from agent_sandbox.manager.tasks import uninterrupted
from agent_sandbox.store import HeadMoved, Store
from agent_sandbox.store.checkouts import Checkouts
from agent_sandbox.store.ports import Progress
from agent_sandbox.types import PreparedWorkspace

log = logging.getLogger(__name__)

_T = TypeVar("_T")

PROJECT = "sandboxes"
_TOTALS = 10_000
"""States whose bytes are remembered: 1 MiB of memory."""
_THREADS = 4
_GC_SECONDS = 60.0
_SYNC_SECONDS = 2.0
_ASK_SECONDS = 30.0
EMPTY = f"{PROJECT}@0"
"""The state that a sandbox of no snapshot begins with."""


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
        self._uploads = ThreadPoolExecutor(_THREADS, thread_name_prefix="upload")
        self._turns = asyncio.Semaphore(_THREADS)
        self._store: Store | None = None
        self._checkouts: Checkouts | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._syncing: asyncio.Task[None] | None = None
        self._garbage = False
        self._collected = 0.0
        self._late: dict[str, Callable[[], None]] = {}
        self._totals: OrderedDict[str, int] = OrderedDict()

    @property
    def is_open(self) -> bool:
        """Whether :meth:`start` was called."""
        return self._loop is not None

    async def start(
        self, snapshots: Collection[str], environments: Collection[str], unreadable: Collection[str] = ()
    ) -> None:
        """Open the store, making it when there is none, and drop what rows no longer lead to; find earlier layers.

        ``snapshots`` and ``environments`` are the ids of all that there are; the backends are up. Of the sandboxes
        ``unreadable`` every environment may be one, parked or not. A second call does nothing. Errors as of
        :class:`Store`.
        """
        if self._loop is None:
            await self._run(lambda: self._open(snapshots, environments, unreadable))
            self._loop = asyncio.get_running_loop()
            await self._run(self._open_checkouts)

    async def close(self) -> None:
        """End captures under way and close the store."""
        self._stopping.set()
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.wait([self._syncing])
        store, self._store = self._store, None
        if store is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, store.close)
        self._threads.shutdown(wait=False)
        self._archives.shutdown(wait=False)
        self._readers.shutdown(wait=False)
        self._paced.shutdown(wait=False)
        self._uploads.shutdown(wait=False)

    # ---- snapshots -------------------------------------------------------------------------------------------------

    async def take(self, env_id: str, snapshot_id: str, workspace: Source, limit: int) -> Taken:
        """Keep an environment's workspace under a snapshot's id, as the next commit of its branch.

        When it returns, the state survives ``kill -9`` and a power loss. :class:`PayloadTooLargeError` above ``limit``
        bytes of files, :class:`LimitExceededError` on a full disk.
        """

        def keep(taken: Taken) -> None:
            self._opened().pin(snapshot_id, taken.commit)

        return await self._capture(env_id, lambda: self._branch(env_id), workspace, limit, keep)

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
                branch = self._branch(f"from-file-{snapshot_id}")
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
            commit = store.pinned(snapshot_id)
            if commit is not None:
                with suppress(NotFoundError):  # somebody else removed it just now
                    try:
                        store.forget(commit.hex())  # before that: gc may take it as soon as the pin is gone
                    finally:
                        store.unpin(snapshot_id)
                self._garbage = True

        await self._let_go(snapshot_id, drop)

    async def stand(self, env_id: str, commit: str) -> None:
        """Keep the state that an environment is going to begin with, until :meth:`gone`; snapshots of it may go."""
        await self.ask(lambda store: store.pin(env_id, commit))

    async def began(self, env_id: str) -> str | None:
        """Give the state that an environment began with; None where it began empty."""
        pinned = await self.ask(lambda store: store.pinned(env_id))
        return None if pinned is None else pinned.hex()

    def know(self, commit: str, data_bytes: int) -> None:
        """Remember how many bytes of data a state has: those of one that is like it are then counted from it."""
        self._totals[commit] = data_bytes
        self._totals.move_to_end(commit)
        while len(self._totals) > _TOTALS:
            self._totals.popitem(last=False)

    async def data_bytes(self, commit: str) -> int:
        """Count the bytes of data in a state's files, once; :class:`NotFoundError` when it is gone."""
        known = self._totals.get(commit)
        if known is None:
            known = await self.study(lambda store: store.data_bytes(commit))
            self.know(commit, known)
        return known

    def _known(self, commit: bytes) -> tuple[str, int] | None:
        total = self._totals.get(commit.hex())
        return None if total is None else (commit.hex(), total)

    async def gone(self, env_id: str) -> None:
        """Note that an environment is no more; snapshots of it stay."""

        def remove() -> None:
            store = self._opened()
            with suppress(NotFoundError):
                store.unpin(env_id)
                self._garbage = True
            with suppress(NotFoundError):
                store.delete(f"{PROJECT}:{env_id}")
                self._garbage = True

        try:
            await self._let_go(env_id, remove)
        except SandboxError as error:
            log.warning("the history of environment %s goes with the next start: %s", env_id, error)

    async def _let_go(self, name: str, work: Callable[[], None]) -> None:
        """Remove what no row names, now or in :meth:`tidy`: gc or a full disk may be in the way, or the start."""
        if self._store is None:  # a removal at start, of what :meth:`start` was perhaps told to keep
            self._late[name] = work
            return
        try:
            await self._run(work)
        except (StoreBusyError, LimitExceededError) as error:
            log.warning("the states of %s go later: %s", name, error)
            self._late[name] = work

    # ---- history ---------------------------------------------------------------------------------------------------

    async def ask(self, work: Callable[[Store], _T]) -> _T:
        """Do ``work`` with the store in a thread. It is seen through, so it must be bounded in time."""
        return await self._run(lambda: work(self._opened()))

    async def study(self, work: Callable[[Store], _T]) -> _T:
        """As :meth:`ask`, for reading that may take seconds."""
        return await self._run(lambda: work(self._opened()), self._readers)

    async def receive(self, work: Callable[[Store, Progress], _T]) -> _T:
        """As :meth:`ask`, for what goes at a client's speed; the progress it is given ends it when the server stops."""

        def progress(*_: int) -> None:
            if self._stopping.is_set():
                raise BackendError("the server is shutting down")

        return await self._run(lambda: work(self._opened(), progress), self._uploads)

    def littered(self) -> None:
        """Note that something was removed, so that gc has something to do."""
        self._garbage = True

    async def pin(self, snapshot_id: str, commit: str) -> None:
        """Keep a state under a snapshot's id, as :meth:`take` does."""
        await self.ask(lambda store: store.pin(snapshot_id, commit))

    async def head(self, env_id: str) -> str | None:
        """Give the state that an environment was last kept as, or began with; None where it began empty."""

        def head(store: Store) -> str | None:
            try:
                return store.resolve(f"{PROJECT}:{env_id}").hex()
            except NotFoundError:
                pinned = store.pinned(env_id)
                return None if pinned is None else pinned.hex()

        return await self.ask(head)

    @asynccontextmanager
    async def aside(self, env_id: str, base: str, workspace: Source, limit: int) -> AsyncIterator[Aside]:
        """Keep a workspace while the block runs, beside the history of its environment; errors as of :meth:`take`.

        ``base`` is the state that it came from; :class:`ConflictError` when the store does not have it any more.
        """
        name = f"{PROJECT}:{env_id}.{secrets.token_hex(8)}"

        def begin() -> str:
            try:
                self._opened().fork(base, name)
            except NotFoundError:
                raise ConflictError(
                    "the store no longer has the state that the workspace is compared with; take a snapshot: changes"
                    " are told from then on"
                ) from None
            return name

        def end() -> None:
            self._garbage = True
            with suppress(NotFoundError):
                self._opened().delete(name)

        try:
            yield Aside(name, await self._capture(env_id, begin, workspace, limit, lambda _: None))
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

    def copied(self, commit: str) -> PreparedWorkspace:
        """Give what lays a commit out in a directory of somebody else's. Errors as of the store, while it does."""

        def fill(directory: int, owner: tuple[int, int], unwanted: Callable[[], bool]) -> None:
            def progress(*_: int) -> None:
                if unwanted() or self._stopping.is_set():
                    raise BackendError("nobody waits for the workspace any more")

            self._opened().lay_out(commit, directory, owner=owner, progress=progress)

        return PreparedWorkspace(fill=fill, state=commit)

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
        room = threading.Semaphore(ARCHIVE_BLOCKS)
        ended = threading.Event()

        def put(piece: bytes | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def write() -> None:
            out = Pieces(put, room, ended)
            try:
                self._opened().export_tar(commit, out)
                out.flush()
            finally:
                put(None)

        work = asyncio.ensure_future(self._run(write, self._archives))
        try:
            while (piece := await pieces.get()) is not None:
                room.release()
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
        late, self._late = self._late, {}
        for name, work in late.items():
            await self._let_go(name, work)
        if self._garbage and time.monotonic() - self._collected > _GC_SECONDS:
            self._garbage, self._collected = False, time.monotonic()
            try:
                report = await self._run(lambda: self._opened().gc(wait_seconds=1.0))
                log.debug("gc freed %d bytes of the store", report.freed)
            except (StoreBusyError, LimitExceededError) as error:
                self._garbage = True
                log.debug("gc comes again: %s", error)

    # ---- within ----------------------------------------------------------------------------------------------------

    def _open(self, snapshots: Collection[str], environments: Collection[str], unreadable: Collection[str]) -> None:
        # The last server may have been killed between a removal and gc. It need not come while all are starting.
        self._garbage, self._collected = self._path.exists(), time.monotonic()
        store = Store.open(self._path) if self._path.exists() else Store.create(self._path)
        try:
            self._clear(store, snapshots, environments, unreadable)
        except BaseException:
            store.close()
            raise
        self._store = store  # last: from now on what is removed meanwhile is removed here too

    def _clear(
        self, store: Store, snapshots: Collection[str], environments: Collection[str], unreadable: Collection[str]
    ) -> None:
        """Drop the names that no row leads to any more."""

        def is_environment(name: str) -> bool:
            sandbox, _, number = name.rpartition("-")
            return name in environments or (sandbox in unreadable and number.isdecimal())

        if PROJECT not in {project.name for project in store.projects()}:
            store.init(PROJECT)
        for pin in list(store.pins()):
            if pin.name not in snapshots and not is_environment(pin.name):
                log.warning("letting go of state %s: no snapshot or sandbox of that name is known", pin.name)
                with suppress(NotFoundError, StoreError):
                    if "-" not in pin.name:  # a snapshot: what follows it is no reason to keep its files
                        store.forget(pin.commit.hex())
                with suppress(StoreFullError):  # the next start does it: only a server that runs can make room
                    store.unpin(pin.name)
                self._garbage = True
        names = {ref.name for ref in store.refs(PROJECT)} - {"main"}
        for id in environments:
            older = id.rpartition("-")[0]  # earlier versions had a branch for each sandbox
            if older in names and id not in names:
                store.fork(f"{PROJECT}:{older}", f"{PROJECT}:{id}")
        for name in names:
            if is_environment(name):
                continue
            with suppress(StoreFullError):
                store.delete(f"{PROJECT}:{name}")
            self._garbage = True

    def _open_checkouts(self) -> None:
        checkouts = self._opened().checkouts(
            self._checkouts_path, max_bytes=self._max_checkout_bytes, in_use=self._known_layers
        )
        checkouts.start()
        self._checkouts = checkouts

    def _branch(self, env_id: str) -> str:
        """The branch of an environment; it begins at the state that this began with."""
        store, branch = self._opened(), f"{PROJECT}:{env_id}"
        try:
            store.resolve(branch)
        except NotFoundError:
            began = store.pinned(env_id)
            try:
                store.fork(began.hex() if began else EMPTY, branch)
            except NotFoundError:  # lost with the store: a workspace needs no past to be kept
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
        self, env_id: str, branch: Callable[[], str], workspace: Source, limit: int, keep: Callable[[Taken], None]
    ) -> Taken:
        """Commit a workspace to what ``branch`` gives, and ``keep`` the commit before anything else happens."""
        given_up = threading.Event()

        def progress(*_: int) -> None:
            if given_up.is_set() or self._stopping.is_set():
                raise BackendError("the snapshot was given up")

        def commit() -> Taken:
            store, where = self._opened(), branch()
            before, below = store.resolve(where), store.pinned(env_id)
            known = [total for state in (before, below) if state and (total := self._known(state))]
            result, exported = workspace.read(store, where, progress, below if known else None)
            if isinstance(result, HeadMoved):
                raise BackendError("two snapshots of one sandbox were taken at once")
            report = result.report
            if not report.whole:
                report = replace(report, bytes=_count(store, result.commit.hex(), known), whole=True)
            if report.bytes > limit:  # known at the end alone: what a sparse file holds is seen by reading it
                back = next(entry.id for entry in store.log(before.hex()) if not entry.forgotten)
                store.reset(where, back.hex())
                self._garbage = True
                raise PayloadTooLargeError(f"the files of the workspace hold more than {limit} bytes")
            taken = Taken(result.commit.hex(), report, exported)
            self.know(taken.commit, report.bytes)
            keep(taken)
            return taken

        async with self._turns if workspace.paced else nullcontext():  # who waits for a thread can still give up
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


def _count(store: Store, commit: str, known: list[tuple[str, int]]) -> int:
    """Count the bytes of a state from the first known one that is there: snapshots may have been deleted meanwhile."""
    for one in known:
        with suppress(NotFoundError):
            return store.data_bytes(commit, one)
    return store.data_bytes(commit)


async def _ended(task: asyncio.Future[_T]) -> None:
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


def _file_of(snapshot_id: str, file: Path) -> BufferedReader:
    try:
        return file.open("rb")
    except FileNotFoundError as error:
        raise BackendError(f"the file of snapshot {snapshot_id} is missing on disk") from error
