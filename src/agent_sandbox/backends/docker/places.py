"""One environment's files on the server's host.

::

    DATA_DIR/docker/instance            this server's name on an engine, which servers of other hosts may share
    DATA_DIR/docker/sandboxd-<digest>   the daemon's program, as containers mount it
    DATA_DIR/docker/env/<id>/           0700
    ├── spec.json                       0600, the record: what was asked for, the image's content, the container
    ├── key                             0600, the 32 bytes that prove either side of the wire to the other
    └── disk.img                        the disk
    /run/agent-sandbox/<place>/docker/<id>/
                                        where the disk is mounted; on it beside the workspace
    └── guest/                          0700, mounted into the sandbox: the daemon's ``config`` (0600) and its ``sock``
    /run/agent-sandbox/<place>/l/<name>-<n>
                                        short names of layers, since mount options end at 4 KiB

With an engine that does not share this host's files only record and key are here; the rest is in the engine's volumes.
The record comes first and whole, so that whatever else is there can be found and removed. Everything blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from agent_sandbox.backends.linux import mounts
from agent_sandbox.backends.linux.disk import Disk, Templates
from agent_sandbox.backends.linux.overlay import (
    MAX_LAYERS,
    OVERLAY_OPTIONS,
    clear_probes,
    forget_layers,
    why_no_overlay,
)
from agent_sandbox.errors import BackendError, NotFoundError
from agent_sandbox.types import SandboxSpec

VERSION = 1
KEY_BYTES = 32
RUN_DIRECTORY = Path("/run/agent-sandbox")
_INSTANCE = re.compile(r"[0-9a-f]{12}")
_RECORD_BYTES = 8 << 20
"""An environment of 4 MiB, the most that a command may get, in escaped JSON, and some."""


@dataclass(frozen=True, slots=True)
class Record:
    """What an environment was made from.

    ``image_id`` names the image's content on the engine. ``shares_files`` says that its workspace is on this host;
    ``layers`` is what that began with, the topmost first. ``container`` is the full id that the engine acknowledged;
    empty before that. ``image_labels`` are the names of the image's labels.
    """

    id: str
    spec: SandboxSpec
    image_id: str
    shares_files: bool
    image_env: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    container: str = ""
    image_labels: tuple[str, ...] = ()


class Environment:
    """The files of environment ``id``. Making the object touches nothing."""

    def __init__(self, directory: Path, mount_point: Path, links: Path) -> None:
        self.id = directory.name
        self.directory = directory
        self.guest = mount_point / "guest"
        self.disk = Disk(directory, mount_point)
        self._links = links
        self._link = hashlib.sha256(self.id.encode()).hexdigest()[:12]
        self._record = directory / "spec.json"
        self._key = directory / "key"

    def reserve(self, record: Record) -> bytes:
        """Make the directory with its record and a fresh key, which is returned. :class:`FileExistsError` for a taken
        id."""
        self.directory.mkdir(mode=0o700)
        self.write(record)
        key = secrets.token_bytes(KEY_BYTES)
        _write(self._key, key)
        return key

    def write(self, record: Record) -> None:
        """Write the record, synced, in the place of an earlier one."""
        text = {"version": VERSION, **_fields(record), "spec": _fields(record.spec)}
        _replace(self._record, json.dumps(text).encode())

    def record(self) -> Record:
        """Read the record back. :class:`NotFoundError` when there is none, :class:`BackendError` when it is damaged."""
        try:
            with self._record.open("rb") as file:
                stored = msgspec.convert(json.loads(file.read(_RECORD_BYTES + 1)), _Stored)
            if stored.version != VERSION or stored.id != self.id:
                raise ValueError("another version or environment")
        except FileNotFoundError:
            raise NotFoundError(f"there is no environment {self.id}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise BackendError(f"the record of environment {self.id} is damaged; destroy it") from error
        values: dict[str, Any] = {
            name: getattr(stored, name) for name in _Stored.__struct_fields__ if name != "version"
        }
        for name in ("volumes", "layers", "image_labels"):
            values[name] = tuple(values[name])
        return Record(**values)

    def is_known(self) -> bool:
        """Whether there is a record, readable or not."""
        return os.path.lexists(self._record)

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
        for path in (self._record, self._key, self.guest / "config"):
            path.unlink(missing_ok=True)

    def prepare_guest(self, config: bytes) -> None:
        """Make the directory that the daemon shares with this host, with its configuration and no socket.

        It is on the disk, which is mounted without set-id bits and devices, and whose full blocks keep a reserve for
        the host's root.
        """
        self.guest.mkdir(mode=0o700, exist_ok=True)
        for name in ("config", "sock"):
            (self.guest / name).unlink(missing_ok=True)
        _write(self.guest / "config", config)

    def make_disk(self, templates: Templates, record: Record) -> None:
        """Make the disk and mount it; a workspace over layers gets its empty changes, whose root is open to its user.

        :class:`BackendError` when a layer is gone.
        """
        spec, disk = record.spec, self.disk
        _require(record.layers)
        disk.make(templates.get(spec.disk_mb), spec.uid, spec.gid, 0)
        if record.layers:
            for directory in (disk.changes, disk.changes_work):
                directory.mkdir(mode=0o755)
            os.chown(disk.changes, spec.uid, spec.gid)

    def short_layers(self, record: Record) -> list[str]:
        """Name the layers in few characters that mean nothing to mount(2). :class:`BackendError` when one is gone."""
        names = []
        _require(record.layers)
        for number, layer in enumerate(record.layers):
            link = self._links / f"{self._link}-{number}"
            link.unlink(missing_ok=True)
            link.symlink_to(layer)
            names.append(str(link))
        return names

    def fit_changes(self, layers: list[str]) -> None:
        """Let the changes be mounted over ``layers``, which show what those showed that the workspace began with.

        The kernel tells files laid out anew from those that it knew; it is tried here, since an engine only says that a
        start failed. :class:`BackendError` where the changes cannot do without the old ones.
        """
        disk = self.disk
        options = f"lowerdir={':'.join(layers)},upperdir={disk.changes},workdir={disk.changes_work},{OVERLAY_OPTIONS}"
        try:
            mounts.mount("overlay", disk.workspace, "overlay", mounts.MS_NOSUID | mounts.MS_NODEV, options)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            forget_layers(disk.changes, disk.changes_work)
        else:
            mounts.unmount(disk.workspace)

    def connect(self) -> socket.socket:
        """Connect to the daemon's socket, without blocking. :class:`OSError` as connect(2) gives it.

        What the sandbox has put in the socket's place is not followed.
        """
        descriptor = os.open(self.guest / "sock", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
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
        """Unmount whatever is mounted for the environment, and remove what a reboot would."""
        for place in (self.disk.mount_point, self.directory):
            for point in mounts.mounted_below(place):
                mounts.unmount(point)
        with contextlib.suppress(FileNotFoundError):
            self.disk.mount_point.rmdir()
        for link in self._links.glob(f"{self._link}-*"):
            link.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory, whose mounts have gone. :class:`OSError` (EBUSY) when one has not."""
        if mounts.mounted_below(self.directory):
            raise OSError(errno.EBUSY, "something is still mounted", str(self.directory))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)


class Places:
    """The directories of the server with ``data_dir``. Making the object writes nothing.

    ``instance`` is what its things on the engine are known by. It is drawn: two hosts may have data directories of one
    name, and one engine. Where environments are from before it was, it is what they have, made of that name.
    """

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = Path(os.path.realpath(data_dir))  # the mount table has no symbolic links
        self.home = self.data_dir / "docker"
        self.environments = self.home / "env"
        self._instance = self.home / "instance"
        self.templates = self.home / "templates"
        self._place = hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:12]
        self._wrong = ""
        self.instance = self._known_instance()
        self.run = RUN_DIRECTORY / self._place
        self.box = self.run / "docker"
        self.links = self.run / "l"

    def environment(self, id: str) -> Environment:
        """The files of environment ``id``, which need not exist."""
        return Environment(self.environments / id, self.box / id, self.links)

    def prepare(self, *, shares_files: bool) -> None:
        """Make the directories; those for disks only where the engine shares this host's files.

        :class:`BackendError` where it is not known which things on the engine are this server's.
        """
        if self._wrong:
            raise BackendError(self._wrong)
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.data_dir.chmod(0o700)
        for directory in (self.home, self.environments):
            directory.mkdir(mode=0o700, exist_ok=True)
        if not self._instance.exists():
            _replace(self._instance, self.instance.encode())
        if not shares_files:
            return
        for directory, mode in ((RUN_DIRECTORY, 0o755), (self.run, 0o711), (self.box, 0o711), (self.links, 0o711)):
            directory.mkdir(mode=mode, exist_ok=True)
            directory.chmod(mode)

    def _known_instance(self) -> str:
        drawn = secrets.token_hex(6)
        try:
            found = self._instance.read_text(errors="replace")
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                drawn = self._place if any(self.environments.iterdir()) else drawn
            return drawn
        except OSError as error:
            self._wrong = f"{self._instance} cannot be read: {error.strerror}"
            return drawn
        if not _INSTANCE.fullmatch(found):
            self._wrong = f"{self._instance} is damaged: put in it what the sandboxes' labels on the engine say"
            return drawn
        return found

    def keep_daemon(self, program: Path) -> Path:
        """A copy of the daemon's program that stays where it is, whatever becomes of the installation it comes from.

        Containers name its path for as long as they are there. Copies that nobody can name any more are removed.
        """
        content = program.read_bytes()
        copy = self.home / f"sandboxd-{hashlib.sha256(content).hexdigest()[:16]}"
        if not copy.exists():
            aside = self.home / f".new-{secrets.token_hex(4)}"
            _write(aside, content)
            aside.chmod(0o755)
            aside.replace(copy)
        if not self.names():
            for other in (*self.home.glob("sandboxd-*"), *self.home.glob(".new-*")):
                if other != copy:
                    other.unlink(missing_ok=True)
        return copy

    def why_no_layers(self) -> str:
        """Why workspaces cannot be overlays of layers on this host; empty when they can, which is tried."""
        clear_probes(self.run)
        return why_no_overlay(self.run)

    def close(self) -> None:
        """Remove the directories below ``/run`` where nothing is left in them."""
        for directory in (self.box, self.links, self.run):
            with contextlib.suppress(OSError):
                directory.rmdir()

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
                found |= set(self.environment(name).record().layers)
        return found


def _require(layers: tuple[str, ...]) -> None:
    for layer in layers:
        if not Path(layer).is_dir():
            raise BackendError(f"a layer of the workspace is gone: {layer}")


def _replace(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    _write(aside, content)
    aside.replace(path)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _fields(value: Record | SandboxSpec) -> dict[str, object]:
    found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: dict(one) if isinstance(one, Mapping) else one for name, one in found.items()}


class _Stored(msgspec.Struct):
    """The record as it must be on the disk. The decoder checks every type, down to each variable's."""

    version: int
    id: str
    spec: SandboxSpec
    image_id: str
    shares_files: bool
    image_env: dict[str, str]
    volumes: list[str]
    layers: Annotated[list[str], msgspec.Meta(max_length=MAX_LAYERS)]
    container: str
    image_labels: list[str] = []
