"""The manager: public calls on sandboxes and snapshots, over any backend.

The rules
---------
* A sandbox's record is on the disk before its environment exists, and its environment is gone before its record is.
  So an environment without a record is an orphan, and a crash at any moment leaks nothing.
* What a caller was told is on the disk. What is cancelled or fails is undone before the caller learns of it, or goes
  on being undone in a tracked task.
* Commands and files take no lock and no database: they find their environment in memory, and afterwards look whether
  it is still the sandbox's. If not, the caller is told so, whatever the guest said.
* Rollback builds aside: a new environment is made, filled, checked, and put in place by one transaction. Until then
  nothing of the old one is touched.

Lifecycle states are in ``lifecycle.py``, the order of calls on one sandbox in ``entries.py``, what happens at start
and on every sweep in ``fleet.py``. This file is longer than its neighbours because every public call stands in it.
"""

from __future__ import annotations

import asyncio
import secrets
import string
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

from agent_sandbox.backends.base import Backend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, InvalidRequestError, PayloadTooLargeError, SandboxError
from agent_sandbox.manager import policy
from agent_sandbox.manager.entries import Entry
from agent_sandbox.manager.fleet import Fleet
from agent_sandbox.manager.policy import CreateOptions, ForkOptions
from agent_sandbox.manager.records import BackendStatus, CommandResult, SandboxRecord, SnapshotRecord
from agent_sandbox.manager.snapshots import MissingFileError
from agent_sandbox.manager.tasks import uninterrupted
from agent_sandbox.types import WORKSPACE, ExecEvent, ExecExit, ExecOutput, FileEntry, SandboxSpec

_T = TypeVar("_T")

_ID_ALPHABET = string.ascii_lowercase + string.digits
_ID_LENGTH = 16  # 82 bits: not to be guessed, and never met twice

_PING_SECONDS = 5.0


class Manager:
    """Owns every sandbox and snapshot of one DATA_DIR. The first backend is the default.

    Use it from one event loop, between :meth:`start` and :meth:`close`. ``clock`` gives seconds since the epoch.
    Every method raises :class:`~agent_sandbox.errors.SandboxError` only; an unknown or expired id is a
    :class:`~agent_sandbox.errors.NotFoundError`.
    """

    def __init__(
        self, settings: Settings, backends: Mapping[str, Backend], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._fleet = Fleet(settings, backends, clock)
        self._calls = 0
        self._last_active = time.monotonic()

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
        (image); :class:`LimitExceededError` above MAX_SANDBOXES. On failure and cancellation nothing is left.
        """
        with self._active():
            known = {name: backend.capabilities for name, backend in self._fleet.backends.items()}
            name = policy.choose_backend(options, known)
            spec = policy.build_spec(options, self._settings, name, known[name])
            ttl = policy.time_to_live(options.timeout_seconds, self._settings)
            return await self._launch(name, spec, ttl, None)

    async def fork(self, snapshot_id: str, options: ForkOptions) -> SandboxRecord:
        """Create a sandbox from a snapshot: its spec with ``options`` over it, its workspace, a new time to live.

        Errors as of :meth:`create`; :class:`NotFoundError` also when the snapshot's image is no longer there. Where it
        was pinned, its content counts, not what its name leads to now.
        """
        with self._active():
            snapshot = await self._fleet.state.get_snapshot(snapshot_id)
            capabilities = self._fleet.backend(snapshot.backend).capabilities
            spec = policy.fork_spec(snapshot.spec, options, self._settings, snapshot.backend, capabilities)
            ttl = policy.time_to_live(options.timeout_seconds, self._settings)
            return await self._launch(snapshot.backend, spec, ttl, snapshot)

    async def get(self, id: str) -> SandboxRecord:
        """Give one sandbox, with ``running`` as the backend sees it now."""
        with self._active():
            entry = self._fleet.find(id)
            await self._fleet.observe(entry)
            return self._fleet.find(id).record

    async def list_sandboxes(self) -> list[SandboxRecord]:
        """Give every sandbox by ``created_at``, those included that are being created or destroyed."""
        with self._active():
            await self._fleet.observe_all(entry for entry in self._fleet.entries.values() if not entry.expired)
            records = [entry.record for entry in self._fleet.entries.values() if not entry.expired]
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
            await uninterrupted(entry.renew(self._fleet.state, self._clock() + ttl))
            return entry.record

    # Commands

    def exec_stream(
        self,
        id: str,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[ExecEvent, None]:
        """Run a command: output as it arrives, then exactly one exit. Close the generator to end the command's tree.

        What is wrong with the request is raised by the call itself; what the backend refuses (a missing ``workdir``: an
        :class:`InvalidRequestError`) with the first item. A sandbox that is destroyed or rolled back meanwhile gives
        :class:`NotFoundError` or :class:`ConflictError` in place of the exit.
        """
        self._fleet.usable(id)
        return self._events(
            id,
            policy.command_argv(command),
            policy.validate_env(env or {}),
            WORKSPACE if workdir is None else policy.normalize_path(workdir),
            policy.exec_timeout(timeout_seconds, self._settings),
        )

    async def exec(
        self,
        id: str,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout_seconds: float | None = None,
    ) -> CommandResult:
        """Run a command to its end. Output beyond MAX_EXEC_OUTPUT_BYTES of both streams is drained and dropped."""
        started = time.monotonic()
        kept = {"stdout": bytearray(), "stderr": bytearray()}
        room, truncated = self._settings.max_exec_output_bytes, False
        events = self.exec_stream(id, command, env=env, workdir=workdir, timeout_seconds=timeout_seconds)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ExecExit):
                    duration = round((time.monotonic() - started) * 1000)
                    return CommandResult(bytes(kept["stdout"]), bytes(kept["stderr"]), event, truncated, duration)
                kept[event.stream] += event.data[:room]
                truncated = truncated or len(event.data) > room
                room -= min(room, len(event.data))
        raise AssertionError("a stream of events ends with an exit or an error")

    async def _events(
        self, id: str, argv: list[str], env: Mapping[str, str], workdir: str, timeout: float
    ) -> AsyncGenerator[ExecEvent, None]:
        with self._active():
            entry, backend = self._fleet.usable(id)
            env_id = entry.record.env_id
            try:
                stream = backend.exec(env_id, argv, env=env, workdir=workdir, timeout_seconds=timeout)
                async with aclosing(stream) as events:
                    async for event in events:
                        if isinstance(event, ExecOutput):
                            yield event
                            continue
                        if (ended := entry.ended(env_id)) is not None:
                            raise ended
                        yield event
                        return
            except SandboxError as error:
                if (ended := entry.ended(env_id)) is not None:
                    raise ended from error
                raise
            raise entry.ended(env_id) or BackendError("the command ended and the guest did not say how")

    # Files

    async def read_file(self, id: str, path: str) -> bytes:
        """Give a file's bytes. :class:`PayloadTooLargeError` above MAX_FILE_BYTES."""
        full = policy.normalize_path(path)
        return await self._on(id, lambda backend, env: backend.read_file(env, full, self._settings.max_file_bytes))

    async def write_file(self, id: str, path: str, data: bytes, mode: int) -> FileEntry:
        """Create or replace a file inside ``/workspace``. Waits while a snapshot or rollback is under way."""
        full, mode = policy.require_in_workspace(path), policy.file_mode(mode)
        if len(data) > self._settings.max_file_bytes:
            raise PayloadTooLargeError(f"a file may have at most {self._settings.max_file_bytes} bytes")
        entry, _ = self._fleet.usable(id)
        async with entry.gate.passing():
            return await self._on(id, lambda backend, env: backend.write_file(env, full, data, mode))

    async def list_files(self, id: str, path: str) -> tuple[str, list[FileEntry]]:
        """Give the absolute path of a directory and its direct children by name."""
        full = policy.normalize_path(path)
        return full, await self._on(id, lambda backend, env: backend.list_files(env, full))

    async def _on(self, id: str, call: Callable[[Backend, str], Awaitable[_T]]) -> _T:
        with self._active():
            entry, backend = self._fleet.usable(id)
            env_id = entry.record.env_id
            try:
                return await call(backend, env_id)
            except SandboxError as error:
                if (ended := entry.ended(env_id)) is not None:
                    raise ended from error
                raise

    # Snapshots

    async def snapshot(self, id: str, name: str | None = None) -> SnapshotRecord:
        """Keep the workspace as it is. When it returns, the snapshot survives ``kill -9`` and a power loss.

        :class:`PayloadTooLargeError` above MAX_SNAPSHOT_BYTES; :class:`LimitExceededError` when the disk is full. On
        failure nothing is left; a call that is cancelled in its last moment may leave the finished snapshot.
        """
        name = policy.snapshot_name(name)
        with self._active():
            return await self._fleet.tasks.own(self._take(self._fleet.find(id), name), f"snapshot {id}")

    async def _take(self, entry: Entry, name: str | None) -> SnapshotRecord:
        async with entry.exclusive("use"), entry.gate.closed():
            record, backend = entry.record, self._fleet.backend(entry.record.backend)
            id, limit = _new_id("snap"), self._settings.max_snapshot_bytes
            created_at = self._clock()
            stored = await self._fleet.snapshots.save(
                id, lambda sink: backend.export_workspace(record.env_id, sink, limit), limit
            )
            snapshot = SnapshotRecord(
                id=id,
                sandbox_id=record.id,
                name=name,
                backend=record.backend,
                spec=record.spec,
                size_bytes=stored.report.file_bytes,
                stored_bytes=stored.stored_bytes,
                created_at=created_at,
                skipped=stored.report.skipped,
                skipped_total=stored.report.skipped_total,
                digest=stored.digest,
            )
            await uninterrupted(self._keep(snapshot))
            return snapshot

    async def _keep(self, snapshot: SnapshotRecord) -> None:
        try:
            await self._fleet.state.put_snapshot(snapshot)
        except SandboxError:
            await self._fleet.snapshots.delete(snapshot.id)
            raise

    async def list_snapshots(self, sandbox_id: str | None = None) -> list[SnapshotRecord]:
        """Give the snapshots by ``created_at``: all, or those of one sandbox, which need not live any more."""
        with self._active():
            return await self._fleet.state.list_snapshots(sandbox_id)

    async def get_snapshot(self, id: str) -> SnapshotRecord:
        """Give one snapshot."""
        with self._active():
            return await self._fleet.state.get_snapshot(id)

    async def delete_snapshot(self, id: str) -> None:
        """Remove a snapshot. A rollback or fork that reads it at this moment ends well."""
        with self._active():
            await uninterrupted(self._drop(id))

    async def _drop(self, id: str) -> None:
        if not await self._fleet.state.delete_snapshot(id):
            await self._fleet.state.get_snapshot(id)
        await self._fleet.snapshots.delete(id)

    async def rollback(self, id: str, snapshot_id: str) -> SandboxRecord:
        """Put a snapshot's workspace in place of a sandbox's; every process in it ends. Id, spec, expiry and env stay.

        Any failure leaves the sandbox as it was, its processes included.
        """
        with self._active():
            entry = self._fleet.find(id)
            snapshot = await self._fleet.state.get_snapshot(snapshot_id)
            return await self._fleet.tasks.own(self._roll_back(entry, snapshot), f"rollback {id}")

    async def _roll_back(self, entry: Entry, snapshot: SnapshotRecord) -> SandboxRecord:
        async with entry.exclusive("rollback"), entry.gate.closed():
            backend = self._fleet.backend(entry.record.backend)
            old = entry.record.env_id
            entry.environments += 1
            new = f"{entry.record.id}-{entry.environments}"
            try:
                await uninterrupted(entry.commit(self._fleet.state, "rollback"))
                await self._make(backend, new, entry.record.spec, snapshot)
                await uninterrupted(
                    entry.commit(self._fleet.state, "settled", env_id=new, source_snapshot_id=snapshot.id, running=True)
                )
            finally:
                is_swapped = entry.record.env_id == new
                if entry.state == "rolling_back":
                    entry.mark("settled")
                self._fleet.retire(entry, old if is_swapped else new)
                if not is_swapped:
                    await self._fleet.retired(entry)
            return entry.record

    # Health

    async def ping(self) -> None:
        """Raise :class:`BackendError` when the default backend does not answer."""
        await self._fleet.backend(self._fleet.default).ping()

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
            return BackendStatus(name, name == self._fleet.default, backend.capabilities, not message, message)

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

    async def _launch(self, name: str, spec: SandboxSpec, ttl: int, snapshot: SnapshotRecord | None) -> SandboxRecord:
        backend = self._fleet.backend(name)
        spec = policy.pin(spec, await backend.resolve_image(spec.image_digest or spec.image))
        await self._fleet.make_room()
        id, now = _new_id("sb"), self._clock()
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
            )
        )
        try:
            return await self._fleet.tasks.own(self._build(entry, ttl, snapshot), f"create {id}")
        except asyncio.CancelledError:
            # It may have become ready in the same moment, and the caller will never learn its id.
            if not entry.gone:
                self._fleet.begin_destroy(entry)
            raise

    async def _build(self, entry: Entry, ttl: int, snapshot: SnapshotRecord | None) -> SandboxRecord:
        try:
            async with entry.exclusive("make"):
                await uninterrupted(self._fleet.state.put_sandbox(entry.record, entry.environments))
                backend = self._fleet.backend(entry.record.backend)
                await self._make(backend, entry.record.env_id, entry.record.spec, snapshot)
                deadline = self._clock() + ttl
                await uninterrupted(entry.commit(self._fleet.state, "ready", expires_at=deadline, running=True))
                return entry.record
        except BaseException:
            # Nobody was told the id, or somebody asked for its end: that holds also when it was ready already.
            if not entry.gone:
                await asyncio.wait([self._fleet.begin_destroy(entry)])
            raise

    async def _make(self, backend: Backend, env_id: str, spec: SandboxSpec, snapshot: SnapshotRecord | None) -> None:
        await backend.create(env_id, spec)
        if snapshot is not None:
            await self._fill(backend, env_id, snapshot)
        if not await backend.is_running(env_id):
            raise BackendError("the new sandbox ended right after its start")

    async def _fill(self, backend: Backend, env_id: str, snapshot: SnapshotRecord) -> None:
        limit = max(self._settings.max_snapshot_bytes, snapshot.size_bytes)
        try:
            async with self._fleet.snapshots.open(snapshot.id, snapshot.stored_bytes, snapshot.digest) as archive:
                try:
                    async with aclosing(archive.blocks()) as blocks:
                        await backend.import_workspace(env_id, blocks, limit)
                except SandboxError as error:
                    await archive.verify()  # a damaged file explains the failure better than the importer can
                    if isinstance(error, InvalidRequestError):
                        # A guest wrote the archive, not who asks for it now.
                        raise BackendError(f"snapshot {snapshot.id} cannot be restored: {error.message}") from error
                    raise
                await archive.verify()
        except MissingFileError:
            await self._fleet.state.get_snapshot(snapshot.id)  # says so when it was deleted a moment ago
            raise

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._last_active = time.monotonic()


def _new_id(prefix: str) -> str:
    return prefix + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
