"""Snapshots of the first version, which were files: they come into the store, or stay as they are."""

from __future__ import annotations

import hashlib
import io
import json
import sqlite3
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.errors import BackendError, NotFoundError
from agent_sandbox.manager.policy import CreateOptions, ForkOptions
from agent_sandbox.manager.records import SandboxRecord, SnapshotRecord
from agent_sandbox.manager.snapshots import SnapshotFiles
from tests.unit.manager_harness import Server, kept_states, serving
from tests.unit.old_snapshots import turn_into_a_file


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path / "data") as server:
        yield server


async def old_snapshot(server: Server) -> tuple[SandboxRecord, SnapshotRecord, Path]:
    """A sandbox whose file ``x`` was ``data`` and is ``newer``; the server is down."""
    sandbox = await server.manager.create(CreateOptions())
    await server.manager.write_file(sandbox.id, "x", b"data", 0o644)
    snapshot = await server.manager.snapshot(sandbox.id)
    await server.manager.write_file(sandbox.id, "x", b"newer", 0o644)
    await server.crash()
    return sandbox, snapshot, turn_into_a_file(server.settings.data_dir, snapshot.id)


async def test_a_file_comes_into_the_store_on_every_backend(server: Server) -> None:
    sandbox, snapshot, file = await old_snapshot(server)
    assert kept_states(server.settings) == set()
    manager = await server.start()
    assert not file.exists()
    assert kept_states(server.settings) == {snapshot.id}
    await manager.rollback(sandbox.id, snapshot.id)
    assert await manager.read_file(sandbox.id, "x") == b"data"
    manager = await server.restart()
    assert await manager.read_file((await manager.fork(snapshot.id, ForkOptions())).id, "x") == b"data"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "longer", "missing"])
async def test_a_damaged_file_stays_and_harms_nothing(server: Server, damage: str) -> None:
    sandbox, snapshot, file = await old_snapshot(server)
    whole = file.read_bytes()
    flipped = whole[:20] + bytes([whole[20] ^ 1]) + whole[21:]
    bad = {"cut": whole[:-1], "flipped": flipped, "empty": b"", "longer": whole + b"x", "missing": None}[damage]
    if bad is None:
        file.unlink()
    else:
        file.write_bytes(bad)
    manager = await server.start()
    for call in (
        manager.rollback(sandbox.id, snapshot.id),
        manager.fork(snapshot.id, ForkOptions()),
        manager.merge(sandbox.id, snapshot.id),
        manager.log(snapshot.id, limit=1),
        anext(manager.archive(snapshot.id)),
    ):
        with pytest.raises(BackendError, match=r"damaged|missing"):
            await call
    assert await manager.read_file(sandbox.id, "x") == b"newer"
    assert kept_states(server.settings) == set()
    file.write_bytes(whole)  # somebody had a backup
    await manager.rollback(sandbox.id, snapshot.id)
    assert await manager.read_file(sandbox.id, "x") == b"data"
    assert not file.exists()


async def test_a_hostile_file_is_refused_with_the_snapshots_name(server: Server) -> None:
    _, snapshot, file = await old_snapshot(server)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../out"))
    file.write_bytes(out.getvalue())
    with sqlite3.connect(server.settings.data_dir / "state.db") as connection:
        (text,) = connection.execute("SELECT record FROM snapshots WHERE id = ?", (snapshot.id,)).fetchone()
        digest = hashlib.blake2b(out.getvalue(), digest_size=32).hexdigest()
        changed = json.dumps({**json.loads(text), "digest": digest})
        connection.execute("UPDATE snapshots SET record = ? WHERE id = ?", (changed, snapshot.id))
    connection.close()
    manager = await server.start()
    with pytest.raises(BackendError, match=f"snapshot {snapshot.id} cannot be restored.*'\\.\\.'"):
        await manager.fork(snapshot.id, ForkOptions())


async def test_one_that_was_deleted_takes_its_file_along(server: Server) -> None:
    _, snapshot, file = await old_snapshot(server)
    whole = file.read_bytes()
    file.write_bytes(b"")  # so that it stays a file
    manager = await server.start()
    file.write_bytes(whole)
    await manager.delete_snapshot(snapshot.id)
    assert not file.exists()
    with pytest.raises(NotFoundError):
        await manager.fork(snapshot.id, ForkOptions())


async def test_start_removes_what_no_snapshot_needs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "snapshots"
    await SnapshotFiles(directory).start(())
    assert not directory.exists()
    directory.mkdir()
    for name in ("snapkept.tar.zst", "snaplost.tar.zst", "snaphalf.tar.zst.tmp", "snapkept.tar.zst.tmp", "README"):
        (directory / name).write_bytes(b"x")
    (directory / "snapdir.tar.zst").mkdir()
    files = SnapshotFiles(directory)
    await files.start({"snapkept"})
    assert sorted(path.name for path in directory.iterdir()) == ["README", "snapdir.tar.zst", "snapkept.tar.zst"]
    assert "snapdir.tar.zst cannot be removed" in caplog.text
    await files.delete("snapdir")
    assert "snapdir stays until the next start" in caplog.text
