"""Making an EROFS file system of a directory, and telling whether a file is the one that was made.

The file is not compressed: under emulation unpacking costs more than reading, and machines share what the host has
cached of it. Times are kept, or interpreters would compile everything anew; extended attributes are not where nobody
asks for them, as in every image here. The same files give the same bytes, so that a machine's memory fits a file that
was made again: the file system's id is made from what it is of, and its own time is put back to 0 (mkfs.erofs 1.5 can
only give that time to every file, too), for which its superblock has no checksum.

Superblock: at 1024 bytes, little-endian; the kernel's fs/erofs/erofs_fs.h.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from agent_sandbox.errors import BackendError, InvalidRequestError, LimitExceededError
from agent_sandbox.images import tools
from agent_sandbox.images.machine import binding
from agent_sandbox.images.tools import Tick, ToolFailedError

FORMAT = 1
"""Of what is asked of mkfs.erofs: with another number every file is made again."""
INSTALL = "install it with: apt-get install erofs-utils"
_SUPERBLOCK = struct.Struct("<I8xB23xI8x16s")
_AT, _MAGIC = 1024, 0xE0F5E1E2
_TIME_AT, _TIME_BYTES = 24, 12


def require() -> None:
    """Raise :class:`BackendError` when mkfs.erofs is not installed."""
    if shutil.which("mkfs.erofs", path=tools.PATH) is None:
        raise BackendError(f"mkfs.erofs is not installed; {INSTALL}")


def make(
    target: Path,
    rootfs: Path,
    binds: Sequence[tuple[Path, str]],
    key: str,
    tick: Tick,
    *,
    attributes: bool = False,
) -> None:
    """Write ``target`` from the directory ``rootfs``, with the directories ``binds`` shown in it.

    ``attributes``: with the extended attributes that files have.

    :class:`LimitExceededError` when the disk is full, :class:`InvalidRequestError` when the tree cannot be packed.
    """
    require()
    options = ["--quiet", "-x2" if attributes else "-x-1", "-Enosbcrc", f"-U{_id(key)}"]
    argv = ["mkfs.erofs", *options, str(target), str(rootfs)]
    if binds:
        shown = [word for source, inside in binds for word in (str(source), f"{rootfs}/{inside.lstrip('/')}")]
        argv = [sys.executable, "-I", binding.__file__, *shown, "--", *argv]
    try:
        tools.run(argv, target.parent, tick, install=INSTALL)
    except ToolFailedError as error:
        if "space left" in error.message.lower():
            raise LimitExceededError("the disk is full: the file system was not made") from error
        raise InvalidRequestError(f"the image cannot be packed for a microVM: {error.message}") from error
    if is_whole(target, key):
        with target.open("r+b") as file:
            file.seek(_AT + _TIME_AT)
            file.write(bytes(_TIME_BYTES))
    else:
        raise BackendError("mkfs.erofs wrote no whole file system; is the disk full?")


def is_whole(path: Path, key: str) -> bool:
    """Whether the file at ``path`` is the file system that was made for ``key``, all of it. Reads one block."""
    try:
        with path.open("rb") as file:
            file.seek(_AT)
            head = file.read(_SUPERBLOCK.size)
            size = file.seek(0, 2)
        magic, bits, blocks, id = _SUPERBLOCK.unpack(head)
    except (OSError, struct.error):
        return False
    return bool(magic == _MAGIC and bits <= 16 and size == blocks << bits and id == _id(key).bytes)


def _id(key: str) -> uuid.UUID:
    return uuid.UUID(bytes=hashlib.sha256(b"agent-sandbox root %d %s" % (FORMAT, key.encode())).digest()[:16])
