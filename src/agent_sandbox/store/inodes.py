"""Reading one file, symlink or FIFO into an entry, by descriptors and never twice the same way into another inode.

Part of the capture (``capture.py`` has the rules). A name is first opened as a mere place (``O_PATH``), which opens
neither FIFO nor device and follows no symlink; only a regular file is then opened for reading, through its place.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from agent_sandbox.errors import ConflictError
from agent_sandbox.store import xattrs
from agent_sandbox.store.content import ChangedError, ContentReader, keep
from agent_sandbox.store.descent import Place
from agent_sandbox.store.objects import MAX_TARGET, Entry, Kind, Type, encode_attrs
from agent_sandbox.store.oserrors import failure, shown
from agent_sandbox.store.past import PastDirectory, PastFile
from agent_sandbox.store.ports import Writer
from agent_sandbox.store.statcache import Remembered

ATTEMPTS = 3
"""How often what changes while it is read is read."""
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
_CHANGED = (
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ESTALE, errno.ENODATA, errno.EAGAIN),
    errno.ENXIO,
)
"""What the system says when something is no longer what it was (ENXIO: a socket now, or cut off where holes are looked
for), or is being changed (EAGAIN: a lease)."""


class UnreadableError(Exception):
    """The rights of this process do not suffice."""


@dataclass(frozen=True, slots=True)
class Found:
    """One inode that was read."""

    entry: Entry
    about: os.stat_result
    """What it was before and after."""
    data: int
    """Bytes of data, holes not counted."""
    whole: bool
    """Whether its attributes are kept too; they are not when they are too large."""


def signature(about: os.stat_result) -> tuple[int, ...]:
    """Return what stays the same unless somebody changes the inode; the first three are which and what it is."""
    kind = stat.S_IFMT(about.st_mode)
    return (about.st_dev, about.st_ino, kind, about.st_mode, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@contextmanager
def reading(place: Place, name: bytes) -> Iterator[None]:
    """Translate errors of the system: :class:`ChangedError`, :class:`UnreadableError`, or what ``oserrors`` says."""
    try:
        yield
    except OSError as error:
        if error.errno in _CHANGED:
            raise ChangedError from None
        if isinstance(error, PermissionError):
            raise UnreadableError from None
        raise failure(error, "read", place.path(name)) from error


def look(place: Place, name: bytes) -> os.stat_result:
    """Return what ``name`` is."""
    with reading(place, name):
        return os.stat(name, dir_fd=place.fd, follow_symlinks=False)


class InodeReader:
    """Reads inodes and keeps their content and attributes."""

    def __init__(self, writer: Writer, *, owners: bool) -> None:
        self._writer = writer
        self._owners = owners
        self.read_bytes = 0
        """Bytes of files that were read, every attempt counted."""

    def owner(self, about: os.stat_result) -> tuple[int, int] | None:
        """Return what an entry records of its owner."""
        return (about.st_uid, about.st_gid) if self._owners else None

    def attributes(self, file: int) -> tuple[bytes | None, bool]:
        """Keep the attributes of an open file or directory: id, or None; and whether that is all of them."""
        try:
            found = xattrs.read(file)
        except xattrs.TooLargeError:
            return None, False
        return (keep(self._writer, Kind.ATTRS, encode_attrs(found)) if found else None), True

    def read(
        self, place: Place, name: bytes, about: os.stat_result, past: PastDirectory, known: Remembered | None
    ) -> Found:
        """Read the inode that ``about`` describes, as if ``name`` were its only name; ``known`` is what it holds.

        Raises :class:`ChangedError` when the name is something else by now, :class:`UnreadableError`, and
        :class:`ConflictError` for a file that changes each time that it is read.
        """
        whole = True
        match stat.S_IFMT(about.st_mode):
            case stat.S_IFREG:
                if known is None:
                    known, about, whole = self._file(place, name, about, past)
                entry = self._entry(name, Type.FILE, about, known)
                return Found(entry, about, known.data, whole)
            case stat.S_IFLNK:
                return Found(
                    self._entry(name, Type.SYMLINK, about, target=self._target(place, name, about)), about, 0, whole
                )
            case _:
                return Found(self._entry(name, Type.FIFO, about), about, 0, whole)

    def _entry(
        self, name: bytes, kind: Type, about: os.stat_result, known: Remembered | None = None, target: bytes = b""
    ) -> Entry:
        entry = Entry(name, kind, stat.S_IMODE(about.st_mode), about.st_mtime_ns, self.owner(about), target=target)
        if known is None:
            return entry
        return replace(entry, attrs=known.attrs, size=about.st_size, content=known.content, paged=known.paged)

    @contextmanager
    def _spot(self, place: Place, name: bytes, about: os.stat_result) -> Iterator[int]:
        """Open a name as a mere place that is still what ``about`` says."""
        with reading(place, name):
            spot = os.open(name, _PLACE, dir_fd=place.fd)
            try:
                if signature(os.fstat(spot))[:3] != signature(about)[:3]:
                    raise ChangedError
                yield spot
            finally:
                os.close(spot)

    def _target(self, place: Place, name: bytes, about: os.stat_result) -> bytes:
        with self._spot(place, name, about) as spot:
            target = os.readlink(b"", dir_fd=spot)
        if not 1 <= len(target) <= MAX_TARGET:
            raise UnreadableError
        return target

    def _file(
        self, place: Place, name: bytes, about: os.stat_result, past: PastDirectory
    ) -> tuple[Remembered, os.stat_result, bool]:
        for _ in range(ATTEMPTS):
            try:
                with self._spot(place, name, about) as spot:
                    file = os.open(f"/proc/self/fd/{spot}", _READ)
                    try:
                        return self._content(file, partial(past.file, name))
                    finally:
                        os.close(file)
            except ChangedError:
                about = look(place, name)
                if not stat.S_ISREG(about.st_mode):
                    raise
        raise ConflictError(f"{shown(place.path(name))} kept changing while it was read")

    def _content(self, file: int, past: Callable[[], PastFile | None]) -> tuple[Remembered, os.stat_result, bool]:
        before = os.fstat(file)
        reader = ContentReader(file, before.st_size, self._writer, past)
        try:
            content = reader.read()
            attrs, whole = self.attributes(file)
        finally:
            self.read_bytes += reader.read_bytes
        if signature(os.fstat(file)) != signature(before):
            raise ChangedError
        return Remembered(content.id, content.paged, content.data, attrs), before, whole
