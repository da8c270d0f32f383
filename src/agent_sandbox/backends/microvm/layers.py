"""States of workspaces as read-only drives: an EROFS file for each state, made once and shared by all who begin there.

::

    DATA_DIR/<backend>/layers/          0700, a cache
    ├── none                            the drive of who has no layers: nothing but a hole
    ├── <state>-<uid>-<gid>.erofs       a state's files, owned by its sandbox user
    ├── <state>-<uid>-<gid>.kept        another name of it in every checkpoint that needs that file
    ├── <state>-<uid>-<gid>.unfit       the state cannot be shown so
    └── trees/                          what files are made of, or were made of and is being removed

The rules
---------
* Every file is as long as :data:`SIZE`, with a hole behind what it holds: a machine that goes on from a template knows
  its drives' sizes from then, and begins over other layers. A hole takes nothing.
* The store lays a state out in a directory of the host's and mkfs.erofs reads that. Nothing here was written by a
  guest but through the store, and nothing is mounted.
* Who has a file in use has another name of it (a hard link), so removing it here takes it from nobody. A machine's
  memory knows where its layers' blocks are, so the same file must be there for it: a checkpoint keeps it by ``.kept``.
* EROFS writes holes out. A state with files that have more than :data:`MOST_HOLE_BYTES` of holes is ``unfit``; so is
  one that is too large. It is then begun with as an archive.
* One builder at a time. Files in use by nobody are removed, those used longest ago first, beyond the limit that all
  of them have together.

Everything blocks.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    LimitExceededError,
    StoreFullError,
    UnsupportedError,
)
from agent_sandbox.images.machine import erofs, files
from agent_sandbox.images.room import Room
from agent_sandbox.types import Fill

_log = logging.getLogger(__name__)

SIZE = 256 << 30
"""Of a drive of layers, in bytes: more than a sandbox's disk holds, and little for every file system that has holes."""
MOST_HOLE_BYTES = 1 << 20
_STATE = re.compile(r"[0-9a-f]{64}")
_TRIES = 3
"""Times that a file may be removed between its making and its use."""


class Layers:
    """The files of one backend in ``directory``, which together take at most ``max_bytes`` beyond what is in use."""

    def __init__(self, directory: Path, backend: str, max_bytes: int) -> None:
        self._directory = directory
        self._backend = backend
        self._max_bytes = max_bytes
        self._trees = directory / "trees"
        self._removing = ThreadPoolExecutor(1, thread_name_prefix="layers")
        self.blank = directory / "none"

    def prepare(self) -> None:
        """Make the directory; clear what a crash left."""
        for directory in (self._directory, self._trees):
            directory.mkdir(mode=0o700, exist_ok=True)
        files.sweep(self._directory)
        for left in self._trees.iterdir():
            self._remove_tree(left)
        for told in self._directory.glob("*.unfit"):  # they do not grow without end, and a release may show more
            told.unlink()
        with self.blank.open("ab") as file:
            file.truncate(SIZE)
            os.fchmod(file.fileno(), 0o444)

    def close(self) -> None:
        """Let the thread go; what it has not removed, the next server removes."""
        self._removing.shutdown(wait=False, cancel_futures=True)

    def link(self, state: str, owner: tuple[int, int], fill: Fill, unwanted: Callable[[], bool], place: Path) -> str:
        """Give the file that shows ``state`` the name ``place``, making it when there is none; return what names it.

        ``fill`` lays the state out, and is ended once ``unwanted``. :class:`UnsupportedError` for a state that cannot
        be shown so, :class:`LimitExceededError` when the disk has no room.
        """
        if not _STATE.fullmatch(state):
            raise BackendError(f"{state!r} names no state of a workspace")
        key = f"{state}-{owner[0]}-{owner[1]}"
        for _ in range(_TRIES):
            if self._unfit(key).exists():
                raise self._refused()
            if self._link(key, place):
                return key
            self._make(key, owner, fill, unwanted)
        raise BackendError("the layers of the workspace are removed as soon as they are made")

    def link_known(self, key: str, place: Path) -> None:
        """Give the file called ``key`` the name ``place``; :class:`ConflictError` when it is not there any more."""
        if not self._link(key, place):
            raise ConflictError("the layers that the machine was saved over are not there any more")

    def link_blank(self, place: Path) -> None:
        """Give the drive of who has no layers the name ``place``."""
        try:
            place.hardlink_to(self.blank)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            with place.open("xb") as file:
                file.truncate(SIZE)

    def keep(self, key: str, place: Path) -> None:
        """Keep the file called ``key`` for as long as there is ``place``, a name for its mark."""
        place.hardlink_to(self._path(key, "kept"))

    def _link(self, key: str, place: Path) -> bool:
        path = self._path(key)
        try:
            os.utime(path)
            place.hardlink_to(path)
        except FileNotFoundError:
            return False
        if place.stat().st_size != SIZE:
            place.unlink()
            path.unlink(missing_ok=True)
            return False
        return True

    def _path(self, key: str, kind: str = "erofs") -> Path:
        return self._directory / f"{key}.{kind}"

    def _unfit(self, key: str) -> Path:
        return self._path(key, "unfit")

    def _refused(self) -> UnsupportedError:
        return UnsupportedError("layered_workspace", self._backend, "the state has large holes, or is too large")

    def _make(self, key: str, owner: tuple[int, int], fill: Fill, unwanted: Callable[[], bool]) -> None:
        room = Room(self._directory, "what the workspace begins with")

        def look(*_: int) -> None:
            room.check()
            if unwanted():
                raise BackendError("nobody waits for the workspace any more")

        def wanted_no_more() -> bool:
            room.check()
            return unwanted()

        with files.building(self._directory, look):
            if self._path(key).exists() or self._unfit(key).exists():
                return
            room.check()
            started = time.monotonic()
            tree = self._trees / secrets.token_hex(8)
            tree.mkdir(mode=0o700)
            try:
                _fill(tree, owner, fill, wanted_no_more)
                if _has_large_holes(tree):
                    raise self._refused()
                with files.aside(self._directory) as new:
                    self._pack(new, tree, key, look)
            except UnsupportedError:
                self._unfit(key).touch()
                raise
            finally:
                self._remove_tree(tree)
            _log.info("state %s: its layers were made in %.1f s", key[:12], time.monotonic() - started)
            self._evict(key)

    def _pack(self, new: Path, tree: Path, key: str, tick: Callable[[int, int], None]) -> None:
        try:
            erofs.make(new, tree, (), key, tick, attributes=True)
        except InvalidRequestError as error:
            raise BackendError(f"what the workspace begins with cannot be packed: {error.message}") from error
        if new.stat().st_size > SIZE:
            raise self._refused()
        os.truncate(new, SIZE)
        new.chmod(0o444)
        files.sync(new)
        mark = self._path(key, "kept")
        if not mark.exists():
            mark.touch(0o600)
            mark.write_text(key)
        new.replace(self._path(key))
        files.sync(self._directory)

    def _remove_tree(self, tree: Path) -> None:
        """Remove a directory in the background: it takes longer than making it."""
        with suppress(RuntimeError):  # the server ends
            self._removing.submit(shutil.rmtree, tree, True)

    def _evict(self, made: str) -> None:
        """Remove what nobody has in use, the oldest first, until the rest is within the limit."""
        found = [(path, path.stat()) for path in self._directory.glob("*.erofs")]
        total = sum(state.st_blocks * 512 for _, state in found)
        for path, state in sorted(found, key=lambda one: one[1].st_mtime):
            if total <= self._max_bytes:
                return
            mark = path.with_suffix(".kept")
            if path.stem != made and not files.in_use(path) and not (mark.exists() and files.in_use(mark)):
                _log.info("the layers of state %s were not used for longest, and go", path.stem[:12])
                path.unlink(missing_ok=True)
                mark.unlink(missing_ok=True)
                total -= state.st_blocks * 512


def _fill(tree: Path, owner: tuple[int, int], fill: Fill, unwanted: Callable[[], bool]) -> None:
    descriptor = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fill(descriptor, owner, unwanted)
    except StoreFullError as error:
        raise LimitExceededError("the server's disk is full; delete snapshots") from error
    finally:
        os.close(descriptor)


def _has_large_holes(tree: Path) -> bool:
    for _, _, names, descriptor in os.fwalk(tree):
        for name in names:
            state = os.lstat(name, dir_fd=descriptor)
            if stat.S_ISREG(state.st_mode) and state.st_size - state.st_blocks * 512 > MOST_HOLE_BYTES:
                return True
    return False
