"""Files that are built aside and come into place whole, by several processes at once, and what killed ones left.

A builder holds a lock of flock(2) on the directory, and what it builds has a name that begins with ``.new-``. Who has
the lock may remove every such name: its builder is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_NEW = ".new-"
_POLL_SECONDS = 0.1


def make(directory: Path) -> Path:
    """Make a directory of this server's alone, and the one above it."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


@contextlib.contextmanager
def building(directory: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Be the only builder in ``directory``, and clear what earlier ones left.

    Waits for another as long as it builds; ``waiting`` is called meanwhile, and may raise.
    """
    make(directory)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_SECONDS)
        _clear(directory)
        yield
    finally:
        os.close(descriptor)


def sweep(directory: Path) -> None:
    """Clear what killed builders left in ``directory``, which need not exist; nothing while somebody builds."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(directory)
        finally:
            os.close(descriptor)


def _clear(directory: Path) -> None:
    for left in directory.glob(f"{_NEW}*"):
        remove(left)


def remove(path: Path) -> None:
    """Remove a file or a tree, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def aside(directory: Path) -> Iterator[Path]:
    """A name in ``directory`` to build under; whatever still has it in the end is removed."""
    path = directory / f"{_NEW}{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        remove(path)


def write(path: Path, content: bytes) -> None:
    """Write a file and sync it. It must not exist."""
    with path.open("xb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def in_use(path: Path) -> bool:
    """Whether a file has another name elsewhere, by which somebody keeps it."""
    return path.lstat().st_nlink > 1
