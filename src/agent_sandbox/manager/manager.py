"""The manager: public calls on sandboxes and snapshots, over any backend.

The rules
---------
* A sandbox's record is on the disk before its environment exists, and its environment is gone before its record is.
  So an environment without a record is an orphan, and a crash at any moment leaks nothing.
* What a caller was told is on the disk. What is cancelled or fails is undone before the caller learns of it, or goes
  on being undone in a tracked task.
* Commands and files take no lock and no database (``core.py``, ``commands.py``, ``files.py``): they find their
  environment in memory, and afterwards look whether it is still the sandbox's. If not, the caller is told so, whatever
  the guest said.
* Rollback builds aside: a new environment is made, filled, checked, and put in place by one transaction. Until then
  nothing of the old one is touched.

Lifecycle states are in ``lifecycle.py``, the order of calls on one sandbox in ``entries.py``, what happens at start
and on every sweep in ``fleet.py``. This file is longer than its neighbours because every public call stands in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from agent_sandbox.backends.base import Backend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError, SandboxError, UnsupportedError
from agent_sandbox.manager import policy
from agent_sandbox.manager.checkpoints import require_resumable, resumes, size_of, unusable
from agent_sandbox.manager.clock import SteadyClock
from agent_sandbox.manager.commands import Commands
from agent_sandbox.manager.core import new_id
from agent_sandbox.manager.entries import Entry, stopped
from agent_sandbox.manager.files import Files
from agent_sandbox.manager.idempotency import Idempotency
from agent_sandbox.manager.keeping import keeping
from agent_sandbox.manager.policy import CreateOptions, ForkOptions
from agent_sandbox.manager.projects import Projects
from agent_sandbox.manager.records import (
    BackendStatus,
    SandboxRecord,
    SandboxStats,
    SnapshotRecord,
    UnreadableRecordError,
)
from agent_sandbox.manager.references import Origin
from agent_sandbox.manager.tasks import uninterrupted
from agent_sandbox.types import SandboxSpec

_T = TypeVar("_T")

_PING_SECONDS = 5.0
_FIRST_PING_SECONDS = 2.0
"""How long a backend may take before the next one is asked, while somebody waits for one that answers."""


class Manager(Commands, Files, Projects):
    """Owns every sandbox and snapshot of one DATA_DIR. The first backend is the default.

    Use it from one event loop, between :meth:`start` and :meth:`close`. ``clock`` gives seconds since the epoch; by
    default it takes no notice of steps of the host's clock.
    Every method raises :class:`~agent_sandbox.errors.SandboxError` only; an unknown or expired id is a
    :class:`~agent_sandbox.errors.NotFoundError`.
    """

    def __init__(
        self, settings: Settings, backends: Mapping[str, Backend], *, clock: Callable[[], float] | None = None
    ) -> None:
        clock = clock or SteadyClock()
        super().__init__(settings, backends, clock)
        self.replies = Idempotency(self._fleet.state, clock)

    async def start(self) -> None:
        """Open the state, start the backends, find the sandboxes again and begin to reap.

        :class:`ConflictError` when another server has the DATA_DIR or a newer one wrote it; :class:`BackendError`
        when the default backend cannot start.
        """
        await self._fleet.start()

    async def close(self) -> None:
        """End creations, snapshots and rollbacks under way, undo them, and let go; sandboxes keep running."""
        await self._fleet.close()

    async def settle(self) -> None:
        """Wait until no creation, snapshot, rollback or removal is under way."""
        await self._fleet.settle()

    # Sandboxes

    async def create(self, options: CreateOptions) -> SandboxRecord:
        """Create a sandbox and return when commands can run in it.

        :class:`InvalidRequestError`, :class:`ForbiddenError`, :class:`UnsupportedError`, :class:`NotFoundError`
        (image, or the state that it is to begin as); :class:`LimitExceededError` above MAX_SANDBOXES, or with less than
        MIN_FREE_MB of disk free. On failure and cancellation nothing is left.
        """
        with self._active():
            known = {name: backend.capabilities for name, backend in self._fleet.backends.items()}
            name = policy.choose_backend(options, known, down=self._fleet.down, allow_tcg=self._settings.allow_tcg)
            spec = policy.build_spec(options, self._settings, name, known[name])
            ttl = policy.time_to_live(options.timeout_seconds, self._settings)
            metadata = policy.labels(options.metadata)
            begin = options.source is not None or options.project is not None
            origin = await self.origin(options.source, options.project) if begin else None
            return await self._launch(name, spec, ttl, origin, metadata)

    async def fork(self, snapshot_id: str, options: ForkOptions) -> SandboxRecord:
        """Create a sandbox from a snapshot: its spec with ``options`` over it, its workspace, a new time to live.

        Errors as of :meth:`create`; :class:`NotFoundError` also when the snapshot's image is no longer there, or not on
        the backend that is asked for. Where it was pinned, its content counts, not what its name leads to now.
        :class:`ConflictError` where its processes are to go on and cannot.
        """
        with self._active():
            if options.backend is not None and options.backend not in self._fleet.backends:
                raise policy.unknown_backend(self._fleet.backends)
            snapshot = await self._fleet.in_store(snapshot_id)
            name = options.backend or snapshot.backend
            backend = self._fleet.backend(name)
            spec = policy.fork_spec(snapshot.spec, options, self._settings, name, backend.capabilities)
            ttl = policy.time_to_live(options.timeout_seconds, self._settings)
            memory = resumes(snapshot, options.memory)
            if memory:
                spec = dataclasses.replace(spec, tmp_mb=snapshot.spec.tmp_mb)  # that of the checkpoint, full or not
                require_resumable(snapshot, backend, spec)
            metadata = policy.labels(options.metadata)
            return await self._launch(name, spec, ttl, Origin.of(snapshot), metadata, memory=memory)

    async def get(self, id: str) -> SandboxRecord:
        """Give one sandbox, with ``running`` as the backend sees it now."""
        with self._active():
            entry = self._fleet.find(id)
            await self._fleet.look(entry)
            return self._fleet.find(id).record

    async def list_sandboxes(self, metadata: Mapping[str, str] | None = None) -> list[SandboxRecord]:
        """Give every sandbox by ``created_at``, those included that are being created or destroyed.

        With ``metadata`` only those which have all of these labels.
        """
        wanted = (metadata or {}).items()
        with self._active():
            found = [entry for entry in self._fleet.entries.values() if wanted <= entry.record.metadata.items()]
            await self._fleet.look_at_all(entry for entry in found if not entry.expired)
            records = [entry.record for entry in found if not entry.expired and not entry.gone]
            return sorted(records, key=lambda record: record.created_at)

    async def destroy(self, id: str) -> None:
        """End every process of a sandbox and remove it; its snapshots remain. Works in every state.

        A second call while the first runs waits with it; later ones raise :class:`NotFoundError`. A call that is
        cancelled does not stop the destruction.
        """
        with self._active():
            if id in self._fleet.unreadable:
                await self._fleet.tasks.own(self._fleet.remove_unreadable(id), f"remove {id}")
                return
            entry = self._fleet.find(id)
            self._fleet.backend(entry.record.backend)
            await asyncio.shield(self._fleet.begin_destroy(entry))

    async def set_timeout(self, id: str, seconds: int) -> SandboxRecord:
        """Let a sandbox live ``seconds`` from now. It does not wait for a snapshot or rollback under way."""
        with self._active():
            ttl = policy.time_to_live(seconds, self._settings)
            entry = self._fleet.find(id)
            now = self._clock()
            latest = now + self._settings.max_timeout_seconds
            await uninterrupted(entry.renew(self._fleet.state, expires_at=now + ttl, latest_at=latest))
            return entry.record

    async def stop(self, id: str) -> SandboxRecord:
        """End every process of a sandbox and free what it holds, but its workspace. One that is stopped stays so.

        It waits for a snapshot or rollback under way. What runs meanwhile gets :class:`ConflictError`. A call that is
        cancelled does not stop the stopping. :class:`UnsupportedError` where the backend cannot.
        """
        return await self._change(id, self._stop)

    async def start_sandbox(self, id: str) -> SandboxRecord:
        """Start a stopped sandbox again: same spec, image content and workspace. One that runs goes on.

        A failure leaves it stopped with its workspace. A call that is cancelled does not stop the starting.
        """
        return await self._change(id, self._start)

    async def _change(self, id: str, work: Callable[[Entry], Coroutine[Any, Any, None]]) -> SandboxRecord:
        with self._active():
            entry = self._fleet.find(id)
            entry.require("use")
            self._fleet.backend(entry.record.backend)
            await asyncio.shield(self._fleet.tasks.spawn(work(entry), f"{work.__name__} {id}"))
            return self._fleet.find(id).record

    async def _stop(self, entry: Entry) -> None:
        async with entry.exclusive("use"), entry.gate.closed():
            backend, was = self._fleet.backend(entry.record.backend), entry.record.running
            entry.stops += 1
            entry.record = dataclasses.replace(entry.record, running=False)
            try:
                await backend.stop_environment(entry.record.env_id)
            except BaseException as error:
                entry.record = dataclasses.replace(entry.record, running=was)
                if not isinstance(error, UnsupportedError):
                    await uninterrupted(self._fleet.observe(entry))
                raise
            entry.kept.clear()

    async def _start(self, entry: Entry) -> None:
        async with entry.exclusive("use"):
            backend = self._fleet.backend(entry.record.backend)
            try:
                await keeping(backend, self._fleet.workspaces).restart(entry.record.env_id, entry.record.spec)
            finally:
                await uninterrupted(self._fleet.observe(entry))
            if not entry.record.running:
                raise BackendError("the sandbox ended right after its start; its workspace is kept")

    async def stats(self, id: str) -> SandboxStats:
        """Give what a sandbox uses now, as far as the backend counts it."""

        async def ask(backend: Backend, env: str) -> SandboxStats:
            guest, seen = await asyncio.gather(backend.guest_stats(env), backend.inspect(env))
            return SandboxStats.of(guest, seen)

        return await self._on(id, ask)

    # Snapshots

    async def snapshot(self, id: str, name: str | None = None, *, memory: bool = False) -> SnapshotRecord:
        """Keep the workspace as it is. When it returns, the snapshot survives ``kill -9`` and a power loss.

        With ``memory`` what its processes have in memory is kept as well, as of the same moment; they go on. Whoever
        reads a command's output or is in a terminal at that moment is cut off, and can attach again.
        :class:`UnsupportedError` where the backend cannot, :class:`ConflictError` for what cannot be kept.
        :class:`PayloadTooLargeError` above MAX_SNAPSHOT_BYTES; :class:`LimitExceededError` when the disk is full. On
        failure nothing is left; a call that is cancelled in its last moment may leave the finished snapshot.
        """
        name = policy.snapshot_name(name)
        with self._active():
            entry = self._fleet.find(id)
            if memory:
                backend = self._fleet.backend(entry.record.backend)
                known = backend.capabilities
                if not known.checkpoint:
                    raise UnsupportedError("checkpoint", backend.name, known.notes.get("checkpoint", ""))
            return await self._fleet.tasks.own(self._take(entry, name, memory), f"snapshot {id}")

    async def _take(self, entry: Entry, name: str | None, memory: bool) -> SnapshotRecord:
        async with entry.exclusive("use"), entry.gate.closed():
            record, backend = entry.record, self._fleet.backend(entry.record.backend)
            if not record.running:
                raise stopped(record.id)
            id, limit = new_id("snap"), self._settings.max_snapshot_bytes
            created_at = self._clock()
            kept, memory_bytes = keeping(backend, self._fleet.workspaces), None
            try:
                async with AsyncExitStack() as stack:
                    making = None
                    if memory:
                        size_mb = size_of(record.spec, backend)
                        making = await stack.enter_async_context(
                            self._fleet.checkpoints.making(id, size_mb, self._settings.min_free_mb)
                        )
                    state = None if making is None else making.state
                    async with kept.held(record.env_id, limit, memory=state) as workspace:
                        taken = await self._fleet.workspaces.take(record.env_id, id, workspace, limit)
                    if making is not None:
                        memory_bytes = await self._fleet.checkpoints.keep(making, record.backend, taken.commit)
            except BaseException:
                with contextlib.suppress(SandboxError):  # it may have been kept just when the call was cancelled
                    await uninterrupted(self._fleet.workspaces.drop(id))
                raise
            snapshot = SnapshotRecord(
                id=id,
                sandbox_id=record.id,
                name=name,
                backend=record.backend,
                spec=record.spec,
                size_bytes=taken.report.bytes,
                stored_bytes=taken.report.stored,
                created_at=created_at,
                skipped=taken.skipped(),
                skipped_total=taken.skipped_total,
                commit=taken.commit,
                memory_bytes=memory_bytes,
            )
            await uninterrupted(self._keep(snapshot))
            return snapshot

    async def _keep(self, snapshot: SnapshotRecord) -> None:
        try:
            await self._fleet.state.put_snapshot(snapshot)
        except SandboxError:
            await self._remove_content(snapshot.id)
            raise

    async def _unkeep(self, snapshot: SnapshotRecord) -> None:
        with contextlib.suppress(NotFoundError):
            await self._fleet.state.delete_snapshot(snapshot.id)
        await self._remove_content(snapshot.id)

    async def _remove_content(self, id: str) -> None:
        await self._fleet.files.delete(id)
        await self._fleet.checkpoints.delete(id)
        await self._fleet.workspaces.drop(id)

    async def list_snapshots(self, sandbox_id: str | None = None, *, auto: bool = False) -> list[SnapshotRecord]:
        """Give the snapshots by ``created_at``: all, or those of one sandbox, which need not live any more.

        ``auto``: those too that rollbacks made of what they replaced. With a sandbox it waits for one that is being
        made; the list of all waits for none, as a sandbox decides how long reading its workspace takes.
        """
        with self._active():
            if auto and (entry := self._fleet.entries.get(sandbox_id or "")) is not None:
                await self._fleet.parking.settled(entry)
            found = await self._fleet.state.list_snapshots(sandbox_id)
            return found if auto else [snapshot for snapshot in found if not snapshot.auto]

    async def get_snapshot(self, id: str) -> SnapshotRecord:
        """Give one snapshot."""
        with self._active():
            return await self._fleet.state.get_snapshot(id)

    async def delete_snapshot(self, id: str) -> None:
        """Remove a snapshot. A rollback or fork that reads it at this moment ends well."""
        with self._active():
            await uninterrupted(self._drop(id))

    async def _drop(self, id: str) -> None:
        with contextlib.suppress(UnreadableRecordError):
            await self._fleet.state.get_snapshot(id)
        await self._fleet.state.delete_snapshot(id)
        await self._remove_content(id)

    async def rollback(self, id: str, snapshot_id: str, *, memory: bool | None = None) -> SandboxRecord:
        """Put a snapshot's workspace in place of a sandbox's; every process in it ends. Id, spec, expiry and env stay.

        The snapshot's processes go on where it has them, unless ``memory`` is false; :class:`ConflictError` when they
        cannot. What is replaced becomes the automatic snapshot in the background (``parking.py``). Any failure leaves
        the sandbox as it was, its processes included.
        """
        with self._active():
            entry = self._fleet.find(id)
            snapshot = await self._fleet.in_store(snapshot_id)
            return await self._fleet.tasks.own(self._roll_back(entry, snapshot, memory), f"rollback {id}")

    async def _roll_back(self, entry: Entry, snapshot: SnapshotRecord, asked: bool | None) -> SandboxRecord:
        async with entry.exclusive("rollback"), entry.gate.closed():
            memory = resumes(snapshot, asked)
            if memory:
                require_resumable(snapshot, self._fleet.backend(entry.record.backend), entry.record.spec)
            await self._swap(entry, snapshot, memory=memory)
            return entry.record

    async def _swap(
        self,
        entry: Entry,
        snapshot: SnapshotRecord,
        ready: Callable[[], Awaitable[None]] | None = None,
        *,
        memory: bool = False,
    ) -> None:
        """Put an environment that begins as a snapshot in place; ``ready`` comes between its being made and that.

        What is replaced is kept, unless the caller is ``ready``: it saw to that.
        """
        backend = self._fleet.backend(entry.record.backend)
        old = entry.record.env_id
        entry.environments += 1
        new = f"{entry.record.id}-{entry.environments}"
        try:
            await uninterrupted(entry.commit(self._fleet.state, "rollback"))
            await self._make(backend, new, entry.record.spec, Origin.of(snapshot), memory)
            if ready is not None:
                await ready()
            await uninterrupted(
                entry.commit(
                    self._fleet.state,
                    "settled",
                    env_id=new,
                    source_snapshot_id=snapshot.id,
                    commit=snapshot.commit,
                    commit_bytes=snapshot.size_bytes,
                    running=True,
                    **({"parked": old} if ready is None else {}),
                )
            )
            entry.kept.clear()
            if memory:
                await self._fleet.learn(entry)
        finally:
            is_swapped = entry.record.env_id == new
            if entry.state == "rolling_back":
                entry.mark("settled")
            if entry.record.parked == old:
                self._fleet.parking.begin(entry)
            else:
                self._fleet.retire(entry, old if is_swapped else new)
            if not is_swapped:
                await self._fleet.retired(entry)

    # Health

    async def ping(self) -> str:
        """Give the name of the first backend that answers, the default before the others.

        What is wrong with the default is raised when none does: :class:`BackendError`.
        """
        first: BackendError | None = None
        for name in self._fleet.backends:
            try:
                async with asyncio.timeout(_FIRST_PING_SECONDS):
                    await self._fleet.backend(name).ping()
                return name
            except TimeoutError:
                first = first or BackendError(f"backend {name!r} did not answer within {_FIRST_PING_SECONDS:g} seconds")
            except BackendError as error:
                first = first or error
        assert first is not None
        raise first

    async def describe_backends(self) -> list[BackendStatus]:
        """Give every configured backend, the default first, with its capabilities and whether it answers now."""

        async def describe(name: str, backend: Backend) -> BackendStatus:
            message = ""
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    await self._fleet.backend(name).ping()
            except SandboxError as error:
                message = error.message
            except TimeoutError:
                message = f"no answer within {_PING_SECONDS:g} seconds"
            is_default, known = name == self._fleet.default, backend.capabilities
            return BackendStatus(name, is_default, known, not message, message, backend.versions, backend.pulls())

        return list(await asyncio.gather(*(describe(name, backend) for name, backend in self._fleet.backends.items())))

    def backend_names(self) -> list[str]:
        """Give the names of the configured backends, the default first."""
        return list(self._fleet.backends)

    def idle_seconds(self) -> float:
        """Seconds since there was a sandbox, a call, or something being removed; 0 while there is."""
        if self._fleet.entries or self._calls or self._fleet.tasks:
            self._last_active = time.monotonic()
        return time.monotonic() - self._last_active

    # Inside

    async def _launch(
        self,
        name: str,
        spec: SandboxSpec,
        ttl: int,
        origin: Origin | None,
        metadata: Mapping[str, str],
        *,
        memory: bool = False,
    ) -> SandboxRecord:
        backend = self._fleet.backend(name)
        snapshot = None if origin is None else origin.snapshot
        try:
            image = await backend.resolve_image(spec.image_digest or spec.image)
        except NotFoundError as error:
            if not spec.image_digest:
                raise
            image_is = f"the image {spec.image!r} ({spec.image_digest}) of the snapshot is"
            if snapshot is not None and snapshot.backend != name:
                raise NotFoundError(f"{image_is} not on backend {name!r}; import or pull it there") from error
            raise NotFoundError(f"{image_is} no longer there; import it again") from error
        spec = policy.pin(spec, image)
        await self._fleet.make_room()
        id, now = new_id("sb"), self._clock()
        entry = self._fleet.reserve(
            SandboxRecord(
                id=id,
                env_id=f"{id}-1",
                backend=name,
                spec=spec,
                state="creating",
                running=False,
                created_at=now,
                expires_at=now + ttl,
                source_snapshot_id=None if snapshot is None else snapshot.id,
                latest_at=now + self._settings.max_timeout_seconds,
                metadata=metadata,
                project=None if origin is None else origin.project,
                source=None if origin is None else origin.text,
                commit=None if origin is None else origin.commit,
                commit_bytes=None if origin is None else origin.data_bytes,
            )
        )
        try:
            return await self._fleet.tasks.own(self._build(entry, ttl, origin, memory), f"create {id}")
        except asyncio.CancelledError:
            # It may have become ready in the same moment, and the caller will never learn its id.
            if not entry.gone:
                self._fleet.begin_destroy(entry)
            raise

    async def _build(self, entry: Entry, ttl: int, origin: Origin | None, memory: bool) -> SandboxRecord:
        try:
            async with entry.exclusive("make"):
                await uninterrupted(self._fleet.state.put_sandbox(entry.record, entry.environments))
                backend = self._fleet.backend(entry.record.backend)
                await self._make(backend, entry.record.env_id, entry.record.spec, origin, memory)
                now = self._clock()
                latest = now + self._settings.max_timeout_seconds
                await uninterrupted(
                    entry.commit(self._fleet.state, "ready", expires_at=now + ttl, latest_at=latest, running=True)
                )
                if memory:
                    await self._fleet.learn(entry)
                return entry.record
        except BaseException:
            # Nobody was told the id, or somebody asked for its end: that holds also when it was ready already.
            if not entry.gone:
                await asyncio.wait([self._fleet.begin_destroy(entry)])
            raise

    async def _make(
        self,
        backend: Backend,
        env_id: str,
        spec: SandboxSpec,
        origin: Origin | None,
        memory: bool,
    ) -> None:
        if origin is not None:
            try:
                await self._fleet.workspaces.stand(env_id, origin.commit)
            except NotFoundError:
                await self._require_there(origin)
                raise
            self._fleet.workspaces.know(origin.commit, origin.data_bytes)
        if origin is None:
            await backend.create(env_id, spec)
        elif memory and origin.snapshot is not None:
            try:
                async with self._fleet.checkpoints.use(origin.snapshot) as place:
                    try:
                        await keeping(backend, self._fleet.workspaces).resume(env_id, spec, origin.commit, place)
                    except ConflictError as error:
                        raise unusable(origin.snapshot.id, error.message) from error
            except ConflictError:
                await self._require_there(origin)
                raise
        else:
            limit = max(self._settings.max_snapshot_bytes, origin.data_bytes)
            await keeping(backend, self._fleet.workspaces).begin(env_id, spec, origin.commit, limit)
        if not await backend.is_running(env_id):
            raise BackendError("the new sandbox ended right after its start")

    async def _require_there(self, origin: Origin) -> None:
        """Say so where what is missing was deleted meanwhile."""
        if origin.snapshot is not None:
            await self._fleet.state.get_snapshot(origin.snapshot.id)
