"""Which states of the store the manager's own records lead to: for a store whose index, and so every pin, is lost.

A snapshot's record names its commit, a sandbox's what its environment began with; both are pins in the store by these
ids (``workspaces.py``). Branches of environments are not in any record: the next commit of one begins at its pin again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from agent_sandbox.errors import BackendError
from agent_sandbox.manager.records import UnreadableRecordError, decode_sandbox, decode_snapshot
from agent_sandbox.manager.state import APPLICATION_ID, DataLock


@contextmanager
def recalled(data_dir: Path) -> Iterator[dict[str, bytes]]:
    """Give the commits that records name, by snapshot and environment, and keep servers out while the block runs.

    Empty where there is no ``state.db`` of a server. Records that cannot be read are left out. :class:`ConflictError`
    when a server runs on this data directory, :class:`BackendError` when its database cannot be read.
    """
    path = data_dir / "state.db"
    if not path.exists():
        yield {}
        return
    lock = DataLock(data_dir / "lock")
    lock.acquire()
    try:
        yield _read(path)
    finally:
        lock.release()


def _read(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as connection:
            if connection.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
                return {}  # somebody else's
            for (text,) in connection.execute("SELECT record FROM snapshots"):
                _note(found, *_snapshot(text))
            for (text,) in connection.execute("SELECT record FROM sandboxes"):
                _note(found, *_sandbox(text))
    except sqlite3.Error as error:
        raise BackendError(
            f"the server's database {path} cannot be read: {error}; put it back from a backup"
        ) from error
    return found


def _snapshot(text: object) -> tuple[str, str | None]:
    try:
        record = decode_snapshot(text)
    except UnreadableRecordError:
        return "", None
    return record.id, record.commit


def _sandbox(text: object) -> tuple[str, str | None]:
    try:
        record = decode_sandbox(text)
    except UnreadableRecordError:
        return "", None
    return record.env_id, record.commit


def _note(found: dict[str, bytes], name: str, commit: str | None) -> None:
    if commit is not None:
        found[name] = bytes.fromhex(commit)
