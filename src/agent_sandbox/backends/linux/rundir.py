"""Directories below ``/run`` of the servers of a host: whose each one is, and the end of those whose owner vanished.

::

    /run/agent-sandbox/<here>/          named after a data directory's path (each backend's places.py)
    └── data-dir -> /var/lib/…          that path: a link that is read and never followed

A server removes its own when it ends with nothing in it. One that is killed, and whose data directory is removed then,
as a test's or a container's is, would leave it until the host's next boot. So a server that starts removes those

* whose link names a path that gives their name, and at which there is nothing any more,
* that no server holds (a lock on the directory itself), that have nothing mounted below them, and no control group of
  theirs has a member group,
* and of these only directories, links, sockets, and the small files that say which process a monitor was. Whatever else
  is found stays, with the way to it.

A lock on ``/run/agent-sandbox`` keeps that apart from servers that start: they make their directories under a shared
one, with their data directory there already. Directories of earlier versions have no link and stay. Everything blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_sandbox.backends.linux import cgroups, mounts

_log = logging.getLogger(__name__)

OWNER = "data-dir"
_NAME = re.compile(r"([0-9a-f]{12})(-[a-z]+)?")
_SMALL = frozenset({"process.json", ".process.json.new", "held"})
_DEPTH = 3
"""``<here>/<kind>/<id>/``, and what is in that."""


def instance_of(data_dir: Path) -> str:
    """Give the name that a data directory, whose links are resolved, has below ``/run``."""
    return hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]


class RunDirectory:
    """``path``, which is ``data_dir``'s, whose links are resolved. Making the object touches nothing."""

    def __init__(self, path: Path, data_dir: Path) -> None:
        self.path = path
        self._data_dir = data_dir
        self._held: int | None = None

    def claim(self, *directories: tuple[Path, int]) -> None:
        """Make it, and ``directories`` below it with their modes, and hold it. The data directory is there already."""
        top = self.path.parent
        top.mkdir(mode=0o755, exist_ok=True)
        with _locked(top, fcntl.LOCK_SH):
            for directory, mode in ((top, 0o755), (self.path, 0o711), *directories):
                directory.mkdir(mode=mode, exist_ok=True)
                directory.chmod(mode)
            with contextlib.suppress(FileExistsError):
                (self.path / OWNER).symlink_to(self._data_dir)
            self._let_go()
            self._held = _open(self.path)
            fcntl.flock(self._held, fcntl.LOCK_SH)

    def release(self, *directories: Path) -> None:
        """Let go, and remove ``directories``, and itself behind them, where nothing is left in them.

        Who has claimed nothing removes nothing: it is another's.
        """
        if self._held is None:
            return
        for directory in directories:
            with contextlib.suppress(OSError):
                directory.rmdir()
        with contextlib.suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [OWNER]:
                (self.path / OWNER).unlink()
            self.path.rmdir()
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None


def clear_vanished(top: Path, is_busy: Callable[[Path], bool] | None = None) -> None:
    """Remove what is below ``top`` of data directories that are no more. Nothing, while a server is just starting.

    ``is_busy`` says whether something still uses a directory; by default mounts and control groups are looked at.
    """
    is_busy = is_busy or _is_busy
    try:
        with _locked(top, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for entry in list(os.scandir(top)):
                if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    _clear(Path(entry.path), is_busy)
    except (FileNotFoundError, BlockingIOError):
        return
    except OSError as error:
        _log.warning("what vanished data directories left in %s could not be looked at: %s", top, error.strerror)


def _clear(run: Path, is_busy: Callable[[Path], bool]) -> None:
    try:
        owner = (run / OWNER).readlink()
    except FileNotFoundError:
        # Whoever makes one has the lock; so this is an earlier version's, or what was left while one was removed.
        with contextlib.suppress(OSError):
            run.rmdir()
        return
    if not owner.is_absolute() or instance_of(owner) != run.name[:12] or not _is_gone(owner) or is_busy(run):
        return
    try:
        with _locked(run, fcntl.LOCK_EX | fcntl.LOCK_NB):
            is_removed = _remove(run, _DEPTH)
    except BlockingIOError:
        return
    if is_removed:
        _log.info("removed %s: its data directory %s is no more", run, owner)
    else:
        _log.info("%s is left: its data directory %s is no more, but something is in it", run, owner)


def _is_gone(path: Path) -> bool:
    """Whether there is surely nothing at a path; what cannot be looked at may be there."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _is_busy(run: Path) -> bool:
    if mounts.mounted_below(run):
        return True
    tops = (hierarchy / f"agent-sandbox-{run.name}" for hierarchy in cgroups.find_hierarchies().all())
    return any(path.is_dir() for top in tops for path in top.glob("*/"))


def _remove(directory: Path, depth: int) -> bool:
    """Remove a directory with what is in it, the owner's link last; ``False`` when something was left."""
    is_empty = True
    for entry in list(os.scandir(directory)):
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            is_empty &= depth > 0 and _remove(Path(entry.path), depth - 1)
        elif entry.name == OWNER and depth == _DEPTH:
            continue
        elif stat.S_ISSOCK(mode) or stat.S_ISLNK(mode) or entry.name in _SMALL:
            Path(entry.path).unlink()
        else:
            is_empty = False
    if not is_empty:
        return False
    if depth == _DEPTH:
        (directory / OWNER).unlink()
    directory.rmdir()
    return True


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    descriptor = _open(directory)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
