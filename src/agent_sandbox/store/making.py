"""Making one inode: content, owner, attributes, mode, times; in this order.

A write or a change of owner takes set-id bits away, and attributes need the right to write, so the mode comes after
them; whatever is done to an inode before its times would change them. Part of the layout (``layout.py``).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_sandbox.errors import StoreDamagedError, StoreError
from agent_sandbox.store import walk
from agent_sandbox.store.descent import Place
from agent_sandbox.store.objects import Entry, Kind, Type, decode_attrs
from agent_sandbox.store.oserrors import failure, shown
from agent_sandbox.store.ports import Objects, Options

_SET_IDS = stat.S_ISUID | stat.S_ISGID
_EASY_SECONDS = range(1 << 31)
"""Times that every file system holds; another one is looked at after it was set, since the kernel clamps silently."""
_BILLION = 1_000_000_000
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def making(place: Place, name: bytes) -> Iterator[None]:
    """Translate errors of the system by ``oserrors``."""
    try:
        yield
    except OSError as error:
        raise failure(error, "make", place.path(name)) from error


def set_mode(spot: int, mode: int) -> None:
    """Set the mode of what a descriptor of a mere place (``O_PATH``) stands for, and of nothing else."""
    Path(f"/proc/self/fd/{spot}").chmod(mode)


class Maker:
    """Makes inodes. ``wrote`` is called with the length of each extent of a file, holes too."""

    def __init__(self, objects: Objects, options: Options, *, wrote: Callable[[int], None]) -> None:
        self._objects = objects
        self._options = options
        self._wrote = wrote

    def make(self, place: Place, entry: Entry) -> None:
        """Make what is no directory under its name, which must be free, in an open directory."""
        with making(place, entry.name):
            match entry.type:
                case Type.FILE:
                    self._file(place, entry)
                case Type.SYMLINK:
                    os.symlink(entry.target, entry.name, dir_fd=place.fd)
                    self._own(entry, entry.name, place.fd)
                    self._time(entry, entry.name, place)
                case _:
                    self._fifo(place, entry)

    def whiteout(self, place: Place, name: bytes) -> None:
        """Make what hides a name in the layers below: a character device 0/0."""
        with making(place, name):
            os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=place.fd)

    def dress(self, place: Place, name: bytes, file: int, entry: Entry) -> None:
        """Give an open file or directory its owner, attributes, mode and times; ``place`` and ``name`` say where."""
        with making(place, name):
            owner = self._owner(entry)
            if owner is not None:
                os.fchown(file, *owner)
            self._attributes(place, name, file, entry)
            os.fchmod(file, entry.mode)
            if entry.mode & _SET_IDS and stat.S_IMODE(os.fstat(file).st_mode) != entry.mode:
                raise StoreError(
                    f"cannot make {shown(place.path(name))}: this user may not give it mode {entry.mode:o}"
                )
            self._time(entry, file, place, name)

    def _file(self, place: Place, entry: Entry) -> None:
        file = os.open(entry.name, _CREATE, 0o600, dir_fd=place.fd)
        try:
            self._content(file, entry)
            if entry.attrs is not None:
                os.fchmod(file, 0o600)  # whatever the umask took
            self.dress(place, entry.name, file, entry)
        finally:
            os.close(file)

    def _content(self, file: int, entry: Entry) -> None:
        at = 0
        for extent in walk.extents(self._objects, entry):
            if extent.id is not None:
                data = memoryview(self._objects.read(extent.id, Kind.BLOB))
                if len(data) != extent.length:
                    raise StoreDamagedError("a damaged list of chunks: a chunk of another length")
                while data:
                    data = data[os.pwrite(file, data, at + extent.length - len(data)) :]
            at += extent.length
            self._wrote(extent.length)
        os.ftruncate(file, entry.size)

    def _fifo(self, place: Place, entry: Entry) -> None:
        os.mkfifo(entry.name, 0o600, dir_fd=place.fd)
        self._own(entry, entry.name, place.fd)
        spot = os.open(entry.name, _PLACE, dir_fd=place.fd)
        try:
            if not stat.S_ISFIFO(os.fstat(spot).st_mode):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            set_mode(spot, entry.mode)
        finally:
            os.close(spot)
        self._time(entry, entry.name, place)

    def _own(self, entry: Entry, name: bytes, directory: int) -> None:
        owner = self._owner(entry)
        if owner is not None:
            os.chown(name, *owner, dir_fd=directory, follow_symlinks=False)

    def _owner(self, entry: Entry) -> tuple[int, int] | None:
        return entry.owner if self._options.owners and entry.owner is not None else self._options.owner

    def _attributes(self, place: Place, name: bytes, file: int, entry: Entry) -> None:
        if entry.attrs is None:
            return
        for attribute, value in decode_attrs(self._objects.read(entry.attrs, Kind.ATTRS)):
            try:
                os.setxattr(file, attribute, value)
            except OSError as error:
                where, what = shown(place.path(name)), shown(attribute)
                raise StoreError(f"this file system does not take {what} of {where}: {error.strerror}") from error

    def _time(self, entry: Entry, what: int | bytes, place: Place, name: bytes = b"") -> None:
        times = (entry.mtime_ns, entry.mtime_ns)
        if isinstance(what, int):
            os.utime(what, ns=times)
        else:
            os.utime(what, ns=times, dir_fd=place.fd, follow_symlinks=False)
        seconds = entry.mtime_ns // _BILLION
        if seconds in _EASY_SECONDS:
            return
        about = os.fstat(what) if isinstance(what, int) else os.stat(what, dir_fd=place.fd, follow_symlinks=False)
        if about.st_mtime_ns // _BILLION != seconds:
            path = shown(place.path(name or entry.name))
            raise StoreError(f"this file system does not hold the time of {path}: {seconds} s since 1970")
