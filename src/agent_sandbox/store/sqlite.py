"""How the index is opened, and what SQLite's failures become.

WAL with ``synchronous=FULL``: a transaction that was committed is on the disk. Pages and schemas that SQLite finds
broken are refused, since a store can be handed around.
"""

from __future__ import annotations

import errno
import mmap
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_sandbox.errors import StoreBusyError, StoreDamagedError, StoreError, StoreFullError

CACHE_KIB = 16_384
_WAL_PAGES = 1_024
"""Pages in the WAL after which SQLite writes them back: 4 MiB."""
_SHARED_BYTES = 256 << 10
"""Bytes of ``-shm``: 32 KiB for each 4,096 pages in the WAL, so enough for 128 MiB of it."""
PAGE_BYTES = 4_096


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what SQLite raises into the store's errors. Integrity errors pass: they are answers."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except sqlite3.Error as error:
        raise _translate(path, error) from error
    except UnicodeDecodeError as error:
        raise StoreDamagedError(f"a damaged index {path}: text that is not UTF-8") from error


def _translate(path: Path, error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    match code:
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_SCHEMA | sqlite3.SQLITE_ERROR:
            return StoreDamagedError(f"a damaged index {path}: {error}; put it back from a backup, or run rebuild")
        case sqlite3.SQLITE_FULL:
            return StoreFullError(f"the disk of {path} is full; make room and try again")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreBusyError(f"the index {path} is held by another process; try again later")
        case sqlite3.SQLITE_IOERR if _is_full(path):
            return StoreFullError(f"the disk of {path} is full; make room and try again")
        case _:
            return StoreError(f"the index {path} cannot be used: {error}")


def _is_full(path: Path) -> bool:
    try:
        return os.statvfs(path.parent).f_bavail == 0
    except OSError:
        return False


def has_small_blocks(path: Path) -> bool:
    """Return whether the file system has blocks smaller than pages of memory; :class:`StoreFullError` when it is full.

    SQLite maps ``-shm`` after it has written one byte to each page of it. Where a page has several blocks, that leaves
    holes, and a hole that is written on a full disk kills the process (SIGBUS).
    """
    about = os.statvfs(path.parent)
    small = about.f_frsize < mmap.PAGESIZE
    if small and about.f_bavail * about.f_frsize < 2 * _SHARED_BYTES:
        raise StoreFullError(f"the disk of {path} is full; make room and try again")
    return small


def allocate_shared_memory(path: Path) -> None:
    """Fill the holes of ``-shm``, and make it larger than any WAL needs that fits such a file system."""
    try:
        fd = os.open(path.with_name(path.name + "-shm"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.posix_fallocate(fd, 0, _SHARED_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError(f"the disk of {path} is full; make room and try again") from error
        raise StoreError(f"the index {path} cannot be used: {error.strerror}") from error


def connect(path: Path, wait_seconds: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=wait_seconds,
    )
    try:
        for pragma in (
            "synchronous = FULL",
            "foreign_keys = ON",
            "trusted_schema = OFF",
            "cell_size_check = ON",
            "mmap_size = 0",
            f"cache_size = -{CACHE_KIB}",
            f"wal_autocheckpoint = {_WAL_PAGES}",
            f"journal_size_limit = {_WAL_PAGES * PAGE_BYTES}",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection
