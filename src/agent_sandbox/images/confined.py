"""File work that cannot leave one directory, whatever links that directory holds.

A root file system is somebody else's data: its ``/etc`` may be a link to the host's, or to ``../..``. Here a path is
resolved by the kernel with the directory as its root (openat2(2), RESOLVE_IN_ROOT), so every link in it, absolute or
not, ends inside; the last component is then worked on through its parent's descriptor and never followed. Nothing
depends on the order in which a hostile archive brings links and files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agent_sandbox.errors import InvalidRequestError, LimitExceededError

MAX_ENTRIES = 2_000_000
"""Ten times a full desktop installation: a bound on what a hostile archive may make of inodes."""
MAX_BYTES = 64 << 30
"""Of file contents: above the largest machine-learning images in use."""
_PATH_BYTES, MAX_DEPTH = 4095, 256
"""The kernel's limit, and a depth far above real trees that keeps walks from recursing without end."""
_ENTRIES_BETWEEN_CHECKS = 256
_IMPLIED_MODE = 0o755
"""Of a directory that only the paths below it name; whatever the umask, since it counts in the digest."""
_TRIES = 1000
"""openat2(2) gives up on ``..`` whenever anything on the machine is renamed or mounted meanwhile, and asks to retry."""
_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_O_DIRECTORY_PATH = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_CONTRADICTIONS = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.EEXIST}
"""What the kernel says when a path of the source leads through a link to nowhere, through a file, and so on."""

_libc = ctypes.CDLL(None, use_errno=True)


def check_size(entries: int, file_bytes: int) -> None:
    """Raise :class:`LimitExceededError` above the limits of this module."""
    if entries > MAX_ENTRIES:
        raise LimitExceededError(f"the image holds more than {MAX_ENTRIES} entries")
    if file_bytes > MAX_BYTES:
        raise LimitExceededError(f"the image holds more than {MAX_BYTES >> 30} GiB")


@dataclass(frozen=True, slots=True)
class Meta:
    """What a file system keeps about an entry. ``mode`` is permission bits with set-id and sticky bits."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0


class Tree:
    """A directory that paths cannot leave. Close it, or use it in a ``with`` statement."""

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, _O_DIRECTORY_PATH)
        self._parent: tuple[bytes, int] | None = None

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the directory."""
        self._forget()
        os.close(self._root)

    def open(self, path: bytes, flags: int) -> int:
        """Open an existing path, links followed inside the tree; the descriptor is the caller's."""
        how = struct.pack("=3Q", flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        for _ in range(_TRIES):
            descriptor = int(_libc.syscall(_SYS_OPENAT2, self._root, path or b".", how, len(how)))
            if descriptor >= 0:
                return descriptor
            number = ctypes.get_errno()
            if number != errno.EAGAIN:
                break
            os.sched_yield()
        raise OSError(number, os.strerror(number), os.fsdecode(path))

    def parent(self, path: bytes) -> tuple[int, bytes]:
        """The descriptor of a path's directory, made with its own parents where missing, and the last component.

        The descriptor is the tree's: it is good until the next call.
        """
        directory, _, name = path.rpartition(b"/")
        if self._parent is None or self._parent[0] != directory:
            self._forget()
            self._parent = (directory, self._directory(directory))
        return self._parent[1], name

    def _directory(self, path: bytes) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self.open(path, _O_DIRECTORY_PATH)
        above, _, name = path.rpartition(b"/")
        parent = self._directory(above)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
                os.chmod(name, _IMPLIED_MODE, dir_fd=parent)
        finally:
            os.close(parent)
        return self.open(path, _O_DIRECTORY_PATH)

    def mode(self, path: bytes) -> int | None:
        """The type and mode of what is at ``path``, its last component not followed; None when nothing is."""
        parent, name = self.parent(path)
        return _mode(name, parent)

    def make_way(self, path: bytes, *, for_directory: bool) -> bool:
        """Remove what is at ``path``; True when it is a directory that may stay since one is wanted."""
        mode = self.mode(path)
        if mode is None:
            return False
        parent, name = self.parent(path)
        if stat.S_ISDIR(mode):
            if for_directory:
                return True
            os.rmdir(name, dir_fd=parent)
            self._forget()
        else:
            os.unlink(name, dir_fd=parent)
        return False

    def _forget(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None


class TreeWriter:
    """Fills a :class:`Tree` entry by entry; a later entry of the same name replaces the earlier.

    Owners are set when this process is root. ``room`` is called now and then and may raise.
    :class:`InvalidRequestError` for paths that cannot be right, :class:`LimitExceededError` above the limits of this
    module, :class:`OSError` of the host.
    """

    def __init__(self, tree: Tree, room: Callable[[], None] = lambda: None) -> None:
        self._tree = tree
        self._room = room
        self._entries = 0
        self._bytes = 0
        self._directories: list[tuple[bytes, Meta]] = []
        self._owns = os.geteuid() == 0

    def directory(self, path: bytes, meta: Meta) -> None:
        """Make a directory; its mode and owner are set at the end, so that it can be filled whatever they are."""
        path = self._admit(path)
        with _explained(path):
            if path and not self._tree.make_way(path, for_directory=True):
                parent, name = self._tree.parent(path)
                os.mkdir(name, 0o755, dir_fd=parent)
        self._directories.append((path, meta))

    def file(self, path: bytes, meta: Meta, content: Iterable[bytes]) -> None:
        """Write a regular file, leaving holes for pieces of zeros."""
        with self._new(path) as (parent, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=parent)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                size = 0
                for piece in content:
                    size += len(piece)
                    self._bytes += len(piece)
                    check_size(self._entries, self._bytes)
                    self._room()
                    if piece.count(0) == len(piece):
                        file.seek(size)
                    else:
                        _write_all(descriptor, piece)
                file.truncate(size)
                self._own(descriptor, meta)
                os.fchmod(descriptor, meta.mode)
                os.utime(descriptor, ns=(meta.mtime_ns, meta.mtime_ns))

    def symlink(self, path: bytes, target: bytes, meta: Meta) -> None:
        """Make a symbolic link; its target is kept as it is."""
        with self._new(path) as (parent, name):
            os.symlink(target, name, dir_fd=parent)
            if self._owns:
                os.chown(name, meta.uid, meta.gid, dir_fd=parent, follow_symlinks=False)

    def hardlink(self, path: bytes, target: bytes) -> None:
        """Give a regular file of the tree another name. :class:`InvalidRequestError` when there is no such file."""
        target = _normalize(target)
        directory, _, target_name = target.rpartition(b"/")
        try:
            source = self._tree.open(directory, _O_DIRECTORY_PATH)
        except OSError as error:
            raise InvalidRequestError(f"a hard link in the image leads nowhere: {_shown(target)}") from error
        try:
            mode = _mode(target_name, source)
            if mode is None or not stat.S_ISREG(mode):
                raise InvalidRequestError(f"a hard link in the image leads to no file: {_shown(target)}")
            if _normalize(path) == target:
                return
            with self._new(path) as (parent, name):
                os.link(target_name, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(source)

    def fifo(self, path: bytes, meta: Meta) -> None:
        """Make a FIFO."""
        with self._new(path) as (parent, name):
            os.mkfifo(name, 0o600, dir_fd=parent)
            if self._owns:
                os.chown(name, meta.uid, meta.gid, dir_fd=parent, follow_symlinks=False)
            os.chmod(name, meta.mode, dir_fd=parent)

    def finish(self) -> None:
        """Set modes and owners of the directories, the deepest first."""
        for path, meta in reversed(self._directories):
            with _explained(path):
                descriptor = self._tree.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._own(descriptor, meta)
                os.fchmod(descriptor, meta.mode)
                os.utime(descriptor, ns=(meta.mtime_ns, meta.mtime_ns))
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def _new(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        path = self._admit(path)
        if not path:
            raise InvalidRequestError("the image's root is not a directory")
        with _explained(path):
            self._tree.make_way(path, for_directory=False)
            yield self._tree.parent(path)

    def _admit(self, path: bytes) -> bytes:
        self._entries += 1
        check_size(self._entries, self._bytes)
        if self._entries % _ENTRIES_BETWEEN_CHECKS == 0:
            self._room()
        return _normalize(path)

    def _own(self, descriptor: int, meta: Meta) -> None:
        if self._owns:
            os.fchown(descriptor, meta.uid, meta.gid)


@contextlib.contextmanager
def _explained(path: bytes) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _CONTRADICTIONS:
            raise InvalidRequestError(f"the image contradicts itself at {_shown(path)}: {error.strerror}") from error
        raise


def _normalize(path: bytes) -> bytes:
    """A path relative to the root without empty and ``.`` parts. :class:`InvalidRequestError` for ``..`` and NUL."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in path or len(path) > _PATH_BYTES or len(parts) > MAX_DEPTH:
        raise InvalidRequestError(f"the image holds a path that leads out of it, or too deep: {_shown(path)}")
    return b"/".join(parts)


def _shown(path: bytes) -> str:
    return repr(os.fsdecode(path[:200]))


def _mode(name: bytes, directory: int) -> int | None:
    try:
        return os.lstat(name, dir_fd=directory).st_mode
    except FileNotFoundError:
        return None


def _write_all(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]
