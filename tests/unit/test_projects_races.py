"""Projects and their states while somebody else removes, makes or reads them: each call ends as one of both orders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agent_sandbox.errors import NotFoundError
from agent_sandbox.manager import CreateOptions
from agent_sandbox.store import Created, Layer, Project, Store
from tests.unit.manager_harness import Server, serving


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path / "data") as server:
        yield server


async def nothing() -> AsyncIterator[bytes]:
    for piece in tuple[bytes, ...]():
        yield piece


async def make(server: Server, *names: str) -> None:
    for name in names:
        await server.manager.create_project(name, nothing())


@pytest.mark.parametrize("late", [False, True])
async def test_one_that_is_removed_meanwhile_is_left_out(
    server: Server, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    await make(server, "a", "b")
    layers = Store.layers

    def after(store: Store, project: str) -> Iterator[Layer]:
        found = layers(store, project) if late else None
        if project == "a":
            store.delete_project("a")
        return found or layers(store, project)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Store, "layers", after)
        assert [project.name for project in await server.manager.list_projects()] == ["b"]
        await make(server, "a2")
    await make(server, "a")
    monkeypatch.setattr(Store, "layers", after)
    with pytest.raises(NotFoundError):
        await server.manager.get_project("a", limit=5)
    monkeypatch.undo()
    await make(server, "a")
    monkeypatch.setattr(Store, "layers", after)
    with pytest.raises(NotFoundError):
        await server.manager.create(CreateOptions(project="a"))


async def test_one_that_is_made_meanwhile_is_there_or_not(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made after the first look, whatever that is."""
    projects, layers, made = Store.projects, Store.layers, list[Created]()

    def make(store: Store) -> None:
        if not made:
            made.append(store.init("a"))

    def first_projects(store: Store) -> Iterator[Project]:
        found = list(projects(store))
        make(store)
        return iter(found)

    def first_layers(store: Store, project: str) -> Iterator[Layer]:
        try:
            return iter(list(layers(store, project)))
        finally:
            make(store)

    monkeypatch.setattr(Store, "projects", first_projects)
    monkeypatch.setattr(Store, "layers", first_layers)
    with suppress(NotFoundError):
        await server.manager.get_project("a", limit=5)
    assert made
    assert (await server.manager.get_project("a", limit=5)).name == "a"


async def test_what_was_published_is_told_though_somebody_removed_its_snapshot(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make(server, "a")
    sandbox = await server.manager.create(CreateOptions(project="a"))
    await server.manager.write_file(sandbox.id, "f", b"1", 0o644)
    extend = Store.extend

    def meanwhile(store: Store, project: str, state: str) -> object:
        done = extend(store, project, state)
        loop.call_soon_threadsafe(removing.set)
        assert removed.wait(30)
        return done

    loop, removing, removed = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    monkeypatch.setattr(Store, "extend", meanwhile)
    publishing = asyncio.create_task(server.manager.publish("a", sandbox.id))
    await removing.wait()
    (snapshot,) = await server.manager.list_snapshots()
    await server.manager.delete_snapshot(snapshot.id)
    removed.set()
    assert (await publishing).layer.number == 1


async def test_archives_that_come_slowly_hold_none_up_that_goes(server: Server) -> None:
    """Streamed rollbacks and forks are archives that go."""
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "f", b"1", 0o644)
    snapshot = await server.manager.snapshot(sandbox.id)
    workspaces, ended = server.manager._fleet.workspaces, threading.Event()
    busy = [asyncio.ensure_future(workspaces.receive(lambda *_: ended.wait(60))) for _ in range(9)]
    await server.manager.rollback(sandbox.id, snapshot.id)
    assert not ended.is_set()
    assert not any(one.done() for one in busy)
    ended.set()
    await asyncio.gather(*busy)


async def test_a_sandbox_ends_while_others_send_slowly(server: Server) -> None:
    """Four workspaces that come at their sandboxes' speed keep the next one waiting, but not from being given up."""
    sandboxes = [await server.manager.create(CreateOptions()) for _ in range(5)]
    server.wire.hold("export_workspace")
    taking = []
    for sandbox in sandboxes:
        taking.append(asyncio.create_task(server.manager.snapshot(sandbox.id)))
        await asyncio.sleep(0.1)
    async with asyncio.timeout(30):
        await server.manager.destroy(sandboxes[-1].id)
    with pytest.raises(NotFoundError):
        await taking.pop()
    assert not any(one.done() for one in taking)
    server.wire.free("export_workspace")
    await asyncio.gather(*taking)
