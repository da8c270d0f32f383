"""A tar from a sandbox, written beneath one local directory and nowhere else.

The archive is hostile: its maker may have taken the daemon over. The rules:

* A name is taken apart into components; one that is absolute, has ``..`` in it, or is too deep is left out. Every
  component is then opened relative to the descriptor of the one above, without following links, whether a link came
  with the archive or lay there before. So nothing depends on the order of entries, or on what changes meanwhile.
* A symbolic link is kept only if it ends inside the copy: relative, with every ``..`` in front and no more of them than
  it has directories above it. (A ``..`` behind a name could climb from wherever that name's link leads.)
* A hard link joins regular files of the copy. FIFOs and devices are left out. Of a mode only the permission bits are
  kept, no set-id bits; owners are the caller's.
* A file is made anew in place of what had its name; it is never opened for writing where something was.
* Headers are bounded, since the parser holds them in memory; content is not held.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

from agent_sandbox.cli.copying import MAX_DEPTH, Copied
from agent_sandbox.errors import InvalidRequestError

HEADER_BYTES = 4 << 20
"""Of the headers of one entry, sparse map included: far above real ones."""
TAIL_BYTES = 1 << 20
"""Of padding behind the archive's end: tar pads to 10 KiB."""
PIECE_BYTES = 256 * 1024

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(pieces: Iterator[bytes], root: int, done: Copied, *, new_root: bool = True) -> None:
    """Write a tar's entries beneath the directory that ``root`` is a descriptor of, whose own mode stays unless new.

    :class:`InvalidRequestError` for a damaged archive, or where a link or file is in the way of a directory;
    :class:`PayloadTooLargeError` above the bounds of a copy. What was written before stays.
    """
    writer = _Writer(root, done)
    for entry in received(pieces):
        with _damage_told():  # a name or target that no file system takes
            writer.write(entry)
    writer.finish(new_root)


@dataclass(frozen=True)
class Received:
    """One entry of an archive: its name's components (None: one that leads elsewhere), and its bytes, if any."""

    member: tarfile.TarInfo
    parts: tuple[str, ...] | None
    content: Iterator[bytes]


def received(pieces: Iterator[bytes]) -> Iterator[Received]:
    """Yield the entries of a tar from a sandbox. The content of each is to be read before the next one is asked for.

    :class:`InvalidRequestError` for a damaged archive.
    """
    from agent_sandbox.images.sources import members

    stream = _Stream(pieces)
    with _damage_told():
        entries = members(cast("IO[bytes]", stream))
    while True:
        with _damage_told():
            stream.allow(HEADER_BYTES)
            found = next(entries, None)
            if found is None:
                break
            stream.allow(None)
            archive, member = found
            parts = _parts(member.name)
            has_content = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
            content = _content(archive, member) if has_content else iter(())
        yield Received(member, parts, content)
    with _damage_told():
        stream.allow(TAIL_BYTES)
        while stream.read(PIECE_BYTES):
            pass


@contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, ValueError, OverflowError, LookupError, TypeError) as error:
        raise InvalidRequestError(f"the archive that the sandbox sent is damaged: {error}") from error


class _Stream:
    """What tarfile reads from: the pieces, with a bound on how much may be read until the next :meth:`allow`."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        self._left: int | None = None

    def allow(self, count: int | None) -> None:
        self._left = count

    def read(self, size: int) -> bytes:
        taken = bytearray()
        while len(taken) < size:
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._rest = memoryview(piece)
            part = self._rest[: size - len(taken)]
            self._rest = self._rest[len(part) :]
            taken += part
        if self._left is not None:
            self._left -= len(taken)
            if self._left < 0:
                raise tarfile.ReadError("it holds an oversized header")
        return bytes(taken)


class _Writer:
    def __init__(self, root: int, done: Copied) -> None:
        self._root = root
        self._done = done
        self._directories: dict[tuple[str, ...], tuple[int, float]] = {}

    def write(self, entry: Received) -> None:
        member, parts, content = entry.member, entry.parts, entry.content
        self._done.entry(0 if parts is None else len(parts))
        if parts is None:
            self._skip(member, "a name that leads elsewhere", content)
        elif member.isdir():
            self._done.noticed.see(parts, stat.S_IFDIR)
            self._directory(parts, member)
        elif not parts:
            self._skip(member, "not a directory, but the root", content)
        elif member.isreg():
            self._done.noticed.see(parts, stat.S_IFREG)
            self._file(parts, member, content)
        elif member.issym():
            self._done.noticed.see(parts, stat.S_IFLNK)
            self._symlink(parts, member)
        elif member.islnk():
            self._done.noticed.see(parts, stat.S_IFREG)
            self._hardlink(parts, member)
        else:
            self._skip(member, "not a regular file", content)

    def finish(self, new_root: bool) -> None:
        """Give the directories their modes and times, the deepest first: until now all could be filled."""
        for parts, (mode, mtime) in sorted(self._directories.items(), key=lambda item: -len(item[0])):
            if not parts and not new_root:
                continue
            with self._open(parts) as fd:
                os.fchmod(fd, mode)
                _set_time(fd, mtime)

    def _skip(self, member: tarfile.TarInfo, reason: str, content: Iterator[bytes]) -> None:
        self._done.skip(member.name[:500], reason)
        for piece in content:
            self._done.piece(len(piece))

    def _directory(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        with self._open(parts):
            self._directories[parts] = (member.mode & 0o777, member.mtime)

    def _file(self, parts: tuple[str, ...], member: tarfile.TarInfo, content: Iterator[bytes]) -> None:
        with self._place(parts) as (parent, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb", buffering=0) as file:
                size = 0
                for piece in content:
                    self._done.piece(len(piece))
                    size += len(piece)
                    if piece.count(0) == len(piece):
                        file.seek(size)
                    else:
                        _write_all(file.fileno(), piece)
                file.truncate(size)
                os.fchmod(file.fileno(), member.mode & 0o777)
                _set_time(file.fileno(), member.mtime)
        self._done.file()

    def _symlink(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        if not stays_inside(member.linkname, len(parts) - 1):
            self._done.skip(member.name[:500], f"a link that leads out of the copy, to {member.linkname[:200]}")
            return
        with self._place(parts) as (parent, name):
            os.symlink(member.linkname, name, dir_fd=parent)

    def _hardlink(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        source = _parts(member.linkname)
        if not source:
            self._done.skip(member.name[:500], "a hard link that leads elsewhere")
            return
        if source == parts:
            return
        with self._open(source[:-1]) as source_fd:
            try:
                found = os.stat(source[-1], dir_fd=source_fd, follow_symlinks=False)
            except FileNotFoundError:
                found = None
            if found is None or not stat.S_ISREG(found.st_mode):
                self._done.skip(member.name[:500], "a hard link to no file of the copy")
                return
            with self._place(parts) as (parent, name):
                os.link(source[-1], name, src_dir_fd=source_fd, dst_dir_fd=parent, follow_symlinks=False)
        self._done.file()

    @contextmanager
    def _place(self, parts: tuple[str, ...]) -> Iterator[tuple[int, str]]:
        """The directory and name for a new entry; what had the name before is removed, unless it is a directory."""
        with self._open(parts[:-1]) as parent:
            try:
                os.unlink(parts[-1], dir_fd=parent)
            except FileNotFoundError:
                pass
            except (IsADirectoryError, PermissionError) as error:
                raise InvalidRequestError(f"cannot write {'/'.join(parts)}: a directory is in its place") from error
            yield parent, parts[-1]

    @contextmanager
    def _open(self, parts: tuple[str, ...]) -> Iterator[int]:
        """A descriptor of a directory, made with its parents where missing; no link is followed on the way."""
        fd = os.dup(self._root)
        try:
            for part in parts:
                try:
                    os.mkdir(part, 0o755, dir_fd=fd)
                except FileExistsError:
                    pass
                try:
                    below = os.open(part, _DIRECTORY, dir_fd=fd)
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.ENOTDIR):
                        shown = "/".join(parts)
                        raise InvalidRequestError(
                            f"cannot use {shown} as a directory: a link or file is in the way (links are not followed)"
                        ) from error
                    raise
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)


def stays_inside(target: str, depth: int) -> bool:
    """Whether a link with ``depth`` directories of the copy above it ends inside the copy, whatever links are there."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    return bool(target) and not target.startswith("/") and climbs <= depth and ".." not in parts[climbs:]


def _parts(name: str) -> tuple[str, ...] | None:
    """The components of an entry's name; ``None`` for a name that is not to be used."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name or len(parts) > MAX_DEPTH:
        return None
    return parts


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    with _damage_told():
        content: Any = archive.extractfile(member)
    left = member.size
    while left:
        with _damage_told():
            piece = content.read(min(PIECE_BYTES, left))
            if not piece:
                raise tarfile.ReadError("it ends inside a file")
        left -= len(piece)
        yield piece


def _write_all(fd: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(fd, view) :]


def _set_time(fd: int, mtime: float) -> None:
    try:
        os.utime(fd, (mtime, mtime))
    except (OverflowError, ValueError, OSError):
        pass  # a time that no filesystem can keep
