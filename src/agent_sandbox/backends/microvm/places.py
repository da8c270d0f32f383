"""One microVM's files on the server's host, and where those of one backend of one server are.

::

    DATA_DIR/<backend>/env/<id>/            0700
    ├── spec.json                           0600, the record: what was asked for, the image's content, the host ids
    ├── key                                 0600, the 32 bytes that prove either side of the wire to the other
    ├── config.img                          0600, the drive that tells the daemon its key (config_image.py)
    ├── root.erofs, root.key                the image's content: another name of the file that all have who share it
    ├── layers.erofs, layers.key            what the workspace is mounted over, as well; no key where there is nothing
    ├── workspace.img                       0600, the drive that the guest writes; never mounted on this host
    └── jail/                               what its monitor has as its root, where it has one of its own
    DATA_DIR/<backend>/kernel/              names of the files that machines boot from, so that they stay
    DATA_DIR/<backend>/templates/           blank disks by size
    DATA_DIR/<backend>/layers/              states of workspaces as drives (layers.py)
    /run/agent-sandbox/<here>/vm/<id>/      0700: the monitor's sockets, which process it is, and whether it is held
    agent-sandbox-<here>/<id>               its control group, in the hierarchies that it needs
    /var/lib/agent-sandbox-ids/             ranges of host ids, shared by all servers; a monitor runs as one of its own

``<here>`` is ``<instance>-<backend>``, and ``<instance>`` is made of the data directory's path: it names the same
server again, and no other. The record comes first and whole, so that whatever else is there can be found and removed.
A socket's path has at most 98 of the 107 bytes that an address holds, whatever the data directory's. Everything blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from agent_sandbox.backends.linux.disk import clone
from agent_sandbox.backends.linux.idranges import END, IdRanges
from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.rundir import RunDirectory, clear_vanished, instance_of
from agent_sandbox.backends.microvm.config_image import config_image, new_identity
from agent_sandbox.errors import BackendError, NotFoundError
from agent_sandbox.types import SandboxSpec

VERSION = 1
KEY_BYTES = 32
RUN_DIRECTORY = Path("/run/agent-sandbox")
ID_DIRECTORY = Path("/var/lib/agent-sandbox-ids")
_RECORD_BYTES = 8 << 20
"""An environment of 4 MiB, the most that a command may get, in escaped JSON, and some."""


@dataclass(frozen=True, slots=True)
class Record:
    """What an environment was made from.

    ``user`` is the host's uid and gid of its monitor, ``image_env`` the image's part of each command's environment.
    """

    id: str
    spec: SandboxSpec
    user: int
    image_env: Mapping[str, str] = field(default_factory=dict)


class Environment:
    """The files of environment ``id``. Making the object touches nothing."""

    def __init__(self, directory: Path, run: Path) -> None:
        self.id = directory.name
        self.directory = directory
        self.run = run
        self.workspace = directory / "workspace.img"
        self.config = directory / "config.img"
        self.root = directory / "root.erofs"
        self.layers = directory / "layers.erofs"
        self.jail = directory / "jail"
        self._record = directory / "spec.json"
        self._key = directory / "key"
        self._process = run / "process.json"
        self._root_key = directory / "root.key"
        self._layers_key = directory / "layers.key"
        self._held = run / "held"

    def reserve(self) -> None:
        """Make the directory, empty. :class:`FileExistsError` when there is one already."""
        self.directory.mkdir(mode=0o700)

    def make(self, record: Record) -> None:
        """Write the record, synced, and a fresh key into the reserved directory."""
        text = {**_fields(record), "version": VERSION, "spec": _fields(record.spec)}
        _write(self._record, json.dumps(text).encode())
        _write(self._key, secrets.token_bytes(KEY_BYTES))

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
        return Record(self.id, stored.spec, stored.user, stored.image_env)

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
        """Remove record and keys: from now on the environment cannot be found, whatever is left of it."""
        for path in (self._record, self._key, self.config):
            path.unlink(missing_ok=True)

    def has_root(self) -> bool:
        """Whether the image's content is at hand."""
        return self.root.exists()

    def link_root(self, content: Path, key: str) -> None:
        """Give the file of the image's content a name here, so that it stays; a link where it is on another disk.

        ``key`` names that content.
        """
        self.root.unlink(missing_ok=True)
        _write(self._root_key, key.encode())
        try:
            self.root.hardlink_to(content)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EMLINK):
                raise
            self.root.symlink_to(content)

    def root_key(self) -> str:
        """What names the image's content. :class:`BackendError` when it is not known."""
        try:
            return self._root_key.read_text()
        except OSError as error:
            raise BackendError(f"what the root of environment {self.id} is made of is not known any more") from error

    def write_layers_key(self, key: str) -> None:
        """Note what names the state on the drive of layers."""
        _write(self._layers_key, key.encode())

    def layers_key(self) -> str:
        """What names the state that the workspace is mounted over; empty where it is mounted over nothing."""
        try:
            return self._layers_key.read_text()
        except FileNotFoundError:
            return ""

    def make_workspace(self, source: Path) -> None:
        """Make the workspace's drive, in the place of an earlier one: as blank or as full as ``source``."""
        self.workspace.unlink(missing_ok=True)
        clone(source, self.workspace)

    def write_config(self, record: Record, *, keyed: bool = True) -> None:
        """Write the configuration's drive, with a fresh identity, in the place of an earlier one."""
        self.config.unlink(missing_ok=True)
        key = self.key() if keyed else None
        _write(self.config, config_image(self.id, record.spec, key, new_identity(), layered=bool(self.layers_key())))

    def hold(self) -> None:
        """Note that what runs inside is frozen, or the machine paused, for as long as it takes to save it."""
        self._held.touch()

    def release(self) -> None:
        """Note that it goes on."""
        self._held.unlink(missing_ok=True)

    def is_held(self) -> bool:
        """Whether a server that ended meanwhile left it so."""
        return self._held.exists()

    def make_run(self) -> None:
        """Make the monitor's directory, empty: what an earlier monitor left there goes."""
        self.clear()
        self.run.mkdir(mode=0o700)

    def write_process(self, pid: int) -> None:
        """Keep which process the monitor is. :class:`ProcessLookupError` when it has ended."""
        process = Process.of(pid)
        if process is None:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        _write(self._process, json.dumps(dataclasses.asdict(process)).encode())

    def process(self) -> Process | None:
        """The monitor's process, alive or not; None where none was started since the last stop."""
        try:
            return msgspec.json.decode(self._process.read_bytes(), type=Process)
        except (OSError, msgspec.MsgspecError):
            return None

    def flush(self) -> None:
        """Bring what the guest wrote to the host's storage. Nothing happens without a drive."""
        with contextlib.suppress(FileNotFoundError), self.workspace.open("rb") as file:
            os.fsync(file.fileno())

    def clear(self) -> None:
        """Remove what a reboot would."""
        for directory in (self.run, self.jail):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(directory)

    def remove(self) -> None:
        """Remove everything; the directory goes last, by which the environment is listed."""
        self.clear()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)


class Places:
    """The directories of ``backend`` in the server with ``data_dir``. Making it only resolves links."""

    def __init__(self, data_dir: Path, id_range_base: int, backend: str) -> None:
        self.data_dir = Path(os.path.realpath(data_dir))
        self.home = self.data_dir / backend
        self.environments = self.home / "env"
        self.templates = self.home / "templates"
        self.layers = self.home / "layers"
        self._kernels = self.home / "kernel"
        self.instance = instance_of(self.data_dir)
        here = f"{self.instance}-{backend}"
        self.group = f"agent-sandbox-{here}"
        self.run = RUN_DIRECTORY / here
        self._run_directory = RunDirectory(self.run, self.data_dir)
        self.box = self.run / "vm"
        self.ranges = IdRanges(ID_DIRECTORY, id_range_base)

    def environment(self, id: str) -> Environment:
        """The files of environment ``id``, which need not exist."""
        return Environment(self.environments / id, self.box / id)

    def prepare(self) -> None:
        """Make the directories. The way to a monitor's own is open to it, and shows it nobody else's."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.data_dir.chmod(0o700)
        for directory in (self.home, self.environments):
            directory.mkdir(mode=0o700, exist_ok=True)
        clear_vanished(RUN_DIRECTORY)
        self._run_directory.claim((self.box, 0o711))
        self.ranges.prepare()

    def keep_kernel(self, name: str, *files: Path) -> list[Path]:
        """Give ``files`` of the kernel called ``name`` names here, and take those of others away; return the new ones.

        So they stay, whatever another server has in the place that they come from.
        """
        self._kernels.mkdir(mode=0o700, exist_ok=True)
        kept = [self._kernels / f"{name}-{file.name}" for file in files]
        for old in self._kernels.iterdir():
            if old not in kept or old.is_symlink():
                old.unlink(missing_ok=True)
        for place, file in zip(kept, files, strict=True):
            if not place.exists():
                try:
                    place.hardlink_to(file)
                except OSError as error:
                    if error.errno not in (errno.EXDEV, errno.EMLINK):
                        raise
                    _write(place, file.read_bytes())
            place.chmod(0o644)  # also of one whose server was killed before it did
        return kept

    def close(self) -> None:
        """Remove the directories below ``/run`` where nothing is left in them."""
        self._run_directory.release(self.box)

    def names(self) -> set[str]:
        """The environments that have a directory here."""
        found = set()
        for directory in (self.environments, self.box):
            with contextlib.suppress(FileNotFoundError):
                found |= {entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)}
        return found


def _write(path: Path, content: bytes) -> None:
    """Write a new file of mode 0600 so that a crash leaves it whole or not at all."""
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    aside.replace(path)


def _fields(value: Record | SandboxSpec) -> dict[str, object]:
    found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: dict(one) if isinstance(one, Mapping) else one for name, one in found.items()}


class _Stored(msgspec.Struct):
    """The record as it must be on the disk. The decoder checks every type, down to each variable's."""

    version: int
    id: str
    spec: SandboxSpec
    user: Annotated[int, msgspec.Meta(gt=0, lt=END)]
    image_env: dict[str, str]
