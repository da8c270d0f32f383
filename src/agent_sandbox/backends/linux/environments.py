"""An environment's files on the server's host, and a backend's directories: what is the same for whoever uses disks.

::

    <directory>/                    0700, outlives a reboot
    ├── spec.json                   0600, the record, which each backend has its own fields in
    ├── key                         0600, the 32 bytes that prove either side of the wire to the other
    └── disk.img                    the disk (disk.py), mounted below /run

The record comes first and whole, so that whatever else is there can be found and removed; without it and the key an
environment cannot be found. The sandbox may be hostile: of what it can write nothing is followed. Everything blocks,
but for :meth:`DiskEnvironment.connect`.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import json
import os
import shutil
import socket
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from agent_sandbox.backends.linux import mounts
from agent_sandbox.backends.linux.disk import Disk
from agent_sandbox.backends.linux.overlay import clear_probes, why_no_overlay
from agent_sandbox.backends.linux.rundir import RunDirectory, clear_vanished
from agent_sandbox.errors import BackendError, NotFoundError

RUN_DIRECTORY = Path("/run/agent-sandbox")
KEY_BYTES = 32
RECORD_VERSION = 1
_RECORD_BYTES = 8 << 20
"""An environment of 4 MiB, the most that a command may get, in escaped JSON, and some."""


class StoredRecord(msgspec.Struct):
    """What every record has on the disk. A backend's own fields come in a subclass; the decoder checks every type."""

    version: int
    id: str


S = TypeVar("S", bound=StoredRecord)


class DiskEnvironment(abc.ABC):
    """The files of the environment that ``directory`` is named after. Making the object touches nothing.

    Its disk is mounted on ``mount_point``, and its daemon listens at ``endpoint``.
    """

    def __init__(self, directory: Path, mount_point: Path) -> None:
        self.id = directory.name
        self.directory = directory
        self.disk = Disk(directory, mount_point)
        self._record = directory / "spec.json"
        self._key = directory / "key"

    @property
    @abc.abstractmethod
    def endpoint(self) -> Path:
        """The daemon's socket."""

    @abc.abstractmethod
    def layers(self) -> tuple[str, ...]:
        """What its workspace began with. :class:`NotFoundError` and :class:`BackendError` as :meth:`stored`."""

    def is_known(self) -> bool:
        """Whether there is a record, readable or not."""
        return os.path.lexists(self._record)

    def stored(self, kind: type[S]) -> S:
        """Read the record back. :class:`NotFoundError` when there is none, :class:`BackendError` when it is damaged."""
        try:
            with self._record.open("rb") as file:
                stored = msgspec.convert(json.loads(file.read(_RECORD_BYTES + 1)), kind)
            if stored.version != RECORD_VERSION or stored.id != self.id:
                raise ValueError("another version or environment")
        except FileNotFoundError:
            raise NotFoundError(f"there is no environment {self.id}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise BackendError(f"the record of environment {self.id} is damaged; destroy it") from error
        return stored

    def key(self) -> bytes:
        """Read the key. :class:`NotFoundError` when there is none, :class:`BackendError` when it is damaged."""
        try:
            key = self._key.read_bytes()
        except FileNotFoundError:
            raise NotFoundError(f"there is no environment {self.id}") from None
        except OSError as error:
            raise BackendError(f"the key of environment {self.id} is damaged; destroy it") from error
        if len(key) != KEY_BYTES:
            raise BackendError(f"the key of environment {self.id} is damaged; destroy it")
        return key

    def forget(self) -> None:
        """Remove record and key: from now on the environment cannot be found, whatever is left of it."""
        self._record.unlink(missing_ok=True)
        self._key.unlink(missing_ok=True)

    def connect(self) -> socket.socket:
        """Connect to the daemon, without blocking. :class:`OSError` as connect(2) gives it.

        What a sandbox has put in the socket's place is not followed.
        """
        descriptor = os.open(self.endpoint, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                connection.connect(f"/proc/self/fd/{descriptor}")
            except OSError:
                connection.close()
                raise
            return connection
        finally:
            os.close(descriptor)

    def unmount(self) -> None:
        """Unmount whatever is mounted for the environment, the latest first, and remove the mount point."""
        for place in (self.disk.mount_point, self.directory):
            for point in mounts.mounted_below(place):
                mounts.unmount(point)
        with contextlib.suppress(FileNotFoundError):
            self.disk.mount_point.rmdir()

    def remove(self) -> None:
        """Remove the directory, whose mounts have gone. :class:`OSError` (EBUSY) when one has not."""
        if mounts.mounted_below(self.directory):
            raise OSError(errno.EBUSY, "something is still mounted", str(self.directory))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)


class DiskPlaces(abc.ABC):
    """Where a backend has its environments: their directories, and below ``/run`` the mount points of their disks."""

    environments: Path
    run: Path
    run_directory: RunDirectory
    box: Path

    @abc.abstractmethod
    def environment(self, id: str) -> DiskEnvironment:
        """The files of environment ``id``, which need not exist."""

    def names(self) -> set[str]:
        """The environments that have a directory here."""
        found = set()
        for directory in (self.environments, self.box):
            with contextlib.suppress(FileNotFoundError):
                found |= {entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)}
        return found

    def layers(self) -> set[str]:
        """The directories that environments have as layers of their workspaces.

        :class:`BackendError` when a record is damaged: its layers cannot be known, and none may be removed.
        """
        found: set[str] = set()
        for name in self.names():
            with contextlib.suppress(NotFoundError):
                found |= set(self.environment(name).layers())
        return found

    def why_no_layers(self) -> str:
        """Why workspaces cannot be overlays of layers on this host; empty when they can, which is tried."""
        clear_probes(self.run)
        return why_no_overlay(self.run)

    def make_directories(self, data_dir: Path, home: Path) -> None:
        """Make those that outlive a reboot: private, from the data directory down."""
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        data_dir.chmod(0o700)
        for directory in (home, self.environments):
            directory.mkdir(mode=0o700, exist_ok=True)

    def make_run_directories(self, *more: tuple[Path, int]) -> None:
        """Make those below ``/run``, ``more`` ones with their modes.

        The way to ``box`` is open to all, or no sandbox's root could come to its own root file system.
        """
        clear_vanished(self.run.parent)
        self.run_directory.claim((self.box, 0o711), *more)

    def remove_empty(self, *more: Path) -> None:
        """Remove the directories below ``/run``, ``more`` ones first, where nothing is left in them."""
        self.run_directory.release(*more, self.box)


def require_layers(layers: tuple[str, ...]) -> None:
    """Raise :class:`BackendError` when a layer is gone."""
    for layer in layers:
        if not Path(layer).is_dir():
            raise BackendError(f"a layer of the workspace is gone: {layer}")


def write_new(path: Path, content: bytes) -> None:
    """Write a file of mode 0600, synced, where there is none."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600 so that a crash leaves the old one, the new one or none, but never half."""
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    write_new(aside, content)
    aside.replace(path)
