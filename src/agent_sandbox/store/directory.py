"""The directory of a store: what makes it one, and how it is made.

``spec/store.md`` ("Directory") is the source. ``STORE`` is read before anything else, and nothing is written before it
was understood. It is written last, so that a directory without it is no store, whatever else a crash left there.

When changing the format: raise the number in ``STORE`` before anything else of a store is touched, so that an older
program stops there. Read "How do I change the stored format" in CONTRIBUTING.md first.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from agent_sandbox.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    StoreDamagedError,
    StoreVersionError,
)
from agent_sandbox.store.index import Index
from agent_sandbox.store.locks import StoreLock
from agent_sandbox.store.packs import failed, open_directory

FORMAT = 1
_STORE = re.compile(rb"agent-sandbox store\nformat ([0-9]{1,9})\nid ([0-9a-f]{32})\n")
_FIRST_LINE = b"agent-sandbox store\n"
_INDEX = ("index.sqlite", "index.sqlite-journal", "index.sqlite-wal", "index.sqlite-shm")
_LEFTOVERS = {"lock", "packs", "STORE.new", *_INDEX}


def read_store(path: Path) -> bytes:
    """Return the id of the store in ``path``; see :meth:`ObjectDatabase.open` for what is refused."""
    try:
        fd = os.open(path / "STORE", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"there is no store in {path}") from None
    except OSError as error:
        raise failed(f"open {path / 'STORE'}", error) from error
    try:
        data = os.read(fd, 128)
    except OSError as error:
        raise failed(f"read {path / 'STORE'}", error) from error
    finally:
        os.close(fd)
    if not data.startswith(_FIRST_LINE):
        raise NotFoundError(f"{path} is no store: its file STORE is another one")
    found = re.match(rb"agent-sandbox store\nformat ([0-9]{1,9})\n", data)
    if found is None:
        raise StoreDamagedError(f"a damaged store: {path / 'STORE'} cannot be understood")
    if int(found[1]) != FORMAT:
        raise StoreVersionError(f"the store {path} has format {int(found[1])}, this program knows {FORMAT}; update it")
    whole = _STORE.fullmatch(data)
    if whole is None:
        raise StoreDamagedError(f"a damaged store: {path / 'STORE'} cannot be understood")
    return bytes.fromhex(whole[2].decode())


def make_store(path: Path, wait_seconds: float) -> None:
    """Make an empty store in ``path``; see :meth:`~agent_sandbox.store.objectdb.ObjectDatabase.create`."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {entry.name for entry in path.iterdir()}
        if "STORE" in names:
            raise ConflictError(f"there is a store in {path} already")
        if not names <= _LEFTOVERS:
            raise InvalidRequestError(f"{path} is not empty; choose another place for the store")
        os.close(os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        lock = StoreLock(path / "lock")
        try:
            with lock.exclusive(wait_seconds):
                _make(path)
        finally:
            lock.close()
    except OSError as error:
        raise failed(f"make a store in {path}", error) from error


def _make(path: Path) -> None:
    """Write everything, ``STORE`` last: what was begun and not finished is no store and is made again."""
    if (path / "STORE").exists():
        raise ConflictError(f"there is a store in {path} already")
    (path / "packs").mkdir(mode=0o700, exist_ok=True)
    if any((path / "packs").iterdir()):
        raise InvalidRequestError(f"{path} holds the packs of a store without the rest; choose another place")
    for name in _INDEX:
        (path / name).unlink(missing_ok=True)
    os.close(os.open(path / "index.sqlite", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    Index.create(path / "index.sqlite")
    (path / "STORE.new").unlink(missing_ok=True)
    fd = os.open(path / "STORE.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(_FIRST_LINE + f"format {FORMAT}\nid {secrets.token_hex(16)}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(path / "packs")
    _sync_directory(path)
    (path / "STORE.new").rename(path / "STORE")
    _sync_directory(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    fd = open_directory(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
