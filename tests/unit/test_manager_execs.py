"""Commands as objects in the manager: kept, read, signalled, over restarts; and how commands keep a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    UnsupportedError,
)
from agent_sandbox.manager import CommandOptions, CreateOptions, Manager, SandboxRecord
from agent_sandbox.manager.entries import HOLD_SECONDS
from agent_sandbox.manager.requests import kept_command
from agent_sandbox.types import AttachEvent, ExecExit, ExecGap, ExecOutput, ExecStarted, TerminalSize
from tests.unit.manager_harness import Server, make_settings, serving

SOON = 10.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path) as running:
        yield running


@pytest.fixture
async def sandbox(server: Server) -> SandboxRecord:
    return await server.manager.create(CreateOptions(timeout_seconds=100))


def options(command: Any, **more: Any) -> CommandOptions:
    return CommandOptions(command=command, **more)


async def read(events: AsyncGenerator[AttachEvent, None]) -> list[AttachEvent]:
    async with asyncio.timeout(SOON), aclosing(events):
        return [event async for event in events]


def output(events: list[AttachEvent]) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, ExecOutput))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_command_read_by_its_starter_can_be_read_again(server: Server, sandbox: SandboxRecord) -> None:
    manager = server.manager
    exec_id, events = manager.open_exec(sandbox.id, options("echo a; echo b >&2; exit 3", tag="t"))
    got = await read(events)
    assert isinstance(got[0], ExecStarted)
    assert isinstance(got[-1], ExecExit)
    assert got[-1].code == 3
    status = await manager.exec_status(sandbox.id, exec_id)
    assert (status.tag, status.running, status.argv) == ("t", False, ("/bin/sh", "-c", "echo a; echo b >&2; exit 3"))
    again = await read(manager.attach_exec(sandbox.id, exec_id, cursor=2, follow=True))
    assert output(again) == b"b\n"
    with pytest.raises(InvalidRequestError):
        await read(manager.attach_exec(sandbox.id, exec_id, cursor=5, follow=True))
    await manager.forget_exec(sandbox.id, exec_id)
    for late in (manager.exec_status, manager.forget_exec):
        with pytest.raises(NotFoundError):
            await late(sandbox.id, exec_id)


async def test_a_detached_command_takes_input_signals_and_sizes(server: Server, sandbox: SandboxRecord) -> None:
    manager = server.manager
    status = await manager.start_exec(sandbox.id, options(["cat"], stdin=True))
    assert status.running
    assert status.pid > 0

    async def typed() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    assert await manager.write_stdin(sandbox.id, status.id, typed()) == 7
    await manager.close_stdin(sandbox.id, status.id)
    assert output(await read(manager.attach_exec(sandbox.id, status.id, cursor=0, follow=True))) == b"one two"
    with pytest.raises(NotFoundError):
        await manager.write_stdin(sandbox.id, status.id, typed())

    terminal = await manager.start_exec(sandbox.id, options(["sleep", "60"], tty=TerminalSize(10, 20), detach=True))
    await manager.resize_exec(sandbox.id, terminal.id, TerminalSize(30, 100))
    with pytest.raises(InvalidRequestError, match="no signal"):
        await manager.signal_exec(sandbox.id, terminal.id, "NOPE")
    assert await manager.signal_exec(sandbox.id, terminal.id, "sigint") == 1
    end = (await read(manager.attach_exec(sandbox.id, terminal.id, cursor=0, follow=True)))[-1]
    assert isinstance(end, ExecExit)
    assert end.signal == 2


async def test_a_program_that_is_missing_is_a_command_that_has_ended(server: Server, sandbox: SandboxRecord) -> None:
    exec_id, events = server.manager.open_exec(sandbox.id, options(["no-such-program"]))
    (end,) = [event for event in await read(events) if not isinstance(event, ExecOutput)]
    assert isinstance(end, ExecExit)
    assert (end.code, end.message) == (127, "no-such-program: not found")
    assert not (await server.manager.exec_status(sandbox.id, exec_id)).running


async def test_an_abandoned_starter_ends_its_command_and_an_attachment_does_not(
    server: Server, sandbox: SandboxRecord
) -> None:
    manager = server.manager
    exec_id, events = manager.open_exec(sandbox.id, options(["sleep", "60"]))
    assert isinstance(await anext(events), ExecStarted)
    watching = manager.attach_exec(sandbox.id, exec_id, cursor=0, follow=True)
    waiting = asyncio.ensure_future(anext(watching))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait({waiting})
    await watching.aclose()
    assert (await manager.exec_status(sandbox.id, exec_id)).running
    await events.aclose()
    end = (await read(manager.attach_exec(sandbox.id, exec_id, cursor=0, follow=True)))[-1]
    assert isinstance(end, ExecExit)
    assert end.signal == 9


async def test_a_slow_reader_is_told_what_it_lost(server: Server, sandbox: SandboxRecord) -> None:
    status = await server.manager.start_exec(sandbox.id, options(["yes"], detach=True))
    await read(server.manager.attach_exec(sandbox.id, status.id, cursor=0, follow=True))
    got = await read(server.manager.attach_exec(sandbox.id, status.id, cursor=0, follow=False))
    assert isinstance(got[0], ExecGap)
    assert got[0].bytes + len(output(got)) == 64 * 1024 * 1024
    assert len(output(got)) <= 1024 * 1024


async def test_running_commands_survive_a_server_that_is_killed(server: Server, sandbox: SandboxRecord) -> None:
    detached = await server.manager.start_exec(sandbox.id, options("echo before; sleep 0.5; echo after", detach=True))
    exec_id, events = server.manager.open_exec(sandbox.id, options("echo x; sleep 0.5; echo y"))
    assert isinstance(await anext(events), ExecStarted)
    manager = await server.restart()
    listed = await manager.list_execs(sandbox.id)
    assert {status.id for status in listed} == {detached.id, exec_id}
    await events.aclose()
    got = await read(manager.attach_exec(sandbox.id, detached.id, cursor=0, follow=True))
    assert output(got) == b"before\nafter\n"
    assert isinstance(got[-1], ExecExit)
    assert got[-1].code == 0


async def test_what_cannot_be_is_refused_before_anything_starts(server: Server, sandbox: SandboxRecord) -> None:
    manager = server.manager
    for wrong, error in (
        (options(""), InvalidRequestError),
        (options("true", tag="x" * 257), InvalidRequestError),
        (options("true", tag="é" * 129), InvalidRequestError),
        (options("true", tag="\udcff"), InvalidRequestError),
        (options("true", tag="a\nb"), InvalidRequestError),
        (options("true", tty=TerminalSize(0, 80)), InvalidRequestError),
        (options("true", tty=TerminalSize(24, 65_536)), InvalidRequestError),
        (options("true", timeout_seconds=0), InvalidRequestError),
        (options("true", timeout_seconds=3_601), InvalidRequestError),
        (options("true", env={"A=": "b"}), InvalidRequestError),
        (options("x" * (4 << 20)), PayloadTooLargeError),
        (options("true", root=True), UnsupportedError),
        (options("true", workdir="/nowhere"), InvalidRequestError),
    ):
        with pytest.raises(error):
            await manager.start_exec(sandbox.id, wrong)
        with pytest.raises(error):
            await read(manager.open_exec(sandbox.id, wrong)[1])
    assert await manager.list_execs(sandbox.id) == []
    assert manager._fleet.entries[sandbox.id].kept == {}


def test_a_terminal_has_a_name_and_nobody_waits_for_the_default_deadline(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    tty = TerminalSize(24, 80)
    assert kept_command(options("true"), settings, "e").timeout_seconds == 60
    assert kept_command(options("true", detach=True), settings, "e").timeout_seconds == 3600
    assert kept_command(options("true", tty=tty), settings, "e").timeout_seconds == 3600
    assert kept_command(options("true", tty=tty, timeout_seconds=5), settings, "e").timeout_seconds == 5
    assert dict(kept_command(options("true", tty=tty), settings, "e").env) == {"TERM": "xterm-256color"}
    assert dict(kept_command(options("true", tty=tty, env={"TERM": "vt100"}), settings, "e").env) == {"TERM": "vt100"}
    assert kept_command(options("true"), settings, "e").env == {}


async def test_a_command_of_a_sandbox_that_is_destroyed_stopped_or_rolled_back(server: Server) -> None:
    manager = server.manager
    for ending, error, match in (
        ("destroy", NotFoundError, "destroyed meanwhile"),
        ("stop", ConflictError, "stopped meanwhile"),
        ("rollback", ConflictError, "rolled back meanwhile"),
    ):
        sandbox = await manager.create(CreateOptions())
        snapshot = await manager.snapshot(sandbox.id)
        exec_id, events = manager.open_exec(sandbox.id, options(["sleep", "60"]))
        assert isinstance(await anext(events), ExecStarted)
        watching = asyncio.ensure_future(read(manager.attach_exec(sandbox.id, exec_id, cursor=0, follow=True)))
        await asyncio.sleep(0.05)
        if ending == "rollback":
            await manager.rollback(sandbox.id, snapshot.id)
        else:
            await getattr(manager, ending)(sandbox.id)
        with pytest.raises(error, match=match):
            await read(events)
        with pytest.raises(error, match=match):
            await watching


# -- commands keep their sandbox --------------------------------------------------------------------------


async def test_a_plain_command_keeps_its_sandbox_and_its_results_for_a_moment(
    server: Server, sandbox: SandboxRecord
) -> None:
    manager = server.manager
    running = asyncio.create_task(manager.exec(sandbox.id, "sleep 0.5; echo done > out", timeout_seconds=3600))
    await until(lambda: bool(server.fake.environments[sandbox.env_id].execs))
    server.clock.now = sandbox.expires_at + 5
    shown = await manager.get(sandbox.id)
    assert shown.expires_at == server.clock.now + HOLD_SECONDS
    server.clock.now = shown.expires_at
    await manager._fleet._sweep()
    assert (await manager.list_sandboxes())[0].expires_at == server.clock.now + HOLD_SECONDS
    server.clock.now += HOLD_SECONDS + 1
    assert (await running).exit.code == 0
    assert await manager.read_file(sandbox.id, "out") == b"done\n"
    await manager.settle()
    manager = await server.restart()
    assert (await manager.get(sandbox.id)).expires_at == server.clock.now + HOLD_SECONDS
    server.clock.now += HOLD_SECONDS
    with pytest.raises(NotFoundError):
        await manager.get(sandbox.id)


async def test_a_detached_command_keeps_its_sandbox_over_a_restart(server: Server, sandbox: SandboxRecord) -> None:
    status = await server.manager.start_exec(sandbox.id, options(["sleep", "60"], detach=True))
    await server.crash()
    server.clock.now = sandbox.expires_at + 1000
    manager = await server.start()
    assert (await manager.get(sandbox.id)).expires_at == server.clock.now + HOLD_SECONDS
    await manager.signal_exec(sandbox.id, status.id, 9)
    await read(manager.attach_exec(sandbox.id, status.id, cursor=0, follow=True))
    server.clock.now += HOLD_SECONDS
    await manager._fleet._sweep()
    await manager.settle()
    assert await server.fake.list_ids() == []


async def test_without_a_command_a_restart_after_the_end_removes_it(server: Server, sandbox: SandboxRecord) -> None:
    done = await server.manager.start_exec(sandbox.id, options(["true"], detach=True))
    await read(server.manager.attach_exec(sandbox.id, done.id, cursor=0, follow=True))
    await server.crash()
    server.clock.now = sandbox.expires_at
    manager = await server.start()
    with pytest.raises(NotFoundError):
        await manager.get(sandbox.id)
    assert await server.fake.list_ids() == []


async def test_no_command_keeps_a_sandbox_for_ever(server: Server, sandbox: SandboxRecord) -> None:
    manager = server.manager
    assert sandbox.latest_at == sandbox.created_at + server.settings.max_timeout_seconds
    await manager.start_exec(sandbox.id, options(["sleep", "60"], detach=True))
    await manager.set_timeout(sandbox.id, 10)
    entry = manager._fleet.entries[sandbox.id]
    entry.kept = dict.fromkeys(entry.kept, float("inf"))  # as a daemon would have it that always says "it runs"
    server.clock.now = entry.record.latest_at - 1
    assert (await manager.get(sandbox.id)).expires_at == entry.record.latest_at
    server.clock.now += 1
    with pytest.raises(NotFoundError):
        await manager.get(sandbox.id)


async def test_a_guest_that_does_not_say_what_runs_is_not_kept(
    server: Server, sandbox: SandboxRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_sandbox.manager.fleet._ASK_SECONDS", 0.05)
    await server.manager.start_exec(sandbox.id, options(["sleep", "60"], detach=True))
    await server.crash()
    server.clock.now = sandbox.expires_at

    async def stalled(id: str) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.fake, "list_execs", stalled)
    await server.start()
    assert await server.fake.list_ids() == []


async def test_a_command_that_has_overstayed_its_own_timeout_keeps_nothing(
    server: Server, sandbox: SandboxRecord
) -> None:
    running = asyncio.create_task(server.manager.exec(sandbox.id, ["sleep", "60"], timeout_seconds=50))
    await until(lambda: bool(server.fake.environments[sandbox.env_id].execs))
    server.clock.now = sandbox.expires_at  # 100 s later on the wall, 0 s on the daemon's own clock
    await server.manager._fleet._sweep()
    with pytest.raises(NotFoundError, match="expired"):
        await running


# -- a sandbox that has stopped ------------------------------------------------------------------------------


async def test_stop_and_start_keep_the_workspace_and_nothing_else(server: Server, sandbox: SandboxRecord) -> None:
    manager = server.manager
    await manager.write_file(sandbox.id, "kept", b"here", 0o644)
    await manager.exec(sandbox.id, "echo x > /tmp/gone")
    snapshot = await manager.snapshot(sandbox.id)
    await manager.start_exec(sandbox.id, options(["sleep", "60"], detach=True))
    stopped = await manager.stop(sandbox.id)
    assert (stopped.running, stopped.state, stopped.expires_at) == (False, "running", sandbox.expires_at)
    assert (await manager.stop(sandbox.id)).running is False
    for call in (
        manager.exec(sandbox.id, "true"),
        manager.read_file(sandbox.id, "kept"),
        manager.write_file(sandbox.id, "x", b"", 0o644),
        manager.list_execs(sandbox.id),
        manager.snapshot(sandbox.id),
        manager.stats(sandbox.id),
    ):
        with pytest.raises(ConflictError, match="is stopped and keeps its workspace; start it: agent-sandbox start sb"):
            await call
    assert (await manager.set_timeout(sandbox.id, 200)).expires_at == server.clock.now + 200
    assert (await manager.start_sandbox(sandbox.id)).running
    assert (await manager.start_sandbox(sandbox.id)).running
    assert await manager.read_file(sandbox.id, "kept") == b"here"
    assert (await manager.exec(sandbox.id, "cat /tmp/gone")).exit.code == 1
    assert await manager.list_execs(sandbox.id) == []
    await manager.stop(sandbox.id)
    assert (await manager.rollback(sandbox.id, snapshot.id)).running
    await manager.stop(sandbox.id)
    await manager.destroy(sandbox.id)
    await manager.settle()
    assert await server.fake.list_ids() == []


async def test_a_stopped_sandbox_is_found_again_as_such(server: Server, sandbox: SandboxRecord) -> None:
    await server.manager.write_file(sandbox.id, "kept", b"here", 0o644)
    await server.manager.stop(sandbox.id)
    manager = await server.restart()
    assert (await manager.get(sandbox.id)).running is False
    with pytest.raises(ConflictError, match="start it"):
        await manager.exec(sandbox.id, "true")
    await manager.start_sandbox(sandbox.id)
    assert await manager.read_file(sandbox.id, "kept") == b"here"


async def test_an_environment_that_died_is_stopped_and_says_so(server: Server, sandbox: SandboxRecord) -> None:
    manager = server.manager
    await manager.write_file(sandbox.id, "kept", b"here", 0o644)
    running = asyncio.create_task(manager.exec(sandbox.id, ["sleep", "60"]))
    await until(lambda: bool(server.fake.environments[sandbox.env_id].execs))
    await server.fake.kill_guest(sandbox.env_id)
    with pytest.raises(BackendError):
        await running  # what became of it is not known
    with pytest.raises(ConflictError, match="is stopped and keeps its workspace; start it: agent-sandbox start sb"):
        await manager.read_file(sandbox.id, "kept")
    await manager.start_sandbox(sandbox.id)
    assert await manager.read_file(sandbox.id, "kept") == b"here"


async def test_a_stop_or_start_that_fails_leaves_it_as_it_was(server: Server, sandbox: SandboxRecord) -> None:
    manager = server.manager
    server.fake.failures["stop_environment"] = [UnsupportedError("stop", "fake"), BackendError("busy")]
    for error in (UnsupportedError, BackendError):
        with pytest.raises(error):
            await manager.stop(sandbox.id)
        assert (await manager.exec(sandbox.id, "true")).exit.code == 0
    await manager.stop(sandbox.id)
    server.fake.failures["start_environment"] = [BackendError("no")]
    with pytest.raises(BackendError, match="no"):
        await manager.start_sandbox(sandbox.id)
    assert (await manager.get(sandbox.id)).running is False
    assert (await manager.start_sandbox(sandbox.id)).running


async def test_a_caller_who_leaves_does_not_undo_a_stop(server: Server, sandbox: SandboxRecord) -> None:
    arrived = server.wire.hold("stop_environment")
    stopping = asyncio.create_task(server.manager.stop(sandbox.id))
    await arrived.wait()
    with pytest.raises(ConflictError, match="start it"):
        await server.manager.exec(sandbox.id, "true")
    stopping.cancel()
    await asyncio.wait({stopping})
    server.wire.free("stop_environment")
    await server.manager.settle()
    assert not server.fake.environments[sandbox.env_id].running


async def test_a_destroy_overtakes_a_stop_and_a_start(server: Server) -> None:
    for method, call in (("stop_environment", "stop"), ("start_environment", "start_sandbox")):
        sandbox = await server.manager.create(CreateOptions())
        arrived = server.wire.hold(method)
        changing = asyncio.create_task(getattr(server.manager, call)(sandbox.id))
        await arrived.wait()
        async with asyncio.timeout(SOON):
            await server.manager.destroy(sandbox.id)
            with pytest.raises(NotFoundError, match="destroyed meanwhile"):
                await changing
        server.wire.free(method)
    assert await server.fake.list_ids() == []


async def test_a_crash_during_stop_or_start_leaves_what_the_backend_says(server: Server) -> None:
    for method, call, running in (
        ("stop_environment", "stop", True),
        ("start_environment", "start_sandbox", False),
    ):
        sandbox = await server.manager.create(CreateOptions())
        if not running:
            await server.manager.stop(sandbox.id)
        arrived = server.wire.hold(method)
        changing = asyncio.create_task(getattr(server.manager, call)(sandbox.id))
        await arrived.wait()
        manager = await server.restart()
        await asyncio.wait({changing})
        assert (await manager.get(sandbox.id)).running is running


async def test_an_upload_that_takes_too_long_does_not_hold_up_a_snapshot(
    server: Server, sandbox: SandboxRecord
) -> None:
    manager = server.manager
    manager._fleet.entries[sandbox.id].gate._patience = 0.1

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.01)

    writing = asyncio.create_task(manager.store_file(sandbox.id, "big", endless(), 0o644))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(SOON):
        await manager.snapshot(sandbox.id)
        with pytest.raises(ConflictError, match="did not wait any longer"):
            await writing
    assert (await manager.list_files(sandbox.id, "."))[1] == []
    await manager.write_file(sandbox.id, "after", b"", 0o644)


async def test_stats_are_what_backend_and_daemon_count(server: Server, sandbox: SandboxRecord) -> None:
    await server.manager.write_file(sandbox.id, "a", b"12345", 0o644)
    await server.manager.start_exec(sandbox.id, options(["sleep", "60"], detach=True))
    stats = await server.manager.stats(sandbox.id)
    assert (stats.memory_bytes, stats.cpu_seconds) == (5, 0.25)
    assert (stats.guest.processes, stats.guest.execs) == (2, 1)


async def test_labels_are_kept_and_found(server: Server) -> None:
    manager: Manager = server.manager
    both = await manager.create(CreateOptions(metadata={"team": "a", "job": "1"}))
    one = await manager.create(CreateOptions(metadata={"team": "a"}))
    assert [record.id for record in await manager.list_sandboxes({"team": "a"})] == [both.id, one.id]
    assert [record.id for record in await manager.list_sandboxes({"team": "a", "job": "1"})] == [both.id]
    assert await manager.list_sandboxes({"team": "b"}) == []
    manager = await server.restart()
    assert (await manager.get(both.id)).metadata == {"team": "a", "job": "1"}
    for wrong in ({"a=b": "c"}, {"": "x"}, {"a" * 65: "x"}, {"a": "x" * 257}, {str(n): "" for n in range(17)}):
        with pytest.raises(InvalidRequestError, match="metadata"):
            await manager.create(CreateOptions(metadata=wrong))
