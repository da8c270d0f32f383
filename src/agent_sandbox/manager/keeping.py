"""How the workspaces of one backend get into the store, and how environments begin as a state of it: three ways.

::

                      a state is kept                          an environment begins as a state
    layered     held still, read from this host                mounted over layers, or filled from the store
    on a disk   held still, its daemon's changes as a layer    mounted over a drive, by the guest's own kernel
    streamed    its daemon's archive, taken apart (pipe.py)    made empty, then filled with an archive

Which one a backend has, its capability ``layered_workspace`` and its ``projection`` say. Everything else of snapshots
is the same for all: what is stored, what a rollback does, how states are compared, merged and archived.

What differs, and is said in ``docs/design/workspaces.md``: a streamed workspace is read whole each time, while its
processes go on, so what they write meanwhile may be in it or not; unless their memory is kept as well: then they stand
still, and the checkpoint holds the workspace as they see it.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from pathlib import Path

from agent_sandbox.backends.base import Backend
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    SandboxError,
    UnsupportedError,
)
from agent_sandbox.manager.pipe import PATIENCE_SECONDS, Pipe
from agent_sandbox.manager.taken import Outcome, Source
from agent_sandbox.manager.workspaces import Workspaces
from agent_sandbox.store import Store, Upper
from agent_sandbox.store.ports import Progress
from agent_sandbox.store.tarinput import Limits
from agent_sandbox.types import ExportReport, HeldWorkspace, PreparedWorkspace, SandboxSpec

log = logging.getLogger(__name__)

_SLACK = 256 << 20
"""Bytes of an archive beyond twice its files' limit: an honest one needs some 2.5 KiB for each entry beside its data, a
daemon that was taken over could send headers for ever."""
MAX_NAMES_BYTES = 512 << 20
"""Bytes of memory for the names of one archive, which are some 1,250,000: more than that slack has room for."""


class Keeping(abc.ABC):
    """One backend's way. Errors as of the backend and of :class:`Workspaces`."""

    def __init__(self, backend: Backend, workspaces: Workspaces) -> None:
        self.backend = backend
        self.workspaces = workspaces

    @abc.abstractmethod
    def held(self, env_id: str, limit: int, *, memory: str | None = None) -> AbstractAsyncContextManager[Source]:
        """Give the workspace of a running environment, to be read once while the block runs.

        ``limit`` is in bytes of its files. ``memory`` is the directory for a checkpoint of the same moment, which is
        there when the block was left without an error; of backends with the capability ``checkpoint``.
        """

    @abc.abstractmethod
    async def begin(self, env_id: str, spec: SandboxSpec, commit: str, limit: int) -> None:
        """Make an environment whose workspace is a state; ``limit`` is no less than the bytes of its files."""

    @abc.abstractmethod
    async def resume(self, env_id: str, spec: SandboxSpec, commit: str, memory: str) -> None:
        """Make an environment of a state and the checkpoint of the same moment in ``memory``."""

    async def restart(self, env_id: str, spec: SandboxSpec) -> None:
        """Start a stopped environment again; see :meth:`Backend.start_environment`."""
        await self.backend.start_environment(env_id)


class Layered(Keeping):
    """The workspace is a directory on this host."""

    @asynccontextmanager
    async def held(self, env_id: str, limit: int, *, memory: str | None = None) -> AsyncIterator[Source]:
        """Every process stands still while the block runs."""
        if memory is None:
            async with self.backend.hold_workspace(env_id) as held:
                yield from_directory(held)
            return
        async with self.backend.checkpoint(env_id, memory) as kept:
            if kept is None:
                raise BackendError(f"backend {self.backend.name!r} gave no workspace to read")
            yield from_directory(kept)

    async def begin(self, env_id: str, spec: SandboxSpec, commit: str, limit: int) -> None:
        """Nothing is copied where the backend mounts layers."""
        async with self._prepared(commit, spec) as workspace:
            await self.backend.create_from(env_id, spec, workspace)

    async def resume(self, env_id: str, spec: SandboxSpec, commit: str, memory: str) -> None:
        """The processes find the files that they had."""
        async with self._prepared(commit, spec) as workspace:
            await self.backend.restore(env_id, spec, workspace, memory)

    async def restart(self, env_id: str, spec: SandboxSpec) -> None:
        """Layers that somebody removed are laid out again, where the store has what the workspace began with."""
        async with AsyncExitStack() as stack:
            workspace = None
            if self.backend.projection == "overlay" and (commit := await self.workspaces.began(env_id)) is not None:
                try:
                    workspace = await stack.enter_async_context(self._prepared(commit, spec))
                except SandboxError as error:  # layers that are there do not hang on the store
                    log.warning("environment %s starts over the layers that it has: %s", env_id, error)
            await self.backend.start_environment(env_id, workspace)

    @asynccontextmanager
    async def _prepared(self, commit: str, spec: SandboxSpec) -> AsyncIterator[PreparedWorkspace]:
        if self.backend.projection == "copy":
            yield self.workspaces.copied(commit)
            return
        async with self.workspaces.prepared(commit, spec.uid, spec.gid) as workspace:
            yield workspace


class Streamed(Keeping):
    """The workspace comes and goes as an archive, which the sandbox's daemon makes and reads."""

    @asynccontextmanager
    async def held(self, env_id: str, limit: int, *, memory: str | None = None) -> AsyncIterator[Source]:
        """The export begins at once, goes as far as the pipe holds, and ends with the block.

        Its processes go on meanwhile, but for a checkpoint: what they have in memory and what is read is of one moment.
        """
        still = nullcontext() if memory is None else self.backend.checkpoint(env_id, memory)
        async with still, self._exported(env_id, limit) as source:
            yield source

    @asynccontextmanager
    async def _exported(self, env_id: str, limit: int, base: str | None = None) -> AsyncIterator[Source]:
        """Send the workspace, or where it can be said so what differs in it from the state ``base``."""
        pipe = Pipe()
        reports: list[ExportReport] = []
        as_changes: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def decide(changes: bool) -> None:
            if not as_changes.done():
                as_changes.set_result(changes)

        async def write_changes(data: bytes) -> None:
            decide(True)
            await pipe.write(data)

        async def export() -> None:
            try:
                if base is not None:
                    try:
                        reports.append(await self.backend.export_changes(env_id, write_changes, limit))
                    except ConflictError as error:
                        if as_changes.done():
                            raise
                        log.info("environment %s is read whole: %s", env_id, error.message)
                if not reports:
                    decide(False)
                    reports.append(await self.backend.export_workspace(env_id, pipe.write, limit))
            except BaseException as error:
                decide(False)
                pipe.end(error)
                raise
            pipe.end()

        def read(store: Store, branch: str, progress: Progress, _: bytes | None) -> Outcome:
            limits = Limits(bytes=2 * limit + _SLACK, memory=MAX_NAMES_BYTES)
            try:
                if under is None:
                    kept = store.import_tar(branch, pipe.reader(progress), limits=limits, progress=progress)
                else:
                    kept = store.import_layer(
                        branch, pipe.reader(progress), limits=limits, progress=progress, under=under
                    )
            except InvalidRequestError as error:  # nobody asked for this archive: the sandbox made it
                raise BackendError(f"the workspace that the sandbox sent cannot be kept: {error.message}") from error
            except NotFoundError as error:
                raise BackendError(f"{error.message}; take the snapshot again") from error
            return kept, reports[0]

        exporting = asyncio.create_task(export(), name=f"export {env_id}")
        try:
            under = base if await _in_time(as_changes) else None
            yield Source(read, paced=True)
        finally:
            pipe.close()
            exporting.cancel()
            await asyncio.wait([exporting])
            if not exporting.cancelled():
                exporting.exception()  # who read has it

    async def resume(self, env_id: str, spec: SandboxSpec, commit: str, memory: str) -> None:
        """The checkpoint holds the workspace too: its bytes and the commit's are of one moment."""
        await self.backend.restore(env_id, spec, PreparedWorkspace(), memory)

    async def begin(self, env_id: str, spec: SandboxSpec, commit: str, limit: int) -> None:
        """The caller removes the environment when it could not be filled."""
        await self.backend.create(env_id, spec)
        try:
            async with aclosing(self.workspaces.archive(commit)) as pieces:
                await self.backend.import_workspace(env_id, pieces, limit)
            if self.backend.capabilities.guest:  # what was written may fail late, where a disk is promised twice
                await self.backend.sync(env_id)
        except InvalidRequestError as error:
            raise BackendError(f"the sandbox does not take the state: {error.message}") from error


class Disk(Streamed):
    """The workspace is on a drive of a guest's, over another one that shows the state that it began with."""

    @asynccontextmanager
    async def held(self, env_id: str, limit: int, *, memory: str | None = None) -> AsyncIterator[Source]:
        """Every process stands still while the block runs. What changed since the beginning is sent, and no more.

        The whole is sent of a workspace that began empty, whose first state is gone, or whose changes a layer does not
        express: a renamed directory, a file of the state that has several names.
        """
        still = nullcontext() if memory is None else self.backend.checkpoint(env_id, memory)
        async with still, self.backend.hold_changes(env_id) as base:
            known = base if base is not None and await self._has(base) else None
            async with self._exported(env_id, limit, known) as source:
                yield source

    async def _has(self, state: str) -> bool:
        return await self.workspaces.ask(lambda store: store.has(state))

    async def begin(self, env_id: str, spec: SandboxSpec, commit: str, limit: int) -> None:
        """Nothing is moved but where a drive cannot show the state."""
        try:
            await self.backend.create_from(env_id, spec, self.workspaces.copied(commit))
        except UnsupportedError:
            await super().begin(env_id, spec, commit, limit)


async def _in_time(decided: asyncio.Future[bool]) -> bool:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await decided
    except TimeoutError:
        raise BackendError("the sandbox does not send its workspace") from None


def keeping(backend: Backend, workspaces: Workspaces) -> Keeping:
    """Give the way of a backend that has been started."""
    if not backend.capabilities.layered_workspace:
        return Streamed(backend, workspaces)
    return (Disk if backend.projection == "disk" else Layered)(backend, workspaces)


def from_directory(held: HeldWorkspace) -> Source:
    """Read a workspace that is held still."""

    def read(store: Store, branch: str, progress: Progress, below: bytes | None) -> Outcome:
        upper = Upper(Path(held.upper), below) if held.upper and below else None
        return store.commit(branch, Path(held.path), fresh=held.mapped, upper=upper, progress=progress), None

    return Source(read)
