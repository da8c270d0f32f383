"""Removing and measuring whole trees on the host, however deep: a state may have 1,000 directories inside each other.

``os.walk`` and ``shutil.rmtree`` call themselves for each level, which ends near 1,000, and name things by paths, which
end at 4,095 bytes. Here it goes by descriptors (``descent.py``), never over a mount and never through a symlink.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agent_sandbox.errors import ConflictError
from agent_sandbox.store.descent import Descent

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path) -> None:
    """Remove a directory and everything in it, what its owner may not change as well. What cannot be removed stays."""

    def unlink(name: str, parent: int) -> None:
        os.unlink(name, dir_fd=parent)

    def rmdir(name: str | bytes, parent: int) -> None:
        os.rmdir(name, dir_fd=parent)

    with suppress(OSError, ConflictError):
        _go(path, unlink, rmdir, opening=True)
        path.rmdir()


def disk_bytes(path: Path) -> int:
    """Bytes that a directory and everything in it take on the disk, each name counted; what has gone counts nothing."""
    total = 0

    def count(name: str | bytes, parent: int) -> None:
        nonlocal total
        total += os.stat(name, dir_fd=parent, follow_symlinks=False).st_blocks * 512

    with suppress(FileNotFoundError, ConflictError):
        total += path.lstat().st_blocks * 512
        _go(path, count, count, opening=False)
    return total


def _go(
    path: Path, file: Callable[[str, int], None], directory: Callable[[str | bytes, int], None], *, opening: bool
) -> None:
    """Call ``file`` for everything but directories, and ``directory`` for those once everything in them was seen.

    Both get a name and the descriptor of its directory; an :class:`OSError` of theirs means nothing. ``opening``: give
    the owner all rights to directories first.
    """
    top = os.open(path, _FLAGS)
    try:
        with Descent(top) as descent:
            waiting = [_look(descent, file, opening)]
            while True:
                if waiting[-1]:
                    if _enter(descent, waiting[-1].pop(), opening):
                        waiting.append(_look(descent, file, opening))
                    continue
                waiting.pop()
                if not waiting:
                    return
                name = descent.here.name
                os.close(descent.leave())
                with suppress(OSError):
                    directory(name, descent.here.fd)
    finally:
        os.close(top)


def _look(descent: Descent, file: Callable[[str, int], None], opening: bool) -> list[bytes]:
    """Call ``file`` for what is in the current directory, and return the names of the directories in it."""
    here, below = descent.here.fd, []
    with suppress(OSError):
        if opening and os.fstat(here).st_mode & 0o700 != 0o700:
            os.fchmod(here, 0o700)
        with os.scandir(here) as entries:
            items = list(entries)
        for item in items:
            with suppress(OSError):
                if item.is_dir(follow_symlinks=False):
                    below.append(os.fsencode(item.name))
                else:
                    file(item.name, here)
    return below


def _enter(descent: Descent, name: bytes, opening: bool) -> bool:
    try:
        about = descent.enter(name)
    except PermissionError:
        if opening and _open_up(name, descent.here.fd):
            return _enter(descent, name, False)
        return False
    except OSError:
        return False
    if about.st_dev != descent.device:
        os.close(descent.leave())
        return False
    return True


def _open_up(name: bytes, parent: int) -> bool:
    """Give the owner of a directory all rights to it, through a descriptor that needs none."""
    with suppress(OSError):
        descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            Path(f"/proc/self/fd/{descriptor}").chmod(0o700)
            return True
        finally:
            os.close(descriptor)
    return False
