"""A machine's memory as a file: how a monitor gets it, how it is saved from outside, how forks share it.

Strategy
--------
* Memory is always a memfd that the server makes and hands in. A fresh machine maps an empty one, shared. One that goes
  on from what was saved maps a filled one, privately: pages that it writes become its own, the others are everybody's.
* The filled one is sealed against writing. QEMU before 8.2 opens its memory for reading and writing even where it maps
  it privately; a monitor that its guest has taken over must not reach into its siblings' memory by that.
* It is filled once from the saved file and kept for the next fork, so forks copy nothing: the latest, and of those
  before it a few (:data:`KEPT`) that are small together. It counts as the server's memory, and clients choose its size.
  Those whose file was deleted go as soon as another is opened.
* Known ugliness: a page that was not saved, when it is touched first, becomes one of the memfd and one of the machine's
  own, since a memfd has no page for what is not there. All machines of one memfd share the first.
* A paused machine's memory is read through ``/proc``: where its memfd holds data, and where pages have become its own
  (pagemap, kernel document "admin-guide/mm/pagemap"). Holes and zeros are left out, so what is saved is sparse.
* Nothing that the monitor can do makes this read anything but its own memory, or more than the size of the machine.

Everything blocks.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.errors import BackendError, ConflictError

KEPT = 4
"""Filled memories that wait for the next fork: templates and the latest checkpoints."""
MIB = 1024 * 1024
KEPT_BYTES = 1024 * MIB
"""What they may hold together, but for the latest. A template's holds some 100 MiB."""
_NAME = "guest-memory"
_MAPPING = f"/memfd:{_NAME} (deleted)"
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
_MAPS_BYTES = 4 * MIB
"""QEMU has some hundreds of mappings, of 100 bytes each."""
_PIECE = 64 * 1024
_ZEROS = bytes(_PIECE)
_SEND_BYTES = 16 * MIB
_PROBED = 8 * MIB
"""Larger than a huge page, 2 MiB."""

Range = tuple[int, int]
"""From the first byte to the one after the last."""


def blank(memory_mb: int) -> int:
    """Make an empty memory of a fixed size; give its descriptor."""
    memory = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, memory_mb * MIB)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def filled(saved: Path, memory_mb: int) -> int:
    """Make a memory with the content of the file ``saved`` that nobody can change; give its descriptor.

    :class:`ConflictError` when the file is not there or has another size.
    """
    try:
        source = os.open(saved, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise ConflictError("the machine's saved memory is not there") from None
    try:
        size = os.fstat(source).st_size
        if size != memory_mb * MIB:
            raise ConflictError(f"the saved memory has {size} bytes, and a machine with {memory_mb} MiB is asked for")
        memory = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, size)
            for start, end in _extents(source, size):
                os.lseek(memory, start, os.SEEK_SET)
                while start < end:
                    sent = os.sendfile(memory, source, start, min(end - start, _SEND_BYTES))
                    if not sent:
                        raise ConflictError("the machine's saved memory was cut off while it was read")
                    start += sent
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(memory)
            raise
        return memory
    finally:
        os.close(source)


def save(process: Process, given: int, memory_mb: int, dest: Path) -> None:
    """Write the memory of a paused machine of this size to the new file ``dest``, which only its owner can read.

    ``given`` is the number of the memory's descriptor in the monitor's process. :class:`BackendError` when the process
    has ended, or does not have its memory as it was started.
    """
    size = memory_mb * MIB
    try:
        proc = os.open(f"/proc/{process.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _ended() from None
    try:
        if not process.alive():
            raise _ended()
        wanted = list(_data(proc, given, size))
        target = os.open(dest, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(target, size)
            _copy(proc, wanted, target)
        finally:
            os.close(target)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.ENOENT):
            raise _ended() from error
        raise
    finally:
        os.close(proc)


def copy_data(source: int, target: int, size: int, *, zeros: bool = True) -> None:
    """Copy what a file holds to the same places of another, its holes left out; and pieces of zeros, if they may be.

    :class:`BackendError` when the file is cut off meanwhile.
    """
    for start, end in _extents(source, size):
        while start < end:
            piece = os.pread(source, min(_PIECE, end - start), start)
            if not piece:
                raise BackendError("the machine's saved memory was cut off while it was read")
            if zeros or piece != _ZEROS[: len(piece)]:
                os.pwrite(target, piece, start)
            start += len(piece)


def tells_holes(empty: int) -> bool:
    """Whether the file system of an empty file tells what was written to a page, and nothing more. It is empty again.

    Some give holes as data (tmpfs with huge pages, network file systems); what is not known to be written is then no
    change that could be told from what was there before.
    """
    os.ftruncate(empty, _PROBED)
    try:
        os.pwrite(empty, bytes(_PAGE), _PROBED // 2)
        return list(_extents(empty, _PROBED)) == [(_PROBED // 2, _PROBED // 2 + _PAGE)]
    finally:
        os.ftruncate(empty, 0)


_Name = tuple[int, int, int, int]
_BLOCK = 512
"""Of st_blocks, see inode(7)."""


def _name(saved: Path) -> _Name | None:
    """What a file is known by while nobody replaces it; None where there is none."""
    try:
        state = saved.lstat()
    except FileNotFoundError:
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


class Fills:
    """The filled memories that are kept for the next machine which goes on from one. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Path, _Name], int] = OrderedDict()

    def open(self, saved: Path, memory_mb: int) -> int:
        """A descriptor of the memory with the content of ``saved``, the caller's to close. Errors as :func:`filled`."""
        with self._lock:
            for path, known in list(self._kept):
                if _name(path) != known:
                    os.close(self._kept.pop((path, known)))
            name = _name(saved)
            if name is None:
                raise ConflictError("the machine's saved memory is not there")
            key = (saved, name)
            if key not in self._kept:
                self._kept[key] = filled(saved, memory_mb)
            self._kept.move_to_end(key)
            memory = fcntl.fcntl(self._kept[key], fcntl.F_DUPFD_CLOEXEC, 0)
            while len(self._kept) > KEPT or (len(self._kept) > 1 and self._bytes() > KEPT_BYTES):
                os.close(self._kept.popitem(last=False)[1])
        size = os.fstat(memory).st_size
        if size != memory_mb * MIB:
            os.close(memory)
            raise ConflictError(f"the saved memory has {size} bytes, and {memory_mb} MiB are asked for")
        return memory

    def _bytes(self) -> int:
        return sum(os.fstat(memory).st_blocks * _BLOCK for memory in self._kept.values())

    def close(self) -> None:
        """Let them go; machines that have one keep it."""
        with self._lock:
            while self._kept:
                os.close(self._kept.popitem()[1])


def _data(proc: int, given: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Where a process has the machine's memory: address, offset in the machine, and bytes, in ascending order."""
    base = _open(proc, f"fd/{given}")
    try:
        state = os.fstat(base)
        if state.st_size != size:
            raise BackendError("the machine's monitor does not have its memory as it was started")
        shared = list(_extents(base, size))
    finally:
        os.close(base)
    expected = 0
    for address, end, offset in _mappings(proc, state.st_ino):
        length = end - address
        if offset != expected or offset + length > size:
            raise BackendError("the machine's monitor does not have its memory as it was started")
        expected += length
        own = ((offset + start, offset + stop) for start, stop in _own_pages(proc, address, length))
        inside = ((max(start, offset), min(stop, offset + length)) for start, stop in shared)
        for start, stop in merged([*own, *(one for one in inside if one[0] < one[1])]):
            yield address + start - offset, start, stop - start
    if expected != size:
        raise BackendError("the machine's monitor does not have its memory as it was started")


def _mappings(proc: int, inode: int) -> list[tuple[int, int, int]]:
    """The mappings of a memory by address: first byte, the one after the last, offset. See proc_pid_maps(5)."""
    maps = _open(proc, "maps")
    with os.fdopen(maps, "rb") as file:
        lines = file.read(_MAPS_BYTES).decode(errors="replace").splitlines()
    found = []
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] == str(inode) and fields[5] == _MAPPING:
            start, _, end = fields[0].partition("-")
            found.append((int(start, 16), int(end, 16), int(fields[2], 16)))
    return sorted(found, key=lambda one: one[2])


def _own_pages(proc: int, address: int, length: int) -> Iterator[Range]:
    """Offsets in a mapping at which the process has pages of its own, no longer those of the file."""
    pagemap = _open(proc, "pagemap")
    try:
        words = array.array("Q", os.pread(pagemap, length // _PAGE * 8, address // _PAGE * 8))
    finally:
        os.close(pagemap)
    first: int | None = None
    for number, word in enumerate(words):
        own = bool(word & (_PRESENT | _SWAPPED)) and not word & _OF_FILE
        if own and first is None:
            first = number
        elif not own and first is not None:
            yield first * _PAGE, number * _PAGE
            first = None
    if first is not None:
        yield first * _PAGE, len(words) * _PAGE


def _copy(proc: int, wanted: list[tuple[int, int, int]], target: int) -> None:
    memory = _open(proc, "mem")
    try:
        for address, offset, length in wanted:
            done = 0
            while done < length:
                piece = os.pread(memory, min(_PIECE, length - done), address + done)
                if not piece:
                    raise _ended()
                if piece != _ZEROS[: len(piece)]:
                    os.pwrite(target, piece, offset + done)
                done += len(piece)
    finally:
        os.close(memory)


def merged(ranges: list[Range]) -> list[Range]:
    """The same bytes as ``ranges`` name, in ascending ranges that neither touch nor overlap."""
    result: list[Range] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def _extents(file: int, size: int) -> Iterator[Range]:
    """Where a file holds data; the rest are holes."""
    end = 0
    while end < size:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = min(os.lseek(file, start, os.SEEK_HOLE), size)
        yield start, end


def _open(proc: int, name: str) -> int:
    """Open a file of a process's, which waits for nobody, whatever the process has put in its place."""
    return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=proc)


def _ended() -> BackendError:
    return BackendError("the machine's monitor has ended")
