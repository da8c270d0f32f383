"""Projects of the server: a name over a line of layers in its store. How their states are named: ``references.py``.

A layer is never changed and goes with its project alone. What sandboxes began with is kept for them, so a project that
is in use can be deleted: they live on. ``sandboxes`` is the server's own and not listed.

An archive that becomes a project is read as it comes, into loose objects; one transaction makes the project of them
when it was whole. Its limits: MAX_SNAPSHOT_BYTES of files, an hour, as much memory for names as a workspace's archive
may take (``keeping.py``), and what the store allows any archive (``store/tarinput.py``). The number of projects is
bounded, because a list gives all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from agent_sandbox.errors import ConflictError, InvalidRequestError, LimitExceededError, NotFoundError
from agent_sandbox.manager.history import require_commit
from agent_sandbox.manager.keeping import MAX_NAMES_BYTES
from agent_sandbox.manager.merging import Merging
from agent_sandbox.manager.records import SnapshotRecord
from agent_sandbox.manager.references import SANDBOX_ID, check_project, newest, require_project
from agent_sandbox.manager.workspaces import PROJECT
from agent_sandbox.store import HeadMoved, Layer, Store, UpToDate
from agent_sandbox.store.ports import Progress
from agent_sandbox.store.tarinput import Limits

MAX_PROJECTS = 1_000
MAX_LAYERS = 1_000
"""Layers that one look at a project shows, the newest."""
IMPORT_SECONDS = 3600.0
_ARCHIVE_SLACK = 256 << 20
"""Of headers and padding beside the files of an archive."""


@dataclass(frozen=True)
class LayerRecord:
    """One layer; ``created_at`` is when its state was made, in seconds since the epoch."""

    number: int
    commit: str
    created_at: float


@dataclass(frozen=True)
class ProjectRecord:
    """One project: how many layers it has, and the newest of them first."""

    name: str
    created_at: float
    count: int
    layers: tuple[LayerRecord, ...]


@dataclass(frozen=True)
class Published:
    """``created`` a layer, or ``up_to_date``: the state is that layer already."""

    outcome: Literal["created", "up_to_date"]
    layer: LayerRecord


class Projects(Merging):
    """The calls on projects. They hold no sandbox up, but for the snapshot when a living one is published."""

    async def create_project(self, name: str, archive: AsyncIterator[bytes]) -> ProjectRecord:
        """Make a project whose layer 0 is what is in a tar, plain or compressed; without any bytes it is empty.

        :class:`ConflictError` when the name is taken; :class:`InvalidRequestError` for a name that cannot be one and
        an archive that is broken or hostile; :class:`PayloadTooLargeError` above the limits;
        :class:`LimitExceededError` above 1,000 projects and on a full disk. Nothing is made then.
        """
        check_project(name)
        limits = Limits(bytes=self._settings.max_snapshot_bytes + _ARCHIVE_SLACK, memory=MAX_NAMES_BYTES)
        with self._active():
            await self._fleet.make_room()
            await self._fleet.workspaces.ask(lambda store: _check_free(store, name))
            first = await anext(archive, None)
            file = Pulled(first or b"", archive, asyncio.get_running_loop())

            def make(store: Store, progress: Progress) -> ProjectRecord:
                if first is None:
                    store.init(name)
                else:
                    store.init_tar(
                        name,
                        file,
                        max_bytes=self._settings.max_snapshot_bytes,
                        limits=limits,
                        progress=progress,
                    )
                return _look(store, name, 1)

            return await self._fleet.workspaces.receive(make)

    async def list_projects(self) -> list[ProjectRecord]:
        """Give the projects by name, each with its newest layer."""

        def look(store: Store) -> list[ProjectRecord]:
            found = []
            for project in store.projects():
                if project.name != PROJECT:
                    with suppress(NotFoundError):  # removed since
                        found.append(_look(store, project.name, 1))
            return found

        with self._active():
            return await self._fleet.workspaces.ask(look)

    async def get_project(self, name: str, *, limit: int) -> ProjectRecord:
        """Give a project with its newest layers."""
        check_project(name)
        with self._active():
            return await self._fleet.workspaces.ask(lambda store: _find(store, name, limit))

    async def delete_project(self, name: str) -> None:
        """Remove a project with its layers and branches. Sandboxes and snapshots that came from it stay."""
        check_project(name)

        def delete(store: Store) -> None:
            require_project(store, name)
            store.delete_project(name)

        with self._active():
            await self._fleet.workspaces.ask(delete)
            self._fleet.workspaces.littered()

    async def publish(self, name: str, state: str) -> Published:
        """Make a state the next layer of a project: a living sandbox's, a snapshot's, or any other reference.

        The state must come from the newest layer: :class:`ConflictError` when the line has moved meanwhile.
        """
        check_project(name)
        with self._active():
            if not SANDBOX_ID.fullmatch(state):
                origin = await self.origin(state)
                return await self._fleet.workspaces.ask(lambda store: _publish(store, name, origin.commit))
            await self._fleet.workspaces.ask(lambda store: _find(store, name, 1))
            taken = await self.snapshot(state, f"for {name}")
            try:
                commit = require_commit(taken)
                return await self._fleet.workspaces.ask(lambda store: _publish(store, name, commit))
            finally:
                with suppress(NotFoundError):  # whoever saw it in a list may have removed it
                    await self.delete_snapshot(taken.id)

    async def snapshot(self, id: str, name: str | None = None) -> SnapshotRecord:
        """Take a snapshot; see the manager."""
        raise NotImplementedError

    async def delete_snapshot(self, id: str) -> None:
        """Delete one; see the manager."""
        raise NotImplementedError


class Pulled:
    """What an archive is read from on a thread: pieces that a coroutine of the loop gives, until the time is over."""

    def __init__(self, first: bytes, pieces: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._rest = memoryview(first)
        self._pieces = pieces
        self._loop = loop
        self._latest = time.monotonic() + IMPORT_SECONDS

    def read(self, size: int, /) -> bytes:
        """Give at most ``size`` bytes, none at the end."""
        while not self._rest:
            if time.monotonic() > self._latest:
                raise InvalidRequestError(f"the archive took longer than {IMPORT_SECONDS:g} s; send a smaller one")
            piece = asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()
            if piece is None:
                return b""
            self._rest = memoryview(piece)
        part, self._rest = self._rest[:size], self._rest[size:]
        return bytes(part)

    async def _next(self) -> bytes | None:
        return await anext(self._pieces, None)


def _check_free(store: Store, name: str) -> None:
    names = {project.name for project in store.projects()}
    if name in names:
        raise ConflictError(f"there is a project {name!r} already; to replace it, remove it first")
    if len(names) > MAX_PROJECTS:
        raise LimitExceededError(f"there are {MAX_PROJECTS} projects already; remove one")


def _find(store: Store, name: str, limit: int) -> ProjectRecord:
    require_project(store, name)
    return _look(store, name, limit)


def _look(store: Store, name: str, limit: int) -> ProjectRecord:
    layers = deque(store.layers(name), maxlen=limit)
    found = next((project for project in store.projects() if project.name == name), None)
    if found is None or not layers:
        raise NotFoundError(f"project {name!r} was removed meanwhile")
    shown = tuple(_shown(store, layer) for layer in reversed(layers))
    return ProjectRecord(name, found.created_ns / 1e9, layers[-1].number + 1, shown)


def _shown(store: Store, layer: Layer) -> LayerRecord:
    (noted,) = store.log(layer.commit.hex(), 1)
    return LayerRecord(layer.number, layer.commit.hex(), noted.commit.time_ns / 1e9)


def _publish(store: Store, name: str, commit: str) -> Published:
    require_project(store, name)
    done = store.extend(name, commit)
    if isinstance(done, HeadMoved):
        last = newest(store, name)
        raise ConflictError(
            f"{name}@{last.number}, the newest layer of the project, is not in the history of this state: merge it into"
            f" the sandbox first (agent-sandbox merge SANDBOX {name}@{last.number}), then add the sandbox",
            details={"layer": last.number, "commit": last.commit.hex()},
        )
    layer = next((layer for layer in store.layers(name) if layer.commit == done.commit), None)
    if layer is None:
        raise NotFoundError(f"project {name!r} was removed meanwhile")
    return Published("up_to_date" if isinstance(done, UpToDate) else "created", _shown(store, layer))
