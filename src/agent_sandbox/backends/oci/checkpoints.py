"""What a checkpoint of gVisor's is on disk, what belongs to it, and what it cannot hold.

::

    DIRECTORY/                the caller's own
    ├── checkpoint.img …      what runsc wrote, 0600
    └── manifest.json         written last, 0600: without it there is no checkpoint

The manifest says what the memory can go on with, and nothing else: the runtime and its version, the machine (its
processor's features, which programs have chosen by), the daemon's program, the image's content, and what of the limits
lives in that memory.
The functions block.

When changing the manifest: count its version up; an older one is then refused, with the versions in the message.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from agent_sandbox.backends.linux.environments import write_private
from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.processor import machine
from agent_sandbox.backends.oci.environment import Record
from agent_sandbox.errors import BackendError, ConflictError

VERSION = 1
MANIFEST = "manifest.json"
_MANIFEST_BYTES = 64 * 1024
_NAMES = 5
"""Files that an error names; more help nobody."""
_DELETED = " (deleted)"
_INSIDE = "/root"
"""Where a runsc sandbox has its file systems, as the host reads its links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a checkpoint was made of.

    All must be the same where it goes on, but for ``memory_mb``, which may be more, and ``daemon``, the digest of the
    daemon's program, which is started from where it is kept.
    """

    version: int = VERSION
    runtime: str
    machine: str
    image: str
    image_digest: str
    rootfs: str
    user: str
    read_only_rootfs: bool
    pids_limit: int
    tmp_mb: int
    memory_mb: int
    daemon: str


_WORDS = {
    "version": "format",
    "runtime": "runtime",
    "machine": "machine",
    "image": "image",
    "image_digest": "image's content",
    "rootfs": "image's content",
    "user": "sandbox user",
    "read_only_rootfs": "kind of root file system",
    "pids_limit": "limit of processes",
    "tmp_mb": "size of /tmp",
}


def made_of(record: Record, runtime: str, daemon: str) -> Made:
    """What a checkpoint of this environment is made of, on this machine."""
    spec = record.spec
    return Made(
        runtime=runtime,
        machine=machine(),
        image=spec.image,
        image_digest=spec.image_digest,
        rootfs=record.rootfs.parent.name,
        user=f"{spec.uid}:{spec.gid}",
        read_only_rootfs=spec.read_only_rootfs,
        pids_limit=spec.pids_limit,
        tmp_mb=spec.tmp_mb,
        memory_mb=spec.memory_mb,
        daemon=daemon,
    )


def require(made: Made, wanted: Made) -> None:
    """Raise :class:`ConflictError` when a checkpoint cannot go on as what is wanted; the message says why not."""
    for field in fields(Made):
        before, now = getattr(made, field.name), getattr(wanted, field.name)
        if field.name == "memory_mb":
            if now < before:
                raise ConflictError(f"the checkpoint needs {before} MiB of memory, and {now} are asked for")
        elif field.name != "daemon" and before != now:
            raise ConflictError(f"the checkpoint is of another {_WORDS[field.name]}: {before!r}, here it is {now!r}")


def seal(directory: Path, made: Made) -> None:
    """Make what runsc wrote private and durable, and then a checkpoint."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fchmod(file.fileno(), 0o600)
            os.fsync(file.fileno())
    write_private(directory / MANIFEST, msgspec.json.encode(made))
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(directory: Path) -> None:
    """Remove what was written of a checkpoint that came to nothing."""
    for path in (directory / MANIFEST, *directory.glob("*")):
        with contextlib.suppress(OSError):
            path.unlink()


def read(directory: Path) -> Made:
    """The manifest. :class:`ConflictError` when there is no whole checkpoint, or one of another format."""
    try:
        with (directory / MANIFEST).open("rb") as file:
            text = file.read(_MANIFEST_BYTES)
        version = msgspec.json.decode(text, type=dict[str, object]).get("version")
        if version != VERSION:
            raise ConflictError(f"the checkpoint is of format {version}, and this release reads {VERSION}")
        return msgspec.json.decode(text, type=Made)
    except FileNotFoundError:
        raise ConflictError("there is no whole checkpoint: it has no manifest") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConflictError("the checkpoint's manifest is damaged") from error


def open_deleted(sandbox: Process | None) -> list[str]:
    """The files that a paused sandbox has open and that have no name any more, as the guest knew them; at most five.

    Every file that a guest has open or mapped is one of the host's that its kernel has open.
    """
    if sandbox is None:
        raise BackendError("the sandbox does not run")
    found: set[str] = set()
    for link in Path(f"/proc/{sandbox.pid}/fd").iterdir():
        try:
            target, state = str(link.readlink()), link.stat()
        except OSError:
            continue
        if not target.endswith(_DELETED) or target.startswith("/memfd:"):
            continue
        if stat.S_ISREG(state.st_mode) and state.st_nlink:
            continue  # a file that is called so
        found.add(target.removesuffix(_DELETED).removeprefix(_INSIDE))
    names = sorted(found)
    return names if len(names) <= _NAMES else [*names[:_NAMES], f"{len(names) - _NAMES} more"]
