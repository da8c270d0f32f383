"""The manager's calls on the fake backend: what users do with sandboxes, files, commands and snapshots."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import ClassVar, NoReturn

import pytest

from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    PayloadTooLargeError,
    UnsupportedError,
)
from agent_sandbox.manager import CreateOptions, ForkOptions, Manager
from agent_sandbox.manager.entries import Entry
from agent_sandbox.types import ExecExit, ExecOutput, ResolvedImage
from tests.unit.manager_harness import Server, kept_states, make_settings, serving

NOTHING = "sb0000000000000000"
NO_SNAPSHOT = "snap0000000000000000"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path / "data") as server:
        yield server


@pytest.fixture
def manager(server: Server) -> Manager:
    return server.manager


# -- sandboxes ------------------------------------------------------------------------------------


async def test_a_new_sandbox(server: Server, manager: Manager) -> None:
    record = await manager.create(CreateOptions(timeout_seconds=30, env={"A": "1"}))
    assert re.fullmatch(r"sb[a-z0-9]{16}", record.id)
    assert record.env_id == f"{record.id}-1"
    assert (record.state, record.running, record.backend) == ("running", True, "fake")
    assert (record.created_at, record.expires_at) == (server.clock.now, server.clock.now + 30)
    assert record.source_snapshot_id is None
    assert await server.fake.list_ids() == [record.env_id]
    assert server.fake.environments[record.env_id].spec == record.spec
    assert await manager.get(record.id) == record
    assert await manager.list_sandboxes() == [record]


async def test_ids_are_not_to_be_guessed_or_met_twice(manager: Manager) -> None:
    ids = {(await manager.create(CreateOptions())).id for _ in range(20)}
    assert len(ids) == 20


async def test_a_list_is_by_time(server: Server, manager: Manager) -> None:
    made = []
    for _ in range(5):
        server.clock.now += 1
        made.append(await manager.create(CreateOptions()))
    assert await manager.list_sandboxes() == made


async def test_what_is_refused_has_no_effect(server: Server, manager: Manager) -> None:
    for options, error in [
        (CreateOptions(cpus=0), InvalidRequestError),
        (CreateOptions(timeout_seconds=0), InvalidRequestError),
        (CreateOptions(env={"A=": ""}), InvalidRequestError),
        (CreateOptions(backend="other"), InvalidRequestError),
        (CreateOptions(network=True), ForbiddenError),
        (CreateOptions(min_isolation="vm"), UnsupportedError),
        (CreateOptions(image="missing"), NotFoundError),
        (CreateOptions(read_only_rootfs=False), UnsupportedError),
    ]:
        with pytest.raises(error):
            await manager.create(options)
    await manager.settle()
    assert await server.fake.list_ids() == []
    assert await manager.list_sandboxes() == []
    assert await (await server.restart()).list_sandboxes() == []


async def test_a_stopped_sandbox_is_shown_as_such(server: Server, manager: Manager) -> None:
    record = await manager.create(CreateOptions())
    await server.fake.kill_guest(record.env_id)
    assert not (await manager.get(record.id)).running
    assert [(r.id, r.running) for r in await manager.list_sandboxes()] == [(record.id, False)]


async def test_destroying(server: Server, manager: Manager) -> None:
    record = await manager.create(CreateOptions())
    await manager.destroy(record.id)
    assert await server.fake.list_ids() == []
    with pytest.raises(NotFoundError, match=record.id):
        await manager.get(record.id)
    with pytest.raises(NotFoundError):
        await manager.destroy(record.id)
    assert await manager.list_sandboxes() == []


async def test_unknown_ids(manager: Manager) -> None:
    for call in (
        manager.get(NOTHING),
        manager.destroy(NOTHING),
        manager.set_timeout(NOTHING, 1),
        manager.exec(NOTHING, "true"),
        manager.read_file(NOTHING, "x"),
        manager.write_file(NOTHING, "x", b"", 0o644),
        manager.list_files(NOTHING, "."),
        manager.snapshot(NOTHING),
        manager.rollback(NOTHING, NO_SNAPSHOT),
        manager.get("../../etc/passwd"),
        manager.get(""),
    ):
        with pytest.raises(NotFoundError):
            await call
    sandbox = await manager.create(CreateOptions())
    for call in (
        manager.rollback(sandbox.id, NO_SNAPSHOT),
        manager.get_snapshot(NO_SNAPSHOT),
        manager.delete_snapshot(NO_SNAPSHOT),
        manager.fork(NO_SNAPSHOT, ForkOptions()),
    ):
        with pytest.raises(NotFoundError, match=NO_SNAPSHOT):
            await call
    assert (await manager.get(sandbox.id)).state == "running"
    assert await manager.list_snapshots(NOTHING) == []


# -- quota ------------------------------------------------------------------------------------------


async def test_the_quota_counts_what_lives_and_what_is_being_made(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", max_sandboxes=3) as server:
        manager = server.manager
        arrived = server.wire.hold("create")
        making = [asyncio.create_task(manager.create(CreateOptions())) for _ in range(3)]
        await arrived.wait()
        with pytest.raises(LimitExceededError, match="3 sandboxes"):
            await manager.create(CreateOptions())
        server.wire.free("create")
        records = await asyncio.gather(*making)
        with pytest.raises(LimitExceededError):
            await manager.create(CreateOptions())
        await manager.destroy(records[0].id)
        await manager.create(CreateOptions())


async def test_nothing_is_made_while_the_disk_has_less_free_than_the_floor(tmp_path: Path) -> None:
    floor = shutil.disk_usage(tmp_path).total >> 20  # more than can be free
    async with serving(tmp_path / "data", min_free_mb=0) as server:
        old = await server.manager.create(CreateOptions(timeout_seconds=60))
        snapshot = await server.manager.snapshot(old.id)
        await server.crash()
        server.settings = dataclasses.replace(server.settings, min_free_mb=floor + 1)
        manager = await server.start()
        server.wire.calls.clear()
        for refused in (manager.create(CreateOptions()), manager.fork(snapshot.id, ForkOptions())):
            with pytest.raises(LimitExceededError, match="AGENT_SANDBOX_MIN_FREE_MB") as caught:
                await refused
            assert caught.value.details["min_free_mb"] == floor + 1
            assert 0 <= caught.value.details["free_mb"] <= floor
        assert "create" not in {method for method, _ in server.wire.calls}
        assert [record.id for record in await manager.list_sandboxes()] == [old.id]
        # What lives goes on, and can be rolled back; what has expired is removed at once, to make room.
        await manager.rollback(old.id, snapshot.id)
        server.clock.now += 61
        with pytest.raises(LimitExceededError):
            await manager.create(CreateOptions())
        await manager.settle()
        assert await server.fake.list_ids() == []


async def test_a_failed_creation_gives_its_place_back(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", max_sandboxes=1) as server:
        for _ in range(3):
            server.fake.failures["create"] = [BackendError("the runtime failed")]
            with pytest.raises(BackendError, match="the runtime failed"):
                await server.manager.create(CreateOptions())
        assert await server.manager.list_sandboxes() == []
        await server.manager.create(CreateOptions())


async def test_many_creations_at_once_do_not_pass_the_quota(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", max_sandboxes=5) as server:
        results = await asyncio.gather(
            *(server.manager.create(CreateOptions()) for _ in range(30)), return_exceptions=True
        )
        assert sum(isinstance(result, LimitExceededError) for result in results) == 25
        assert len(await server.fake.list_ids()) == 5


async def test_expired_sandboxes_do_not_hold_places(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", max_sandboxes=2) as server:
        for _ in range(2):
            await server.manager.create(CreateOptions(timeout_seconds=10))
        server.clock.now += 10
        record = await server.manager.create(CreateOptions())
        assert [r.id for r in await server.manager.list_sandboxes()] == [record.id]
        await server.manager.settle()
        assert await server.fake.list_ids() == [record.env_id]


# -- time to live --------------------------------------------------------------------------------------


async def test_an_expired_sandbox_is_gone_before_the_sweep(server: Server, manager: Manager) -> None:
    record = await manager.create(CreateOptions(timeout_seconds=10))
    server.clock.now += 9.999
    assert await manager.get(record.id)
    server.clock.now += 0.001
    for call in (
        manager.get(record.id),
        manager.destroy(record.id),
        manager.set_timeout(record.id, 10),
        manager.exec(record.id, "true"),
        manager.read_file(record.id, "x"),
        manager.write_file(record.id, "x", b"", 0o644),
        manager.list_files(record.id, "."),
        manager.snapshot(record.id),
    ):
        with pytest.raises(NotFoundError):
            await call
    assert await manager.list_sandboxes() == []
    assert await server.fake.list_ids() == [record.env_id]  # the sweep has not come yet


async def test_the_sweep_removes_what_expired(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", reap_interval_seconds=0.05) as server:
        kept = await server.manager.create(CreateOptions(timeout_seconds=100))
        for _ in range(10):
            await server.manager.create(CreateOptions(timeout_seconds=10))
        server.clock.now += 10
        async with asyncio.timeout(10):
            while len(await server.fake.list_ids()) > 1:
                await asyncio.sleep(0.01)
        assert await server.fake.list_ids() == [kept.env_id]
        await server.manager.settle()
        assert list(server.manager._fleet.entries) == [kept.id]


async def test_renewal(server: Server, manager: Manager) -> None:
    record = await manager.create(CreateOptions(timeout_seconds=10))
    server.clock.now += 5
    renewed = await manager.set_timeout(record.id, 10)
    assert renewed == dataclasses.replace(record, expires_at=record.expires_at + 5, latest_at=record.latest_at + 5)
    shortened = await manager.set_timeout(record.id, 1)
    assert shortened.expires_at == server.clock.now + 1
    for seconds in (0, -1, 86401):
        with pytest.raises(InvalidRequestError, match="timeout_seconds"):
            await manager.set_timeout(record.id, seconds)
    manager = await server.restart()
    assert (await manager.get(record.id)).expires_at == shortened.expires_at


async def test_renewal_at_the_moment_of_expiry_is_one_or_the_other(server: Server, manager: Manager) -> None:
    """While the renewal is on its way to the disk the old deadline passes, and a sweep comes."""
    for _ in range(20):
        record = await manager.create(CreateOptions(timeout_seconds=10))
        server.clock.now += 9.9
        renewal = asyncio.create_task(manager.set_timeout(record.id, 10))
        await asyncio.sleep(0)
        server.clock.now += 0.2
        await manager._fleet._sweep()
        try:
            await renewal
        except NotFoundError:
            with pytest.raises(NotFoundError):
                await manager.get(record.id)
        else:
            await manager.settle()
            assert (await manager.get(record.id)).running
            assert (await manager.exec(record.id, "true")).exit.code == 0
            await manager.destroy(record.id)


async def test_a_renewal_under_way_keeps_alive_and_one_that_came_late_does_not(
    server: Server, manager: Manager
) -> None:
    entry = manager._fleet.entries[(await manager.create(CreateOptions(timeout_seconds=10))).id]
    server.clock.now += 9
    write = entry.renew(manager._fleet.state, expires_at=server.clock.now + 10)
    server.clock.now += 2  # past the old deadline, the write still under way
    assert await manager.get(entry.record.id)
    await manager._fleet._sweep()
    await write
    assert (await manager.get(entry.record.id)).expires_at == server.clock.now + 8
    server.clock.now += 8
    with pytest.raises(NotFoundError, match="expired"):
        await entry.renew(manager._fleet.state, expires_at=server.clock.now + 10)
    await manager._fleet._sweep()
    await manager.settle()
    assert await server.fake.list_ids() == []


# -- commands --------------------------------------------------------------------------------------------


async def test_a_command(manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions(env={"A": "sandbox", "B": "sandbox"}))
    result = await manager.exec(sandbox.id, "echo out; echo err >&2; printenv A B; exit 3", env={"B": "exec"})
    assert (result.stdout, result.stderr) == (b"out\nsandbox\nexec\n", b"err\n")
    assert (result.exit.code, result.exit.timed_out, result.truncated) == (3, False, False)
    assert (await manager.exec(sandbox.id, ["echo", "$A", "a b"])).stdout == b"$A a b\n"
    assert (await manager.exec(sandbox.id, ["pwd"])).stdout == b"/workspace\n"
    await manager.exec(sandbox.id, "mkdir sub")
    assert (await manager.exec(sandbox.id, ["pwd"], workdir="sub/./")).stdout == b"/workspace/sub\n"
    assert (await manager.exec(sandbox.id, ["nonsense"])).exit.code == 127
    assert (await manager.exec(sandbox.id, "kill -9 1")).exit.signal == 9


async def test_bad_commands_are_refused(manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    for call in (
        manager.exec(sandbox.id, ""),
        manager.exec(sandbox.id, []),
        manager.exec(sandbox.id, "a\0"),
        manager.exec(sandbox.id, "true", env={"A=B": ""}),
        manager.exec(sandbox.id, "true", workdir="a\0"),
        manager.exec(sandbox.id, "true", workdir=""),
        manager.exec(sandbox.id, "true", workdir="missing"),
        manager.exec(sandbox.id, "true", timeout_seconds=0),
        manager.exec(sandbox.id, "true", timeout_seconds=3601),
    ):
        with pytest.raises(InvalidRequestError):
            await call
    with pytest.raises(InvalidRequestError):  # at the call, before a reply has begun
        manager.exec_stream(sandbox.id, "")
    with pytest.raises(NotFoundError):
        manager.exec_stream(NOTHING, "true")


async def test_a_timeout_keeps_the_output(manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    result = await manager.exec(sandbox.id, "echo before; sleep 60", timeout_seconds=0.2)
    assert (result.stdout, result.exit.timed_out) == (b"before\n", True)
    assert 200 <= result.duration_ms < 5000


async def test_output_beyond_the_limit_is_drained_and_dropped(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", max_exec_output_bytes=1000) as server:
        sandbox = await server.manager.create(CreateOptions())
        exact = await server.manager.exec(sandbox.id, ["echo", "-n", "x" * 1000])
        assert (len(exact.stdout), exact.truncated) == (1000, False)
        more = await server.manager.exec(sandbox.id, ["echo", "-n", "x" * 1001])
        assert (more.stdout, more.truncated, more.exit.code) == (b"x" * 1000, True, 0)
        both = await server.manager.exec(sandbox.id, f"echo -n {'o' * 600}; echo -n {'e' * 600} >&2; exit 5")
        assert (both.stdout, both.stderr) == (b"o" * 600, b"e" * 400)
        assert (both.truncated, both.exit.code) == (True, 5)


async def test_a_stream_ends_with_one_exit(manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    events = [event async for event in manager.exec_stream(sandbox.id, "echo a; echo b >&2; exit 4")]
    assert [type(event) for event in events[:-1]] == [ExecOutput] * (len(events) - 1)
    assert b"".join(e.data for e in events if isinstance(e, ExecOutput) and e.stream == "stdout") == b"a\n"
    assert isinstance(events[-1], ExecExit)
    assert events[-1].code == 4


async def test_closing_a_stream_ends_the_command(server: Server, manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    async with aclosing(manager.exec_stream(sandbox.id, "echo started; sleep 60")) as events:
        async for _ in events:
            break
    async with asyncio.timeout(5):
        while server.fake.environments[sandbox.env_id].execs:
            await asyncio.sleep(0.01)


async def test_a_command_needs_no_database(server: Server, manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    await manager._fleet.state.close()
    assert (await manager.exec(sandbox.id, "echo ok")).stdout == b"ok\n"
    await manager.write_file(sandbox.id, "x", b"1", 0o644)
    assert await manager.read_file(sandbox.id, "x") == b"1"


async def test_commands_run_beside_each_other_and_beside_a_snapshot(server: Server, manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    arrived = server.wire.hold("export_workspace")
    snapshot = asyncio.create_task(manager.snapshot(sandbox.id))
    await arrived.wait()
    async with asyncio.timeout(5):
        results = await asyncio.gather(*(manager.exec(sandbox.id, f"echo {n}") for n in range(64)))
    assert [result.stdout for result in results] == [f"{n}\n".encode() for n in range(64)]
    assert not snapshot.done()
    server.wire.free("export_workspace")
    await snapshot


# -- files ------------------------------------------------------------------------------------------------


async def test_files(manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    entry = await manager.write_file(sandbox.id, "a/../b/c\udcff d", b"\0data", 0o750)
    assert (entry.path, entry.size, entry.mode, entry.type) == ("/workspace/b/c\udcff d", 5, 0o750, "file")
    assert await manager.read_file(sandbox.id, "/workspace/b/c\udcff d") == b"\0data"
    path, entries = await manager.list_files(sandbox.id, "b/")
    assert path == "/workspace/b"
    assert entries == [entry]
    await manager.exec(sandbox.id, "echo tmp > /tmp/x")
    assert await manager.read_file(sandbox.id, "/tmp/x") == b"tmp\n"
    with pytest.raises(NotFoundError):
        await manager.read_file(sandbox.id, "missing")
    with pytest.raises(InvalidRequestError):
        await manager.read_file(sandbox.id, "b")


async def test_bad_paths_are_refused(manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    for path in ("", "a\0", "\ud800"):
        for call in (
            manager.read_file(sandbox.id, path),
            manager.write_file(sandbox.id, path, b"", 0o644),
            manager.list_files(sandbox.id, path),
        ):
            with pytest.raises(InvalidRequestError):
                await call
    for path in ("/etc/x", "../x", "/workspace", "."):
        with pytest.raises(InvalidRequestError, match="inside /workspace"):
            await manager.write_file(sandbox.id, path, b"", 0o644)
    with pytest.raises(InvalidRequestError, match="mode"):
        await manager.write_file(sandbox.id, "x", b"", 0o10000)


async def test_file_size_limits(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", max_file_bytes=10) as server:
        sandbox = await server.manager.create(CreateOptions())
        await server.manager.write_file(sandbox.id, "x", b"x" * 10, 0o644)
        assert await server.manager.read_file(sandbox.id, "x") == b"x" * 10
        with pytest.raises(PayloadTooLargeError, match="10 bytes"):
            await server.manager.write_file(sandbox.id, "x", b"x" * 11, 0o644)
        await server.manager.exec(sandbox.id, f"echo {'x' * 10} > x")
        with pytest.raises(PayloadTooLargeError):
            await server.manager.read_file(sandbox.id, "x")


async def test_writes_wait_while_a_snapshot_reads(server: Server, manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    await manager.write_file(sandbox.id, "x", b"old", 0o644)
    arrived = server.wire.hold("export_workspace")
    snapshot = asyncio.create_task(manager.snapshot(sandbox.id))
    await arrived.wait()
    write = asyncio.create_task(manager.write_file(sandbox.id, "x", b"new", 0o644))
    await asyncio.sleep(0.05)
    assert not write.done()
    assert await manager.read_file(sandbox.id, "x") == b"old"  # reads do not wait
    server.wire.free("export_workspace")
    record = await snapshot
    await write
    assert await manager.read_file(sandbox.id, "x") == b"new"
    await manager.rollback(sandbox.id, record.id)
    assert await manager.read_file(sandbox.id, "x") == b"old"


async def test_a_snapshot_waits_for_writes_under_way(server: Server, manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    arrived = server.wire.hold("write_file")
    write = asyncio.create_task(manager.write_file(sandbox.id, "x", b"new", 0o644))
    await arrived.wait()
    snapshot = asyncio.create_task(manager.snapshot(sandbox.id))
    await asyncio.sleep(0.05)
    assert ("export_workspace", sandbox.env_id) not in server.wire.calls
    server.wire.free("write_file")
    await write
    forked = await manager.fork((await snapshot).id, ForkOptions())
    assert await manager.read_file(forked.id, "x") == b"new"


# -- snapshots, rollback, fork ------------------------------------------------------------------------------


async def tree(manager: Manager, id: str) -> dict[str, bytes]:
    _, entries = await manager.list_files(id, ".")
    return {entry.name: await manager.read_file(id, entry.path) for entry in entries if entry.type == "file"}


async def test_write_snapshot_change_restore_five_times(server: Server, manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions(env={"A": "1"}))
    for turn in range(1, 6):
        await manager.write_file(sandbox.id, "kept", str(turn).encode(), 0o600)
        await manager.write_file(sandbox.id, f"file{turn}", b"x", 0o644)
        before = await tree(manager, sandbox.id)
        snapshot = await manager.snapshot(sandbox.id, f"turn {turn}")
        await manager.write_file(sandbox.id, "kept", b"broken", 0o644)
        await manager.write_file(sandbox.id, "later", b"x", 0o644)
        await manager.exec(sandbox.id, f"rm file{turn}; echo x > /tmp/x")
        assert await tree(manager, sandbox.id) != before
        rolled = await manager.rollback(sandbox.id, snapshot.id)
        assert await tree(manager, sandbox.id) == before
        assert rolled == dataclasses.replace(
            sandbox,
            env_id=f"{sandbox.id}-{turn + 1}",
            source_snapshot_id=snapshot.id,
            commit=snapshot.commit,
            commit_bytes=snapshot.size_bytes,
            parked=f"{sandbox.id}-{turn}",
        )
        assert (await manager.exec(sandbox.id, "printenv A")).stdout == b"1\n"
        with pytest.raises(NotFoundError):
            await manager.read_file(sandbox.id, "/tmp/x")
        (entry,) = [e for e in (await manager.list_files(sandbox.id, "."))[1] if e.name == "kept"]
        assert entry.mode == 0o600
    await manager.settle()
    assert await server.fake.list_ids() == [f"{sandbox.id}-6"]
    assert [record.name for record in await manager.list_snapshots(sandbox.id)] == [f"turn {n}" for n in range(1, 6)]


async def test_what_a_snapshot_says(server: Server, manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    await manager.write_file(sandbox.id, "x", b"x" * 100_000, 0o644)
    record = await manager.snapshot(sandbox.id, "first")
    assert re.fullmatch(r"snap[a-z0-9]{16}", record.id)
    assert (record.sandbox_id, record.name, record.backend) == (sandbox.id, "first", "fake")
    assert (record.size_bytes, record.spec, record.created_at) == (100_000, sandbox.spec, server.clock.now)
    assert 0 < record.stored_bytes < 2000
    assert (await manager.snapshot(sandbox.id)).stored_bytes == 0
    assert await manager.get_snapshot(record.id) == record
    assert (await manager.snapshot(sandbox.id)).name is None
    for name in ("", "a\n", "x" * 201):
        with pytest.raises(InvalidRequestError, match="name"):
            await manager.snapshot(sandbox.id, name)


async def test_snapshots_outlive_their_sandbox(server: Server, manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions(env={"A": "1"}, cpus=2))
    await manager.write_file(sandbox.id, "x", b"data", 0o644)
    snapshot = await manager.snapshot(sandbox.id)
    await manager.destroy(sandbox.id)
    manager = await server.restart()
    assert await manager.list_snapshots(sandbox.id) == [snapshot]
    server.clock.now += 100
    forked = await manager.fork(snapshot.id, ForkOptions())
    assert forked.spec == snapshot.spec
    assert forked.source_snapshot_id == snapshot.id
    assert forked.id != sandbox.id
    assert forked.expires_at == server.clock.now + 900
    assert await manager.read_file(forked.id, "x") == b"data"
    assert (await manager.exec(forked.id, "printenv A")).stdout == b"1\n"


async def test_forks_are_apart(manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    await manager.write_file(sandbox.id, "x", b"data", 0o644)
    snapshot = await manager.snapshot(sandbox.id)
    forks = await asyncio.gather(*(manager.fork(snapshot.id, ForkOptions()) for _ in range(5)))
    for number, fork in enumerate(forks):
        await manager.write_file(fork.id, "x", str(number).encode(), 0o644)
    assert [await manager.read_file(fork.id, "x") for fork in forks] == [b"0", b"1", b"2", b"3", b"4"]
    assert await manager.read_file(sandbox.id, "x") == b"data"


async def test_fork_options(manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions(timeout_seconds=10))
    snapshot = await manager.snapshot(sandbox.id)
    fork = await manager.fork(snapshot.id, ForkOptions(timeout_seconds=77, cpus=2, memory_mb=64))
    assert (fork.spec.cpus, fork.spec.memory_mb, fork.expires_at - fork.created_at) == (2.0, 64, 77)
    for options, error in [
        (ForkOptions(network=True), ForbiddenError),
        (ForkOptions(cpus=99), InvalidRequestError),
        (ForkOptions(timeout_seconds=0), InvalidRequestError),
    ]:
        with pytest.raises(error):
            await manager.fork(snapshot.id, options)


async def test_any_visible_snapshot_may_be_rolled_back_to(manager: Manager) -> None:
    one, other = await manager.create(CreateOptions(cpus=1)), await manager.create(CreateOptions(cpus=2))
    await manager.write_file(one.id, "x", b"of one", 0o644)
    snapshot = await manager.snapshot(one.id)
    rolled = await manager.rollback(other.id, snapshot.id)
    assert rolled.spec == other.spec
    assert await manager.read_file(other.id, "x") == b"of one"


async def test_deleting_a_snapshot(server: Server, manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    snapshot = await manager.snapshot(sandbox.id)
    assert kept_states(server.settings) == {snapshot.id}
    await manager.delete_snapshot(snapshot.id)
    assert kept_states(server.settings) == set()
    for call in (
        manager.get_snapshot(snapshot.id),
        manager.delete_snapshot(snapshot.id),
        manager.fork(snapshot.id, ForkOptions()),
        manager.rollback(sandbox.id, snapshot.id),
    ):
        with pytest.raises(NotFoundError):
            await call
    assert (await manager.exec(sandbox.id, "true")).exit.code == 0


async def test_deleting_a_snapshot_that_is_being_forked(server: Server, manager: Manager) -> None:
    sandbox = await manager.create(CreateOptions())
    await manager.write_file(sandbox.id, "x", b"data", 0o644)
    snapshot = await manager.snapshot(sandbox.id)
    for method in ("create", "import_workspace"):
        arrived = server.wire.hold(method)
        fork = asyncio.create_task(manager.fork(snapshot.id, ForkOptions()))
        await arrived.wait()
        await manager.delete_snapshot(snapshot.id)
        server.wire.free(method)
        assert await manager.read_file((await fork).id, "x") == b"data"
        snapshot = await manager.snapshot(sandbox.id)
    assert len(await manager.list_sandboxes()) == 3


async def test_snapshot_size_limit(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", max_snapshot_bytes=1000) as server:
        sandbox = await server.manager.create(CreateOptions())
        await server.manager.write_file(sandbox.id, "x", b"x" * 1001, 0o644)
        with pytest.raises(PayloadTooLargeError):
            await server.manager.snapshot(sandbox.id)
        assert kept_states(server.settings) == set()
        assert await server.manager.list_snapshots() == []
        await server.manager.write_file(sandbox.id, "x", b"x" * 1000, 0o644)
        snapshot = await server.manager.snapshot(sandbox.id)
    async with serving(tmp_path / "data", max_snapshot_bytes=10) as server:  # an older one stays usable
        assert await server.manager.fork(snapshot.id, ForkOptions())


async def test_a_fork_gets_the_content_of_its_image(tmp_path: Path) -> None:
    class Images(FakeBackend):
        images: ClassVar[dict[str, str]] = {"py": "sha256:1"}

        async def resolve_image(self, name: str) -> ResolvedImage:
            digest = name if name in self.images.values() else self.images.get(name)
            if digest is None:
                raise NotFoundError(f"there is no image {name!r}")
            return ResolvedImage(name, digest, True)

    settings = make_settings(tmp_path / "data", default_image="py")
    manager = Manager(settings, {"fake": Images(settings)})
    await manager.start()
    try:
        sandbox = await manager.create(CreateOptions())
        assert sandbox.spec.image_digest == "sha256:1"
        snapshot = await manager.snapshot(sandbox.id)
        Images.images = {"py": "sha256:2", "old": "sha256:1"}
        assert (await manager.create(CreateOptions())).spec.image_digest == "sha256:2"
        fork = await manager.fork(snapshot.id, ForkOptions())
        assert (fork.spec.image, fork.spec.image_digest) == ("py", "sha256:1")
        Images.images = {"py": "sha256:2"}
        with pytest.raises(NotFoundError, match=r"the image 'py' \(sha256:1\) of the snapshot is no longer there"):
            await manager.fork(snapshot.id, ForkOptions())
        assert len(await manager.list_sandboxes()) == 3
    finally:
        for record in await manager.list_sandboxes():
            await manager.destroy(record.id)
        await manager.close()


# -- health --------------------------------------------------------------------------------------------------


async def test_health(server: Server, manager: Manager) -> None:
    assert await manager.ping() == "fake"
    assert manager.backend_names() == ["fake"]
    (status,) = await manager.describe_backends()
    assert (status.name, status.default, status.healthy, status.message) == ("fake", True, True, "")
    assert status.capabilities == FakeBackend.capabilities
    server.fake.failures["ping"] = [BackendError("start the runtime"), BackendError("start the runtime")]
    with pytest.raises(BackendError, match="start the runtime"):
        await manager.ping()
    (status,) = await manager.describe_backends()
    assert (status.healthy, status.message) == (False, "start the runtime")


async def test_idle_time(server: Server, manager: Manager) -> None:
    await asyncio.sleep(0.02)
    assert manager.idle_seconds() >= 0.02
    sandbox = await manager.create(CreateOptions())
    await asyncio.sleep(0.02)
    assert manager.idle_seconds() == pytest.approx(0, abs=0.005)
    await manager.destroy(sandbox.id)
    await manager.settle()
    await asyncio.sleep(0.02)
    assert 0.02 <= manager.idle_seconds() < 5
    arrived = server.wire.hold("resolve_image")
    call = asyncio.create_task(manager.create(CreateOptions(image="missing")))
    await arrived.wait()
    await asyncio.sleep(0.02)
    assert manager.idle_seconds() == pytest.approx(0, abs=0.005)
    server.wire.free("resolve_image")
    with pytest.raises(NotFoundError):
        await call


async def test_nothing_is_left_in_memory(manager: Manager) -> None:
    for _ in range(20):
        sandbox = await manager.create(CreateOptions())
        snapshot = await manager.snapshot(sandbox.id)
        await manager.rollback(sandbox.id, snapshot.id)
        await manager.destroy(sandbox.id)
    await manager.settle()
    fleet = manager._fleet
    assert (fleet.entries, fleet._orphans, fleet._removing, len(fleet.tasks)) == ({}, {}, set(), 0)


async def test_no_secret_is_logged_or_shown(server: Server, manager: Manager, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    options = CreateOptions(env={"TOKEN": "hunter2"})
    assert "hunter2" not in repr(options)
    sandbox = await manager.create(options)
    snapshot = await manager.snapshot(sandbox.id)
    assert "hunter2" not in repr((sandbox, snapshot))
    server.fake.failures["create"] = [BackendError("no")]
    with pytest.raises(BackendError):
        await manager.fork(snapshot.id, ForkOptions())
    await manager.exec(sandbox.id, "true", env={"TOKEN": "hunter2"})
    await server.restart()
    await server.manager.destroy(sandbox.id)
    assert "hunter2" not in caplog.text


class NoWalk(dict[str, Entry]):
    """A map that may be looked into but not walked through."""

    def values(self) -> NoReturn:
        raise AssertionError("walked")

    items = keys = __iter__ = values


async def test_ten_thousand_records(tmp_path: Path) -> None:
    """A call on one sandbox does not look at the others."""
    async with serving(tmp_path / "data", max_sandboxes=10_001) as server:
        manager, fleet = server.manager, server.manager._fleet
        sandbox = await manager.create(CreateOptions())
        for number in range(9_999):
            record = dataclasses.replace(sandbox, id=f"sb{number:016}", env_id=f"sb{number:016}-1")
            fleet.entries[record.id] = Entry(record, 1, server.clock)
        assert len(await manager.list_sandboxes()) == 10_000
        everything, fleet.entries = fleet.entries, NoWalk(fleet.entries)
        assert (await manager.exec(sandbox.id, "echo ok")).stdout == b"ok\n"
        await manager.write_file(sandbox.id, "x", b"1", 0o644)
        assert await manager.read_file(sandbox.id, "x") == b"1"
        await manager.get(sandbox.id)
        await manager.set_timeout(sandbox.id, 10)
        snapshot = await manager.snapshot(sandbox.id)
        await manager.rollback(sandbox.id, snapshot.id)
        other = await manager.create(CreateOptions())
        await manager.destroy(other.id)
        everything.clear()
        fleet.entries = everything


async def test_a_conflict_while_being_created(server: Server, manager: Manager) -> None:
    arrived = server.wire.hold("create")
    making = asyncio.create_task(manager.create(CreateOptions()))
    await arrived.wait()
    (record,) = await manager.list_sandboxes()
    assert (record.state, record.running) == ("creating", False)
    for call in (
        manager.exec(record.id, "true"),
        manager.read_file(record.id, "x"),
        manager.set_timeout(record.id, 10),
    ):
        with pytest.raises(ConflictError, match="still being created"):
            await call
    server.wire.free("create")
    assert (await making).id == record.id
