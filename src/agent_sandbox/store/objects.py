"""The objects of the store: what their canonical bytes are, and their ids.

``spec/store.md`` ("Objects") is the source, ``spec/vectors/store/objects.json`` the golden bytes. Nothing here
does I/O. One file above the usual length, since encoder and decoder of a shape are changed together.

When changing this: it is the stored format. Read "How do I change the stored format" in CONTRIBUTING.md first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from blake3 import blake3

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.encoding import Reader, block, svarint, uvarint

ID_BYTES = 32
LINK_BYTES = 16
SMALL_FILE = 131_072
"""A file of fewer bytes, without holes, is one blob."""
MAX_CHUNK = 32_768
MAX_LEVEL = 12
MAX_NAME = 255
MAX_TARGET = 4_095
MAX_SIZE = (1 << 63) - 1
MAX_PARENTS = 8
MAX_AUTHOR = 1_024
MAX_MESSAGE = 65_536
MAX_VALUE = 65_536
MAX_MODE = 0o7777
MAX_OWNER = (1 << 32) - 2
SYMLINK_MODE = 0o777
"""The mode of every symlink: Linux has no other, so what an archive says of it could not be laid out."""

MIN_ENTRIES = 32
MAX_ENTRIES = 256
CUT_MASK = 0x3F
MAX_TREE_PAGE = 32_768
"""A page of a directory ends after the entry that reaches this many bytes."""


class Kind(IntEnum):
    """The kinds of objects; the number is stored."""

    BLOB = 1
    PAGE = 2
    TREE = 3
    ATTRS = 4
    COMMIT = 5


MAX_CANONICAL = {
    Kind.BLOB: SMALL_FILE - 1,
    Kind.PAGE: 65_536,
    Kind.TREE: 65_536,
    Kind.ATTRS: 1_048_576,
    Kind.COMMIT: 131_072,
}
"""The most canonical bytes of each kind; a reader allocates no more."""

_DOMAINS = {kind: f"agent-sandbox/store/1/{kind.name.lower()}\n".encode() for kind in Kind}
_LINK_DOMAIN = b"agent-sandbox/store/1/link\n"


def identity(kind: Kind, canonical: bytes) -> bytes:
    """Return the 32-byte id of an object."""
    hasher = blake3(_DOMAINS[kind])
    hasher.update(canonical)
    return hasher.digest()


def link_id(path: bytes) -> bytes:
    """Return the 16-byte link id of the inode whose first name, relative to the workspace, is ``path``."""
    return blake3(_LINK_DOMAIN + path).digest()[:LINK_BYTES]


class Type(IntEnum):
    """The types of entries; the number is stored."""

    FILE = 1
    DIRECTORY = 2
    SYMLINK = 3
    FIFO = 4


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One name in a directory, or the root of a commit (empty name)."""

    name: bytes
    type: Type
    mode: int
    mtime_ns: int
    """Nanoseconds since the epoch, signed."""
    owner: tuple[int, int] | None = None
    """uid and gid where the project records them."""
    attrs: bytes | None = None
    """Id of the extended attributes."""
    link: bytes | None = None
    """Link id shared by the names of one inode."""
    size: int = 0
    """Bytes of a file; 0 for every other type."""
    content: bytes | None = None
    """File: id of its blob or root page, None when empty. Directory: id of its root tree."""
    paged: bool = False
    """Whether a file's ``content`` is a page."""
    target: bytes = b""
    """Where a symlink points."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One entry of a page of level 0: ``length`` bytes of data under ``id``, or a hole (None)."""

    length: int
    id: bytes | None


@dataclass(frozen=True, slots=True)
class Child:
    """One entry of a page above level 0: ``weight`` is bytes (page) or names (tree) below; ``last`` the last name."""

    weight: int
    id: bytes
    last: bytes = b""


@dataclass(frozen=True, slots=True)
class Commit:
    """One state with where it came from."""

    root: Entry
    parents: tuple[bytes, ...]
    base: bytes | None
    """The commit of the layer that its branch stands on."""
    time_ns: int
    author: str
    message: str


# ---- encoding ------------------------------------------------------------------------------------------------------


def encode_entry(entry: Entry) -> bytes:
    """Return the bytes of one entry of a tree of level 0; raises :class:`ValueError` for what no entry can hold."""
    encoded = _entry(entry)
    _prove(encoded, _decode_entry, entry)
    return encoded


def encode_root(entry: Entry) -> bytes:
    """Return the bytes of the root of a state, as a commit holds it; raises :class:`ValueError` as above."""
    encoded = _entry(entry)
    _prove(encoded, decode_root, entry)
    return encoded


def _prove(encoded: bytes, decode: Callable[[bytes], object], meant: object) -> None:
    """Read back what is about to be kept: whatever a decoder would refuse, or take for something else, ends here."""
    try:
        found = decode(encoded)
    except StoreDamagedError as error:
        raise ValueError(f"cannot be stored: {error.message.partition(': ')[2]}") from None
    if found != meant:
        raise ValueError("cannot be stored: fields that do not fit each other")


def _entry(entry: Entry) -> bytes:
    flags = entry.type | (entry.attrs is not None) << 3 | (entry.link is not None) << 4 | (entry.owner is not None) << 5
    seconds, nanoseconds = divmod(entry.mtime_ns, 1_000_000_000)
    out = bytearray((flags,))
    out += block(entry.name)
    out += uvarint(entry.mode)
    out += svarint(seconds)
    out += uvarint(nanoseconds)
    if entry.owner is not None:
        out += uvarint(entry.owner[0]) + uvarint(entry.owner[1])
    if entry.attrs is not None:
        out += entry.attrs
    if entry.link is not None:
        out += entry.link
    match entry.type:
        case Type.FILE:
            out += uvarint(entry.size)
            if entry.content is not None:
                out.append(2 if entry.paged else 1)
                out += entry.content
        case Type.DIRECTORY:
            out += entry.content or b""
        case Type.SYMLINK:
            out += block(entry.target)
        case Type.FIFO:
            pass
    return bytes(out)


def encode_tree(level: int, entries: Iterable[bytes]) -> bytes:
    """Return the canonical bytes of a tree page from its encoded entries or children."""
    return bytes((level,)) + b"".join(entries)


def encode_tree_child(child: Child) -> bytes:
    """Return the bytes of one entry of a tree above level 0."""
    return uvarint(child.weight) + block(child.last) + child.id


def encode_extent(extent: Extent) -> bytes:
    """Return the bytes of one entry of a page of level 0; raises :class:`ValueError` for a length it cannot have."""
    if not 1 <= extent.length <= (MAX_SIZE if extent.id is None else MAX_CHUNK):
        raise ValueError(f"an extent of {extent.length} bytes")
    return uvarint(extent.length << 1 | (extent.id is None)) + (extent.id or b"")


def encode_page_child(child: Child) -> bytes:
    """Return the bytes of one entry of a page above level 0."""
    return uvarint(child.weight) + child.id


def encode_page(level: int, entries: Iterable[bytes]) -> bytes:
    """Return the canonical bytes of a page from its encoded entries."""
    return bytes((level,)) + b"".join(entries)


def encode_attrs(attributes: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the canonical bytes of extended attributes, sorted here; raises :class:`ValueError` where they are more
    than an object may hold."""
    encoded = b"".join(block(name) + block(value) for name, value in sorted(attributes))
    _prove(encoded, decode_attrs, sorted(attributes))
    return encoded


def encode_commit(commit: Commit) -> bytes:
    """Return the canonical bytes of a commit; raises :class:`ValueError` for what no commit can hold."""
    seconds, nanoseconds = divmod(commit.time_ns, 1_000_000_000)
    encoded = b"".join((
        b"\x01",
        _entry(commit.root),
        bytes((len(commit.parents),)),
        *commit.parents,
        b"\x00" if commit.base is None else b"\x01" + commit.base,
        svarint(seconds),
        uvarint(nanoseconds),
        block(commit.author.encode()),
        block(commit.message.encode()),
    ))  # fmt: skip
    _prove(encoded, decode_commit, commit)
    return encoded


# ---- decoding ------------------------------------------------------------------------------------------------------


def _usable(name: bytes) -> bool:
    return b"/" not in name and b"\0" not in name and name not in (b".", b"..")


def _read_entry(reader: Reader, *, root: bool = False) -> Entry:
    flags = reader.u8()
    try:
        kind = Type(flags & 7)
    except ValueError:
        raise reader.damaged("an entry of an unknown type") from None
    if flags & 0xC0:
        raise reader.damaged("a reserved bit is set")
    name = reader.block(0, 0) if root else reader.block(1, MAX_NAME)
    if not _usable(name):
        raise reader.damaged("a name that no file can have")
    mode = reader.uvarint(MAX_MODE)
    seconds = reader.svarint()
    mtime_ns = seconds * 1_000_000_000 + reader.uvarint(999_999_999)
    owner = (reader.uvarint(MAX_OWNER), reader.uvarint(MAX_OWNER)) if flags & 0x20 else None
    attrs = reader.take(ID_BYTES) if flags & 8 else None
    link = reader.take(LINK_BYTES) if flags & 0x10 else None
    size, content, paged, target = 0, None, False, b""
    match kind:
        case Type.FILE:
            size = reader.uvarint(MAX_SIZE)
            if size:
                form = reader.u8()
                if form not in (1, 2) or (form == 1 and size >= SMALL_FILE):
                    raise reader.damaged("content of an unknown form")
                content, paged = reader.take(ID_BYTES), form == 2
        case Type.DIRECTORY:
            content = reader.take(ID_BYTES)
            if link is not None:
                raise reader.damaged("a linked directory")
        case Type.SYMLINK:
            target = reader.block(1, MAX_TARGET)
            if b"\0" in target or mode != SYMLINK_MODE:
                raise reader.damaged("a target or mode that no symlink can have")
        case Type.FIFO:
            pass
    if attrs is not None and kind not in (Type.FILE, Type.DIRECTORY):
        raise reader.damaged("attributes of neither file nor directory")
    if root and kind is not Type.DIRECTORY:
        raise reader.damaged("a root that is no directory")
    return Entry(name, kind, mode, mtime_ns, owner, attrs, link, size, content, paged, target)


def decode_root(encoded: bytes) -> Entry:
    """Return the root of a state from its bytes by :func:`encode_root`."""
    return _decode_entry(encoded, root=True)


def _decode_entry(encoded: bytes, *, root: bool = False) -> Entry:
    reader = Reader(encoded, "root" if root else "entry")
    entry = _read_entry(reader, root=root)
    reader.finish()
    return entry


def _open(kind: Kind, canonical: bytes, what: str) -> Reader:
    reader = Reader(canonical, what)
    if len(canonical) > MAX_CANONICAL[kind]:
        raise reader.damaged(f"it is longer than {MAX_CANONICAL[kind]} bytes")
    return reader


def _level(reader: Reader) -> int:
    level = reader.u8()
    if level > MAX_LEVEL:
        raise reader.damaged("a level above 12")
    return level


def decode_tree(canonical: bytes) -> tuple[int, list[Entry] | list[Child]]:
    """Return the level of a tree page and its entries (level 0) or children."""
    reader = _open(Kind.TREE, canonical, "directory")
    level = _level(reader)
    if level == 0:
        entries: list[Entry] = []
        while reader.left:
            entry = _read_entry(reader)
            if entries and entries[-1].name >= entry.name:
                raise reader.damaged("names out of order")
            entries.append(entry)
        _count(reader, len(entries), 0)
        return 0, entries
    children: list[Child] = []
    while reader.left:
        weight = reader.uvarint(MAX_SIZE)
        last = reader.block(1, MAX_NAME)
        if weight == 0 or not _usable(last):
            raise reader.damaged("an empty part, or a name that no file can have")
        if children and children[-1].last >= last:
            raise reader.damaged("names out of order")
        children.append(Child(weight, reader.take(ID_BYTES), last))
    _count(reader, len(children), 1)
    return level, children


def decode_page(canonical: bytes) -> tuple[int, list[Extent] | list[Child]]:
    """Return the level of a page and its extents (level 0) or children."""
    reader = _open(Kind.PAGE, canonical, "list of chunks")
    level = _level(reader)
    if level == 0:
        extents: list[Extent] = []
        while reader.left:
            number = reader.uvarint()
            length, hole = number >> 1, bool(number & 1)
            if length == 0 or (not hole and length > MAX_CHUNK):
                raise reader.damaged("a chunk of a wrong length")
            if hole and extents and extents[-1].id is None:
                raise reader.damaged("two holes in a row")
            extents.append(Extent(length, None if hole else reader.take(ID_BYTES)))
        _count(reader, len(extents), 1)
        return 0, extents
    children: list[Child] = []
    while reader.left:
        weight = reader.uvarint(MAX_SIZE)
        if weight == 0:
            raise reader.damaged("an empty part")
        children.append(Child(weight, reader.take(ID_BYTES)))
    _count(reader, len(children), 1)
    return level, children


def _count(reader: Reader, count: int, least: int) -> None:
    if not least <= count <= MAX_ENTRIES:
        raise reader.damaged(f"{count} entries in one page")


def decode_attrs(canonical: bytes) -> list[tuple[bytes, bytes]]:
    """Return the extended attributes, sorted by name."""
    reader = _open(Kind.ATTRS, canonical, "set of attributes")
    attributes: list[tuple[bytes, bytes]] = []
    while reader.left:
        name = reader.block(len(b"user.") + 1, MAX_NAME)
        if not name.startswith(b"user.") or b"\0" in name or (attributes and attributes[-1][0] >= name):
            raise reader.damaged("a name that is not allowed there")
        attributes.append((name, reader.block(0, MAX_VALUE)))
    if not attributes:
        raise reader.damaged("it is empty")
    return attributes


def decode_commit(canonical: bytes) -> Commit:
    """Return the commit."""
    reader = _open(Kind.COMMIT, canonical, "commit")
    if reader.u8() != 1:
        raise reader.damaged("an unknown version")
    root = _read_entry(reader, root=True)
    count = reader.u8()
    if count > MAX_PARENTS:
        raise reader.damaged("too many parents")
    parents = tuple(reader.take(ID_BYTES) for _ in range(count))
    if len(set(parents)) != count:
        raise reader.damaged("a parent twice")
    has_base = reader.u8()
    if has_base > 1:
        raise reader.damaged("an unknown mark")
    base = reader.take(ID_BYTES) if has_base else None
    seconds = reader.svarint()
    time_ns = seconds * 1_000_000_000 + reader.uvarint(999_999_999)
    try:
        author = reader.block(0, MAX_AUTHOR).decode()
        message = reader.block(0, MAX_MESSAGE).decode()
    except UnicodeDecodeError:
        raise reader.damaged("text that is not UTF-8") from None
    reader.finish()
    return Commit(root, parents, base, time_ns, author, message)
