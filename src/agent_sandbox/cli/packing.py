"""A local directory as a POSIX pax tar, made while it is sent: nothing is held but one piece of one file.

Links are kept as they are and never followed; what is no file, directory, link or FIFO is left out and reported. A file
that shrinks while it is read is filled up with zeros, one that grows is cut off: its header has been sent.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent_sandbox.cli.copying import Copied

PIECE_BYTES = 256 * 1024
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)


@dataclass(frozen=True)
class Sent:
    """What an entry was when it was packed: a file's ``digest`` (BLAKE2b-256) is of what was sent."""

    stat: os.stat_result
    target: str = ""
    digest: bytes = b""


def total_bytes(source: Path) -> int:
    """Return the bytes of the regular files below a directory, for a progress bar."""
    total = 0
    for _, _, files, folder_fd in os.fwalk(source, follow_symlinks=False):
        for name in files:
            try:
                found = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            except OSError:
                continue
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def pack_directory(source: Path, done: Copied, sent: dict[str, Sent] | None = None) -> Iterator[bytes]:
    """Yield a directory's tar, names relative to it. :class:`PayloadTooLargeError` above the bounds of a copy.

    ``sent`` gets every entry that is in it, by its name.
    """
    yield _header(".", source.stat(), tarfile.DIRTYPE)
    for folder, names, files, folder_fd in os.fwalk(source, follow_symlinks=False):
        relative = os.path.relpath(folder, source)
        prefix = "" if relative == "." else f"{relative}/"
        for name in sorted([*names, *files]):
            done.entry(prefix.count("/"))
            shown = os.path.join(folder, name)  # noqa: PTH118 - may hold bytes that are not UTF-8
            try:
                found = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                target = ""
                if stat.S_ISLNK(found.st_mode):
                    target = os.readlink(name, dir_fd=folder_fd)
                    yield _header(prefix + name, found, tarfile.SYMTYPE, target)
                elif stat.S_ISDIR(found.st_mode):
                    yield _header(prefix + name, found, tarfile.DIRTYPE)
                elif stat.S_ISFIFO(found.st_mode):
                    yield _header(prefix + name, found, tarfile.FIFOTYPE)
                elif stat.S_ISREG(found.st_mode):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    fd = os.open(name, flags, dir_fd=folder_fd)
                else:
                    done.skip(shown, "a socket or device")
                    continue
            except OSError as error:
                done.skip(shown, error.strerror or str(error))
                continue
            if stat.S_ISREG(found.st_mode):
                yield from _file(prefix + name, fd, shown, done, sent)
            elif sent is not None:
                sent[prefix + name] = Sent(found, target)
    yield _END


def pack_file(source: Path, name: str, done: Copied) -> Iterator[bytes]:
    """Yield the tar of one file under another name."""
    fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    yield from _file(name, fd, os.fspath(source), done)
    yield _END


def _file(name: str, fd: int, shown: str, done: Copied, sent: dict[str, Sent] | None = None) -> Iterator[bytes]:
    with os.fdopen(fd, "rb", buffering=0) as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            done.skip(shown, "not a regular file")
            return
        yield _header(name, found, tarfile.REGTYPE)
        left, digest = found.st_size, hashlib.blake2b(digest_size=32)
        while left and (piece := file.read(min(PIECE_BYTES, left))):
            left -= len(piece)
            done.piece(len(piece))
            if sent is not None:
                digest.update(piece)
            yield piece
        if left:
            done.skip(shown, f"its last {left} bytes went while it was read; they are zeros in the copy")
        while left:
            piece = bytes(min(PIECE_BYTES, left))
            left -= len(piece)
            digest.update(piece)
            yield piece
        if sent is not None:
            sent[name] = Sent(found, digest=digest.digest())
        if padding := -found.st_size % _BLOCK:
            yield bytes(padding)
    done.file()


def _header(name: str, found: os.stat_result, kind: bytes, target: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    info.mode = stat.S_IMODE(found.st_mode) & 0o777
    info.size = found.st_size if kind == tarfile.REGTYPE else 0
    seconds, nanoseconds = divmod(found.st_mtime_ns, 1_000_000_000)
    info.mtime = max(seconds, 0)
    info.pax_headers = {"mtime": f"{max(seconds, 0)}.{nanoseconds:09d}"}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
