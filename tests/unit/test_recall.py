"""A server's store whose index is lost: what its own records name comes back under the same ids."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.errors import BackendError, ConflictError, StoreDamagedError
from agent_sandbox.manager import CreateOptions, ForkOptions
from agent_sandbox.manager.recall import recalled
from agent_sandbox.store.rebuild import rebuild
from tests.unit.manager_harness import Server, kept_states, serving


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path / "data") as server:
        yield server


async def test_snapshots_and_what_sandboxes_began_with_come_back(server: Server) -> None:
    data_dir, manager = server.settings.data_dir, server.manager
    sandbox = await manager.create(CreateOptions())
    await manager.write_file(sandbox.id, "x", b"first", 0o644)
    first = await manager.snapshot(sandbox.id)
    await manager.write_file(sandbox.id, "x", b"second", 0o644)
    second = await manager.snapshot(sandbox.id)
    fork = await manager.fork(first.id, ForkOptions())
    with pytest.raises(ConflictError, match="stop it"), recalled(data_dir):
        pass
    await manager.close()
    before = kept_states(server.settings)
    assert before == {first.id, second.id, fork.env_id}
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        (data_dir / "store" / name).unlink(missing_ok=True)
    with pytest.raises(StoreDamagedError, match="rebuild"):
        await server.start()
    with recalled(data_dir) as pins:
        assert set(pins) == before
        report = rebuild(data_dir / "store", pins=pins)
    assert (report.pins, report.lost, report.incomplete) == (3, (), 0)
    manager = await server.start()
    assert kept_states(server.settings) == before
    assert await manager.list_snapshots() == [first, second]
    for snapshot, content in ((first, b"first"), (second, b"second")):
        await manager.rollback(sandbox.id, snapshot.id)
        assert await manager.read_file(sandbox.id, "x") == content
    await manager.write_file(fork.id, "y", b"more", 0o644)
    changes = await manager.changes(fork.id, limit=10, text=False)
    assert "/workspace/y" in [change.path for change in changes.changes]
    await manager.snapshot(fork.id)


async def test_records_that_cannot_be_read_are_left_out(server: Server) -> None:
    data_dir = server.settings.data_dir
    sandbox = await server.manager.create(CreateOptions())
    kept, lost = await server.manager.snapshot(sandbox.id), await server.manager.snapshot(sandbox.id)
    await server.manager.close()
    with sqlite3.connect(data_dir / "state.db") as connection:
        connection.execute("UPDATE snapshots SET record = 'no record' WHERE id = ?", (lost.id,))
    connection.close()
    with recalled(data_dir) as pins:
        assert pins == {kept.id: bytes.fromhex(kept.commit or "")}


def test_no_database_a_damaged_and_a_foreign_one(tmp_path: Path) -> None:
    with recalled(tmp_path) as pins:
        assert pins == {}
    with sqlite3.connect(tmp_path / "state.db") as connection:
        connection.execute("CREATE TABLE snapshots (of TEXT)")
    connection.close()
    with recalled(tmp_path) as pins:
        assert pins == {}
    (tmp_path / "state.db").write_bytes(b"no database" * 100)
    with pytest.raises(BackendError, match="backup"), recalled(tmp_path):
        pass
