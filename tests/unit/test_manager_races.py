"""Calls that meet each other, fail in the middle, or are cancelled: nothing half-made stays, nothing hangs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    SandboxError,
)
from agent_sandbox.manager import CreateOptions, ForkOptions, Manager, SandboxRecord, fleet
from tests.unit.manager_harness import Server, kept_states, serving

SOON = 10.0
"""Seconds that nothing here takes unless it hangs."""

STEP = 0.0002
"""Seconds by which the moment of a cancellation moves; sixty steps cover more than one whole operation."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path / "data") as server:
        yield server


@pytest.fixture
def manager(server: Server) -> Manager:
    return server.manager


async def nothing_is_left(server: Server, *records: SandboxRecord) -> None:
    """Memory, backend and a restarted server agree that exactly ``records`` are there."""
    await server.manager.settle()
    expected = sorted(record.id for record in records)
    assert sorted(record.id for record in await server.manager.list_sandboxes()) == expected
    assert sorted(await server.fake.list_ids()) == sorted(
        record.env_id for record in await server.manager.list_sandboxes()
    )
    manager = await server.restart()
    assert sorted(record.id for record in await manager.list_sandboxes()) == expected
    assert len(await server.fake.list_ids()) == len(expected)


# -- creation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["resolve_image", "create", "is_running"])
async def test_cancelling_a_creation_leaves_nothing(server: Server, method: str) -> None:
    arrived = server.wire.hold(method)
    making = asyncio.create_task(server.manager.create(CreateOptions()))
    await arrived.wait()
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    server.wire.free(method)
    await nothing_is_left(server)


async def test_cancelling_a_creation_at_any_step(server: Server) -> None:
    for step in range(60):
        making = asyncio.create_task(server.manager.create(CreateOptions()))
        await asyncio.sleep(step * STEP)
        making.cancel()
        try:
            record = await making
        except asyncio.CancelledError:
            await server.manager.settle()
        else:
            await server.manager.destroy(record.id)
        assert await server.fake.list_ids() == []
        assert await server.manager.list_sandboxes() == []
    await nothing_is_left(server)


async def test_cancelling_twice_does_not_stop_the_cleaning(server: Server) -> None:
    arrived = server.wire.hold("is_running")
    making = asyncio.create_task(server.manager.create(CreateOptions()))
    await arrived.wait()
    destroying = server.wire.hold("destroy")
    making.cancel()
    await destroying.wait()
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert len(await server.fake.list_ids()) == 1
    server.wire.free("destroy")
    server.wire.free("is_running")
    await nothing_is_left(server)


@pytest.mark.parametrize("method", ["create", "is_running"])
async def test_destroying_during_creation(server: Server, method: str) -> None:
    arrived = server.wire.hold(method)
    making = asyncio.create_task(server.manager.create(CreateOptions()))
    await arrived.wait()
    (record,) = await server.manager.list_sandboxes()
    async with asyncio.timeout(SOON):
        await asyncio.gather(server.manager.destroy(record.id), server.manager.destroy(record.id))
        with pytest.raises(NotFoundError, match="destroyed meanwhile"):
            await making
    server.wire.free(method)
    await nothing_is_left(server)


async def test_a_creation_that_fails_and_cannot_be_cleaned_at_once_is_cleaned_later(server: Server) -> None:
    server.fake.failures["create"] = [BackendError("first reason")]
    arrived = server.wire.hold("create")
    making = asyncio.create_task(server.manager.create(CreateOptions()))
    await arrived.wait()
    server.fake.failures["destroy"] = [BackendError("busy"), BackendError("busy")]
    server.wire.free("create")
    with pytest.raises(BackendError, match=r"busy|first reason"):
        await making
    server.fake.failures.clear()
    await server.manager._fleet._sweep()
    await nothing_is_left(server)


async def test_an_environment_that_ends_right_after_its_start_is_an_error(server: Server) -> None:
    arrived = server.wire.hold("is_running")
    making = asyncio.create_task(server.manager.create(CreateOptions()))
    await arrived.wait()
    (env_id,) = await server.fake.list_ids()
    await server.fake.kill_guest(env_id)
    server.wire.free("is_running")
    with pytest.raises(BackendError, match="ended right after its start"):
        await making
    await nothing_is_left(server)


async def test_a_fork_whose_import_fails_leaves_nothing(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    server.fake.failures["import_workspace"] = [LimitExceededError("no space")]
    with pytest.raises(LimitExceededError, match="no space"):
        await server.manager.fork(snapshot.id, ForkOptions())
    await nothing_is_left(server, sandbox)


# -- destruction --------------------------------------------------------------------------------------------


async def test_two_destructions_at_once_both_succeed(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await asyncio.gather(*(server.manager.destroy(sandbox.id) for _ in range(5)))
    assert [call for call in server.wire.calls if call[0] == "destroy"] == [("destroy", sandbox.env_id)]
    await nothing_is_left(server)


async def test_cancelling_a_destruction_does_not_stop_it(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    arrived = server.wire.hold("destroy")
    ending = asyncio.create_task(server.manager.destroy(sandbox.id))
    await arrived.wait()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    (record,) = await server.manager.list_sandboxes()
    assert record.state == "destroying"
    with pytest.raises(ConflictError, match="being destroyed"):
        await server.manager.exec(sandbox.id, "true")
    with pytest.raises(ConflictError, match="being destroyed"):
        await server.manager.set_timeout(sandbox.id, 10)
    server.wire.free("destroy")
    await nothing_is_left(server)


async def test_a_destruction_that_fails_is_told_and_tried_again(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    server.fake.failures["destroy"] = [BackendError("busy"), BackendError("still busy")]
    with pytest.raises(BackendError, match=r"^busy"):
        await server.manager.destroy(sandbox.id)
    assert (await server.manager.get(sandbox.id)).state == "destroying"
    with pytest.raises(BackendError, match="still busy"):
        await server.manager.destroy(sandbox.id)
    await server.manager._fleet._sweep()
    await nothing_is_left(server)


@pytest.mark.parametrize("method", ["export_workspace", "create", "import_workspace", "is_running"])
async def test_a_guest_that_stalls_does_not_keep_itself_alive(server: Server, method: str) -> None:
    """Destruction ends the snapshot or rollback under way instead of waiting for it."""
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    arrived = server.wire.hold(method)
    operation: Coroutine[Any, Any, Any] = (
        server.manager.snapshot(sandbox.id)
        if method == "export_workspace"
        else server.manager.rollback(sandbox.id, snapshot.id)
    )
    task = asyncio.create_task(operation)
    await arrived.wait()
    write = asyncio.create_task(server.manager.write_file(sandbox.id, "x", b"", 0o644))
    await asyncio.sleep(0)
    async with asyncio.timeout(SOON):
        await server.manager.destroy(sandbox.id)
        with pytest.raises(NotFoundError, match="destroyed meanwhile"):
            await task
        with pytest.raises((NotFoundError, ConflictError), match=r"destroyed|does not exist"):
            await write
    server.wire.free(method)
    assert [record.id for record in await server.manager.list_snapshots()] == [snapshot.id]
    assert len(kept_states(server.settings)) == 1
    await nothing_is_left(server)


async def test_expiry_ends_a_snapshot_under_way(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions(timeout_seconds=10))
    arrived = server.wire.hold("export_workspace")
    task = asyncio.create_task(server.manager.snapshot(sandbox.id))
    await arrived.wait()
    server.clock.now += 10
    await server.manager._fleet._sweep()
    with pytest.raises(NotFoundError, match="expired meanwhile"):
        await task
    await nothing_is_left(server)


async def test_renewal_does_not_wait_for_a_snapshot(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions(timeout_seconds=10))
    arrived = server.wire.hold("export_workspace")
    task = asyncio.create_task(server.manager.snapshot(sandbox.id))
    await arrived.wait()
    async with asyncio.timeout(SOON):
        renewed = await server.manager.set_timeout(sandbox.id, 100)
    assert renewed.expires_at == server.clock.now + 100
    server.wire.free("export_workspace")
    await task


async def test_renewal_during_a_rollback_is_not_lost(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions(timeout_seconds=10))
    snapshot = await server.manager.snapshot(sandbox.id)
    for method in ("create", "is_running"):
        arrived = server.wire.hold(method)
        task = asyncio.create_task(server.manager.rollback(sandbox.id, snapshot.id))
        await arrived.wait()
        server.clock.now += 1
        renewed = await server.manager.set_timeout(sandbox.id, 10)
        server.wire.free(method)
        rolled = await task
        assert rolled.expires_at == renewed.expires_at == server.clock.now + 10
        manager = await server.restart()
        (record,) = await manager.list_sandboxes()
        assert (record.expires_at, record.env_id) == (rolled.expires_at, rolled.env_id)


# -- commands and files under a destruction or rollback ------------------------------------------------------------


def command(manager: Manager, id: str) -> Coroutine[Any, Any, Any]:
    return manager.exec(id, "echo started; sleep 60", timeout_seconds=120)


async def test_a_command_whose_sandbox_is_destroyed(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    running = [asyncio.create_task(command(server.manager, sandbox.id)) for _ in range(3)]
    while len(server.fake.environments[sandbox.env_id].execs) < 3:
        await asyncio.sleep(0.01)
    await server.manager.destroy(sandbox.id)
    async with asyncio.timeout(SOON):
        for task in running:
            with pytest.raises(NotFoundError, match=f"{sandbox.id} was destroyed meanwhile"):
                await task


async def test_a_command_whose_sandbox_expires(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions(timeout_seconds=10))
    task = asyncio.create_task(command(server.manager, sandbox.id))
    while not server.fake.environments[sandbox.env_id].execs:
        await asyncio.sleep(0.01)
    server.clock.now = server.manager._fleet.entries[sandbox.id].record.latest_at
    await server.manager._fleet._sweep()
    async with asyncio.timeout(SOON):
        with pytest.raises(NotFoundError, match="expired"):
            await task


async def test_a_command_whose_sandbox_is_rolled_back(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    task = asyncio.create_task(command(server.manager, sandbox.id))
    while not server.fake.environments[sandbox.env_id].execs:
        await asyncio.sleep(0.01)
    await server.manager.rollback(sandbox.id, snapshot.id)
    async with asyncio.timeout(SOON):
        with pytest.raises(ConflictError, match="rolled back meanwhile"):
            await task
    assert (await server.manager.exec(sandbox.id, "true")).exit.code == 0


async def test_an_exit_that_came_with_the_end_is_no_success(server: Server) -> None:
    """A shell whose child was killed first may still leave with 0 while its sandbox is destroyed."""
    sandbox = await server.manager.create(CreateOptions())
    arrived = server.wire.hold("destroy")
    ending = asyncio.create_task(command_then_destroy(server, sandbox.id))
    await arrived.wait()
    async with asyncio.timeout(SOON):
        with pytest.raises(NotFoundError, match="destroyed meanwhile"):
            await ending
    server.wire.free("destroy")
    await nothing_is_left(server)


async def command_then_destroy(server: Server, id: str) -> None:
    events = server.manager.exec_stream(id, "echo started; sleep 0.1; exit 0")
    ending: asyncio.Task[None] | None = None
    async for _ in events:
        if ending is None:
            ending = asyncio.create_task(server.manager.destroy(id))


async def test_a_failed_rollback_leaves_commands_running(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    task = asyncio.create_task(server.manager.exec(sandbox.id, "echo a; sleep 0.3; echo b"))
    while not server.fake.environments[sandbox.env_id].execs:
        await asyncio.sleep(0.01)
    server.fake.failures["import_workspace"] = [BackendError("no")]
    with pytest.raises(BackendError):
        await server.manager.rollback(sandbox.id, snapshot.id)
    assert (await task).stdout == b"a\nb\n"


@pytest.mark.parametrize("method", ["read_file", "write_file", "list_files"])
async def test_file_calls_under_a_destruction(server: Server, method: str) -> None:
    sandbox = await server.manager.create(CreateOptions())
    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "read_file": lambda: server.manager.read_file(sandbox.id, "x"),
        "write_file": lambda: server.manager.write_file(sandbox.id, "x", b"", 0o644),
        "list_files": lambda: server.manager.list_files(sandbox.id, "."),
    }
    arrived = server.wire.hold(method)
    task = asyncio.create_task(calls[method]())
    await arrived.wait()
    await server.manager.destroy(sandbox.id)
    server.wire.free(method)
    with pytest.raises(NotFoundError, match="destroyed meanwhile"):
        await task


async def test_a_write_during_a_rollback_lands_in_what_comes_after(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "x", b"old", 0o644)
    snapshot = await server.manager.snapshot(sandbox.id)
    arrived = server.wire.hold("import_workspace")
    rollback = asyncio.create_task(server.manager.rollback(sandbox.id, snapshot.id))
    await arrived.wait()
    write = asyncio.create_task(server.manager.write_file(sandbox.id, "x", b"new", 0o644))
    assert await server.manager.read_file(sandbox.id, "x") == b"old"
    server.wire.free("import_workspace")
    await rollback
    await write
    assert await server.manager.read_file(sandbox.id, "x") == b"new"


# -- rollback ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["create", "import_workspace", "is_running", "swap"])
async def test_a_rollback_that_fails_leaves_the_sandbox_as_it_was(
    server: Server, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "x", b"old", 0o644)
    snapshot = await server.manager.snapshot(sandbox.id)
    await server.manager.write_file(sandbox.id, "x", b"new", 0o644)
    await server.manager.exec(sandbox.id, "echo kept > /tmp/x")
    if method == "swap":
        state = server.manager._fleet.state
        put = state.put_sandbox

        async def full(record: SandboxRecord, environments: int) -> None:
            if record.env_id != sandbox.env_id:
                raise LimitExceededError("the disk is full")
            await put(record, environments)

        monkeypatch.setattr(state, "put_sandbox", full)
        error: type[SandboxError] = LimitExceededError
    elif method == "is_running":
        arrived = server.wire.hold("is_running")
        error = BackendError

        async def kill() -> None:
            await arrived.wait()
            await server.fake.kill_guest(f"{sandbox.id}-2")
            server.wire.free("is_running")

        killer = asyncio.create_task(kill())
    else:
        server.fake.failures[method] = [BackendError("no")]
        error = BackendError
    with pytest.raises(error):
        await server.manager.rollback(sandbox.id, snapshot.id)
    monkeypatch.undo()
    if method == "is_running":
        await killer
    assert await server.manager.get(sandbox.id) == sandbox
    assert await server.fake.list_ids() == [sandbox.env_id]  # already: a failure is told when it is undone
    assert await server.manager.read_file(sandbox.id, "x") == b"new"
    assert await server.manager.read_file(sandbox.id, "/tmp/x") == b"kept\n"
    rolled = await server.manager.rollback(sandbox.id, snapshot.id)
    assert rolled.env_id == f"{sandbox.id}-3"  # a number is never used twice
    assert await server.manager.read_file(sandbox.id, "x") == b"old"
    await nothing_is_left(server, rolled)


async def test_cancelling_a_rollback_at_any_step(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "x", b"old", 0o644)
    snapshot = await server.manager.snapshot(sandbox.id)
    cancelled = 0
    for step in range(60):
        await server.manager.write_file(sandbox.id, "x", b"new", 0o644)
        before = (await server.manager.get(sandbox.id)).env_id
        rollback = asyncio.create_task(server.manager.rollback(sandbox.id, snapshot.id))
        await asyncio.sleep(step * STEP)
        rollback.cancel()
        try:
            await rollback
        except asyncio.CancelledError:
            cancelled += 1
        await server.manager.settle()
        record = await server.manager.get(sandbox.id)
        assert (record.state, record.running) == ("running", True)
        assert await server.fake.list_ids() == [record.env_id]
        assert await server.manager.read_file(sandbox.id, "x") == (b"new" if record.env_id == before else b"old")
    assert cancelled
    await nothing_is_left(server, sandbox)


async def test_two_rollbacks_come_one_after_the_other(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshots = []
    for name in ("a", "b"):
        await server.manager.write_file(sandbox.id, "x", name.encode(), 0o644)
        snapshots.append(await server.manager.snapshot(sandbox.id, name))
    results = await asyncio.gather(*(server.manager.rollback(sandbox.id, s.id) for s in snapshots))
    assert [result.env_id for result in results] == [f"{sandbox.id}-2", f"{sandbox.id}-3"]
    assert await server.manager.read_file(sandbox.id, "x") == b"b"
    await nothing_is_left(server, results[1])


async def test_an_old_environment_that_cannot_be_removed_is_tried_again(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    server.fake.failures["destroy"] = [BackendError("busy")]
    rolled = await server.manager.rollback(sandbox.id, snapshot.id)
    await server.manager.settle()
    assert len(await server.fake.list_ids()) == 2
    await server.manager._fleet._sweep()
    await nothing_is_left(server, rolled)


async def test_destroying_also_waits_for_the_environment_that_a_rollback_left(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    arrived = server.wire.hold("destroy", sandbox.env_id)
    await server.manager.rollback(sandbox.id, snapshot.id)
    await arrived.wait()
    ending = asyncio.create_task(server.manager.destroy(sandbox.id))
    while f"{sandbox.id}-2" in await server.fake.list_ids():
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert not ending.done()
    server.wire.free("destroy")
    await ending
    assert await server.fake.list_ids() == []


class FullDisk:
    """Refuses to remove rows, as SQLite does on a full disk, until room has been made."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
        self.refusals = refusals
        self._remove = server.manager._fleet.state.delete_sandbox
        monkeypatch.setattr(server.manager._fleet.state, "delete_sandbox", self.remove)

    async def remove(self, id: str) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise LimitExceededError("the disk is full")
        await self._remove(id)


async def test_an_archive_that_cannot_be_right_is_not_the_callers_fault(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    for call in (server.manager.fork(snapshot.id, ForkOptions()), server.manager.rollback(sandbox.id, snapshot.id)):
        server.fake.failures["import_workspace"] = [InvalidRequestError("../x: a name with .. in it")]
        with pytest.raises(BackendError, match=r"does not take the state: \.\./x"):
            await call
    await nothing_is_left(server, sandbox)


async def test_destroying_on_a_full_disk_waits_for_the_room_that_it_makes(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await server.manager.create(CreateOptions())
    disk = FullDisk(server, monkeypatch, refusals=3)
    await server.manager.destroy(sandbox.id)
    assert disk.refusals == 0
    assert await server.manager.list_sandboxes() == []
    assert await (await server.restart()).list_sandboxes() == []


async def test_a_disk_that_stays_full_is_said_and_the_next_sweep_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_ROOM_PAUSES_SECONDS", (0.0, 0.0))
    sandbox = await server.manager.create(CreateOptions())
    FullDisk(server, monkeypatch, refusals=3)
    with pytest.raises(LimitExceededError):
        await server.manager.destroy(sandbox.id)
    assert await server.fake.list_ids() == []
    await server.manager._fleet._sweep()
    await server.manager.settle()
    assert await server.manager.list_sandboxes() == []


class SlowSwap:
    """Holds the transaction that puts a rollback's environment in place."""

    def __init__(self, server: Server, env_id: str) -> None:
        self.arrived, self.go = asyncio.Event(), asyncio.Event()
        state = server.manager._fleet.state
        put = state.put_sandbox

        async def slow(record: SandboxRecord, environments: int) -> None:
            if record.env_id == env_id and not self.arrived.is_set():
                self.arrived.set()
                await self.go.wait()
            await put(record, environments)

        state.put_sandbox = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("end", ["cancel", "destroy", "close"])
async def test_a_swap_under_way_is_not_split(server: Server, end: str) -> None:
    """Cancelled while its transaction is on the way to the disk, the rollback has happened, as a whole."""
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "x", b"old", 0o644)
    snapshot = await server.manager.snapshot(sandbox.id)
    await server.manager.write_file(sandbox.id, "x", b"new", 0o644)
    swap = SlowSwap(server, f"{sandbox.id}-2")
    rollback = asyncio.create_task(server.manager.rollback(sandbox.id, snapshot.id))
    await swap.arrived.wait()
    ending: asyncio.Task[None] | None = None
    if end == "cancel":
        rollback.cancel()
    else:
        work = server.manager.destroy(sandbox.id) if end == "destroy" else server.manager.close()
        ending = asyncio.create_task(work)
    await asyncio.sleep(0.05)
    assert not rollback.done()
    swap.go.set()
    with pytest.raises({"cancel": asyncio.CancelledError, "destroy": NotFoundError, "close": BackendError}[end]):
        await rollback
    if ending is not None:
        await ending
    if end == "close":
        await server.start()
    if end == "destroy":
        await nothing_is_left(server)
        return
    rolled = await server.manager.get(sandbox.id)
    assert (rolled.env_id, rolled.source_snapshot_id) == (f"{sandbox.id}-2", snapshot.id)
    assert await server.manager.read_file(sandbox.id, "x") == b"old"
    await nothing_is_left(server, rolled)


async def test_a_renewal_while_the_swap_is_written_loses_neither(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions(timeout_seconds=10))
    snapshot = await server.manager.snapshot(sandbox.id)
    swap = SlowSwap(server, f"{sandbox.id}-2")
    rollback = asyncio.create_task(server.manager.rollback(sandbox.id, snapshot.id))
    await swap.arrived.wait()
    renewal = asyncio.create_task(server.manager.set_timeout(sandbox.id, 77))
    await asyncio.sleep(0.05)
    swap.go.set()
    await asyncio.gather(rollback, renewal)
    expected = (f"{sandbox.id}-2", server.clock.now + 77)
    (record,) = await server.manager.list_sandboxes()
    assert (record.env_id, record.expires_at) == expected
    (record,) = await (await server.restart()).list_sandboxes()
    assert (record.env_id, record.expires_at) == expected


async def test_a_creation_whose_reply_is_lost_leaves_nothing(server: Server) -> None:
    """The caller goes away after the sandbox became ready, before it could be told the id."""
    tasks = server.manager._fleet.tasks
    making = asyncio.create_task(server.manager.create(CreateOptions()))
    while not len(tasks):
        await asyncio.sleep(0)
    while len(tasks):
        await asyncio.sleep(0)
    assert [entry.state for entry in server.manager._fleet.entries.values()] == ["running"]
    assert not making.done()
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    await nothing_is_left(server)


# -- snapshots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["export", "row"])
async def test_a_snapshot_that_fails_leaves_nothing(server: Server, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "x", b"data", 0o644)
    if step == "export":
        server.fake.failures["export_workspace"] = [BackendError("no")]
    else:

        async def full(record: object) -> None:
            raise BackendError("no")

        monkeypatch.setattr(server.manager._fleet.state, "put_snapshot", full)
    with pytest.raises(BackendError, match="no"):
        await server.manager.snapshot(sandbox.id)
    monkeypatch.undo()
    assert kept_states(server.settings) == set()
    assert await server.manager.list_snapshots() == []
    await server.manager.write_file(sandbox.id, "x", b"the gate is open again", 0o644)
    assert await server.manager.snapshot(sandbox.id)


async def test_cancelling_a_snapshot_at_any_step(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    for step in range(60):
        task = asyncio.create_task(server.manager.snapshot(sandbox.id))
        await asyncio.sleep(step * STEP)
        task.cancel()
        await asyncio.wait([task])
        await server.manager.settle()
        assert kept_states(server.settings) == {record.id for record in await server.manager.list_snapshots()}
        await server.manager.write_file(sandbox.id, "x", b"the gate is open", 0o644)


async def test_ten_snapshots_at_once_on_one_sandbox(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    records = await asyncio.gather(*(server.manager.snapshot(sandbox.id, str(n)) for n in range(10)))
    assert len({record.id for record in records}) == 10


# -- shutting down --------------------------------------------------------------------------------------------------


async def test_closing_ends_what_is_under_way_and_keeps_the_rest(server: Server) -> None:
    manager = server.manager
    sandbox = await manager.create(CreateOptions())
    snapshot = await manager.snapshot(sandbox.id)
    arrived = server.wire.hold("import_workspace")
    fork = asyncio.create_task(manager.fork(snapshot.id, ForkOptions()))
    rollback = asyncio.create_task(manager.rollback(sandbox.id, snapshot.id))
    await arrived.wait()
    while len(await server.fake.list_ids()) < 3:
        await asyncio.sleep(0.01)
    async with asyncio.timeout(SOON):
        await manager.close()
    for task in (fork, rollback):
        with pytest.raises(BackendError, match="shutting down"):
            await task
    assert await server.fake.list_ids() == [sandbox.env_id]
    for call in (manager.create(CreateOptions()), manager.exec(sandbox.id, "true"), manager.get(sandbox.id)):
        with pytest.raises(BackendError, match="shutting down"):
            await call
    await server.start()
    assert await server.manager.get(sandbox.id) == dataclasses.replace(sandbox)
    await nothing_is_left(server, sandbox)


async def test_nothing_is_begun_while_closing(server: Server) -> None:
    manager = server.manager
    sandbox = await manager.create(CreateOptions())
    resolving, destroying = server.wire.hold("resolve_image"), server.wire.hold("destroy")
    making = asyncio.create_task(manager.create(CreateOptions()))
    ending = asyncio.create_task(manager.destroy(sandbox.id))
    await resolving.wait()
    await destroying.wait()
    closing = asyncio.create_task(manager.close())
    await asyncio.sleep(0.01)
    server.wire.free("resolve_image")
    with pytest.raises(BackendError, match="shutting down"):
        await making
    assert not closing.done()  # it waits for the destruction
    server.wire.free("destroy")
    await asyncio.gather(closing, ending)
    assert [id for method, id in server.wire.calls if method == "create"] == [sandbox.env_id]
    await server.start()
    await nothing_is_left(server)
