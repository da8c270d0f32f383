"""Automatic snapshots: what a rollback replaced is kept once; whatever comes between leaves one or none, not more."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.errors import BackendError, LimitExceededError, NotFoundError
from agent_sandbox.manager import CreateOptions, ForkOptions
from agent_sandbox.manager.records import SandboxRecord, SnapshotRecord
from tests.unit.manager_harness import Server, kept_states, serving


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path / "data", max_snapshot_bytes=1_000) as server:
        yield server


async def changed(server: Server, text: bytes = b"after") -> tuple[SandboxRecord, SnapshotRecord]:
    """A sandbox with a file, kept, and then changed."""
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "f", b"before", 0o644)
    snapshot = await server.manager.snapshot(sandbox.id)
    await server.manager.write_file(sandbox.id, "f", text, 0o644)
    return sandbox, snapshot


async def automatic(server: Server, sandbox: SandboxRecord) -> list[SnapshotRecord]:
    found = await server.manager.list_snapshots(sandbox.id, auto=True)
    named = await server.manager.list_snapshots(sandbox.id)
    assert not any(snapshot.auto for snapshot in named)
    return [snapshot for snapshot in found if snapshot not in named]


async def read(server: Server, sandbox: SandboxRecord) -> bytes:
    return await server.manager.read_file(sandbox.id, "f")


async def is_tidy(server: Server, sandbox: SandboxRecord) -> None:
    """One environment of the sandbox, and states for the snapshots and for what it began with, no others."""
    await server.manager.settle()
    record = await server.manager.get(sandbox.id)
    assert await server.fake.list_ids() == [record.env_id]
    assert record.parked is None
    kept = {snapshot.id for snapshot in await server.manager.list_snapshots(auto=True)}
    assert kept_states(server.settings) == kept | {record.env_id}


async def test_a_rollback_is_undone_and_redone(server: Server) -> None:
    sandbox, snapshot = await changed(server)
    rolled = await server.manager.rollback(sandbox.id, snapshot.id)
    assert rolled.parked == sandbox.env_id
    (undo,) = await automatic(server, sandbox)
    assert (undo.name, undo.size_bytes, undo.auto) == (f"before rollback to {snapshot.id}", 5, True)
    await server.manager.rollback(sandbox.id, undo.id)
    assert await read(server, sandbox) == b"after"
    (redo,) = await automatic(server, sandbox)
    with pytest.raises(NotFoundError):
        await server.manager.get_snapshot(undo.id)
    await server.manager.rollback(sandbox.id, redo.id)
    assert await read(server, sandbox) == b"before"
    assert len(await automatic(server, sandbox)) == 1
    await is_tidy(server, sandbox)


async def test_a_rollback_waits_for_nothing_of_it(server: Server) -> None:
    sandbox, snapshot = await changed(server)
    arrived = server.wire.hold("export_workspace", sandbox.env_id)
    await server.manager.rollback(sandbox.id, snapshot.id)
    await arrived.wait()
    assert await read(server, sandbox) == b"before"
    assert await server.manager.list_snapshots(auto=True) == [snapshot]  # who asks for no sandbox's waits for none
    listing = asyncio.create_task(automatic(server, sandbox))
    await asyncio.sleep(0.05)
    assert not listing.done()
    server.wire.free("export_workspace")
    assert len(await listing) == 1


async def test_a_list_waits_for_no_other_sandbox(server: Server) -> None:
    sandbox, snapshot = await changed(server)
    other, its = await changed(server)
    arrived = server.wire.hold("export_workspace", sandbox.env_id)
    await server.manager.rollback(sandbox.id, snapshot.id)
    await arrived.wait()
    await server.manager.rollback(other.id, its.id)
    assert len(await automatic(server, other)) == 1
    found = await server.manager.list_snapshots(auto=True)
    assert [snapshot.sandbox_id for snapshot in found if snapshot.auto] == [other.id]
    server.wire.free("export_workspace")
    assert len(await automatic(server, sandbox)) == 1


async def test_another_rollback_takes_its_place(server: Server) -> None:
    sandbox, snapshot = await changed(server)
    arrived = server.wire.hold("export_workspace", sandbox.env_id)
    second = await server.manager.rollback(sandbox.id, snapshot.id)
    await arrived.wait()
    await server.manager.write_file(sandbox.id, "f", b"second", 0o644)
    third = await server.manager.rollback(sandbox.id, snapshot.id)
    assert third.parked == second.env_id
    (undo,) = await automatic(server, sandbox)
    await is_tidy(server, sandbox)
    await server.manager.rollback(sandbox.id, undo.id)
    assert await read(server, sandbox) == b"second"


async def test_what_cannot_be_kept_leaves_no_older_one(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    sandbox, snapshot = await changed(server)
    await server.manager.rollback(sandbox.id, snapshot.id)
    assert len(await automatic(server, sandbox)) == 1
    await server.manager.write_file(sandbox.id, "f", b"x" * 2_000, 0o644)
    await server.manager.rollback(sandbox.id, snapshot.id)
    assert await automatic(server, sandbox) == []
    assert "could not be kept" in caplog.text
    await is_tidy(server, sandbox)


@pytest.mark.parametrize("method", ["is_running", "export_workspace", "destroy"])
async def test_a_crash_in_between_costs_nothing(server: Server, method: str) -> None:
    sandbox, snapshot = await changed(server)
    arrived = server.wire.hold(method, sandbox.env_id)
    await server.manager.rollback(sandbox.id, snapshot.id)
    await arrived.wait()
    await server.restart()
    (undo,) = await automatic(server, sandbox)
    await is_tidy(server, sandbox)
    await server.manager.rollback(sandbox.id, undo.id)
    assert await read(server, sandbox) == b"after"


async def test_what_is_parked_keeps_what_it_began_with_while_its_record_cannot_be_read(server: Server) -> None:
    sandbox, snapshot = await changed(server)
    await server.manager.rollback(sandbox.id, snapshot.id)
    await server.manager.settle()
    await server.manager.write_file(sandbox.id, "f", b"again", 0o644)
    second = await server.manager.get(sandbox.id)
    keeping = server.wire.hold("export_workspace", second.env_id)
    third = await server.manager.rollback(sandbox.id, snapshot.id)
    await keeping.wait()
    await server.crash()
    with contextlib.closing(sqlite3.connect(server.settings.data_dir / "state.db")) as db, db:
        (whole,) = db.execute("SELECT record FROM sandboxes").fetchone()
        db.execute("UPDATE sandboxes SET record = '{}'")
    await server.start()
    assert {second.env_id, third.env_id} <= kept_states(server.settings)
    await server.crash()
    with contextlib.closing(sqlite3.connect(server.settings.data_dir / "state.db")) as db, db:
        db.execute("UPDATE sandboxes SET record = ?", (whole,))  # somebody mended it
    await server.start()
    (undo,) = await automatic(server, sandbox)
    await server.manager.rollback(sandbox.id, undo.id)
    assert await read(server, sandbox) == b"again"


async def test_a_stopped_environment_is_started_to_be_read(server: Server) -> None:
    sandbox, snapshot = await changed(server)
    await server.manager.stop(sandbox.id)
    await server.manager.rollback(sandbox.id, snapshot.id)
    (undo,) = await automatic(server, sandbox)
    await server.manager.rollback(sandbox.id, undo.id)
    assert await read(server, sandbox) == b"after"
    await automatic(server, sandbox)
    await is_tidy(server, sandbox)


@pytest.mark.parametrize("under_way", [True, False])
async def test_it_goes_with_its_sandbox(server: Server, under_way: bool) -> None:
    sandbox, snapshot = await changed(server)
    if under_way:
        arrived = server.wire.hold("export_workspace", sandbox.env_id)
        await server.manager.rollback(sandbox.id, snapshot.id)
        await arrived.wait()
    else:
        await server.manager.rollback(sandbox.id, snapshot.id)
        assert len(await automatic(server, sandbox)) == 1
    await server.manager.destroy(sandbox.id)
    await server.manager.settle()
    assert await server.manager.list_snapshots(auto=True) == [snapshot]
    assert await server.fake.list_ids() == []
    assert kept_states(server.settings) == {snapshot.id}


async def test_one_without_a_sandbox_goes_with_the_next_start(server: Server) -> None:
    sandbox, snapshot = await changed(server)
    await server.manager.rollback(sandbox.id, snapshot.id)
    assert len(await automatic(server, sandbox)) == 1
    await server.manager.settle()
    server.fake.failures["start"] = []
    for id in await server.fake.list_ids():
        await server.fake.destroy(id)
    await server.restart()
    assert await server.manager.list_snapshots(auto=True) == [snapshot]
    assert kept_states(server.settings) == {snapshot.id}


async def test_a_rollback_that_fails_keeps_the_one_before(server: Server) -> None:
    sandbox, snapshot = await changed(server)
    await server.manager.rollback(sandbox.id, snapshot.id)
    before = await automatic(server, sandbox)
    server.fake.failures["create"] = [BackendError("no")]
    with pytest.raises(BackendError):
        await server.manager.rollback(sandbox.id, snapshot.id)
    assert await automatic(server, sandbox) == before
    await is_tidy(server, sandbox)


async def test_a_server_that_shuts_down_lets_the_next_one_go_on(server: Server) -> None:
    sandbox, snapshot = await changed(server)
    arrived = server.wire.hold("export_workspace", sandbox.env_id)
    await server.manager.rollback(sandbox.id, snapshot.id)
    await arrived.wait()
    closing = asyncio.create_task(server.manager.close())
    await asyncio.sleep(0.05)
    server.manager._fleet.tasks.cancel()  # as when it does not end in time
    await closing
    assert len(await server.fake.list_ids()) == 2
    await server.start()
    assert len(await automatic(server, sandbox)) == 1
    await is_tidy(server, sandbox)


@pytest.mark.parametrize("is_destroyed", [False, True])
async def test_one_that_is_being_written_is_not_written_after_later_ones(
    server: Server, monkeypatch: pytest.MonkeyPatch, is_destroyed: bool
) -> None:
    sandbox, snapshot = await changed(server)
    state = server.manager._fleet.state
    put, arrived, go = state.put_automatic, asyncio.Event(), asyncio.Event()

    async def late(record: SnapshotRecord) -> list[SnapshotRecord]:
        if not arrived.is_set():
            arrived.set()
            await go.wait()
        return await put(record)

    monkeypatch.setattr(state, "put_automatic", late)
    await server.manager.rollback(sandbox.id, snapshot.id)
    await arrived.wait()
    for text in (b"second", b"third"):
        await server.manager.write_file(sandbox.id, "f", text, 0o644)
        await server.manager.rollback(sandbox.id, snapshot.id)
    if is_destroyed:
        destroying = asyncio.create_task(server.manager.destroy(sandbox.id))
    await asyncio.sleep(0.2)
    go.set()
    if is_destroyed:
        await destroying
        await server.manager.settle()
        assert await server.manager.list_snapshots(auto=True) == [snapshot]
        assert kept_states(server.settings) == {snapshot.id}
        return
    (undo,) = await automatic(server, sandbox)
    await is_tidy(server, sandbox)
    await server.manager.rollback(sandbox.id, undo.id)
    assert await read(server, sandbox) == b"third"


async def test_a_merge_does_not_park_again_what_was_let_go_meanwhile(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, snapshot = await changed(server)
    fork = await server.manager.fork(snapshot.id, ForkOptions())
    await server.manager.write_file(fork.id, "g", b"theirs", 0o644)
    theirs = await server.manager.snapshot(fork.id)
    keeping = server.wire.hold("export_workspace", sandbox.env_id)
    await server.manager.rollback(sandbox.id, snapshot.id)
    await keeping.wait()
    await server.manager.write_file(sandbox.id, "h", b"ours", 0o644)
    making = server.wire.hold("create", f"{sandbox.id}-3")
    merging = asyncio.create_task(server.manager.merge(sandbox.id, theirs.id))
    await making.wait()

    state = server.manager._fleet.state
    put, arrived, go = state.put_sandbox, asyncio.Event(), asyncio.Event()

    async def late(record: SandboxRecord, environments: int) -> None:
        arrived.set()
        await go.wait()
        await put(record, environments)

    monkeypatch.setattr(state, "put_sandbox", late)
    server.wire.free("export_workspace")
    await arrived.wait()
    server.wire.free("create")
    await asyncio.sleep(0.3)
    go.set()
    assert (await merging).outcome == "merged"
    await server.manager.destroy(fork.id)
    await is_tidy(server, sandbox)


async def test_a_merge_that_fails_removes_what_it_can_and_says_why_it_failed(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox, snapshot = await changed(server)
    fork = await server.manager.fork(snapshot.id, ForkOptions())
    await server.manager.write_file(fork.id, "g", b"theirs", 0o644)
    theirs = await server.manager.snapshot(fork.id)
    state = server.manager._fleet.state
    delete, refused = state.delete_snapshot, list[str]()

    async def full_once(id: str) -> None:
        if not refused:
            refused.append(id)
            raise LimitExceededError("the server's disk is full")
        await delete(id)

    monkeypatch.setattr(state, "delete_snapshot", full_once)
    server.fake.failures["create"] = [BackendError("no room for another")]
    with pytest.raises(BackendError, match="no room for another"):
        await server.manager.merge(sandbox.id, theirs.id)
    left = {found.id for found in await server.manager.list_snapshots()} - {snapshot.id, theirs.id}
    assert left == set(refused), "the other one is gone"
    assert f"snapshot {refused[0]} of a merge that failed stays" in caplog.text
    await server.manager.delete_snapshot(refused[0])
    assert kept_states(server.settings) == {snapshot.id, theirs.id, fork.env_id}
    assert set(await server.fake.list_ids()) == {sandbox.env_id, fork.env_id}
