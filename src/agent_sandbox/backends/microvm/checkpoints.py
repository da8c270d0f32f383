"""What a saved machine is on disk, and what it can go on as.

::

    DIRECTORY/           0700, the caller's own
    ├── memory           the guest's memory, sparse (see memory.py)
    ├── state            its devices' and processors', as the monitor writes it
    ├── disk             the workspace's drive at the same moment, sparse
    ├── layers           another name of the mark that keeps what it is mounted over (layers.py); where there is that
    └── manifest.json    written last: without it there is no saved machine

The manifest holds facts that must be the same where the machine goes on: the monitor and its version, the processor
that the guest saw, its kernel, its root's content and its sizes. The daemon inside goes on as well, whatever the
server's release has now: the wire tells versions apart. All functions block.

When changing the manifest: count ``VERSION`` up; an older one is then refused, with the versions in the message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from agent_sandbox.backends.linux.disk import clone
from agent_sandbox.backends.microvm.monitor import MEMORY_FILE, STATE_FILE, Facts, MachineSpec
from agent_sandbox.errors import ConflictError
from agent_sandbox.types import SandboxSpec

VERSION = 2
MANIFEST, DISK, LAYERS = "manifest.json", "disk", "layers"
_MANIFEST_BYTES = 64 * 1024
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a saved machine was made of. Sizes are in MiB; ``kernel`` is its version, ``root`` names its content.

    A template, which has no key yet, has none of what a key brings: there ``user``, ``pids_limit``, ``tmp_mb`` and
    ``guest_mb`` (the commands' share of the memory) are empty. ``layers`` names what the workspace is mounted over, and
    must not be the same: it is what goes on as well.
    """

    version: int = VERSION
    monitor: str
    cpu: str
    kernel: str
    root: str
    vcpus: int
    memory_mb: int
    disk_mb: int
    user: str = ""
    guest_mb: int = 0
    pids_limit: int = 0
    tmp_mb: int = 0
    layers: str = ""


_WORDS = {
    "version": "format",
    "monitor": "monitor",
    "cpu": "processor",
    "kernel": "kernel",
    "root": "root file system",
    "vcpus": "number of processors",
    "memory_mb": "size of memory",
    "disk_mb": "size of disk",
    "user": "sandbox user",
    "guest_mb": "memory_mb",
    "pids_limit": "limit of processes",
    "tmp_mb": "size of /tmp",
}


def made_of(spec: SandboxSpec, machine: MachineSpec, facts: Facts, kernel: str, root: str) -> Made:
    """What a machine for ``spec`` is made of on this host, once it has its key."""
    return Made(
        monitor=f"{facts.name} {facts.version}",
        cpu=facts.cpu,
        kernel=kernel,
        root=root,
        vcpus=machine.vcpus,
        memory_mb=machine.memory_mb,
        disk_mb=spec.disk_mb,
        user=f"{spec.uid}:{spec.gid}",
        guest_mb=spec.memory_mb,
        pids_limit=spec.pids_limit,
        tmp_mb=spec.tmp_mb,
    )


def template_of(made: Made, boots: str) -> Made:
    """What the template of a machine is made of: the same before it has a key, and the very kernel that it boots."""
    return dataclasses.replace(made, kernel=boots, user="", guest_mb=0, pids_limit=0, tmp_mb=0)


def require(made: Made, wanted: Made) -> None:
    """Raise :class:`ConflictError` when what was saved cannot go on as what is wanted; the message says why not."""
    for field in fields(Made):
        if field.name not in _WORDS:
            continue
        before, now = getattr(made, field.name), getattr(wanted, field.name)
        if before != now:
            raise ConflictError(
                f"the machine was saved with another {_WORDS[field.name]}: {before!r}, not {now!r}; "
                "use its workspace without its memory"
            )


def keep_disk(workspace: Path, directory: Path) -> None:
    """Copy a paused machine's drive beside its memory."""
    clone(workspace, directory / DISK)


def seal(directory: Path, made: Made) -> None:
    """Make what was saved durable, and then a saved machine."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    descriptor = os.open(directory / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(made))
        file.flush()
        os.fsync(descriptor)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(directory: Path) -> None:
    """Remove what was written of something that came to nothing."""
    with contextlib.suppress(FileNotFoundError):
        for path in (directory / MANIFEST, *directory.iterdir()):
            with contextlib.suppress(OSError):
                path.unlink()


def read(directory: Path) -> Made:
    """The manifest. :class:`ConflictError` when there is no whole saved machine, or one of another format."""
    try:
        with (directory / MANIFEST).open("rb") as file:
            text = file.read(_MANIFEST_BYTES)
        version = msgspec.json.decode(text, type=dict[str, object]).get("version")
        if version != VERSION:
            raise ConflictError(f"the saved machine is of format {version}, and this release reads {VERSION}")
        made = msgspec.json.decode(text, type=Made)
        for name, size in ((MEMORY_FILE, made.memory_mb * MIB), (DISK, made.disk_mb * MIB), (STATE_FILE, None)):
            found = (directory / name).stat().st_size
            if found != (size or found) or not found:
                raise ConflictError(f"the saved machine is damaged: its {name} has {found} bytes")
        if made.layers:
            with (directory / LAYERS).open("rb") as file:
                if file.read(len(made.layers) + 1) != made.layers.encode():
                    raise ConflictError("the saved machine is damaged: what keeps its layers is not what it was")
        return made
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise ConflictError(f"there is no whole saved machine: it has no {missing}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConflictError("the saved machine's manifest is damaged") from error
