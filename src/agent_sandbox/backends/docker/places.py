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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from agent_sandbox.backends.linux import mounts
from agent_sandbox.backends.linux.disk import Templates
from agent_sandbox.backends.linux.environments import (
    KEY_BYTES,
    RECORD_VERSION,
    RUN_DIRECTORY,
    DiskEnvironment,
    DiskPlaces,
    StoredRecord,
    require_layers,
    write_new,
    write_private,
)
from agent_sandbox.backends.linux.overlay import MAX_LAYERS, OVERLAY_OPTIONS, forget_layers
from agent_sandbox.backends.linux.rundir import RunDirectory, instance_of
from agent_sandbox.errors import BackendError
from agent_sandbox.types import SandboxSpec

_INSTANCE = re.compile(r"[0-9a-f]{12}")


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


class Environment(DiskEnvironment):
    """The files of environment ``id``. Making the object touches nothing."""

    def __init__(self, directory: Path, mount_point: Path, links: Path) -> None:
        super().__init__(directory, mount_point)
        self.guest = mount_point / "guest"
        self._links = links
        self._link = hashlib.sha256(self.id.encode()).hexdigest()[:12]

    @property
    def endpoint(self) -> Path:
        return self.guest / "sock"

    def reserve(self, record: Record) -> bytes:
        """Make the directory with its record and a fresh key, which is returned. :class:`FileExistsError` for a taken
        id."""
        self.directory.mkdir(mode=0o700)
        self.write(record)
        key = secrets.token_bytes(KEY_BYTES)
        write_new(self._key, key)
        return key

    def write(self, record: Record) -> None:
        """Write the record, synced, in the place of an earlier one."""
        text = {"version": RECORD_VERSION, **_fields(record), "spec": _fields(record.spec)}
        write_private(self._record, json.dumps(text).encode())

    def record(self) -> Record:
        """Read the record back. :class:`NotFoundError` when there is none, :class:`BackendError` when it is damaged."""
        stored = self.stored(_Stored)
        values: dict[str, Any] = {
            name: getattr(stored, name) for name in _Stored.__struct_fields__ if name != "version"
        }
        for name in ("volumes", "layers", "image_labels"):
            values[name] = tuple(values[name])
        return Record(**values)

    def layers(self) -> tuple[str, ...]:
        return self.record().layers

    def forget(self) -> None:
        """Remove record and key: from now on the environment cannot be found, whatever is left of it."""
        super().forget()
        (self.guest / "config").unlink(missing_ok=True)

    def prepare_guest(self, config: bytes) -> None:
        """Make the directory that the daemon shares with this host, with its configuration and no socket.

        It is on the disk, which is mounted without set-id bits and devices, and whose full blocks keep a reserve for
        the host's root.
        """
        self.guest.mkdir(mode=0o700, exist_ok=True)
        for name in ("config", "sock"):
            (self.guest / name).unlink(missing_ok=True)
        write_new(self.guest / "config", config)

    def make_disk(self, templates: Templates, record: Record) -> None:
        """Make the disk and mount it; a workspace over layers gets its empty changes, whose root is open to its user.

        :class:`BackendError` when a layer is gone.
        """
        spec, disk = record.spec, self.disk
        require_layers(record.layers)
        disk.make(templates.get(spec.disk_mb), spec.uid, spec.gid, 0)
        if record.layers:
            for directory in (disk.changes, disk.changes_work):
                directory.mkdir(mode=0o755)
            os.chown(disk.changes, spec.uid, spec.gid)

    def short_layers(self, record: Record) -> list[str]:
        """Name the layers in few characters that mean nothing to mount(2). :class:`BackendError` when one is gone."""
        names = []
        require_layers(record.layers)
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

    def unmount(self) -> None:
        """Unmount whatever is mounted for the environment, and remove what a reboot would."""
        super().unmount()
        for link in self._links.glob(f"{self._link}-*"):
            link.unlink(missing_ok=True)


class Places(DiskPlaces):
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
        self._place = instance_of(self.data_dir)
        self._wrong = ""
        self.instance = self._known_instance()
        self.run = RUN_DIRECTORY / self._place
        self.run_directory = RunDirectory(self.run, self.data_dir)
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
        self.make_directories(self.data_dir, self.home)
        if not self._instance.exists():
            write_private(self._instance, self.instance.encode())
        if shares_files:
            self.make_run_directories((self.links, 0o711))

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
            write_new(aside, content)
            aside.chmod(0o755)
            aside.replace(copy)
        if not self.names():
            for other in (*self.home.glob("sandboxd-*"), *self.home.glob(".new-*")):
                if other != copy:
                    other.unlink(missing_ok=True)
        return copy

    def close(self) -> None:
        """Remove the directories below ``/run`` where nothing is left in them."""
        self.remove_empty(self.links)


def _fields(value: Record | SandboxSpec) -> dict[str, object]:
    found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: dict(one) if isinstance(one, Mapping) else one for name, one in found.items()}


class _Stored(StoredRecord):
    """The record as it must be on the disk. The decoder checks every type, down to each variable's."""

    spec: SandboxSpec
    image_id: str
    shares_files: bool
    image_env: dict[str, str]
    volumes: list[str]
    layers: Annotated[list[str], msgspec.Meta(max_length=MAX_LAYERS)]
    container: str
    image_labels: list[str] = msgspec.field(default_factory=list)
