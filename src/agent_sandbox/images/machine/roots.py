"""The root file systems of images as EROFS files: one for each content, shared by all machines that run on it.

::

    MACHINE_DIR/root/
    ├── sha256-<hex>.erofs      an imported image, by its digest
    └── host-<hex>.erofs        this host's programs as they were once

A file is made when it is first asked for and then found by its name alone. It is built aside under a lock, synced,
and renamed into place; builders of several servers wait for each other. Who runs a machine gives the file another name
of its own (a hard link): then it may be removed here with its image, or make room, and the machine keeps it.

The host's programs change under their image, which has no digest. Its file is named by what lies in ``/usr``: names,
modes, owners, sizes and times. That is looked at once in a process, and again when a directory of programs or the
package manager's list has another time; a change of the host while its file is made is noticed, and an error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
)
from agent_sandbox.images.digest import fail
from agent_sandbox.images.machine import erofs, files
from agent_sandbox.images.room import Room
from agent_sandbox.images.sources import Progress

if TYPE_CHECKING:
    from agent_sandbox.images.store import ImageRoot

_log = logging.getLogger(__name__)

_KEPT = {"host": 2, "sha256": 100}
"""Files of each kind that stay without a machine on them, those used last. A state of the host has the size of /usr; an
image goes with its removal, unless another server removed it that had its files elsewhere."""
_LOG_SECONDS = 5.0
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WATCHED = ("", "bin", "sbin", "lib", "lib64", "libexec", "share", "lib/python3/dist-packages")
"""Directories of /usr in which an installation adds, replaces or removes something."""
_PACKAGE_LISTS = (
    "/var/lib/dpkg/status",
    "/usr/lib/sysimage/rpm",
    "/var/lib/rpm",
    "/lib/apk/db",
    "/var/lib/pacman/local",
)


@dataclass(frozen=True, slots=True)
class MachineRoot:
    """A root file system for machines. ``key`` names its content: the same key, the same bytes."""

    path: Path
    key: str


class Roots:
    """The root file systems below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._host_lock = threading.Lock()
        self._host: tuple[object, _HostState] = (None, _HostState("", 0))

    def sweep(self) -> None:
        """Clear what killed builders left."""
        files.sweep(self._directory)

    def open(self, image: ImageRoot, digest: str, progress: Progress) -> MachineRoot:
        """The root file system of an image, made when there is none yet. See :meth:`MachineImages.rootfs`."""
        found = self.find(image, digest)
        if found is None:
            key, total = self._key(image, digest)
            found = MachineRoot(self._path(key), key)
            self._make(found.path, key, image, digest, _Told(key, total, progress))
        return found

    def find(self, image: ImageRoot, digest: str) -> MachineRoot | None:
        """The root file system of an image, where there is one."""
        key, _ = self._key(image, digest)
        path = self._path(key)
        if not erofs.is_whole(path, key):
            return None
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return MachineRoot(path, key)

    def remove(self, digest: str) -> None:
        """Remove the file of an image that is removed; who runs on it has it by a name of its own."""
        if _DIGEST.fullmatch(digest):
            self._path(digest.replace(":", "-")).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.erofs"

    def _key(self, image: ImageRoot, digest: str) -> tuple[str, int]:
        """The name of an image's content here, and its bytes. Takes a second or so when the host has changed."""
        if digest:
            if not _DIGEST.fullmatch(digest):
                raise ValueError(f"no digest of an image: {digest!r}")
            return digest.replace(":", "-"), image.file_bytes
        with self._host_lock, _explained():
            seen = (image, _marks(image))
            if self._host[0] != seen:
                self._host = (seen, _look(image))
            return self._host[1].key, self._host[1].file_bytes

    def _make(self, path: Path, key: str, image: ImageRoot, digest: str, told: _Told) -> None:
        with _explained(), files.building(self._directory, told.waiting):
            if erofs.is_whole(path, key):
                return
            room = Room(self._directory, "the image's root file system")
            room.check()
            started = time.monotonic()

            def tick(read: int, written: int) -> None:
                room.check()
                told.written(written)

            _log.info("image %s: making its root file system for microVMs", key)
            with files.aside(self._directory) as new:
                try:
                    erofs.make(new, image.rootfs, image.binds, key, tick)
                except InvalidRequestError:
                    _require(image)
                    raise
                if not digest and key != _look(image).key:
                    raise ConflictError("this host's programs changed while their image was made; try again")
                new.chmod(0o644)
                files.sync(new)
                new.replace(path)
            files.sync(self._directory)
            try:
                _require(image)
            except NotFoundError:
                path.unlink(missing_ok=True)
                raise
            size = path.stat().st_size
            _log.info("image %s: made, %d MiB in %.0f s", key, size >> 20, time.monotonic() - started)
            self._evict()

    def _evict(self) -> None:
        for kind, kept in _KEPT.items():
            oldest_first = sorted(self._directory.glob(f"{kind}-*.erofs"), key=lambda path: path.stat().st_mtime)
            for path in oldest_first[:-kept]:
                if not files.in_use(path):
                    _log.info("the root file system %s was not used for longest, and goes", path.stem)
                    path.unlink(missing_ok=True)


class _Told:
    """Passes progress on, and now and then to the log."""

    def __init__(self, key: str, total: int, progress: Progress) -> None:
        self._key, self._total, self._progress = key, total, progress
        self._logged = time.monotonic()

    def written(self, done: int) -> None:
        self._progress("root", min(done, self._total) if self._total else done, self._total)
        self._log("%d of %d MiB written", done >> 20, self._total >> 20)

    def waiting(self) -> None:
        self._progress("wait", 0, 0)
        self._log("another process makes one; waiting")

    def _log(self, text: str, *values: int) -> None:
        if time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            _log.info("image %s: " + text, self._key, *values)


def _require(image: ImageRoot) -> None:
    """Raise :class:`NotFoundError` when the image has been removed, which takes its content away first."""
    if not image.rootfs.is_dir():
        raise NotFoundError("the image was removed while its root file system was made")


def _marks(image: ImageRoot) -> list[tuple[str, int]]:
    """The times of what changes when programs of the host are installed or removed."""
    found = []
    watched = [str(source / name) for source, _ in image.binds[:1] for name in _WATCHED]
    for path in (*watched, *_PACKAGE_LISTS):
        with contextlib.suppress(OSError):
            found.append((path, Path(path).stat().st_mtime_ns))
    return found


@dataclass(frozen=True, slots=True)
class _HostState:
    """The host's programs as they are at a time."""

    key: str
    file_bytes: int


def _look(image: ImageRoot) -> _HostState:
    """Look at all that the image shows of this host: everything about each file but its content."""
    total = 0
    whole = hashlib.sha256(b"agent-sandbox host root 1\n" + os.fsencode(image.rootfs.parent.name))
    covered = {inside for _, inside in image.binds}
    for source, inside in image.binds:
        base = os.fsencode(source)
        device = source.stat().st_dev
        for top, directories, names, descriptor in os.fwalk(base, onerror=fail):
            here = os.fsdecode(top[len(base) :])
            whole.update(b"\n%s\n" % os.fsencode(inside + here))
            if os.fstat(descriptor).st_dev != device:
                directories.clear()
                continue
            directories[:] = sorted(
                name for name in directories if f"{inside}{here}/{os.fsdecode(name)}" not in covered
            )
            for name in sorted(names) + directories:
                with contextlib.suppress(FileNotFoundError):
                    state = os.lstat(name, dir_fd=descriptor)
                    total += state.st_size if stat.S_ISREG(state.st_mode) else 0
                    whole.update(_record(name, state))
    return _HostState(f"host-{whole.hexdigest()[:32]}", total)


def _record(name: bytes, state: os.stat_result) -> bytes:
    time_and_size = (0, 0) if stat.S_ISDIR(state.st_mode) else (state.st_mtime_ns, state.st_size)
    return b"%s %o %d %d %d %d\n" % (name, state.st_mode, state.st_uid, state.st_gid, *time_and_size)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise LimitExceededError("the disk is full: the image's root file system was not made") from error
        reason = error.strerror or error
        raise BackendError(f"making an image's root file system failed: {error.filename or ''} {reason}") from error
