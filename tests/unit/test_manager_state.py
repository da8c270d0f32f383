"""``state.db``: durable, one owner, never opened by a server that would misread it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError, NotFoundError
from agent_sandbox.manager import state
from agent_sandbox.manager.records import UnreadableRecordError
from agent_sandbox.manager.state import (
    APPLICATION_ID,
    MIGRATIONS,
    DataLock,
    StateStore,
    StoredReply,
    prepare_data_dir,
)
from tests.unit.test_manager_records import SANDBOX, SANDBOX_V1, SANDBOX_V2, SNAPSHOT


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[StateStore]:
    store = StateStore(tmp_path / "state.db")
    await store.open()
    yield store
    await store.close()


async def reopened(store: StateStore, tmp_path: Path) -> StateStore:
    await store.close()
    again = StateStore(tmp_path / "state.db")
    await again.open()
    return again


async def test_sandboxes_survive(store: StateStore, tmp_path: Path) -> None:
    await store.put_sandbox(SANDBOX, 3)
    moved = dataclasses.replace(SANDBOX, env_id="sb0123456789abcdef-4", expires_at=1.5)
    await store.put_sandbox(moved, 4)
    again = await reopened(store, tmp_path)
    try:
        (row,) = await again.load_sandboxes()
        assert (row.record, row.environments) == (moved, 4)
        await again.delete_sandbox(SANDBOX.id)
        await again.delete_sandbox(SANDBOX.id)
        assert await again.load_sandboxes() == []
    finally:
        await again.close()


async def test_snapshots_survive_in_order(store: StateStore, tmp_path: Path) -> None:
    others = [
        dataclasses.replace(SNAPSHOT, id=f"snap{n}", created_at=10.0 - n, sandbox_id=f"sb{n % 2}") for n in range(4)
    ]
    for snapshot in others:
        await store.put_snapshot(snapshot)
    again = await reopened(store, tmp_path)
    try:
        assert [record.id for record in await again.list_snapshots(None)] == ["snap3", "snap2", "snap1", "snap0"]
        assert [record.id for record in await again.list_snapshots("sb1")] == ["snap3", "snap1"]
        assert await again.list_snapshots("sb9") == []
        assert await again.get_snapshot("snap2") == others[2]
        assert await again.snapshot_ids() == {"snap0", "snap1", "snap2", "snap3"}
        assert await again.delete_snapshot("snap2")
        assert not await again.delete_snapshot("snap2")
        with pytest.raises(NotFoundError, match="snap2"):
            await again.get_snapshot("snap2")
    finally:
        await again.close()


async def test_a_write_is_synced_before_it_returns(store: StateStore) -> None:
    settings = await store._call(
        lambda: [store._db().execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    )
    assert settings == ["wal", 2]  # 2 is FULL


async def test_one_thread_owns_the_connection(store: StateStore) -> None:
    names = {await store._call(lambda: threading.current_thread().name) for _ in range(20)}
    assert len(names) == 1
    assert names != {threading.current_thread().name}


async def test_the_file_is_private(store: StateStore, tmp_path: Path) -> None:
    await store.put_sandbox(SANDBOX, 3)
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


async def test_a_commit_survives_kill_9(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, signal
from pathlib import Path
from agent_sandbox.manager.records import decode_sandbox
from agent_sandbox.manager.state import StateStore
async def main():
    store = StateStore(Path({str(tmp_path / "state.db")!r}))
    await store.open()
    await store.put_sandbox(decode_sandbox({SANDBOX_V2!r}), 3)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script], timeout=60)
    assert done.returncode == -9
    store = StateStore(tmp_path / "state.db")
    await store.open()
    (row,) = await store.load_sandboxes()
    assert row.record == SANDBOX
    await store.close()


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


async def test_a_newer_schema_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {len(MIGRATIONS) + 1};"
            "CREATE TABLE sandboxes (whatever);"
        )
    connection.close()
    before = content(tmp_path)
    store = StateStore(path)
    with pytest.raises(ConflictError, match=f"newer.*schema {len(MIGRATIONS) + 1}"):
        await store.open()
    await store.close()
    assert content(tmp_path) == before


async def test_another_programs_database_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url)")
    connection.close()
    before = content(tmp_path)
    store = StateStore(path)
    with pytest.raises(ConflictError, match="not a state"):
        await store.open()
    await store.close()
    assert content(tmp_path) == before


async def test_a_damaged_database_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"this is not a database" * 1000)
    store = StateStore(path)
    with pytest.raises(BackendError, match="damaged"):
        await store.open()
    await store.close()
    assert path.read_bytes() == b"this is not a database" * 1000


async def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore(tmp_path / "state.db")
    await store.open()
    await store.put_sandbox(SANDBOX, 3)
    await store.close()
    with monkeypatch.context() as patched:
        broken = "ALTER TABLE sandboxes ADD COLUMN extra TEXT; INSERT INTO nowhere VALUES (1)"
        patched.setattr(state, "MIGRATIONS", (*MIGRATIONS, broken))
        store = StateStore(tmp_path / "state.db")
        with pytest.raises(BackendError, match="nowhere"):
            await store.open()
        await store.close()
    store = StateStore(tmp_path / "state.db")
    await store.open()
    (row,) = await store.load_sandboxes()
    assert row.record == SANDBOX
    await store.close()


async def test_migrations_run_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore(tmp_path / "state.db")
    await store.open()
    await store.put_sandbox(SANDBOX, 3)
    await store.close()
    more = ("CREATE TABLE extra (n)", "INSERT INTO extra VALUES (1)")
    monkeypatch.setattr(state, "MIGRATIONS", (*MIGRATIONS, *more))

    async def extra(store: StateStore) -> list[tuple[int]]:
        return await store._call(lambda: store._db().execute("SELECT n FROM extra").fetchall())

    for _ in range(2):
        store = StateStore(tmp_path / "state.db")
        await store.open()
        assert await extra(store) == [(1,)]
        assert len(await store.load_sandboxes()) == 1
        await store.close()


async def test_version_2_of_the_schema_is_what_it_was(store: StateStore) -> None:
    rows = await store._call(
        lambda: (
            store._db()
            .execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name")
            .fetchall()
        )
    )
    columns = {name: " ".join(sql.split()) for name, sql in rows}
    assert columns == {
        "replies": "CREATE TABLE replies ( name TEXT PRIMARY KEY NOT NULL, request TEXT NOT NULL,"
        " created_at REAL NOT NULL, status INTEGER NOT NULL, body BLOB NOT NULL )",
        "replies_by_time": "CREATE INDEX replies_by_time ON replies (created_at)",
        "sandboxes": "CREATE TABLE sandboxes ( id TEXT PRIMARY KEY NOT NULL, env_id TEXT NOT NULL,"
        " backend TEXT NOT NULL, environments INTEGER NOT NULL, record TEXT NOT NULL )",
        "snapshots": "CREATE TABLE snapshots ( id TEXT PRIMARY KEY NOT NULL, sandbox_id TEXT NOT NULL,"
        " created_at REAL NOT NULL, record TEXT NOT NULL )",
        "snapshots_by_sandbox": "CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox_id, created_at)",
    }


async def test_a_database_of_schema_1_is_brought_up_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(f"{MIGRATIONS[0]}; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 1;")
        row = (SANDBOX.id, SANDBOX.env_id, SANDBOX.backend, 3, SANDBOX_V1)
        connection.execute("INSERT INTO sandboxes VALUES (?, ?, ?, ?, ?)", row)
    connection.close()
    store = StateStore(path)
    await store.open()
    (found,) = await store.load_sandboxes()
    assert found.record is not None
    assert (found.record.id, found.environments) == (SANDBOX.id, 3)
    reply = StoredReply("name", "request", 10.0, 201, b"{}")
    await store.put_reply(reply, 0.0, 5)
    assert await store.get_reply("name", 10.0) == reply
    await store.close()


async def test_replies_are_forgotten_by_age_and_number(store: StateStore) -> None:
    for at in range(6):
        await store.put_reply(StoredReply(f"r{at}", "request", float(at), 201, b"x"), 1.0, 3)
    kept = [at for at in range(6) if await store.get_reply(f"r{at}", 0.0) is not None]
    assert kept == [3, 4, 5]
    assert await store.get_reply("r3", 3.5) is None
    await store.put_reply(StoredReply("r9", "request", 9.0, 201, b"x"), 4.5, 3)
    assert await store.get_reply("r4", 0.0) is None
    assert await store.get_reply("r5", 0.0) is not None


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE sandboxes SET record = substr(record, 1, 100)",
        "UPDATE sandboxes SET record = ''",
        "UPDATE sandboxes SET record = x'00ff'",
        "UPDATE sandboxes SET record = replace(record, '\"version\":3', '\"version\":99')",
        "UPDATE sandboxes SET env_id = 'sb0123456789abcdef-9'",
        "UPDATE sandboxes SET environments = 'many'",
    ],
)
async def test_a_damaged_row_keeps_its_names(store: StateStore, damage: str) -> None:
    await store.put_sandbox(SANDBOX, 3)
    await store._write(damage, ())
    (row,) = await store.load_sandboxes()
    assert row.record is None
    assert (row.id, row.backend) == (SANDBOX.id, "runc")
    assert row.env_id.startswith(SANDBOX.id)


async def test_a_damaged_snapshot_row_is_left_out_and_can_be_deleted(
    store: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    await store.put_snapshot(SNAPSHOT)
    await store.put_snapshot(dataclasses.replace(SNAPSHOT, id="snapgood"))
    await store._write("UPDATE snapshots SET record = '{' WHERE id = ?", (SNAPSHOT.id,))
    assert [record.id for record in await store.list_snapshots(None)] == ["snapgood"]
    assert SNAPSHOT.id in caplog.text
    assert await store.snapshot_ids() == {SNAPSHOT.id, "snapgood"}  # so its file is not taken for a leftover
    with pytest.raises(UnreadableRecordError):
        await store.get_snapshot(SNAPSHOT.id)
    assert await store.delete_snapshot(SNAPSHOT.id)


@pytest.mark.parametrize("id", ["\ud800", "snap\0", "é", "?", "x" * 100_000], ids=ascii)
async def test_an_id_that_no_snapshot_can_have_is_not_found(store: StateStore, id: str) -> None:
    await store.put_snapshot(SNAPSHOT)
    with pytest.raises(NotFoundError):
        await store.get_snapshot(id)
    assert not await store.delete_snapshot(id)
    assert await store.list_snapshots(id) == []


async def test_a_full_disk_is_a_limit_and_leaves_the_database_usable(store: StateStore) -> None:
    await store.put_sandbox(SANDBOX, 3)
    pages = await store._call(lambda: store._db().execute("PRAGMA page_count").fetchone()[0])
    await store._call(lambda: store._db().execute(f"PRAGMA max_page_count = {pages + 2}").fetchone())
    huge = dataclasses.replace(SNAPSHOT, name="x" * 1_000_000)
    with pytest.raises(LimitExceededError, match="full"):
        await store.put_snapshot(huge)
    assert await store.list_snapshots(None) == []
    assert len(await store.load_sandboxes()) == 1


async def test_after_closing(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state.db")
    await store.open()
    await store.close()
    with pytest.raises(BackendError, match="shutting down"):
        await store.load_sandboxes()


def test_the_data_directory_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    old = os.umask(0)
    try:
        prepare_data_dir(path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_wide_data_directory_is_narrowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "wide"
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    prepare_data_dir(path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert "narrowing" in caplog.text


def test_an_impossible_data_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BackendError, match="data directory"):
        prepare_data_dir(tmp_path / "file" / "x")
    with pytest.raises(BackendError, match="data directory"):
        prepare_data_dir(tmp_path / "file")


def test_one_server_for_a_data_directory(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = DataLock(path), DataLock(path)
    first.acquire()
    with pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    second.release()


def test_a_lock_that_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("directory", "link"):
        with pytest.raises(BackendError, match=f"{tmp_path / name}: .*remove it"):
            DataLock(tmp_path / name).acquire()
    assert not (tmp_path / "target").exists()


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    script = f"""
import os, signal
from pathlib import Path
from agent_sandbox.manager.state import DataLock
DataLock(Path({str(path)!r})).acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == -9
    lock = DataLock(path)
    lock.acquire()
    lock.release()


@pytest.mark.parametrize(("free", "kind"), [(0, LimitExceededError), (100, BackendError)])
def test_a_failed_write_on_a_full_disk_is_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: type[Exception]
) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    found = list(os.statvfs(tmp_path))
    found[4] = free  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(found))
    assert type(state._translate(error, tmp_path / "state.db")) is kind
