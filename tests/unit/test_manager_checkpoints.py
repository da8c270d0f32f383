"""Snapshots with memory: what goes on, what belongs together, what is refused, and what a crash or a failure leaves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError, NotFoundError, UnsupportedError
from agent_sandbox.manager import CommandOptions, CreateOptions, ForkOptions, Manager, SandboxRecord
from agent_sandbox.manager.state import StateStore
from agent_sandbox.types import ExecOutput
from tests.unit.checkpoint_backend import CheckpointBackend, StreamedCheckpointBackend
from tests.unit.manager_harness import Clock, make_settings


class World:
    """One backend with checkpoints and one without, and managers that come and go over them."""

    def __init__(self, tmp_path: Path, kind: type[CheckpointBackend]) -> None:
        self.settings = make_settings(tmp_path / "data", backends=("kept", "fake"), min_free_mb=0)
        self.clock = Clock()
        self.kept = kind(self.settings, tmp_path / "scratch")
        self.fake = FakeBackend(self.settings)
        self.place = tmp_path / "data" / "checkpoints"
        self.manager: Manager

    async def start(self) -> Manager:
        self.manager = Manager(self.settings, {"kept": self.kept, "fake": self.fake}, clock=self.clock)
        await self.manager.start()
        return self.manager

    async def counting(self, **options: Any) -> tuple[SandboxRecord, str]:
        """A sandbox in which a counter runs, and the id of its command."""
        sandbox = await self.manager.create(CreateOptions(**options))
        command = await self.manager.start_exec(sandbox.id, CommandOptions(command=["count"], detach=True, tag="n"))
        await self.number(sandbox.id, command.id, 3)
        return sandbox, command.id

    async def number(self, id: str, exec_id: str, least: int) -> int:
        """What a counter has come to, once that is at least so much; it never leaves one out."""
        async with asyncio.timeout(20):
            while True:
                printed = b""
                async for event in self.manager.attach_exec(id, exec_id, cursor=0, follow=False):
                    if isinstance(event, ExecOutput):
                        printed += event.data
                numbers = [int(line) for line in printed.split()]
                assert numbers == list(range(1, len(numbers) + 1))
                if len(numbers) >= least:
                    return len(numbers)
                await asyncio.sleep(0.01)

    def checkpoints(self) -> set[str]:
        return {path.name for path in self.place.iterdir()}


@pytest.fixture(params=[CheckpointBackend, StreamedCheckpointBackend], ids=["layered", "streamed"])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world = World(tmp_path, request.param)
    await world.start()
    yield world
    await world.manager.close()
    for backend in (world.kept, world.fake):
        await backend.close()
        for id in await backend.list_ids():
            await backend.destroy(id)


async def test_a_counter_goes_on_after_a_rollback_and_in_three_forks(world: World) -> None:
    manager = world.manager
    sandbox, counter = await world.counting(env={"A": "1"})
    await manager.write_file(sandbox.id, "f", b"then", 0o644)
    await manager.exec(sandbox.id, "echo then > /tmp/t")
    snapshot = await manager.snapshot(sandbox.id, memory=True)
    assert snapshot.memory_bytes == sum(path.stat().st_size for path in (world.place / snapshot.id / "state").iterdir())
    at = await world.number(sandbox.id, counter, 3)
    await world.number(sandbox.id, counter, at + 20)
    await manager.write_file(sandbox.id, "f", b"later", 0o644)
    rolled = await manager.rollback(sandbox.id, snapshot.id)
    assert world.kept.restored == [rolled.env_id]
    assert (rolled.id, rolled.source_snapshot_id) == (sandbox.id, snapshot.id)
    (status,) = await manager.list_execs(sandbox.id)
    assert (status.id, status.tag, status.running) == (counter, "n", True)
    forks = [await manager.fork(snapshot.id, ForkOptions()) for _ in range(3)]
    for box in (rolled, *forks):
        assert await manager.read_file(box.id, "f") == b"then"
        assert (await manager.exec(box.id, "cat /tmp/t; printenv A")).stdout == b"then\n1\n"
        await world.number(box.id, counter, at + 10)
    await manager.signal_exec(forks[0].id, counter, "KILL")
    at = await world.number(forks[1].id, counter, 1)
    await world.number(forks[1].id, counter, at + 5)
    assert not (await manager.exec_status(forks[0].id, counter)).running


async def test_the_workspace_alone_is_used_when_that_is_asked_for(world: World) -> None:
    sandbox, _ = await world.counting()
    await world.manager.write_file(sandbox.id, "f", b"then", 0o644)
    snapshot = await world.manager.snapshot(sandbox.id, memory=True)
    forked = await world.manager.fork(snapshot.id, ForkOptions(memory=False))
    rolled = await world.manager.rollback(sandbox.id, snapshot.id, memory=False)
    for box in (forked, rolled):
        assert await world.manager.list_execs(box.id) == []
        assert await world.manager.read_file(box.id, "f") == b"then"
    assert world.kept.restored == []


async def test_what_goes_on_keeps_its_sandbox_as_it_did(world: World) -> None:
    sandbox, counter = await world.counting()
    snapshot = await world.manager.snapshot(sandbox.id, memory=True)
    forked = await world.manager.fork(snapshot.id, ForkOptions(timeout_seconds=10))
    rolled = await world.manager.rollback(sandbox.id, snapshot.id)
    plain = await world.manager.fork(snapshot.id, ForkOptions(timeout_seconds=10, memory=False))
    world.clock.now += 1000
    alive = {record.id for record in await world.manager.list_sandboxes()}
    assert alive == {forked.id, rolled.id}
    await world.manager.signal_exec(forked.id, counter, "KILL")
    world.clock.now += 100
    await world.manager._fleet._sweep()
    assert {record.id for record in await world.manager.list_sandboxes()} == {rolled.id}
    assert plain.id not in alive


async def test_a_rollback_without_memory_ends_what_kept_its_sandbox(world: World) -> None:
    sandbox, _ = await world.counting()
    snapshot = await world.manager.snapshot(sandbox.id)
    await world.manager.rollback(sandbox.id, snapshot.id)
    world.clock.now += 1000
    assert await world.manager.list_sandboxes() == []


async def test_a_backend_without_checkpoints_refuses_before_anything(world: World) -> None:
    sandbox = await world.manager.create(CreateOptions(backend="fake"))
    with pytest.raises(UnsupportedError) as caught:
        await world.manager.snapshot(sandbox.id, memory=True)
    assert caught.value.details == {"capability": "checkpoint", "backend": "fake"}
    assert await world.manager.list_snapshots() == []
    assert world.checkpoints() == set()


async def test_a_snapshot_without_memory_has_no_processes(world: World) -> None:
    sandbox, _ = await world.counting()
    snapshot = await world.manager.snapshot(sandbox.id)
    assert snapshot.memory_bytes is None
    for call in (
        world.manager.fork(snapshot.id, ForkOptions(memory=True)),
        world.manager.rollback(sandbox.id, snapshot.id, memory=True),
    ):
        with pytest.raises(ConflictError, match="without memory"):
            await call
    assert len(await world.manager.list_sandboxes()) == 1


async def test_processes_go_on_only_where_they_find_what_they_had(world: World) -> None:
    sandbox, counter = await world.counting(memory_mb=128)
    snapshot = await world.manager.snapshot(sandbox.id, memory=True)
    for options, why in (
        (ForkOptions(memory_mb=64), "memory_mb"),
        (ForkOptions(backend="fake"), "backend 'kept', not 'fake'"),
    ):
        with pytest.raises(ConflictError, match=f"{why}.*memory: false"):
            await world.manager.fork(snapshot.id, options)
    other = await world.manager.create(CreateOptions(image="another", memory_mb=256))
    with pytest.raises(ConflictError, match=r"image 'host'.*memory: false"):
        await world.manager.rollback(other.id, snapshot.id)
    assert (await world.manager.get(other.id)).env_id == other.env_id
    more = await world.manager.fork(snapshot.id, ForkOptions(memory_mb=256, cpus=2))
    await world.number(more.id, counter, 1)
    assert (more.spec.memory_mb, more.spec.cpus, more.spec.tmp_mb) == (256, 2.0, 64)


async def test_the_workspace_of_a_snapshot_goes_to_another_backend(world: World) -> None:
    sandbox, _ = await world.counting(env={"A": "1"})
    await world.manager.write_file(sandbox.id, "d/f", b"then", 0o755)
    with_memory = await world.manager.snapshot(sandbox.id, memory=True)
    forked = await world.manager.fork(with_memory.id, ForkOptions(backend="fake", memory=False))
    assert forked.backend == "fake"
    assert (await world.manager.exec(forked.id, "cat d/f; printenv A")).stdout == b"then1\n"
    back = await world.manager.fork((await world.manager.snapshot(forked.id)).id, ForkOptions(backend="kept"))
    assert (back.backend, await world.manager.read_file(back.id, "d/f")) == ("kept", b"then")
    assert (await world.manager.rollback(back.id, with_memory.id)).backend == "kept"


async def test_a_checkpoint_of_another_runtime_leaves_the_workspace_usable(world: World) -> None:
    sandbox, counter = await world.counting()
    snapshot = await world.manager.snapshot(sandbox.id, memory=True)
    world.kept.version = "2"
    before = await world.manager.list_sandboxes()
    for call in (
        world.manager.fork(snapshot.id, ForkOptions()),
        world.manager.rollback(sandbox.id, snapshot.id),
    ):
        with pytest.raises(ConflictError, match=r"version 1, and this is 2; .*memory: false") as caught:
            await call
        assert caught.value.details == {"memory": False}
    await world.manager.settle()
    assert await world.manager.list_sandboxes() == before
    assert await world.kept.list_ids() == [sandbox.env_id]
    at = await world.number(sandbox.id, counter, 1)
    await world.number(sandbox.id, counter, at + 1)  # the old processes go on
    assert (await world.manager.fork(snapshot.id, ForkOptions(memory=False))).running


@pytest.mark.parametrize("step", ["checkpoint", "read", "write"])
async def test_a_failure_leaves_neither_snapshot_nor_memory(world: World, step: str) -> None:
    sandbox, counter = await world.counting()
    if step == "read":
        step = "hold_workspace" if world.kept.capabilities.layered_workspace else "export_workspace"
    world.kept.failures[step] = [ConflictError("a file is open and deleted")]
    with pytest.raises(ConflictError, match="open and deleted"):
        await world.manager.snapshot(sandbox.id, memory=True)
    assert await world.manager.list_snapshots() == []
    assert world.checkpoints() == set()
    assert await world.manager._fleet.workspaces.ask(lambda store: list(store.pins())) == []
    at = await world.number(sandbox.id, counter, 1)
    await world.number(sandbox.id, counter, at + 1)
    assert (await world.manager.snapshot(sandbox.id, memory=True)).memory_bytes


async def test_a_row_that_cannot_be_written_leaves_no_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(store: StateStore, record: object) -> None:
        raise LimitExceededError("the disk is full")

    sandbox, _ = await world.counting()
    monkeypatch.setattr(StateStore, "put_snapshot", full)
    with pytest.raises(LimitExceededError):
        await world.manager.snapshot(sandbox.id, memory=True)
    assert world.checkpoints() == set()


async def test_a_failed_restore_leaves_nothing(world: World) -> None:
    sandbox, counter = await world.counting()
    snapshot = await world.manager.snapshot(sandbox.id, memory=True)
    for call in (world.manager.fork(snapshot.id, ForkOptions()), world.manager.rollback(sandbox.id, snapshot.id)):
        world.kept.failures["restore"] = [BackendError("the runtime died")]
        with pytest.raises(BackendError, match="the runtime died"):
            await call
    await world.manager.settle()
    assert await world.kept.list_ids() == [sandbox.env_id]
    at = await world.number(sandbox.id, counter, 1)
    await world.number(sandbox.id, counter, at + 1)


async def test_memory_goes_with_its_snapshot_and_survives_a_restart(world: World) -> None:
    sandbox, counter = await world.counting()
    snapshots = [await world.manager.snapshot(sandbox.id, memory=True) for _ in range(2)]
    await world.manager.delete_snapshot(snapshots[0].id)
    assert world.checkpoints() == {snapshots[1].id}
    (world.place / ".new-snapunfinished" / "state").mkdir(parents=True)
    (world.place / "snapunacknowledged").mkdir()
    await world.manager.close()
    manager = await world.start()
    assert world.checkpoints() == {snapshots[1].id}
    assert await manager.list_snapshots() == [snapshots[1]]
    forked = await manager.fork(snapshots[1].id, ForkOptions())
    await world.number(forked.id, counter, 1)
    await manager.destroy(forked.id)
    await manager.destroy(sandbox.id)
    again = await manager.fork(snapshots[1].id, ForkOptions())  # the sandbox it was taken of need not live
    await world.number(again.id, counter, 1)


async def test_damaged_memory_says_so_and_the_workspace_is_there(world: World) -> None:
    sandbox, _ = await world.counting()
    snapshot = await world.manager.snapshot(sandbox.id, memory=True)
    os.truncate(world.place / snapshot.id / "state" / "memory", 3)
    with pytest.raises(ConflictError, match=r"damaged.*memory: false"):
        await world.manager.fork(snapshot.id, ForkOptions())
    assert (await world.manager.rollback(sandbox.id, snapshot.id, memory=False)).running
    await world.manager.delete_snapshot(snapshot.id)
    assert world.checkpoints() == set()


async def test_a_merge_takes_no_processes_along(world: World) -> None:
    sandbox, _ = await world.counting()
    await world.manager.snapshot(sandbox.id, memory=True)
    await world.manager.write_file(sandbox.id, "mine", b"1", 0o644)
    snapshot = await world.manager.snapshot(sandbox.id)
    forked = await world.manager.fork(snapshot.id, ForkOptions())
    await world.manager.write_file(forked.id, "theirs", b"2", 0o644)
    theirs = await world.manager.snapshot(forked.id, memory=True)
    merged = await world.manager.merge(sandbox.id, theirs.id)
    assert merged.outcome == "merged"
    assert await world.manager.list_execs(sandbox.id) == []
    assert await world.manager.read_file(sandbox.id, "theirs") == b"2"


async def test_a_snapshot_that_is_deleted_before_it_is_restored_is_gone_not_damaged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, _ = await world.counting()
    stand = world.manager._fleet.workspaces.stand

    for memory in (True, False):
        snapshot = await world.manager.snapshot(sandbox.id, memory=True)

        async def after(env_id: str, commit: str, id: str = snapshot.id, late: bool = memory) -> None:
            if late:
                await stand(env_id, commit)
            await world.manager.delete_snapshot(id)
            if not late:  # nothing is at its state any more
                await world.manager.write_file(sandbox.id, "later", b"1", 0o644)
                await world.manager.snapshot(sandbox.id)
                await stand(env_id, commit)

        monkeypatch.setattr(world.manager._fleet.workspaces, "stand", after)
        with pytest.raises(NotFoundError, match=snapshot.id):
            await world.manager.fork(snapshot.id, ForkOptions(memory=memory))
    await world.manager.settle()
    assert await world.kept.list_ids() == [sandbox.env_id]
