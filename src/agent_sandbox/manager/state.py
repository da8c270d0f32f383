"""``state.db``: what must survive the server, and the lock that keeps a second server out.

The rules
---------
* One thread owns the connection; every call goes there, so the event loop never waits for a disk. Nothing on the way of
  a command needs the database: the manager holds the sandboxes in memory as well.
* WAL with ``synchronous=FULL``: a write that returned is on the disk.
* A write is not split by cancellation: callers wrap it with the change in memory in :func:`tasks.uninterrupted`.
* The schema has a number (``user_version``) and migrations in order. A newer or a foreign database is refused before
  anything is written. ``application_id`` is the magic.
* ``env_id`` and ``backend`` stand beside the record, so that a record that cannot be read still says whose environment
  must be left alone.

DATA_DIR is 0700, ``state.db`` 0600: a sandbox's ``env`` is in it, and may hold what its owner calls a secret.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError, NotFoundError, SandboxError
from agent_sandbox.manager.records import (
    SandboxRecord,
    SnapshotRecord,
    UnreadableRecordError,
    decode_sandbox,
    decode_snapshot,
    encode_sandbox,
    encode_snapshot,
)

log = logging.getLogger(__name__)

APPLICATION_ID = 0x61736278  # "asbx"

# When adding one: append, never change one that was released; add a fixture of the old schema to the tests.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY NOT NULL,
        env_id TEXT NOT NULL,
        backend TEXT NOT NULL,
        environments INTEGER NOT NULL,
        record TEXT NOT NULL
    );
    CREATE TABLE snapshots (
        id TEXT PRIMARY KEY NOT NULL,
        sandbox_id TEXT NOT NULL,
        created_at REAL NOT NULL,
        record TEXT NOT NULL
    );
    CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox_id, created_at);
    """,
    """
    CREATE TABLE replies (
        name TEXT PRIMARY KEY NOT NULL,
        request TEXT NOT NULL,
        created_at REAL NOT NULL,
        status INTEGER NOT NULL,
        body BLOB NOT NULL
    );
    CREATE INDEX replies_by_time ON replies (created_at);
    """,
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredSandbox:
    """A row: ``environments`` is the last number used in an environment id; ``record`` is ``None`` if unreadable."""

    id: str
    env_id: str
    backend: str
    environments: int
    record: SandboxRecord | None


@dataclass(frozen=True)
class StoredReply:
    """The reply of a creation under the name of its key; ``request`` is the hash of what asked for it."""

    name: str
    request: str
    created_at: float
    status: int
    body: bytes


def prepare_data_dir(path: Path) -> None:
    """Create DATA_DIR with mode 0700, or narrow it to that. Raises :class:`BackendError` where it cannot be used."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
        if info.st_uid != os.geteuid():
            raise BackendError(f"data directory {path} belongs to user {info.st_uid}; give it to the server's user")
        if stat.S_IMODE(info.st_mode) & 0o077:
            log.warning("data directory %s was open to others; narrowing it to 0700", path)
            path.chmod(0o700)
    except OSError as error:
        raise BackendError(f"cannot use data directory {path}: {error}") from error


class DataLock:
    """An advisory lock on a file of DATA_DIR: one server at a time. The kernel lets go of it with the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock or raise :class:`ConflictError`, which names the process that has it.

        :class:`BackendError` when what stands there is no file that could be locked.
        """
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise BackendError(
                f"cannot use the lock {self._path}: {error.strerror}; it is a file of the server's own: remove it"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise ConflictError(
                f"another server (process {holder}) uses {self._path.parent}; stop it, or choose another"
                " AGENT_SANDBOX_DATA_DIR"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Let go. Harmless when the lock is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class StateStore:
    """The rows of ``state.db``. Every method raises :class:`BackendError` when the database fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")

    async def open(self) -> None:
        """Open or create the database and bring its schema up to date. :class:`ConflictError` when it is newer."""
        await self._call(self._open)

    async def close(self) -> None:
        """Close the connection; later calls fail. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._call(self._close)
        finally:
            self._thread.shutdown(wait=False)

    async def load_sandboxes(self) -> list[StoredSandbox]:
        """Every sandbox, the unreadable ones without their record; each of these is logged."""
        return await self._call(self._load_sandboxes)

    async def put_sandbox(self, record: SandboxRecord, environments: int) -> None:
        """Write a sandbox, new or changed, in one transaction."""
        row = (record.id, record.env_id, record.backend, environments, encode_sandbox(record))
        await self._write(
            "INSERT INTO sandboxes VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET env_id = excluded.env_id,"
            " backend = excluded.backend, environments = excluded.environments, record = excluded.record",
            row,
        )

    async def delete_sandbox(self, id: str) -> None:
        """Remove a sandbox's row; nothing happens when there is none."""
        await self._write("DELETE FROM sandboxes WHERE id = ?", (id,))

    async def put_snapshot(self, record: SnapshotRecord) -> None:
        """Write a new snapshot, whose file must be on the disk already."""
        row = (record.id, record.sandbox_id, record.created_at, encode_snapshot(record))
        await self._write("INSERT INTO snapshots VALUES (?, ?, ?, ?)", row)

    async def put_automatic(self, record: SnapshotRecord) -> list[SnapshotRecord]:
        """Write a new automatic snapshot in place of those that its sandbox has; give what went."""

        def write() -> list[SnapshotRecord]:
            with self._db() as connection:
                gone = []
                rows = connection.execute("SELECT record FROM snapshots WHERE sandbox_id = ?", (record.sandbox_id,))
                for (text,) in rows.fetchall():
                    with suppress(UnreadableRecordError):  # it is left alone
                        if (other := decode_snapshot(text)).auto:
                            connection.execute("DELETE FROM snapshots WHERE id = ?", (other.id,))
                            gone.append(other)
                row = (record.id, record.sandbox_id, record.created_at, encode_snapshot(record))
                connection.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", row)
            return gone

        return await self._call(write)

    async def replace_snapshot(self, record: SnapshotRecord) -> bool:
        """Write a snapshot's record anew; False when it was deleted meanwhile."""
        row = (encode_snapshot(record), record.id)
        return await self._write("UPDATE snapshots SET record = ? WHERE id = ?", row) > 0

    async def get_snapshot(self, id: str) -> SnapshotRecord:
        """One snapshot. :class:`NotFoundError`; :class:`UnreadableRecordError`."""

        def read() -> SnapshotRecord:
            row = self._db().execute("SELECT record FROM snapshots WHERE id = ?", (_key(id),)).fetchone()
            if row is None:
                raise NotFoundError(f"snapshot {id} does not exist, or no longer does")
            return decode_snapshot(row[0])

        return await self._call(read)

    async def list_snapshots(self, sandbox_id: str | None) -> list[SnapshotRecord]:
        """Snapshots by time, of one sandbox or all. Unreadable ones are logged and left out."""

        def read() -> list[SnapshotRecord]:
            query = "SELECT id, record FROM snapshots"
            args: tuple[str, ...] = ()
            if sandbox_id is not None:
                query, args = query + " WHERE sandbox_id = ?", (_key(sandbox_id),)
            found = []
            for id, text in self._db().execute(query + " ORDER BY created_at, rowid", args):
                try:
                    found.append(decode_snapshot(text))
                except UnreadableRecordError as error:
                    log.error("snapshot %s is left alone: %s", id, error)
            return found

        return await self._call(read)

    async def snapshot_ids(self) -> set[str]:
        """The id of every snapshot, the unreadable ones included."""
        return await self._call(lambda: {str(id) for (id,) in self._db().execute("SELECT id FROM snapshots")})

    async def delete_snapshot(self, id: str) -> bool:
        """Remove a snapshot's row; whether there was one."""
        return await self._write("DELETE FROM snapshots WHERE id = ?", (_key(id),)) > 0

    async def get_reply(self, name: str, since: float) -> StoredReply | None:
        """A kept reply, unless it is older than ``since``."""

        def read() -> StoredReply | None:
            query = "SELECT name, request, created_at, status, body FROM replies WHERE name = ? AND created_at >= ?"
            row = self._db().execute(query, (name, since)).fetchone()
            return None if row is None else StoredReply(*row)

        return await self._call(read)

    async def put_reply(self, reply: StoredReply, since: float, most: int) -> None:
        """Keep a reply; forget those older than ``since``, and the oldest of more than ``most``."""
        row = (reply.name, reply.request, reply.created_at, reply.status, reply.body)

        def write() -> None:
            with self._db() as connection:
                connection.execute("DELETE FROM replies WHERE created_at < ?", (since,))
                connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)", row)
                connection.execute(
                    "DELETE FROM replies WHERE rowid IN"
                    " (SELECT rowid FROM replies ORDER BY created_at DESC, rowid DESC LIMIT -1 OFFSET ?)",
                    (most,),
                )

        await self._call(write)

    async def _write(self, statement: str, args: tuple[object, ...]) -> int:
        def write() -> int:
            with self._db() as connection:
                return connection.execute(statement, args).rowcount

        return await self._call(write)

    async def _call(self, work: Callable[[], _T]) -> _T:
        def translated() -> _T:
            try:
                return work()
            except sqlite3.Error as error:
                raise _translate(error, self._path) from error

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, translated)
        except RuntimeError as error:  # the executor was shut down
            raise BackendError("the server is shutting down") from error

    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise BackendError("the server is shutting down")
        return self._connection

    def _open(self) -> None:
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._path.chmod(0o600)
        except OSError as error:
            raise BackendError(f"cannot open {self._path}: {error}") from error
        connection = sqlite3.connect(self._path, isolation_level="IMMEDIATE", timeout=5)
        try:
            self._check(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            self._migrate(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _check(self, connection: sqlite3.Connection) -> None:
        magic = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if magic != APPLICATION_ID and (magic or version or tables):
            raise ConflictError(f"{self._path} is not a state of agent-sandbox; choose another AGENT_SANDBOX_DATA_DIR")
        if version > len(MIGRATIONS):
            raise ConflictError(
                f"{self._path} was written by a newer agent-sandbox (schema {version}, this one knows"
                f" {len(MIGRATIONS)}); use that version"
            )

    @staticmethod
    def _migrate(connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            connection.executescript(
                f"BEGIN IMMEDIATE; {script}; PRAGMA application_id = {APPLICATION_ID};"
                f" PRAGMA user_version = {number}; COMMIT;"
            )

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _load_sandboxes(self) -> list[StoredSandbox]:
        found = []
        for id, env_id, backend, environments, text in self._db().execute("SELECT * FROM sandboxes ORDER BY rowid"):
            record: SandboxRecord | None
            try:
                record = decode_sandbox(text)
                if (record.id, record.env_id, record.backend) != (id, env_id, backend) or type(environments) is not int:
                    raise UnreadableRecordError("the record and its columns differ")
            except UnreadableRecordError as error:
                log.error("sandbox %s is left alone, with its environment %s: %s", id, env_id, error)
                record = None
            found.append(StoredSandbox(str(id), str(env_id), str(backend), environments if record else 0, record))
        return found


def _key(id: str) -> str:
    """Give an id as the database can take it: a caller's may hold lone surrogates, and ours are ASCII."""
    return id.encode("ascii", "replace").decode("ascii")


def _is_full(path: Path) -> bool:
    try:
        return os.statvfs(path.parent).f_bavail == 0
    except OSError:
        return False


def _translate(error: sqlite3.Error, path: Path) -> SandboxError:
    code = getattr(error, "sqlite_errorcode", None)
    # Some file systems tell a lack of room for the log and its index as any other failure to write.
    if code == sqlite3.SQLITE_FULL or (code is not None and code & 0xFF == sqlite3.SQLITE_IOERR and _is_full(path)):
        return LimitExceededError(f"the disk of {path.parent} is full")
    if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
        return BackendError(f"{path} is damaged ({error}); restore it from a backup: nothing was changed or removed")
    return BackendError(f"the state in {path} cannot be used: {error}")
