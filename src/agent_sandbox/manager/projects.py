"""Projects of the server: a name over a line of layers in its store, and what ``from`` and ``project`` of a new
sandbox mean.

======================  ================================================================================
``snap…``               a snapshot
``NAME``                the newest layer of a project
``NAME@N``              its layer ``N``, counted from 0
``NAME:BRANCH``         the head of one of its branches, or a tag (``agent-sandbox store`` makes them)
hexadecimal digits      a commit, by 8 or more digits of its id
======================  ================================================================================

Where a project is given beside, ``N`` alone is its layer and any other name its branch.

A layer is never changed and goes with its project alone. What sandboxes began with is kept for them, so a project that
is in use can be deleted: they live on. ``sandboxes`` is the project in which the server keeps their history; it is not
listed, and nobody can name a state of it but by its snapshot.

An archive that becomes a project is read as it comes, into loose objects; one transaction makes the project of them
when it was whole. Its limits: MAX_SNAPSHOT_BYTES of files, an hour, and what the store allows any archive
(``store/tarinput.py``). The number of projects is bounded, because a list gives all of them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from agent_sandbox.errors import ConflictError, InvalidRequestError, LimitExceededError
from agent_sandbox.manager.history import require_commit
from agent_sandbox.manager.merging import Merging
from agent_sandbox.manager.records import SnapshotRecord
from agent_sandbox.manager.workspaces import PROJECT
from agent_sandbox.store import HeadMoved, Layer, Store, UpToDate, refs
from agent_sandbox.store.ports import Progress
from agent_sandbox.store.tarinput import Limits

MAX_PROJECTS = 1_000
MAX_LAYERS = 1_000
"""Layers that one look at a project shows, the newest."""
IMPORT_SECONDS = 3600.0
_ARCHIVE_SLACK = 256 << 20
"""Of headers and padding beside the files of an archive."""
_SANDBOX = re.compile(r"sb[a-z0-9]{16}")
_SNAPSHOT = re.compile(r"snap[a-z0-9]{16}")
_NUMBER = re.compile(r"@?(0|[1-9][0-9]{0,6})")


@dataclass(frozen=True)
class Source:
    """What a workspace begins as: a state of the store, its reference in full, and the project that it is of.

    Of a snapshot there is its record.
    """

    text: str
    commit: str
    project: str | None = None
    snapshot: SnapshotRecord | None = None


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
        _check_name(name)
        limits = Limits(bytes=self._settings.max_snapshot_bytes + _ARCHIVE_SLACK)
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
            return [_look(store, project.name, 1) for project in store.projects() if project.name != PROJECT]

        with self._active():
            return await self._fleet.workspaces.ask(look)

    async def get_project(self, name: str, *, limit: int) -> ProjectRecord:
        """Give a project with its newest layers."""
        _check_name(name)
        with self._active():
            return await self._fleet.workspaces.ask(lambda store: _look(store, name, limit))

    async def delete_project(self, name: str) -> None:
        """Remove a project with its layers and branches. Sandboxes and snapshots that came from it stay."""
        _check_name(name)
        with self._active():
            await self._fleet.workspaces.ask(lambda store: store.delete_project(name))
            self._fleet.workspaces.littered()

    async def publish(self, name: str, state: str) -> Published:
        """Make a state the next layer of a project: a living sandbox's, a snapshot's, or any other reference.

        The state must come from the newest layer: :class:`ConflictError` when the line has moved meanwhile.
        """
        _check_name(name)
        with self._active():
            if not _SANDBOX.fullmatch(state):
                source = await self.source(state)
                assert source is not None
                return await self._fleet.workspaces.ask(lambda store: _publish(store, name, source.commit))
            await self._fleet.workspaces.ask(lambda store: _look(store, name, 1))
            taken = await self.snapshot(state, f"for {name}")
            try:
                commit = require_commit(taken)
                return await self._fleet.workspaces.ask(lambda store: _publish(store, name, commit))
            finally:
                await self.delete_snapshot(taken.id)

    async def source(self, text: str | None, project: str | None = None) -> Source | None:
        """Find what a new workspace shall begin as: None where nothing is asked for.

        :class:`InvalidRequestError` for what is no reference, :class:`NotFoundError` for what is not there.
        """
        if text is None and project is None:
            return None
        if text is not None and _SNAPSHOT.fullmatch(text):
            snapshot = await self._fleet.in_store(text)
            return Source(text, require_commit(snapshot), project, snapshot)
        return await self._fleet.workspaces.ask(lambda store: _find(store, text, project))

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


def _check_name(name: str) -> str:
    refs.check_project(name)
    if name == PROJECT or _SNAPSHOT.fullmatch(name) or _SANDBOX.fullmatch(name):
        raise InvalidRequestError(f"{name!r} cannot be a project: the server uses such names itself")
    return name


def _check_free(store: Store, name: str) -> None:
    names = {project.name for project in store.projects()}
    if name in names:
        raise ConflictError(f"there is a project {name!r} already; to replace it, remove it first")
    if len(names) > MAX_PROJECTS:
        raise LimitExceededError(f"there are {MAX_PROJECTS} projects already; remove one")


def _find(store: Store, text: str | None, project: str | None) -> Source:
    if project is not None:
        _check_name(project)
        number = None if text is None else _NUMBER.fullmatch(text)
        if text is None:
            text = project
        elif number is not None:
            text = f"{project}@{number[1]}"
        elif not refs.parse(text).digits and ":" not in text and "@" not in text:
            text = f"{project}:{text}"
    assert text is not None
    reference = refs.parse(text)
    if reference.project == PROJECT:
        raise InvalidRequestError(f"{PROJECT} is the server's own project; name a snapshot in place of {text!r}")
    if not reference.digits and reference.layer is None and ":" not in text:
        text = f"{reference.project}@{_newest(store, reference.project).number}"
    commit = store.resolve(text).hex()
    next(iter(store.entries(commit)), None)  # says so when the state is gone
    return Source(commit if reference.digits else text, commit, reference.project or project)


def _newest(store: Store, name: str) -> Layer:
    return deque(store.layers(name), maxlen=1)[0]  # a project is made with its layer 0


def _look(store: Store, name: str, limit: int) -> ProjectRecord:
    found = next((project for project in store.projects() if project.name == name), None)
    layers = deque(store.layers(name), maxlen=limit)
    assert found is not None, "listing its layers says when there is none"
    shown = tuple(_shown(store, layer) for layer in reversed(layers))
    return ProjectRecord(name, found.created_ns / 1e9, layers[-1].number + 1, shown)


def _shown(store: Store, layer: Layer) -> LayerRecord:
    (noted,) = store.log(layer.commit.hex(), 1)
    return LayerRecord(layer.number, layer.commit.hex(), noted.commit.time_ns / 1e9)


def _publish(store: Store, name: str, commit: str) -> Published:
    done = store.extend(name, commit)
    if isinstance(done, HeadMoved):
        last = _newest(store, name)
        raise ConflictError(
            f"{name}@{last.number}, the newest layer of the project, is not in the history of this state: merge it into"
            f" the sandbox first (agent-sandbox merge SANDBOX {name}@{last.number}), then add the sandbox",
            details={"layer": last.number, "commit": last.commit.hex()},
        )
    layer = next(layer for layer in store.layers(name) if layer.commit == done.commit)
    return Published("up_to_date" if isinstance(done, UpToDate) else "created", _shown(store, layer))
