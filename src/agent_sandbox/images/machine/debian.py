"""The kernel in a package of Debian's: fetched by apt, which verifies it, and read here without being installed.

A package is an ``ar`` archive of three members (deb(5)), of which ``data.tar.*`` holds the files. Only the kernel
image, its configuration and its modules are taken out, by the same confined writer that imports images; links, owners
and everything else in it are left out, and no script of it is run.
"""

from __future__ import annotations

import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from agent_sandbox.errors import BackendError, InvalidRequestError
from agent_sandbox.images.confined import Meta, Tree, TreeWriter
from agent_sandbox.images.room import Room
from agent_sandbox.images.sources import Progress, decompressed, members, whole_tar
from agent_sandbox.images.tools import ToolFailedError, run

PACKAGE = "linux-image-cloud-amd64"
"""A kernel for virtual machines: small, and it has every driver that is needed."""
_MAX_PACKAGE_BYTES = 1 << 30
_MAX_FILES_BYTES = 2 << 30
"""Of what is taken out: 0.1 GiB in the cloud kernel, 0.5 GiB in the ordinary one."""
_MAX_FILES = 50_000
_PIECE = 256 << 10
_INSTALL = "this needs Debian or Ubuntu with apt; elsewhere name a kernel with --kernel and --modules"
_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]{1,200}")
_MODULES = re.compile(r"(?:\./)?(?:usr/)?lib/modules/([^/]+)/(.+)")
_KERNEL_FILES = {"vmlinuz": "vmlinuz", "config": "config"}


def fetch(scratch: Path, progress: Progress) -> Path:
    """Download the newest kernel package into ``scratch``; the file's path.

    :class:`BackendError` when there is no apt, no such package, or no way to the mirror.
    """
    name = _newest(scratch)
    try:
        run(
            ["apt-get", "download", "-q", name],
            scratch,
            lambda read, written: progress("download", read, 0),
            install=_INSTALL,
        )
    except ToolFailedError as error:
        raise BackendError(
            f"the package {name} cannot be downloaded: {error.message}; run apt-get update and try again, or name a "
            "kernel with --kernel and --modules"
        ) from error
    found = [path for path in scratch.glob("*.deb") if path.is_file() and not path.is_symlink()]
    if len(found) != 1:
        raise BackendError(f"apt-get download left {len(found)} packages, and not one")
    return found[0]


def _newest(scratch: Path) -> str:
    """The package that :data:`PACKAGE`, which has no files of its own, depends on."""
    try:
        told = run(
            ["apt-cache", "show", "--no-all-versions", PACKAGE], scratch, lambda read, written: None, install=_INSTALL
        )
    except ToolFailedError as error:
        raise BackendError(
            f"there is no package {PACKAGE} here ({error.message}); run apt-get update, or name a kernel with --kernel "
            "and --modules"
        ) from error
    for line in told.decode(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == "Depends":
            for word in re.split(r"[,|]", value):
                name = word.strip().partition(" ")[0]
                if name.startswith("linux-image-") and _NAME.fullmatch(name):
                    return name
    raise BackendError(f"the package {PACKAGE} does not say which kernel is the newest; name one with --kernel")


def extract(package: Path, target: Path, progress: Progress) -> None:
    """Take ``vmlinuz``, ``config`` and ``modules/`` out of a kernel package into the empty directory ``target``.

    :class:`InvalidRequestError` when it is damaged or holds no kernel, :class:`LimitExceededError` for want of room.
    """
    room, total = Room(target, "the kernel"), package.stat().st_size
    if total > _MAX_PACKAGE_BYTES:
        raise InvalidRequestError(f"{package.name} is larger than {_MAX_PACKAGE_BYTES >> 30} GiB")
    files = taken = 0
    with Tree(target) as tree, whole_tar(package), package.open("rb") as raw:
        writer = TreeWriter(tree, room.check)
        with decompressed(_data(raw, package.name)) as stream:
            for archive, member in members(stream):
                name = _wanted(member)
                if not name:
                    continue
                files, taken = files + 1, taken + member.size
                if files > _MAX_FILES or taken > _MAX_FILES_BYTES:
                    raise InvalidRequestError(f"{package.name} holds more than a kernel has")
                content = archive.extractfile(member)
                assert content is not None
                writer.file(name.encode(), Meta(0o644), _exactly(content, member.size))
                progress("unpack", raw.tell(), total)
        writer.finish()
    if not (target / "vmlinuz").is_file():
        raise InvalidRequestError(f"{package.name} holds no kernel")


def _wanted(member: tarfile.TarInfo) -> str:
    """What a file of the package is called here; empty for what is left out."""
    if not member.isfile() or not stat.S_IMODE(member.mode) & stat.S_IRUSR:
        return ""
    name = member.name.removeprefix("./")
    if name.startswith("boot/"):
        kind, _, version = name.removeprefix("boot/").partition("-")
        return _KERNEL_FILES.get(kind, "") if version and "/" not in version else ""
    found = _MODULES.fullmatch(name)
    return f"modules/{found[2]}" if found else ""


def _exactly(content: IO[bytes], size: int) -> Iterator[bytes]:
    while piece := content.read(_PIECE):
        size -= len(piece)
        yield piece
    if size:
        raise tarfile.ReadError("it ends inside a file")


def _data(raw: IO[bytes], shown: str) -> IO[bytes]:
    """The member ``data.tar.*`` of an ``ar`` archive: a magic of 8 bytes, then members, each with a header of 60."""
    if raw.read(8) != b"!<arch>\n":
        raise InvalidRequestError(f"{shown} is no Debian package")
    while len(header := raw.read(60)) == 60 and header[58:] == b"`\n":
        name, size = header[:16].strip().rstrip(b"/"), header[48:58].strip()
        if not size.isdigit():
            break
        if name.startswith(b"data.tar"):
            return cast("IO[bytes]", _Part(raw, int(size)))
        raw.seek(int(size) + int(size) % 2, 1)
    raise InvalidRequestError(f"{shown} is damaged: it has no files in it")


class _Part:
    """A stretch of a file as a file of its own, from where the other stands; for reading."""

    def __init__(self, raw: IO[bytes], size: int) -> None:
        self._raw, self._start, self._size, self._at = raw, raw.tell(), size, 0

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the other file open."""

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._at
        piece = self._raw.read(left if size < 0 else min(size, left))
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence:
            raise OSError("only to a place from its start")
        self._raw.seek(self._start + offset)
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Leave the other file open."""
