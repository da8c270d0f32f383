"""Pack files: the one place that appends records and syncs them, and the one that reads them.

``spec/store.md`` ("Packs", "The order of writes") is the source. The rules
--------------------------------------------------------------------------
* A pack is created exclusively, and its header and its name in ``packs/`` are on the disk before it is used.
* ``kept`` is where the bytes end that an index transaction leads to, or may lead to. What is behind it can be cut off;
  nothing before it ever changes.
* A pack whose append or sync failed is cut back to ``kept`` and never used again: after a failed ``fsync`` the kernel
  has forgotten which pages were not written (https://lwn.net/Articles/752063/), so asking again would say yes wrongly.
* Reading is by ``pread`` into memory that the record's kind bounds; nothing is mapped, because a file that another
  process cuts would kill the reader (SIGBUS).

:class:`PackFiles` is the seam for injected faults: everything that is written goes through it.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from agent_sandbox.errors import StoreDamagedError, StoreError, StoreFullError
from agent_sandbox.store.ports import Location
from agent_sandbox.store.records import PACK_HEADER, pack_header

MAX_PACK = 64 << 20
"""Bytes after which a writer goes on in a new pack.

Large enough that an import is written in few long runs and 100 GB are 1,600 files; small enough that gc, which copies
a pack's living half before it unlinks it, needs no more than this beside what the store has.
"""
MAX_DESCRIPTORS = 64
"""Packs that are kept open for reading."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def pack_name(number: int) -> str:
    """Return the file name of a pack."""
    return f"{number:010d}.pack"


def failed(what: str, error: OSError) -> StoreError:
    """Return the store's error for one of the system, where ``what`` (a verb and its object) did not work."""
    if error.errno in _FULL:
        return StoreFullError(f"cannot {what}: {error.strerror}; make room and try again")
    return StoreError(f"cannot {what}: {error.strerror}")


class PackFile(Protocol):
    """A file open for writing. Every method may raise :class:`OSError`."""

    def write(self, data: bytes | memoryview, offset: int) -> int:
        """Write at ``offset`` and return how many bytes were taken, which may be fewer."""

    def sync(self) -> None:
        """Return when all that was written is on the disk."""

    def truncate(self, size: int) -> None:
        """Cut the file back to ``size`` bytes."""

    def close(self) -> None:
        """Close it."""


class PackFiles(Protocol):
    """The directory of the packs, for whoever writes. Every method may raise :class:`OSError`."""

    def create(self, name: str) -> PackFile:
        """Create a file, which must not exist, and open it."""

    def remove(self, name: str) -> None:
        """Unlink a file."""

    def sync(self) -> None:
        """Return when the names are on the disk."""


class _OsFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(self._fd, data, offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        os.close(self._fd)


class OsFiles:
    """:class:`PackFiles` on a real directory."""

    def __init__(self, directory: int) -> None:
        self._directory = directory

    def create(self, name: str) -> PackFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return _OsFile(os.open(name, flags, 0o600, dir_fd=self._directory))

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._directory)

    def sync(self) -> None:
        os.fsync(self._directory)


class Pack:
    """One pack that this process appends to. For one thread at a time."""

    def __init__(self, files: PackFiles, store: bytes, number: int) -> None:
        """Create the file of pack ``number`` with its header, and sync both; :class:`FileExistsError` when it is
        there, :class:`StoreError` for what else may go wrong."""
        self.number = number
        self.usable = True
        self._closed = False
        try:
            self._file = files.create(pack_name(number))
        except FileExistsError:
            raise
        except OSError as error:
            raise failed(f"create pack {number}", error) from error
        self.size = 0
        self.kept = PACK_HEADER.size
        self.append(pack_header(store, number))
        self.sync()
        try:
            files.sync()
        except OSError as error:
            raise self._fail("sync the directory of the packs", error) from error

    def append(self, data: bytes | memoryview) -> None:
        """Append whole records."""
        self._need_open()
        view = memoryview(data)
        try:
            while view:
                taken = self._file.write(view, self.size)
                if taken <= 0:
                    raise OSError(errno.EIO, "nothing was written")
                self.size += taken
                view = view[taken:]
        except OSError as error:
            raise self._fail(f"write to pack {self.number}", error) from error

    def sync(self) -> None:
        """Return when everything appended is on the disk."""
        self._need_open()
        try:
            self._file.sync()
        except OSError as error:
            raise self._fail(f"sync pack {self.number}", error) from error

    def cut(self) -> None:
        """Give up what no transaction leads to; nothing happens once the pack is closed."""
        if self.size > self.kept and not self._closed:
            try:
                self._file.truncate(self.kept)
            except OSError:
                self.usable = False
            else:
                self.size = self.kept

    def close(self) -> None:
        """Close the file, once; it is never appended to again."""
        self.usable = False
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._file.close()

    def _need_open(self) -> None:
        """A closed descriptor's number may be another file's by now."""
        if self._closed:
            raise StoreError(f"pack {self.number} has failed or is closed; begin again")

    def _fail(self, what: str, error: OSError) -> StoreError:
        self.cut()
        self.close()
        return failed(what, error)


class _Open:
    """A descriptor and how many threads read from it just now."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.dropped = False


class PackReader:
    """Reads records; keeps the packs that it read last open. Safe for threads."""

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._mutex = threading.Lock()
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._seen = -1

    def read(self, place: Location, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset`` of the record; :class:`StoreDamagedError` when they are not there."""
        with self._opened(place.pack) as fd:
            try:
                data = os.pread(fd, length, place.offset + offset)
            except OSError as error:
                if error.errno == errno.EIO:
                    raise StoreDamagedError(f"a damaged pack: {pack_name(place.pack)}: {error.strerror}") from error
                raise failed(f"read {pack_name(place.pack)}", error) from error
        if len(data) != length:
            raise StoreDamagedError(f"a damaged pack: {pack_name(place.pack)} ends inside a record")
        return data

    def refresh(self) -> None:
        """Let go of packs that another process may have removed, so that their room is free."""
        changed = os.fstat(self._directory).st_mtime_ns
        with self._mutex:
            if changed != self._seen:
                self._seen = changed
                self._drop(0)

    def close(self) -> None:
        """Close every descriptor."""
        with self._mutex:
            self._drop(0)

    @contextmanager
    def _opened(self, number: int) -> Iterator[int]:
        with self._mutex:
            entry = self._open.get(number)
            if entry is None:
                entry = self._open[number] = _Open(self._open_file(number))
                self._drop(MAX_DESCRIPTORS)
            self._open.move_to_end(number)
            entry.users += 1
        try:
            yield entry.fd
        finally:
            with self._mutex:
                entry.users -= 1
                if entry.dropped and not entry.users:
                    os.close(entry.fd)

    def _open_file(self, number: int) -> int:
        name = pack_name(number)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._directory)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                raise StoreDamagedError(f"a damaged store: {name} is missing") from error
            raise failed(f"open {name}", error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StoreDamagedError(f"a damaged store: {name} is no regular file")
        return fd

    def _drop(self, most: int) -> None:
        while len(self._open) > most:
            _, entry = self._open.popitem(last=False)
            entry.dropped = True
            if not entry.users:
                os.close(entry.fd)


def open_directory(path: Path) -> int:
    """Open a directory of the store; :class:`StoreDamagedError` when it is none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StoreDamagedError(f"a damaged store: {path} cannot be opened: {error.strerror}") from error
