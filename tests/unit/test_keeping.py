"""Workspaces that come as an archive from a daemon which nobody trusts."""

from __future__ import annotations

import asyncio
import io
import tarfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.base import ByteSink
from agent_sandbox.errors import BackendError, ConflictError, PayloadTooLargeError, SandboxError
from agent_sandbox.manager import keeping, pipe
from agent_sandbox.manager.pipe import Pipe
from agent_sandbox.manager.policy import CreateOptions
from agent_sandbox.store import Store
from agent_sandbox.types import ExportReport
from tests.unit.manager_harness import Server, kept_states, serving

Export = Callable[[str, ByteSink, int], Any]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path / "data") as server:
        yield server


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def sending(data: bytes, report: ExportReport | None = None) -> Export:
    async def export(id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        await dest(data)
        return report or ExportReport(file_bytes=0, entries=1)

    return export


WHOLE = archive((tarfile.TarInfo("f"), b"12345"))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"not a tar" * 1_000, id="no archive"),
        pytest.param(WHOLE[:700], id="cut off"),
        pytest.param(archive((tarfile.TarInfo("/etc/passwd"), b"x")), id="absolute"),
        pytest.param(archive((tarfile.TarInfo("a/../../b"), b"x")), id="dot dot"),
        pytest.param(archive((link("out", "/etc"), b""), (tarfile.TarInfo("out/x"), b"x")), id="through a link"),
        pytest.param(archive((link("hard", "/etc/passwd", tarfile.LNKTYPE), b"")), id="a link out"),
    ],
)
async def test_a_hostile_archive_is_the_sandboxs_fault_and_nothing_is_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    sandbox = await server.manager.create(CreateOptions())
    monkeypatch.setattr(server.wire, "export_workspace", sending(data))
    with pytest.raises(BackendError, match="cannot be kept"):
        await server.manager.snapshot(sandbox.id)
    assert kept_states(server.settings) == set()
    monkeypatch.setattr(server.wire, "export_workspace", sending(WHOLE))
    assert (await server.manager.snapshot(sandbox.id)).size_bytes == 5  # counted here, whatever the daemon says


async def test_what_the_daemon_and_the_store_left_out_is_told_together(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tarfile.TarInfo("null")
    device.type = tarfile.CHRTYPE
    report = ExportReport(5, 2, (("run/sock", "a socket"),), 7)
    data = archive((tarfile.TarInfo("f"), b"12345"), (device, b""))
    sandbox = await server.manager.create(CreateOptions())
    monkeypatch.setattr(server.wire, "export_workspace", sending(data, report))
    snapshot = await server.manager.snapshot(sandbox.id)
    assert snapshot.skipped == (("run/sock", "a socket"), ("null", "device"))
    assert snapshot.skipped_total == 8


async def test_an_archive_is_bounded_whatever_it_holds(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_SLACK", 1 << 20)
    sent = 0

    async def headers_for_ever(id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        nonlocal sent
        block = archive((tarfile.TarInfo("d"), b""))[:512] * 128
        while True:
            await dest(block)
            sent += len(block)

    server.manager._settings = server.settings.__class__(**{**vars(server.settings), "max_snapshot_bytes": 1000})
    sandbox = await server.manager.create(CreateOptions())
    monkeypatch.setattr(server.wire, "export_workspace", headers_for_ever)
    with pytest.raises(PayloadTooLargeError):
        await server.manager.snapshot(sandbox.id)
    assert sent < 16 << 20
    assert kept_states(server.settings) == set()


@pytest.mark.parametrize("when", ["before", "between", "at the end"])
async def test_an_export_that_fails_is_told_and_nothing_is_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async def export(id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        if when != "before":
            await dest(WHOLE[: 700 if when == "between" else None])
        raise PayloadTooLargeError("the guest says so")

    sandbox = await server.manager.create(CreateOptions())
    monkeypatch.setattr(server.wire, "export_workspace", export)
    with pytest.raises(PayloadTooLargeError, match="the guest says so"):
        await server.manager.snapshot(sandbox.id)
    assert kept_states(server.settings) == set()


async def test_one_that_stops_in_the_middle_cannot_keep_itself_alive_nor_hold_others_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, begun = server.wire.export_workspace, asyncio.Event()

    async def export(id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        if id != bad.env_id:
            return await inner(id, dest, max_bytes)
        await dest(WHOLE[:600])
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    good, bad = [await server.manager.create(CreateOptions()) for _ in range(2)]
    monkeypatch.setattr(server.wire, "export_workspace", export)
    stuck = asyncio.create_task(server.manager.snapshot(bad.id))
    await begun.wait()
    async with asyncio.timeout(20):
        assert await server.manager.snapshot(good.id)
        await server.manager.destroy(bad.id)
        with pytest.raises(SandboxError, match="was destroyed"):
            await stuck


async def test_a_snapshot_that_nobody_waits_for_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def export(id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    sandbox = await server.manager.create(CreateOptions())
    with monkeypatch.context() as patched:
        patched.setattr(server.wire, "export_workspace", export)
        stuck = asyncio.create_task(server.manager.snapshot(sandbox.id))
        await begun.wait()
        stuck.cancel()
        async with asyncio.timeout(20):
            with pytest.raises(asyncio.CancelledError):
                await stuck
    assert await server.manager.snapshot(sandbox.id)


async def test_a_pipe_gives_what_it_took_and_holds_a_bounded_part() -> None:
    held = Pipe()
    pieces = [bytes([n % 256]) * (100_000 + n) for n in range(200)]
    sent = 0

    async def write() -> None:
        nonlocal sent
        for piece in pieces:
            await held.write(piece)
            sent += len(piece)
        held.end()

    writing = asyncio.create_task(write())
    await asyncio.sleep(0.05)
    assert sent < 5 << 20
    reader = held.reader(lambda *_: None)
    taken = await asyncio.to_thread(lambda: b"".join(iter(lambda: reader.read(70_001), b"")))
    await writing
    assert taken == b"".join(pieces)


async def test_a_pipes_reader_gives_up_on_a_sender_that_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(pipe, "_LOOK_SECONDS", 0.01)
    held = Pipe()
    await held.write(b"x" * 100)
    reader = held.reader(lambda *_: None)
    assert await asyncio.to_thread(reader.read, 1000) == b"x" * 100
    with pytest.raises(BackendError, match="too slowly"):
        await asyncio.to_thread(reader.read, 1000)


async def test_a_pipes_reader_ends_when_the_result_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = threading.Event()

    def progress(*_: int) -> None:
        if wanted.is_set():
            raise BackendError("given up")

    reading = asyncio.create_task(asyncio.to_thread(Pipe().reader(progress).read, 10))
    await asyncio.sleep(0.05)
    wanted.set()
    with pytest.raises(BackendError, match="given up"):
        await reading


async def test_a_pipes_writer_ends_when_nobody_reads() -> None:
    held = Pipe()
    await held.write(bytes(5 << 20))
    writing = asyncio.create_task(held.write(b"more"))
    await asyncio.sleep(0.01)
    assert not writing.done()
    held.close()
    with pytest.raises(BackendError, match="nobody"):
        await writing


class OnDisk:
    """What the server's backend does where the workspace is the guest's: ``differs`` sends, ``whole`` sends instead."""

    def __init__(self, server: Server, patch: pytest.MonkeyPatch, differs: Export, state: str | None = None) -> None:
        self.held = self.sent_whole = 0
        self.state: str | None = state
        whole = server.wire.export_workspace

        @asynccontextmanager
        async def hold(id: str) -> AsyncIterator[str | None]:
            self.held += 1
            try:
                yield self.state
            finally:
                self.held -= 1

        async def export(id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
            assert self.held == 1
            self.sent_whole += 1
            return await whole(id, dest, max_bytes)

        async def changes(id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
            assert self.held == 1
            report: ExportReport = await differs(id, dest, max_bytes)
            return report

        capabilities = replace(server.wire.capabilities, layered_workspace=True)
        patch.setattr(server.wire, "capabilities", capabilities)
        patch.setattr(server.wire, "projection", "disk", raising=False)
        patch.setattr(server.wire, "hold_changes", hold)
        patch.setattr(server.wire, "export_workspace", export)
        patch.setattr(server.wire, "export_changes", changes)


def names(server: Server, commit: str | None) -> set[str]:
    assert commit is not None
    with Store.open(server.settings.data_dir / "store") as store:
        return {entry.name.decode() for entry in store.entries(commit)}


async def begun(server: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A sandbox, and the state with two files that it is said to begin with."""
    first = await server.manager.create(CreateOptions())
    with monkeypatch.context() as patched:
        state = archive((tarfile.TarInfo("old"), b"123"), (tarfile.TarInfo("gone"), b"1234567"))
        patched.setattr(server.wire, "export_workspace", sending(state))
        snapshot = await server.manager.snapshot(first.id)
    assert snapshot.commit is not None
    return (await server.manager.create(CreateOptions())).id, snapshot.commit


async def test_what_differs_is_put_over_the_state_that_the_workspace_began_with(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, state = await begun(server, monkeypatch)
    layer = archive((tarfile.TarInfo("new"), b"12345"), (tarfile.TarInfo(".wh.gone"), b""))
    disk = OnDisk(server, monkeypatch, sending(layer), state)
    snapshot = await server.manager.snapshot(sandbox)
    assert names(server, snapshot.commit) == {"old", "new"}
    assert snapshot.size_bytes == 8  # of all that is in it, whatever the daemon says
    assert (disk.held, disk.sent_whole) == (0, 0)
    # The same changes once more are the same state: they are put over its beginning, not over the last snapshot.
    assert (await server.manager.snapshot(sandbox)).commit == snapshot.commit


@pytest.mark.parametrize("why", ["it began empty", "the state is gone", "a layer cannot say it"])
async def test_the_whole_is_kept_where_what_differs_does_not_say_it(
    server: Server, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def refuse(id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        assert why == "a layer cannot say it"
        raise ConflictError("d/ was renamed")

    sandbox, state = await begun(server, monkeypatch)
    given = {"it began empty": None, "the state is gone": "0" * 64, "a layer cannot say it": state}[why]
    disk = OnDisk(server, monkeypatch, refuse, given)
    snapshot = await server.manager.snapshot(sandbox)
    assert disk.sent_whole == 1
    assert names(server, snapshot.commit) == set()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(WHOLE[:700], id="cut off"),
        pytest.param(archive((tarfile.TarInfo("a/../../b"), b"x")), id="dot dot"),
        pytest.param(archive((tarfile.TarInfo(".wh.."), b"")), id="a whiteout of its own"),
        pytest.param(archive((tarfile.TarInfo(".wh.x/y"), b"")), id="below a whiteout"),
        pytest.param(archive((link("hard", "nothing", tarfile.LNKTYPE), b"")), id="a link to nothing"),
    ],
)
async def test_hostile_changes_are_the_sandboxs_fault_and_nothing_is_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    sandbox, state = await begun(server, monkeypatch)
    before = kept_states(server.settings)
    disk = OnDisk(server, monkeypatch, sending(data), state)
    if data:
        with pytest.raises(BackendError, match="cannot be kept"):
            await server.manager.snapshot(sandbox)
        assert kept_states(server.settings) == before
    else:
        with pytest.raises(BackendError):
            await server.manager.snapshot(sandbox)
    assert disk.held == 0


async def test_a_daemon_that_never_begins_to_send_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        await asyncio.Event().wait()
        raise AssertionError

    sandbox, state = await begun(server, monkeypatch)
    monkeypatch.setattr(keeping, "PATIENCE_SECONDS", 0.05)
    OnDisk(server, monkeypatch, silent, state)
    with pytest.raises(BackendError, match="does not send"):
        await server.manager.snapshot(sandbox)
