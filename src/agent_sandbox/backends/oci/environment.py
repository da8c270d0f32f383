"""One environment's files: its record, key, socket and disk.

::

    DATA_DIR/<backend>/env/<id>/   0700
    ├── spec.json               0600, the record: what was asked for and which image content it runs
    ├── key                     0600, the 32 bytes that prove either side of the wire to the other
    ├── config.json             the bundle (nothing secret)
    ├── sock                    where sandboxd listens; bound here, handed over, so it outlives the server
    ├── daemon/                 0700, instead of that where the daemon binds its own: sock, and its configuration
    │                           (0600), in a small memory file system, since the sandbox's root can write there
    └── disk.img                the disk
    /run/agent-sandbox/<instance>/box/<id>/
                                where the disk is mounted, and on it the root file system is put together

The record comes first and whole, so that whatever else is there can be found and removed. It holds the values of the
sandbox's environment, for which both modes are what they are. What a reboot takes is below ``/run``, what it leaves is
in the directory. A sandbox's root is no user of the host's, so it could not pass through DATA_DIR to its own root file
system: that is the other reason for the place of the mount. The functions block, but for the socket's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from agent_sandbox.backends.linux import mounts
from agent_sandbox.backends.linux.environments import (
    KEY_BYTES,
    RECORD_VERSION,
    DiskEnvironment,
    StoredRecord,
    require_layers,
    write_private,
)
from agent_sandbox.backends.linux.idranges import END
from agent_sandbox.backends.linux.overlay import MAX_LAYERS, OVERLAY_OPTIONS, forget_layers, take_after
from agent_sandbox.backends.oci import idmap
from agent_sandbox.errors import BackendError
from agent_sandbox.types import SandboxSpec

_BACKLOG = 64
"""Connections waiting for the daemon: one server makes one, and again after a break."""
_LOG_TAIL_BYTES = 2000
_DAEMON_OPTIONS = "mode=0700,size=64k,nr_inodes=32"
"""Of the daemon's directory, for a socket and a configuration of 4 KiB: who has taken a daemon over fills no disk of
the host's with it, nor leaves a tree there that cannot be removed."""


@dataclass(frozen=True, slots=True)
class Record:
    """What an environment was made from.

    ``rootfs`` is the directory of the image's content, ``ids`` the first of its 65,536 host ids: None when it shares
    the host's. ``image_env`` is the image's part of each command's environment. ``layers`` is what the workspace began
    with, the topmost first; none where it began empty.
    """

    id: str
    spec: SandboxSpec
    rootfs: Path
    ids: int | None = None
    image_env: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()


class Environment(DiskEnvironment):
    """The files of environment ``id`` below ``parent``, its mount below ``box``. Making the object touches nothing."""

    def __init__(self, parent: Path, box: Path, id: str, socket: str = "sock") -> None:
        super().__init__(parent / id, box / id)
        self.daemon = self.directory / "daemon"
        self._socket = socket
        self.has_right_layers = False
        """Whether the record's layers are known to show what the workspace began with, should they be other ones."""

    @property
    def endpoint(self) -> Path:
        return self.directory / self._socket

    def reserve(self) -> None:
        """Make the directory, empty. :class:`FileExistsError` when there is one already."""
        self.directory.mkdir(mode=0o700)

    def make(self, record: Record) -> bytes:
        """Write the record, synced, and a fresh key, which is returned, into the reserved directory."""
        self.replace(record)
        key = secrets.token_bytes(KEY_BYTES)
        descriptor = os.open(self._key, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        return key

    def replace(self, record: Record) -> None:
        """Write the record, synced, in place of the one that is there."""
        text = {
            "version": RECORD_VERSION,
            "id": record.id,
            "rootfs": str(record.rootfs),
            "spec": _spec_to_json(record.spec),
            "ids": record.ids,
            "image_env": dict(record.image_env),
            "layers": list(record.layers),
        }
        write_private(self._record, json.dumps(text).encode())

    def record(self) -> Record:
        """Read the record back. :class:`NotFoundError` when there is none, :class:`BackendError` when it is damaged."""
        stored = self.stored(_Stored)
        return Record(self.id, stored.spec, Path(stored.rootfs), stored.ids, stored.image_env, tuple(stored.layers))

    def layers(self) -> tuple[str, ...]:
        return self.record().layers

    def listen(self) -> socket.socket:
        """Bind the socket that the daemon gets, in the place of an earlier one."""
        (self.directory / "sock").unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _directory(self.directory) as base:
                listener.bind(f"{base}/sock")
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    def has_socket(self) -> bool:
        """Whether something stands where the daemon binds its socket."""
        return os.path.lexists(self.endpoint)

    def make_daemon(self, config: bytes) -> None:
        """Make the directory that the daemon binds its socket in, and in it the configuration that it reads."""
        self.daemon.mkdir(mode=0o700, exist_ok=True)
        flags = mounts.MS_NOSUID | mounts.MS_NODEV
        mounts.mount("tmpfs", self.daemon, "tmpfs", flags, _DAEMON_OPTIONS)
        write_private(self.daemon / "config", config)

    def write_bundle(self, config: dict[str, Any]) -> None:
        """Write the bundle's config.json."""
        descriptor = os.open(
            self.directory / "config.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
        )
        with os.fdopen(descriptor, "w") as file:
            json.dump(config, file)

    def bundle(self) -> dict[str, Any]:
        """Read the bundle's config.json back. :class:`BackendError` when it is not there."""
        try:
            found: dict[str, Any] = json.loads((self.directory / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise BackendError(f"the bundle of environment {self.id} is damaged; start it again") from error
        return found

    def open_log(self) -> int:
        """Open the daemon's log, which is on the sandbox's own disk and so within its limit."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self.disk.log, flags, 0o600)

    def log_tail(self) -> str:
        """The end of the daemon's log, at most 2,000 bytes; empty when there is none."""
        try:
            descriptor = os.open(self.disk.log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        with os.fdopen(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                return ""
            file.seek(max(0, state.st_size - _LOG_TAIL_BYTES))
            return file.read(_LOG_TAIL_BYTES).decode(errors="replace").strip()

    def make_root(
        self, rootfs: Path, binds: Sequence[tuple[Path, str]], namespace: int | None, *, writable: bool
    ) -> None:
        """Put the root file system together on ``disk.root``.

        It shows ``rootfs``, with the ids of ``namespace`` where there is one: read-only with ``binds`` on it, or
        writable with the changes on the sandbox's disk.
        """
        if not writable and namespace is not None:
            idmap.attach(rootfs, self.disk.root, namespace)
            for source, destination in binds:
                idmap.attach(source, self.disk.root / destination.lstrip("/"), namespace)
            return
        if namespace is None:
            self._overlay(rootfs)
            return
        idmap.attach(rootfs, self.disk.lower, namespace)
        self._overlay(self.disk.lower)
        mounts.detach(self.disk.lower)

    def _overlay(self, lower: Path) -> None:
        parts = (lower, self.disk.upper, self.disk.work)
        with contextlib.ExitStack() as stack:
            lower_, upper, work = (stack.enter_context(_directory(part)) for part in parts)
            options = f"lowerdir={lower_},upperdir={upper},workdir={work},redirect_dir=on,metacopy=off"
            mounts.mount("overlay", self.disk.root, "overlay", mounts.MS_NOSUID | mounts.MS_NODEV, options)

    def make_workspace(self, record: Record, namespace: int | None, *, new: bool) -> None:
        """Put a workspace over layers together on ``disk.workspace``. :class:`BackendError` when a layer is gone.

        The changes' root begins as that of the topmost layer.
        """
        require_layers(record.layers)
        disk, layers = self.disk, [Path(layer) for layer in record.layers]
        with contextlib.ExitStack() as stack:
            shown: list[Path] = []
            if namespace is None:
                shown = layers
            else:
                for number, layer in enumerate(layers):
                    place = disk.mount_point / f"layer-{number}"
                    place.mkdir(mode=0o755, exist_ok=True)
                    idmap.attach(layer, place, namespace)
                    stack.callback(mounts.detach, place)
                    shown.append(place)
            if new:
                for directory in (disk.changes, disk.changes_work):
                    directory.mkdir(mode=0o755)
                take_after(layers[0], disk.changes, record.ids or 0)
            lowers = [stack.enter_context(_directory(place)) for place in shown]
            upper, work = (stack.enter_context(_directory(part)) for part in (disk.changes, disk.changes_work))
            options = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work},{OVERLAY_OPTIONS}"

            def mount() -> None:
                mounts.mount("overlay", disk.workspace, "overlay", mounts.MS_NOSUID | mounts.MS_NODEV, options)

            try:
                mount()
            except OSError as error:
                if error.errno != errno.ESTALE or new or not self.has_right_layers:
                    raise
                forget_layers(disk.changes, disk.changes_work)
                mount()

    def hide_root(self) -> None:
        """Take the root file system out of the host's sight, once the sandbox has it."""
        for point in mounts.mounted_below(self.disk.root):
            mounts.detach(point)

    def clear(self) -> None:
        """Remove what a stopped environment does not need."""
        for name in ("sock", "config.json"):
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.daemon)


@contextlib.contextmanager
def _directory(path: Path) -> Any:
    """A name for a directory that is short and free of special characters: socket addresses hold 107 bytes, and mount
    options give commas and colons a meaning."""
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class _Stored(StoredRecord):
    """The record as it must be on the disk. The decoder checks every type, down to each variable's.

    Records of older releases lack what has a default.
    """

    rootfs: str
    spec: SandboxSpec
    ids: Annotated[int, msgspec.Meta(gt=0, lt=END)] | None = None
    image_env: dict[str, str] = msgspec.field(default_factory=dict)
    layers: Annotated[list[str], msgspec.Meta(max_length=MAX_LAYERS)] = msgspec.field(default_factory=list)


def _spec_to_json(spec: SandboxSpec) -> dict[str, Any]:
    return {**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}, "env": dict(spec.env)}
