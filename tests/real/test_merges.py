"""Merges that fail on the way, on the embedded backend below a manager of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.config import load_settings
from agent_sandbox.errors import BackendError, NotFoundError, PayloadTooLargeError
from agent_sandbox.manager import CreateOptions, ForkOptions, Manager

pytestmark = pytest.mark.real


class World:
    """A sandbox, and the snapshot of a fork that can be merged into it."""

    def __init__(self, data: Path) -> None:
        settings = load_settings({"data_dir": data, "max_snapshot_bytes": 150_000}, {})
        self.backend = OciBackend(settings)
        self.manager = Manager(settings, {"runc": self.backend})

    async def begin(self) -> None:
        await self.manager.start()
        self.id = (await self.manager.create(CreateOptions(memory_mb=64, disk_mb=64))).id
        base = await self.manager.snapshot(self.id)
        fork = await self.manager.fork(base.id, ForkOptions())
        await self.run(fork.id, "head -c 100000 /dev/zero | tr '\\0' x > theirs")
        self.theirs = (await self.manager.snapshot(fork.id)).id
        await self.manager.destroy(fork.id)
        await self.run(self.id, "echo 1 > ours; (sleep 1000 &)")

    async def end(self) -> None:
        for record in await self.manager.list_sandboxes():
            await self.manager.destroy(record.id)
        await self.manager.settle()
        await self.manager.close()

    async def run(self, id: str, command: str) -> str:
        done = await self.manager.exec(id, command)
        assert done.exit.code == 0, done
        return done.stdout.decode()

    async def is_as_it_was(self) -> None:
        """The workspace, its processes, the snapshots and what the store keeps are those from before the merge."""
        assert await self.run(self.id, "cat *; pgrep -cx sleep") == "1\n1\n"
        assert len(await self.manager.list_snapshots()) == 2
        store = self.manager._fleet.workspaces
        pins, refs = await store.ask(lambda it: (list(it.pins()), list(it.refs("sandboxes"))))
        assert {pin.name for pin in pins} == {record.id for record in await self.manager.list_snapshots()}
        assert {ref.name for ref in refs} == {"main", (await self.manager.get(self.id)).env_id}
        found = await self.manager.changes(self.id, limit=9, text=False)
        assert [change.path for change in found.changes] == ["/workspace/ours"]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "data")
    try:
        await world.begin()
        yield world
    finally:
        await world.end()


async def test_a_merge_whose_environment_cannot_be_made_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise BackendError("no room for an environment")

    with monkeypatch.context() as patch:
        patch.setattr(world.backend, "create_from", refuse)
        with pytest.raises(BackendError, match="no room"):
            await world.manager.merge(world.id, world.theirs)
    await world.is_as_it_was()
    assert (await world.manager.merge(world.id, world.theirs)).outcome == "merged"
    assert await world.run(world.id, "ls") == "ours\ntheirs\n"


async def test_a_merge_that_is_cancelled_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = asyncio.Event()

    async def wait(*_: Any) -> None:
        arrived.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(world.backend, "create_from", wait)
        merge = asyncio.create_task(world.manager.merge(world.id, world.theirs))
        await arrived.wait()
        merge.cancel()
        with pytest.raises(asyncio.CancelledError):
            await merge
    await world.is_as_it_was()


async def test_a_result_that_is_too_large_is_refused(world: World) -> None:
    await world.run(world.id, "head -c 100000 /dev/zero | tr '\\0' y > large")
    with pytest.raises(PayloadTooLargeError, match="merged workspace"):
        await world.manager.merge(world.id, world.theirs)
    await world.run(world.id, "rm large")
    await world.is_as_it_was()


async def test_a_sandbox_that_is_destroyed_meanwhile_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = asyncio.Event()

    async def wait(*_: Any) -> None:
        arrived.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(world.backend, "create_from", wait)
    merge = asyncio.create_task(world.manager.merge(world.id, world.theirs))
    await arrived.wait()
    await world.manager.destroy(world.id)
    with pytest.raises(NotFoundError):
        await merge
    assert len(await world.manager.list_snapshots()) == 2
    assert [id for id in await world.backend.list_ids() if await world.backend.is_running(id)] == []
