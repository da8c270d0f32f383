"""A server that ends at any moment and another that comes: nothing acknowledged is lost, nothing else stays."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError, NotFoundError
from agent_sandbox.manager import CreateOptions, ForkOptions, Manager, SandboxRecord
from agent_sandbox.manager.state import MIGRATIONS
from agent_sandbox.store import Store
from tests.unit.manager_harness import Server, kept_states, make_settings, serving


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path / "data") as server:
        yield server


async def ids(server: Server) -> tuple[list[str], list[str]]:
    """The environments that records name, and those that the backend holds."""
    await server.manager.settle()
    return sorted(r.env_id for r in await server.manager.list_sandboxes()), sorted(await server.fake.list_ids())


def edit(server: Server, statement: str, *args: object) -> None:
    """Change the state while no server runs."""
    with sqlite3.connect(server.settings.data_dir / "state.db") as connection:
        connection.execute(statement, args)
    connection.close()


async def test_everything_is_found_again(server: Server) -> None:
    made = [await server.manager.create(CreateOptions(timeout_seconds=10 * n, env={"N": str(n)})) for n in (1, 2, 3)]
    await server.manager.write_file(made[0].id, "x", b"data", 0o644)
    snapshot = await server.manager.snapshot(made[0].id, "name")
    for ending in ("crash", "close"):
        if ending == "crash":
            await server.crash()
        else:
            await server.manager.close()
        manager = await server.start()
        assert await manager.list_sandboxes() == made
        assert await manager.list_snapshots() == [snapshot]
        assert await manager.read_file(made[0].id, "x") == b"data"
        assert (await manager.exec(made[2].id, "printenv N")).stdout == b"3\n"
    server.clock.now += 10
    assert [record.id for record in await manager.list_sandboxes()] == [made[1].id, made[2].id]


async def test_what_expired_while_no_server_ran_is_removed(server: Server) -> None:
    await server.manager.create(CreateOptions(timeout_seconds=10))
    await server.crash()
    server.clock.now += 100
    manager = await server.start()
    assert await manager.list_sandboxes() == []
    async with asyncio.timeout(10):
        while await server.fake.list_ids():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("method", ["create", "import_workspace", "is_running"])
async def test_a_crash_during_creation(server: Server, method: str) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    arrived = server.wire.hold(method)
    making = asyncio.create_task(server.manager.fork(snapshot.id, ForkOptions()))
    await arrived.wait()
    await server.restart()
    await asyncio.wait([making])
    assert await ids(server) == ([sandbox.env_id], [sandbox.env_id])


@pytest.mark.parametrize("method", ["create", "import_workspace", "is_running"])
async def test_a_crash_during_rollback_before_the_swap(server: Server, method: str) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "x", b"old", 0o644)
    snapshot = await server.manager.snapshot(sandbox.id)
    await server.manager.write_file(sandbox.id, "x", b"new", 0o644)
    arrived = server.wire.hold(method)
    rolling = asyncio.create_task(server.manager.rollback(sandbox.id, snapshot.id))
    await arrived.wait()
    await server.restart()
    await asyncio.wait([rolling])
    assert await ids(server) == ([sandbox.env_id], [sandbox.env_id])
    assert await server.manager.get(sandbox.id) == sandbox
    assert await server.manager.read_file(sandbox.id, "x") == b"new"
    rolled = await server.manager.rollback(sandbox.id, snapshot.id)
    assert rolled.env_id == f"{sandbox.id}-3"  # -2 was used, if only half


async def test_a_crash_during_rollback_after_the_swap(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "x", b"old", 0o644)
    snapshot = await server.manager.snapshot(sandbox.id)
    arrived = server.wire.hold("destroy")
    rolled = await server.manager.rollback(sandbox.id, snapshot.id)
    await arrived.wait()
    assert len(await server.fake.list_ids()) == 2
    await server.restart()
    assert await ids(server) == ([rolled.env_id], [rolled.env_id])
    assert await server.manager.get(sandbox.id) == dataclasses.replace(rolled, parked=None)
    assert await server.manager.read_file(sandbox.id, "x") == b"old"


async def test_a_crash_during_destruction(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    arrived = server.wire.hold("destroy")
    ending = asyncio.create_task(server.manager.destroy(sandbox.id))
    await arrived.wait()
    await server.restart()
    await asyncio.wait([ending])
    assert await ids(server) == ([], [])


async def test_an_environment_without_a_record_is_removed(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.fake.create("sbstranger00000000-1", sandbox.spec)
    await server.restart()
    assert await ids(server) == ([sandbox.env_id], [sandbox.env_id])
    assert "sbstranger00000000-1 has no record" in caplog.text


async def test_an_orphan_that_cannot_be_removed_does_not_stop_the_start(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.fake.create("sbstranger00000000-1", sandbox.spec)
    server.fake.failures["destroy"] = [BackendError("busy")] * 2
    await server.restart()
    await server.manager.settle()
    assert len(await server.fake.list_ids()) == 2
    server.fake.failures.clear()
    await server.manager._fleet._sweep()
    assert await ids(server) == ([sandbox.env_id], [sandbox.env_id])


async def test_a_record_without_its_environment_is_dropped(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    kept = await server.manager.create(CreateOptions())
    lost = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(lost.id)
    await server.crash()
    await server.fake.destroy(lost.env_id)
    manager = await server.start()
    assert [record.id for record in await manager.list_sandboxes()] == [kept.id]
    assert f"sandbox {lost.id} is gone" in caplog.text
    assert await manager.list_snapshots() == [snapshot]


async def test_a_stopped_sandbox_keeps_its_workspace(server: Server) -> None:
    """As after a restart of the host: the environment is there, its processes are not."""
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "x", b"data", 0o644)
    snapshot = await server.manager.snapshot(sandbox.id)
    await server.crash()
    await server.fake.kill_guest(sandbox.env_id)
    manager = await server.start()
    (record,) = await manager.list_sandboxes()
    assert (record.id, record.state, record.running) == (sandbox.id, "running", False)
    assert "/workspace/x" in server.fake.environments[sandbox.env_id].files
    assert (await manager.rollback(sandbox.id, snapshot.id)).running
    assert await manager.read_file(sandbox.id, "x") == b"data"


async def test_what_a_stop_that_was_cut_short_still_holds_is_freed(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    cut, runs, fails = [await server.manager.create(CreateOptions()) for _ in range(3)]
    await server.manager.write_file(cut.id, "x", b"data", 0o644)
    await server.crash()
    for sandbox in (cut, fails):
        await server.fake.kill_guest(sandbox.env_id)
    server.fake.failures["stop_environment"] = [BackendError("it is stuck")]
    manager = await server.start()
    await manager.settle()
    stops = [env_id for method, env_id in server.wire.calls if method == "stop_environment"]
    assert sorted(stops) == sorted([cut.env_id, fails.env_id])
    assert "was not freed: it is stuck" in caplog.text
    assert (await manager.get(runs.id)).running
    for sandbox in (cut, fails):
        assert (await manager.start_sandbox(sandbox.id)).running
    assert await manager.read_file(cut.id, "x") == b"data"


# -- unreadable records --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE sandboxes SET record = substr(record, 1, 50) WHERE id = ?",
        "UPDATE sandboxes SET record = replace(record, '\"version\":3', '\"version\":4') WHERE id = ?",
        "UPDATE sandboxes SET env_id = 'nonsense' WHERE id = ?",
        "UPDATE sandboxes SET environments = 'x' WHERE id = ?",
    ],
)
async def test_an_unreadable_record_never_costs_a_workspace(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path / "data", max_sandboxes=2) as server:
        good = await server.manager.create(CreateOptions())
        bad = await server.manager.create(CreateOptions(timeout_seconds=10))
        await server.manager.write_file(bad.id, "x", b"precious", 0o644)
        await server.crash()
        edit(server, damage, bad.id)
        server.clock.now += 100  # it would have expired, but who knows
        manager = await server.start()
        await manager._fleet._sweep()
        await manager.settle()
        assert server.fake.environments[bad.env_id].files["/workspace/x"].data == b"precious"
        assert bad.id in caplog.text
        assert [record.id for record in await manager.list_sandboxes()] == [good.id]
        with pytest.raises(BackendError, match="cannot be read"):
            await manager.get(bad.id)
        with pytest.raises(BackendError, match="cannot be read"):
            await manager.exec(bad.id, "true")
        with pytest.raises(LimitExceededError):  # something lives there, so it counts
            await manager.create(CreateOptions())
        manager = await server.restart()
        assert bad.env_id in server.fake.environments
        await manager.destroy(bad.id)  # its owner's word is enough
        with pytest.raises(NotFoundError):
            await manager.destroy(bad.id)
        assert await ids(server) == ([good.env_id], [good.env_id])
        await manager.create(CreateOptions())


async def test_what_was_kept_for_an_unreadable_record_goes_with_it(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    await server.manager.rollback(sandbox.id, snapshot.id)
    assert len(await server.manager.list_snapshots(sandbox.id, auto=True)) == 2
    await server.manager.settle()
    await server.crash()
    edit(server, "UPDATE sandboxes SET record = '{}' WHERE id = ?", sandbox.id)
    manager = await server.start()
    assert len(await manager.list_snapshots(auto=True)) == 2
    await manager.destroy(sandbox.id)
    assert await manager.list_snapshots(auto=True) == [snapshot]
    assert kept_states(server.settings) == {snapshot.id}


async def test_an_unreadable_snapshot_keeps_its_state(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    await server.crash()
    edit(server, "UPDATE snapshots SET record = '{}' WHERE id = ?", snapshot.id)
    manager = await server.start()
    assert kept_states(server.settings) == {snapshot.id}
    with pytest.raises(BackendError, match="cannot be read"):
        await manager.rollback(sandbox.id, snapshot.id)
    await manager.delete_snapshot(snapshot.id)
    assert kept_states(server.settings) == set()


# -- snapshots ------------------------------------------------------------------------------------------------


class Crashed(BaseException):
    """The server ends here."""


@pytest.mark.parametrize("step", ["read", "committed", "pinned", "told"])
async def test_a_crash_at_any_step_of_a_snapshot(server: Server, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "x", b"x" * 3_000_000, 0o644)
    earlier = await server.manager.snapshot(sandbox.id, "earlier")
    state = server.manager._fleet.state
    put, take = state.put_snapshot, Store.import_tar

    def read(store: Store, ref: str, file: Any, **options: Any) -> None:
        file.read(1000)
        raise Crashed

    def committed(store: Store, *args: Any, **options: Any) -> None:
        take(store, *args, **options)
        raise Crashed

    async def pinned(record: object) -> None:
        raise Crashed

    async def told(record: object) -> None:
        await put(record)  # type: ignore[arg-type]
        raise Crashed

    await server.manager.write_file(sandbox.id, "y", b"new", 0o644)
    with monkeypatch.context() as patched:
        if step in {"read", "committed"}:
            patched.setattr(Store, "import_tar", locals()[step])
        else:
            patched.setattr(state, "put_snapshot", locals()[step])
        with pytest.raises(Crashed):
            await server.manager.snapshot(sandbox.id, "interrupted")
    kept = kept_states(server.settings)
    assert len(kept) == (2 if step in {"pinned", "told"} else 1)  # as after a real crash
    assert earlier.id in kept
    manager = await server.restart()
    found = await manager.list_snapshots()
    assert kept_states(server.settings) == {record.id for record in found}
    assert [record.name for record in found] == ["earlier", "interrupted"][: 2 if step == "told" else 1]
    for record in found:
        fork = await manager.fork(record.id, ForkOptions())
        assert await manager.read_file(fork.id, "x") == b"x" * 3_000_000


async def test_a_crash_while_a_snapshot_is_deleted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)

    async def crash(id: str) -> None:
        raise Crashed

    monkeypatch.setattr(server.manager._fleet.workspaces, "drop", crash)
    with pytest.raises(Crashed):
        await server.manager.delete_snapshot(snapshot.id)
    manager = await server.restart()
    assert await manager.list_snapshots() == []
    assert kept_states(server.settings) == set()


# -- starting ----------------------------------------------------------------------------------------------------


async def test_a_second_server_on_one_data_directory_is_refused(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    closed: list[str] = []

    class Watched(FakeBackend):
        async def close(self) -> None:
            closed.append(self.name)

    second = Manager(server.settings, {"fake": Watched(server.settings)})
    with pytest.raises(ConflictError, match="another server"):
        await second.start()
    assert closed == []  # closing tidies up what the first server uses
    assert (await server.manager.exec(sandbox.id, "true")).exit.code == 0
    await server.restart()
    assert await ids(server) == ([sandbox.env_id], [sandbox.env_id])


async def test_a_state_of_a_newer_server_is_refused_and_nothing_touched(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    snapshot = await server.manager.snapshot(sandbox.id)
    await server.crash()
    edit(server, "PRAGMA user_version = 99")
    (server.settings.data_dir / "snapshots").mkdir()
    (server.settings.data_dir / "snapshots" / "snapother.tar.zst").write_bytes(b"of the newer server")
    for _ in range(2):  # twice: the lock was given back
        with pytest.raises(ConflictError, match="newer"):
            await server.start()
    assert ("destroy", sandbox.env_id) not in server.wire.calls
    assert (server.settings.data_dir / "snapshots" / "snapother.tar.zst").exists()
    edit(server, f"PRAGMA user_version = {len(MIGRATIONS)}")
    manager = await server.start()
    assert await manager.list_snapshots() == [snapshot]
    assert await ids(server) == ([sandbox.env_id], [sandbox.env_id])


async def test_a_default_backend_that_cannot_start_is_an_error(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.crash()
    server.fake.failures["start"] = [BackendError("install runc")]
    with pytest.raises(BackendError, match="install runc"):
        await server.start()
    assert ("close", "") in server.wire.calls
    await server.start()
    assert await ids(server) == ([sandbox.env_id], [sandbox.env_id])


class Second(FakeBackend):
    name = "second"


async def test_another_backend_that_is_down_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = make_settings(tmp_path / "data", backends=("fake", "second"))
    first, second = FakeBackend(settings), Second(settings)

    async def start() -> Manager:
        manager = Manager(settings, {"fake": first, "second": second})
        await manager.start()
        return manager

    manager = await start()
    sandbox = await manager.create(CreateOptions(backend="second"))
    await second.create("sborphan0000000000-1", sandbox.spec)
    snapshot = await manager.snapshot(sandbox.id)
    await manager.close()
    second.failures["start"] = [BackendError("start the engine")] * 2
    manager = await start()
    try:
        assert [(s.name, s.healthy, s.default) for s in await manager.describe_backends()] == [
            ("fake", True, True),
            ("second", False, False),
        ]
        assert [record.id for record in await manager.list_sandboxes()] == [sandbox.id]
        for call in (
            manager.exec(sandbox.id, "true"),
            manager.destroy(sandbox.id),
            manager.fork(snapshot.id, ForkOptions()),
            manager.create(CreateOptions(backend="second")),
        ):
            with pytest.raises(BackendError, match="start the engine"):
                await call
        assert (await manager.get(sandbox.id)).state == "running"
        second.failures.clear()
        await manager._fleet._sweep()
        await manager.settle()
        assert await second.list_ids() == [sandbox.env_id]
        assert (await manager.exec(sandbox.id, "echo back")).stdout == b"back\n"
        await manager.destroy(sandbox.id)
    finally:
        await manager.close()


async def test_what_was_kept_for_a_sandbox_that_is_gone_goes_when_its_backend_comes_up(tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "data", backends=("fake", "second"))
    first, second = FakeBackend(settings), Second(settings)
    manager = Manager(settings, {"fake": first, "second": second})
    await manager.start()
    sandbox = await manager.create(CreateOptions(backend="second"))
    snapshot = await manager.snapshot(sandbox.id)
    await manager.rollback(sandbox.id, snapshot.id)
    assert len(await manager.list_snapshots(sandbox.id, auto=True)) == 2
    await manager.settle()
    await manager.close()
    for id in await second.list_ids():
        await second.destroy(id)
    second.failures["start"] = [BackendError("start the engine")]
    manager = Manager(settings, {"fake": first, "second": second})
    await manager.start()
    try:
        await manager._fleet._sweep()
        await manager.settle()
        assert await manager.list_sandboxes() == []
        assert await manager.list_snapshots(auto=True) == [snapshot]
        assert kept_states(settings) == {snapshot.id}
    finally:
        await manager.close()


async def test_orphans_that_two_sweeps_meet_are_removed_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The later one comes to them when the earlier one has removed them."""
    fleet = server.manager._fleet
    fleet._orphans |= {f"sborphan-{number}": "fake" for number in range(10)}
    arrived = server.wire.hold("destroy")
    with caplog.at_level(logging.DEBUG, "agent_sandbox.manager.tasks"):
        fleet._start_removals()
        await arrived.wait()
        fleet._start_removals()
        del fleet._orphans["sborphan-9"]  # as the earlier one does in the end
        server.wire.free("destroy")
        await server.manager.settle()
    assert fleet._orphans == {}
    assert "remove orphans" not in caplog.text


async def test_a_default_that_is_down_stops_no_other(tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "data", backends=("fake", "second"))
    first, second = FakeBackend(settings), Second(settings)
    manager = Manager(settings, {"fake": first, "second": second})
    first.failures["start"] = [BackendError("install runc")] * 100
    await manager.start()
    try:
        assert await manager.ping() == "second"
        with pytest.raises(BackendError, match="install runc"):
            await manager.create(CreateOptions())
        made = await manager.create(CreateOptions(min_isolation="process"))
        assert made.backend == "second"
        assert (await manager.exec(made.id, "echo there")).stdout == b"there\n"
        with pytest.raises(BackendError, match="'fake' is down"):  # what is in use there is not known
            await manager._fleet._layers_in_use()
        first.failures.clear()
        await manager._fleet._sweep()
        assert (await manager.create(CreateOptions())).backend == "fake"
        assert await manager.ping() == "fake"
        first.failures["ping"] = [BackendError("gone")]
        assert await manager.ping() == "second"
        first.failures["ping"], second.failures["ping"] = [BackendError("gone")], [BackendError("too")]
        with pytest.raises(BackendError, match="gone"):
            await manager.ping()
        for record in await manager.list_sandboxes():
            await manager.destroy(record.id)
    finally:
        await manager.close()


async def test_a_server_of_which_no_backend_comes_up_does_not_start(tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "data", backends=("fake", "second"))
    first, second = FakeBackend(settings), Second(settings)
    first.failures["start"], second.failures["start"] = [BackendError("install runc")], [BackendError("install it")]
    manager = Manager(settings, {"fake": first, "second": second})
    with pytest.raises(BackendError, match="no backend is up; fake: install runc"):
        await manager.start()
    again = Manager(settings, {"fake": first, "second": second})
    await again.start()  # nothing was held on to
    await again.close()


async def test_a_backend_that_is_not_configured_any_more(tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "data")
    first, second = FakeBackend(settings), Second(settings)
    manager = Manager(settings, {"fake": first, "second": second})
    await manager.start()
    sandbox = await manager.create(CreateOptions(backend="second"))
    await manager.close()
    manager = Manager(settings, {"fake": first})
    await manager.start()
    assert [(r.id, r.running) for r in await manager.list_sandboxes()] == [(sandbox.id, False)]
    for call in (manager.exec(sandbox.id, "true"), manager.destroy(sandbox.id)):
        with pytest.raises(BackendError, match="'second' is not configured"):
            await call
    with pytest.raises(BackendError, match="'second', which is not configured"):  # its layers are not known
        await manager._fleet._layers_in_use()
    await manager.close()
    manager = Manager(settings, {"fake": first, "second": second})
    await manager.start()
    assert (await manager.exec(sandbox.id, "echo back")).stdout == b"back\n"
    await manager.destroy(sandbox.id)
    await manager.close()


async def test_a_damaged_database_costs_nothing(server: Server) -> None:
    sandbox = await server.manager.create(CreateOptions())
    await server.crash()
    directory = server.settings.data_dir
    shutil.copy(directory / "state.db", directory / "backup")
    (directory / "state.db").write_bytes(b"garbage" * 1000)
    with pytest.raises(BackendError, match="damaged"):
        await server.start()
    assert await server.fake.list_ids() == [sandbox.env_id]
    shutil.copy(directory / "backup", directory / "state.db")
    await server.start()
    assert await ids(server) == ([sandbox.env_id], [sandbox.env_id])


async def test_a_sweep_that_fails_is_not_the_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(tmp_path / "data", reap_interval_seconds=0.05) as server:
        fleet = server.manager._fleet
        real, failures = fleet._sweep, 0

        async def sweep() -> None:
            nonlocal failures
            failures += 1
            if failures < 3:
                raise RuntimeError("unexpected")
            await real()

        fleet._sweep = sweep  # type: ignore[method-assign]
        await server.manager.create(CreateOptions(timeout_seconds=1))
        server.clock.now += 1
        async with asyncio.timeout(10):
            while await server.fake.list_ids():
                await asyncio.sleep(0.01)
        assert caplog.text.count("a sweep failed") == 2


def test_records_are_what_the_interface_promises() -> None:
    """Names that the server, the command line and later work count on."""
    assert list(SandboxRecord.__dataclass_fields__) == [
        "id",
        "env_id",
        "backend",
        "spec",
        "state",
        "running",
        "created_at",
        "expires_at",
        "source_snapshot_id",
        "latest_at",
        "metadata",
        "project",
        "source",
        "commit",
        "commit_bytes",
        "parked",
    ]
