"""Files into blobs and pages, directories into pages: what is new is kept as a patch of what it replaces.

:class:`ContentReader` reads one file: whole, or cut into chunks around its holes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agent_sandbox.store.chunks import cut, put_pages
from agent_sandbox.store.objects import (
    MAX_CHUNK,
    SMALL_FILE,
    Child,
    Extent,
    Kind,
    decode_page,
    decode_tree,
    identity,
)
from agent_sandbox.store.past import PastDirectory, PastFile
from agent_sandbox.store.ports import Writer

WINDOW = 1 << 20
"""Bytes of a file that are in memory at once."""


class ChangedError(Exception):
    """What is being read is not what it was a moment ago."""


@dataclass(frozen=True, slots=True)
class Content:
    """Where the content of a file is, and how many bytes of data it has."""

    id: bytes | None
    paged: bool
    data: int


def keep(writer: Writer, kind: Kind, canonical: bytes, resembles: Callable[[], bytes | None] | None = None) -> bytes:
    """Keep one object; only when it is new, ``resembles`` is asked for the id of one that it replaces."""
    id = identity(kind, canonical)
    if not writer.has([id])[0]:
        writer.put(kind, canonical, resembles() if resembles else None)
    return id


def keep_tree(writer: Writer, past: PastDirectory, kind: Kind, canonical: bytes) -> bytes:
    """Keep one page of a directory, which resembles the one that covered its first name in ``past``."""

    def resembles() -> bytes | None:
        level, items = decode_tree(canonical)
        if not items:
            return None
        return past.page(level, items[0].last if isinstance(items[0], Child) else items[0].name)

    return keep(writer, kind, canonical, resembles)


class Keeper:
    """Keeps the chunks and pages of one file; each resembles what covered its first byte before.

    ``past`` finds what the same path held; it is called once, and only when something is new.
    """

    def __init__(self, writer: Writer, past: Callable[[], PastFile | None]) -> None:
        self._writer = writer
        self._find_past = past
        self._past: PastFile | None = None
        self._sought = False
        self._ends: dict[int, int] = {}

    def _past_file(self) -> PastFile | None:
        if not self._sought:
            self._sought = True
            self._past = self._find_past()
        return self._past

    def chunk(self, offset: int, data: bytes) -> bytes:
        """Keep a chunk, or a whole small file (offset 0), and return its id."""

        def resembles() -> bytes | None:
            past = self._past_file()
            return past.chunk(offset) if past else None

        return keep(self._writer, Kind.BLOB, data, resembles)

    def page(self, kind: Kind, canonical: bytes) -> bytes:
        """Keep a page, for :func:`put_pages`, which gives those of one level in order."""
        level, items = decode_page(canonical)
        start = self._ends.get(level, 0)
        self._ends[level] = start + sum(i.length if isinstance(i, Extent) else i.weight for i in items)

        def resembles() -> bytes | None:
            past = self._past_file()
            return past.page(level, start) if past else None

        return keep(self._writer, kind, canonical, resembles)


class ContentReader:
    """Reads one open file of ``size`` bytes; ``past`` is what the same path held in the base."""

    def __init__(self, file: int, size: int, writer: Writer, past: Callable[[], PastFile | None]) -> None:
        self._file = file
        self._size = size
        self._keeper = Keeper(writer, past)
        self.read_bytes = 0

    def read(self) -> Content:
        """Keep the content and return where it is; raises :class:`ChangedError` when the file ends too early."""
        if not self._size:
            return Content(None, False, 0)
        if self._size < SMALL_FILE and os.lseek(self._file, 0, os.SEEK_HOLE) >= self._size:
            return Content(self._keeper.chunk(0, self._take(0, self._size)), False, self._size)
        id = put_pages(self._extents(), self._keeper.page)
        return Content(id, True, self.read_bytes)

    def _take(self, offset: int, length: int) -> bytes:
        pieces = []
        while length:
            piece = os.pread(self._file, length, offset)
            if not piece:
                raise ChangedError
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
            self.read_bytes += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Start and end of each run of data; between them are holes."""
        at = 0
        while at < self._size:
            try:
                start = os.lseek(self._file, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return
            if start >= self._size:
                return
            at = min(os.lseek(self._file, start, os.SEEK_HOLE), self._size)
            if at <= start:
                raise ChangedError
            yield start, at

    def _extents(self) -> Iterator[Extent]:
        at = 0
        for start, end in self._runs():
            if start > at:
                yield Extent(start - at, None)
            yield from self._chunks(start, end)
            at = end
        if at < self._size:
            yield Extent(self._size - at, None)

    def _chunks(self, start: int, end: int) -> Iterator[Extent]:
        while start < end:
            window = self._take(start, min(WINDOW, end - start))
            last = start + len(window) == end
            at = 0
            # A cut looks up to 32 KiB ahead: what is left of a window begins the next one.
            while at < len(window) if last else at + MAX_CHUNK <= len(window):
                stop = cut(window, at, len(window))
                yield Extent(stop - at, self._keeper.chunk(start + at, window[at:stop]))
                at = stop
            self.read_bytes -= len(window) - at
            start += at
