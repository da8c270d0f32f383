"""The stat cache: which content a file had when it was last captured, so that it need not be read again.

Both engines read and write this file; it is no part of the stored format, only a memory that may be lost or refused at
any time. Version 1, little-endian::

    64 bytes    magic "ASBSTAT1", u64 device, 32 bytes id of the root tree of the capture that wrote it,
                u64 number of records, u32 number of attrs, u32 zero
    88 bytes    each record, ascending by inode (unsigned): u64 inode, u64 size, u64 bytes of data (holes not counted),
                i64 mtime and i64 ctime in seconds, u32 and u32 their nanoseconds, u8 form (0 empty file, 1 blob,
                2 page, 3 directory), 3 bytes zero, u32 number of its attrs + 1 (0: none), 32 bytes id of the content
                (zeros for form 0; a directory's root tree for form 3)
    32 bytes    each id of an attrs, by number
    32 bytes    BLAKE3-256 of everything before

Rules, with their reasons:

* A file whose sum, lengths or magic are wrong is no cache. It is replaced by a rename without a sync: a torn one fails
  its sum.
* A record is good for a file with the same device, inode, size, mtime and ctime. No call can set a ctime.
* An inode whose ctime is later than 50 ms before the capture began is not remembered: a clock tick is 10 ms at most
  (CONFIG_HZ=100), and a second write in the tick of the first leaves the same ctime.
* A store may have lost what a record names (a gc, another store). Where the header's root is that of the base, every id
  is reachable from it; else whoever uses an id asks the writer whether it has it. A capture that read a directory twice
  may remember what is not in its tree, and writes zeros for the root.
* A file whose attributes were left out is not remembered, so that each report names it.
* Records of form 3 say that a tree exists; this module writes none and passes them over.
"""

from __future__ import annotations

import heapq
import os
import struct
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

from blake3 import blake3

from agent_sandbox.store.objects import ID_BYTES

MAGIC = b"ASBSTAT1"
HEADER = struct.Struct("<8sQ32sQII")
RECORD = struct.Struct("<QQQqqIIB3xI32s")
MARGIN_NS = 50_000_000
"""How much older than the start of the capture a ctime must be."""
_EMPTY, _BLOB, _PAGE = 0, 1, 2
_BLOCK = 64
"""Records that are read at once; the first inode of each such block is kept in memory."""
_BILLION = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a file held."""

    content: bytes | None
    paged: bool
    data: int
    """Bytes of data, holes not counted."""
    attrs: bytes | None


class StatCache:
    """A cache that was written before, open for look-ups; holds one block and one number for every 64 records."""

    def __init__(self, file: FileIO) -> None:
        """Read and prove a cache; :class:`ValueError` when it is none, and :class:`OSError`."""
        self._file = file
        head = file.read(HEADER.size)
        if len(head) != HEADER.size:
            raise ValueError("no cache")
        magic, self.device, self.root, count, attrs, zero = HEADER.unpack(head)
        self._count: int = count
        body = self._count * RECORD.size + attrs * ID_BYTES
        if magic != MAGIC or zero or os.fstat(file.fileno()).st_size != HEADER.size + body + ID_BYTES:
            raise ValueError("no cache, or one of another version")
        self._firsts: list[int] = []
        self._attrs = HEADER.size + self._count * RECORD.size
        self._attrs_count = attrs
        self._block = (-1, b"")
        sum_ = blake3(head)
        last = -1
        for start in range(0, self._count, _BLOCK):
            block = self._read(HEADER.size + start * RECORD.size, self._length(start))
            sum_.update(block)
            inodes = [int.from_bytes(block[at : at + 8], "little") for at in range(0, len(block), RECORD.size)]
            if inodes[0] <= last or inodes != sorted(inodes):
                raise ValueError("records out of order")
            self._firsts.append(inodes[0])
            last = inodes[-1]
        at = self._attrs
        while at < HEADER.size + body:
            piece = self._read(at, min(1 << 16, HEADER.size + body - at))
            sum_.update(piece)
            at += len(piece)
        if self._read(at, ID_BYTES) != sum_.digest():
            raise ValueError("a damaged cache")

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Return the cache at ``path``, or None when there is none that is understood."""
        try:
            file = path.open("rb", buffering=0)
        except OSError:
            return None
        try:
            return cls(file)
        except (OSError, ValueError):
            file.close()
            return None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _length(self, start: int) -> int:
        return min(_BLOCK, self._count - start) * RECORD.size

    def _read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._file.fileno(), length, offset)
        if len(data) != length:
            raise ValueError("a cache that was cut")
        return data

    def find(self, about: os.stat_result) -> Remembered | None:
        """Return what the file was that ``about`` describes, or None."""
        try:
            return self._find(about)
        except (OSError, ValueError):  # the file was cut, or its disk fails: no more than a cache that is lost
            return None

    def _find(self, about: os.stat_result) -> Remembered | None:
        number = bisect_right(self._firsts, about.st_ino) - 1
        if number < 0 or about.st_dev != self.device:
            return None
        start = number * _BLOCK
        if self._block[0] != number:
            self._block = (number, self._read(HEADER.size + start * RECORD.size, self._length(start)))
        block = self._block[1]
        low, high = 0, len(block) // RECORD.size
        while low < high:
            middle = (low + high) // 2
            if int.from_bytes(block[middle * RECORD.size : middle * RECORD.size + 8], "little") < about.st_ino:
                low = middle + 1
            else:
                high = middle
        if low * RECORD.size == len(block):
            return None
        inode, size, data, mtime, ctime, mtime_ns, ctime_ns, form, attrs, id = RECORD.unpack_from(
            block, low * RECORD.size
        )
        same = (
            inode == about.st_ino
            and size == about.st_size
            and mtime * _BILLION + mtime_ns == about.st_mtime_ns
            and ctime * _BILLION + ctime_ns == about.st_ctime_ns
        )
        if not same or form not in (_EMPTY, _BLOB, _PAGE) or attrs > self._attrs_count:
            return None
        attrs_id = self._read(self._attrs + (attrs - 1) * ID_BYTES, ID_BYTES) if attrs else None
        return Remembered(id if form else None, form == _PAGE, data, attrs_id)


class CacheWriter:
    """Collects the records of one capture. Sorts in runs on disk, so memory does not grow with the tree."""

    def __init__(self, path: Path, device: int, start_ns: int, *, run: int = 65_536) -> None:
        """``start_ns``: when the capture began, by CLOCK_REALTIME; ``run``: how many records are sorted in memory.

        Raises :class:`OSError`.
        """
        self._path = path
        self._device = device
        self._before = start_ns - MARGIN_NS
        self.reachable = True
        """Whether all that is remembered is in the tree that is captured; set it to False when not."""
        self._run_length = run
        self._attrs: dict[bytes, int] = {}
        self._records: list[bytes] = []
        self._spilled = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115  (closed by close)
        self._runs: list[int] = []

    def remember(self, about: os.stat_result, what: Remembered) -> None:
        """Note a file; ``about`` is what it was before and after it was read."""
        if about.st_ctime_ns >= self._before:
            return
        attrs = 0 if what.attrs is None else self._attrs.setdefault(what.attrs, len(self._attrs)) + 1
        form = _EMPTY if what.content is None else _PAGE if what.paged else _BLOB
        mtime, mtime_ns = divmod(about.st_mtime_ns, _BILLION)
        ctime, ctime_ns = divmod(about.st_ctime_ns, _BILLION)
        content = what.content or bytes(ID_BYTES)
        self._records.append(
            RECORD.pack(about.st_ino, about.st_size, what.data, mtime, ctime, mtime_ns, ctime_ns, form, attrs, content)
        )
        if len(self._records) >= self._run_length:
            self._spill()

    def _spill(self) -> None:
        self._records.sort(key=_inode)
        self._spilled.write(b"".join(self._records))
        self._runs.append(len(self._records))
        self._records = []

    def _run(self, start: int, count: int) -> Iterator[bytes]:
        for at in range(start, start + count, _BLOCK):
            size = min(_BLOCK, start + count - at) * RECORD.size
            block = os.pread(self._spilled.fileno(), size, at * RECORD.size)
            yield from (block[i : i + RECORD.size] for i in range(0, size, RECORD.size))

    def _sorted(self) -> Iterator[bytes]:
        """All records by inode, each inode once: a name that was read twice is the same file."""
        self._spill()
        self._spilled.flush()
        starts = [sum(self._runs[:number]) for number in range(len(self._runs))]
        last = b""
        for record in heapq.merge(*map(self._run, starts, self._runs), key=_inode):
            if record[:8] != last:
                yield record
            last = record[:8]

    def replace(self, root: bytes) -> None:
        """Write the cache in place of what is there; ``root`` is the id of the captured root tree.

        A cache that cannot be written (a full disk) is left out, not an error: it only saves time.
        """
        with suppress(OSError):
            self._replace(root)

    def _replace(self, root: bytes) -> None:
        file = tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".stat-", delete=False)  # noqa: SIM115
        try:
            with file:
                file.write(bytes(HEADER.size))
                count = 0
                for record in self._sorted():
                    file.write(record)
                    count += 1
                for id in self._attrs:
                    file.write(id)
                file.seek(0)
                head = HEADER.pack(
                    MAGIC, self._device, root if self.reachable else bytes(ID_BYTES), count, len(self._attrs), 0
                )
                file.write(head)
                file.flush()
                os.lseek(file.fileno(), 0, os.SEEK_SET)
                sum_ = blake3()
                while piece := os.read(file.fileno(), 1 << 20):
                    sum_.update(piece)
                os.write(file.fileno(), sum_.digest())
            Path(file.name).replace(self._path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Give up what is held on disk."""
        self._spilled.close()


def _inode(record: bytes) -> int:
    return int.from_bytes(record[:8], "little")
