"""How the workspaces of one backend get into the store, and how environments begin as a state of it: two ways.

::

                      a state is kept                          an environment begins as a state
    layered     held still, read from this host                mounted over layers, or filled from the store
    streamed    its daemon's archive, taken apart (pipe.py)    made empty, then filled with an archive

Which one a backend has, its capability ``layered_workspace`` says. Everything else of snapshots is the same for all:
what is stored, what a rollback does, how states are compared, merged and archived.

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
from agent_sandbox.errors import BackendError, InvalidRequestError, SandboxError
from agent_sandbox.manager.pipe import Pipe
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
    async def _exported(self, env_id: str, limit: int) -> AsyncIterator[Source]:
        pipe = Pipe()
        reports: list[ExportReport] = []

        async def export() -> None:
            try:
                reports.append(await self.backend.export_workspace(env_id, pipe.write, limit))
            except BaseException as error:
                pipe.end(error)
                raise
            pipe.end()

        def read(store: Store, branch: str, progress: Progress, _: bytes | None) -> Outcome:
            limits = Limits(bytes=2 * limit + _SLACK, memory=MAX_NAMES_BYTES)
            try:
                kept = store.import_tar(branch, pipe.reader(progress), limits=limits, progress=progress)
            except InvalidRequestError as error:  # nobody asked for this archive: the sandbox made it
                raise BackendError(f"the workspace that the sandbox sent cannot be kept: {error.message}") from error
            return kept, reports[0]

        exporting = asyncio.create_task(export(), name=f"export {env_id}")
        try:
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


def keeping(backend: Backend, workspaces: Workspaces) -> Keeping:
    """Give the way of a backend that has been started."""
    return (Layered if backend.capabilities.layered_workspace else Streamed)(backend, workspaces)


def from_directory(held: HeldWorkspace) -> Source:
    """Read a workspace that is held still."""

    def read(store: Store, branch: str, progress: Progress, below: bytes | None) -> Outcome:
        upper = Upper(Path(held.upper), below) if held.upper and below else None
        return store.commit(branch, Path(held.path), fresh=held.mapped, upper=upper, progress=progress), None

    return Source(read)
