"""A tar archive as a stream of members, from bytes that nobody vouches for.

Strategy
--------
* Python's ``tarfile`` is not used: it reads a pax header of any announced size into memory, takes damaged numbers for
  others, and goes on after many faults. This reader knows v7, ustar with its prefix, pax headers for one entry and for
  all, GNU's long names, sizes in octal and base 256, and files with holes in all four of GNU's formats (old ``S``, 0.0,
  0.1, 1.0). Whatever it does not know it refuses; it guesses nothing. ``crates/sandboxd/src/tarread.rs`` follows the
  same rules.
* Nothing is allocated on the word of a number: an extended header holds at most 4 MiB, a map of holes at most 4,194,304
  pieces (16 bytes each), data goes through in the pieces that the caller asks for.
* An archive that ends without its closing zeros was cut off and is refused: half a workspace is no workspace. What
  comes after them is read to the end and ignored.
* Every fault is an :class:`InvalidRequestError`. Names, links and times are bytes and numbers as they stand; what may
  be in a workspace is for the caller to judge.

A little above the usual length: the state of one reader, with the four forms of a file with holes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from agent_sandbox.store.objects import MAX_SIZE
from agent_sandbox.store.tarfmt import (
    BLOCK,
    MAX_EXTENDED,
    check_time,
    decimal,
    is_header,
    malformed,
    number,
    padding,
    parse_records,
    parse_time,
    xattr_name,
)

MAX_PIECES = 4_194_304
"""The most pieces of data in a file with holes: 32 GiB with a hole in every 8 KiB."""
_PIECE = 1 << 18
_ZERO = bytes(BLOCK)


class Stream(Protocol):
    """Where the archive's bytes come from."""

    def read(self, size: int, /) -> bytes:
        """Return at least one and at most ``size`` bytes, or none at the end."""


class MemberKind(Enum):
    """What a member of an archive is."""

    FILE = "file"
    HARD_LINK = "hard link"
    SYMLINK = "symlink"
    DIRECTORY = "directory"
    FIFO = "fifo"
    DEVICE = "device"


@dataclass(slots=True)
class Member:
    """One member; the data of a file is read through :meth:`TarReader.read` before the next one is asked for."""

    kind: MemberKind
    path: bytes
    link: bytes
    mode: int
    mtime_ns: int
    owner: tuple[int | None, int | None]
    """uid and gid; None where the archive holds no number."""
    size: int
    """Bytes of a file with its holes; 0 for every other kind."""
    pieces: array[int]
    """The runs of data, ascending, apart and not empty: offset, length, offset, length, …"""
    attributes: dict[bytes, bytes]
    """Extended attributes in ``user.*``."""


@dataclass(slots=True)
class _Extended:
    """What extended headers said about the entry that follows them."""

    path: bytes | None = None
    link: bytes | None = None
    size: int | None = None
    mtime_ns: int | None = None
    uid: bytes | None = None
    gid: bytes | None = None
    long_path: bytes | None = None
    long_link: bytes | None = None
    attributes: dict[bytes, bytes] = field(default_factory=dict)
    sparse: dict[bytes, bytes] = field(default_factory=dict)
    """``GNU.sparse.*`` by the last part of their keys."""
    runs: array[int] = field(default_factory=lambda: array("q"))
    """The map of format 0.0, whose records repeat."""

    def something(self) -> bool:
        return self != _Extended()

    def take(self, body: bytes) -> _Extended:
        """What a pax header says; it replaces an earlier one for the same entry, but not GNU's long names."""
        new = _Extended(long_path=self.long_path, long_link=self.long_link)
        for key, value in parse_records(body):
            match key:
                case b"path":
                    new.path = value or None
                case b"linkpath":
                    new.link = value or None
                case b"size":
                    new.size = decimal(value)
                case b"mtime":
                    new.mtime_ns = parse_time(value)
                case b"uid":
                    new.uid = value
                case b"gid":
                    new.gid = value
                case b"GNU.sparse.offset" | b"GNU.sparse.numbytes":
                    if (key == b"GNU.sparse.offset") != (len(new.runs) % 2 == 0):
                        raise malformed("a map of holes out of order")
                    new.runs.append(decimal(value))
                case _ if key.startswith(b"GNU.sparse."):
                    new.sparse[key.removeprefix(b"GNU.sparse.")] = value
                case _:
                    name = xattr_name(key)
                    if name is not None and name.startswith(b"user."):
                        new.attributes[name] = value
        return new


class TarReader:
    """Read one archive from front to back. Only with ``empty`` may it have no member at all: zeros are easily had."""

    def __init__(self, stream: Stream, *, empty: bool = False) -> None:
        self._stream = stream
        self._empty = empty
        self._buffer = b""
        self._at = 0
        self._started = False
        self._data = 0
        """Bytes of the member at hand that were not read yet."""
        self._pad = 0
        self._mtime_ns: int | None = None
        """A time for all entries."""

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def _some(self, most: int) -> bytes:
        if self._at == len(self._buffer):
            self._buffer, self._at = self._stream.read(_PIECE), 0
        piece = self._buffer[self._at : self._at + most]
        self._at += len(piece)
        return piece

    def _exactly(self, count: int) -> bytes:
        piece = self._some(count)
        if len(piece) == count:
            return piece
        pieces = [piece]
        left = count - len(piece)
        while left:
            piece = self._some(left)
            if not piece:
                raise malformed("it ends too early")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _skip(self, count: int) -> None:
        while count:
            piece = self._some(count)
            if not piece:
                raise malformed("it ends too early")
            count -= len(piece)

    def read(self, most: int) -> bytes:
        """Return the next bytes of the member's data, at most ``most``; none when there are no more."""
        if not self._data or not most:
            return b""
        piece = self._some(min(most, self._data))
        if not piece:
            raise malformed("it ends too early")
        self._data -= len(piece)
        return piece

    def _body(self, size: int) -> bytes:
        if size > MAX_EXTENDED:
            raise malformed(f"an extended header of {size} bytes, above {MAX_EXTENDED}")
        body = self._exactly(size)
        self._skip(padding(size))
        return body

    # ---- headers ---------------------------------------------------------------------------------------------------

    def next(self) -> Member | None:
        """Return the next member, or None at the end, when everything that followed it has been read."""
        self._skip(self._data + self._pad)
        self._data = self._pad = 0
        extended = _Extended()
        pending = False
        while True:
            block = self._exactly(BLOCK)
            if block == _ZERO:
                if pending:
                    raise malformed("an extended header without an entry")
                if not self._started and not self._empty:
                    raise malformed("it does not begin with a header")
                while self._some(_PIECE):
                    pass
                return None
            if not is_header(block):
                raise malformed("a header with a wrong checksum" if self._started else "it has no header")
            self._started = True
            size = number(block[124:136])
            if size is None or size < 0:
                raise malformed("an entry without a size")
            match block[156:157]:
                case b"x":
                    extended = extended.take(self._body(size))
                case b"g":
                    self._globals(self._body(size))
                    continue
                case b"L":
                    extended.long_path = _until_nul(self._body(size))
                case b"K":
                    extended.long_link = _until_nul(self._body(size))
                case b"V" if size == 0 and not pending:  # the label of a volume
                    continue
                case _:
                    return self._member(block, size, extended)
            pending = True

    def _globals(self, body: bytes) -> None:
        """Records for all entries. Only a time makes sense for more than one."""
        for key, value in parse_records(body):
            if key == b"mtime":
                self._mtime_ns = parse_time(value)
            elif key in (b"path", b"linkpath", b"size", b"uid", b"gid") or key.startswith(b"GNU.sparse."):
                raise malformed("one path, link, size, owner or map of holes for all entries")

    def _member(self, block: bytes, size: int, extended: _Extended) -> Member:
        path = extended.path or extended.long_path or _plain_path(block)
        kind = _kind(block[156:157], path)
        mode = number(block[100:108])
        if mode is None or mode < 0:
            raise malformed("an entry without a mode")
        mtime_ns = extended.mtime_ns if extended.mtime_ns is not None else self._mtime_ns
        if mtime_ns is None:
            seconds = number(block[136:148])
            if seconds is None:
                raise malformed("an entry without a time")
            mtime_ns = check_time(seconds * 1_000_000_000)
        member = Member(
            kind,
            path,
            extended.link or extended.long_link or _until_nul(block[157:257]),
            mode & 0o7777,
            mtime_ns,
            (_owner(extended.uid, block[108:116]), _owner(extended.gid, block[116:124])),
            0,
            array("q"),
            extended.attributes,
        )
        if kind is MemberKind.FILE:  # Links and the like have no data, whatever their size says.
            size = size if extended.size is None else extended.size
            self._data, self._pad = size, padding(size)
            if block[156:157] == b"S":
                self._old_sparse(member, block)
            elif extended.sparse or extended.runs:
                self._sparse(member, extended)
            else:
                member.size = size
                if size:
                    member.pieces.extend((0, size))
        return member

    # ---- files with holes ------------------------------------------------------------------------------------------

    def _old_sparse(self, member: Member, block: bytes) -> None:
        """GNU's old format: four pieces in the header, and 21 in each block after it while a flag says so."""
        if block[257:265] != b"ustar  \0":
            raise malformed("a file with holes that is not GNU's")
        size = number(block[483:495])
        runs = array("q")
        at, count, flag = 386, 4, 482
        while True:
            for start in range(at, at + 24 * count, 24):
                if block[start + 12] == 0:
                    break
                for place in (start, start + 12):
                    value = number(block[place : place + 12])
                    if value is None or value < 0:
                        raise malformed("a map of holes")
                    runs.append(value)
            if not block[flag]:
                break
            if len(runs) > 2 * MAX_PIECES:
                raise malformed(f"a file in more than {MAX_PIECES} pieces")
            block, at, count, flag = self._exactly(BLOCK), 0, 21, 504
        self._pieces(member, runs, size)

    def _sparse(self, member: Member, extended: _Extended) -> None:
        """The formats that pax headers announce: 0.0 with repeated records, 0.1 with a list, 1.0 before the data."""
        said = extended.sparse
        member.path = said.get(b"name") or member.path
        version = (said.get(b"major", b"0"), said.get(b"minor", b"0"))
        if version == (b"1", b"0"):
            real = said.get(b"realsize", said.get(b"size"))
            runs = self._map()
        elif version[0] == b"0" and version[1] in (b"0", b"1"):
            real = said.get(b"size", said.get(b"realsize"))
            runs = extended.runs
            if b"map" in said:
                if runs:
                    raise malformed("two maps of holes for one file")
                runs = array("q", (decimal(text) for text in said[b"map"].split(b",") if said[b"map"]))
            if b"numblocks" in said and 2 * decimal(said[b"numblocks"]) != len(runs):
                raise malformed("a map of holes of another length")
        else:
            raise malformed("a file with holes in an unknown format")
        self._pieces(member, runs, None if real is None else decimal(real))

    def _map(self) -> array[int]:
        """The map in front of the data of format 1.0: numbers on lines of their own, filled up to whole blocks."""
        lines = self._lines()
        count = decimal(next(lines))
        if count > MAX_PIECES:
            raise malformed(f"a file in {count} pieces, above {MAX_PIECES}")
        runs = array("q")
        for _ in range(2 * count):
            runs.append(decimal(next(lines)))
        return runs

    def _lines(self) -> Iterator[bytes]:
        text, at = b"", 0
        while True:
            end = text.find(b"\n", at)
            if end >= 0:
                yield text[at:end]
                at = end + 1
                continue
            text, at = text[at:], 0
            if self._data < BLOCK or len(text) > 20:
                raise malformed("a map of holes that does not end")
            text += self._exactly(BLOCK)
            self._data -= BLOCK

    def _pieces(self, member: Member, runs: array[int], size: int | None) -> None:
        """Set size and pieces, after a check that they fit the file and the data that is there."""
        if size is None or not 0 <= size <= MAX_SIZE or len(runs) % 2 or len(runs) > 2 * MAX_PIECES + 2:
            raise malformed("a map of holes")
        pieces = member.pieces
        end = total = 0
        for at in range(0, len(runs), 2):
            offset, length = runs[at], runs[at + 1]
            if offset < end or offset + length > size:
                raise malformed("a map of holes whose pieces overlap or leave the file")
            if length and pieces and offset == end:
                pieces[-1] += length
            elif length:
                pieces.extend((offset, length))
            end = offset + length
            total += length
        if total != self._data:
            raise malformed("a map of holes that does not fit its data")
        member.size = size


def _until_nul(text: bytes) -> bytes:
    return text.split(b"\0", 1)[0]


def _plain_path(block: bytes) -> bytes:
    name = _until_nul(block[:100])
    if block[257:263] != b"ustar\0":
        return name
    # star keeps times behind a shorter prefix, and says so at the end.
    prefix = _until_nul(block[345 : 345 + 131 if block[508:512] == b"tar\0" else 500])
    return prefix + b"/" + name if prefix else name


def _kind(flag: bytes, path: bytes) -> MemberKind:
    match flag:
        case b"\0" | b"0" | b"7":
            # Before there was a type for it, a directory was a name with a slash.
            return MemberKind.DIRECTORY if path.endswith(b"/") else MemberKind.FILE
        case b"S":
            return MemberKind.FILE
        case b"1":
            return MemberKind.HARD_LINK
        case b"2":
            return MemberKind.SYMLINK
        case b"3" | b"4":
            return MemberKind.DEVICE
        case b"5":
            return MemberKind.DIRECTORY
        case b"6":
            return MemberKind.FIFO
        case _:
            raise malformed(f"an entry of the unknown type {flag!r}")


def _owner(said: bytes | None, field: bytes) -> int | None:
    if said is None:
        return number(field)
    return int(said) if said.isdigit() and len(said) <= 10 else None
