"""Export of a state as an archive: POSIX pax, streamed, the same bytes for the same state.

Everything that a state holds is in it: names and targets as bytes (``hdrcharset=BINARY`` where they are not UTF-8),
``mtime`` as an exact decimal, hard links (the first name in the archive carries the data), FIFOs, ``user.*``
attributes (``SCHILY.xattr.*``), holes (GNU sparse 1.0). Names are relative, without a leading ``./``; the workspace
itself is the entry ``./`` first; siblings are sorted. GNU tar, bsdtar and Python's ``tarfile`` restore it.

Memory: one page of each level, one chunk, 64 KiB of output, and the first path of each inode with several names. A
file's pages are read up to three times (how many runs, the map, the data), since the map of its holes comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import tarfmt, walk
from agent_sandbox.store.objects import Entry, Kind, Type, decode_attrs
from agent_sandbox.store.ports import Objects, Progress
from agent_sandbox.store.tarfmt import BLOCK, padding

_BUFFER = 1 << 16
_KINDS = {
    Type.FILE: tarfmt.FILE,
    Type.DIRECTORY: tarfmt.DIRECTORY,
    Type.SYMLINK: tarfmt.SYMLINK,
    Type.FIFO: tarfmt.FIFO,
}


class Sink(Protocol):
    """Where an archive goes."""

    def write(self, data: bytes, /) -> object:
        """Take all of ``data``."""


def write_tar(
    objects: Objects, root: Entry, out: Sink, *, owner: tuple[int, int] = (0, 0), progress: Progress | None = None
) -> None:
    """Write the state with this root to ``out`` as a tar archive.

    ``owner`` is uid and gid of entries for which the state records none. ``progress`` is told entries done and bytes
    written; how many there will be is not known before (0). Raises :class:`StoreDamagedError`, and what ``out`` raises.
    """
    archive = Archive(objects, out, owner, progress)
    archive.add(b"", root)
    for path, entry in walk.walk(objects, root):
        archive.add(path, entry)
    archive.close()


class Archive:
    """One archive that is being written."""

    def __init__(self, objects: Objects, out: Sink, owner: tuple[int, int], progress: Progress | None) -> None:
        self._objects = objects
        self._out = out
        self._owner = owner
        self._progress = progress
        self._buffer = bytearray()
        self._links: dict[bytes, bytes] = {}
        self._done = self._written = 0

    def add(self, path: bytes, entry: Entry) -> None:
        """Write one entry; the name of the workspace itself is empty."""
        first = path
        if entry.link is not None:
            first = self._links.setdefault(entry.link, path)
        if first != path:
            self._header(tarfmt.HARD_LINK, path, entry, link=first)
        elif entry.type is Type.FILE:
            self._file(path, entry)
        else:
            name = (path or b".") + b"/" if entry.type is Type.DIRECTORY else path
            self._header(_KINDS[entry.type], name, entry, link=entry.target, records=self._attributes(entry))
        self._done += 1

    def empty(self, path: bytes) -> None:
        """Write an empty file that is in no state, such as a whiteout."""
        self._write(tarfmt.header(tarfmt.FILE, path, b"", 0o644, self._owner, 0, 0))

    def close(self) -> None:
        """Write the end of the archive."""
        self._write(bytes(2 * BLOCK))
        self._flush()

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _header(
        self,
        kind: bytes,
        name: bytes,
        entry: Entry,
        *,
        link: bytes = b"",
        size: int = 0,
        records: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        owner = entry.owner or self._owner
        self._write(tarfmt.header(kind, name, link, entry.mode, owner, size, entry.mtime_ns, records or []))

    def _attributes(self, entry: Entry) -> list[tuple[bytes, bytes]]:
        if entry.attrs is None:
            return []
        attributes = decode_attrs(self._objects.read(entry.attrs, Kind.ATTRS))
        return [(tarfmt.xattr_key(name), value) for name, value in attributes]

    def _file(self, path: bytes, entry: Entry) -> None:
        records = self._attributes(entry)
        count = size = width = 0
        for offset, length in self._map(entry):
            count += 1
            size += length
            width += len(_line(offset)) + len(_line(length))
        if size == entry.size:
            self._header(tarfmt.FILE, path, entry, size=size, records=records)
        else:
            width += len(_line(count))
            records += [
                (b"GNU.sparse.major", b"1"),
                (b"GNU.sparse.minor", b"0"),
                (b"GNU.sparse.name", path),
                (b"GNU.sparse.realsize", b"%d" % entry.size),
            ]
            # Where a reader knows no holes, the packed form lies beside the file and not in its place.
            head, slash, tail = path.rpartition(b"/")
            packed = (head + slash + b"GNUSparseFile.0/" + tail).decode("ascii", "replace").encode("ascii", "replace")
            size += width + padding(width)
            self._header(tarfmt.FILE, packed[:100], entry, size=size, records=records)
            self._write(_line(count))
            for offset, length in self._map(entry):
                self._write(_line(offset) + _line(length))
            self._write(bytes(padding(width)))
        for extent in walk.extents(self._objects, entry):
            if extent.id is not None:
                chunk = self._objects.read(extent.id, Kind.BLOB)
                if len(chunk) != extent.length:
                    raise StoreDamagedError("a damaged list of chunks: a chunk of another length")
                self._write(chunk)
        self._write(bytes(padding(size)))

    def _map(self, entry: Entry) -> Iterator[tuple[int, int]]:
        """Offset and length of each run of data, and an empty run at the end of a file that ends with a hole."""
        at = start = 0
        for extent in walk.extents(self._objects, entry):
            if extent.id is None:
                if start < at:
                    yield start, at - start
                start = at + extent.length
            at += extent.length
        if start < at or (at and start == at):
            yield start, at - start

    def _write(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        self._out.write(bytes(self._buffer))
        self._written += len(self._buffer)
        self._buffer.clear()
        if self._progress is not None:
            self._progress(self._done, 0, self._written, 0)


def _line(value: int) -> bytes:
    return b"%d\n" % value
