"""Write the golden bytes of the stored format from first principles: struct, hashlib, zlib and the BLAKE3 function.

It and ``formats.py`` use nothing of the project, and no zstd: frames are put together by hand from RFC 8878. So an
error in an implementation cannot hide in its own vectors. Run it in this folder; it rewrites ``numbers.json``,
``objects.json``, ``reject.json``, ``chunks.json``, ``pages.json`` and ``records.json``, which are committed. It is long
because it is tables of cases.

* Bytes are hex; ``(61*4095)`` in it is the byte 61, 4,095 times.
* Long data is described, not written out: ``{"seed": s, "offset": o, "length": n}`` is ``n`` bytes of the BLAKE3
  output stream of the ASCII text ``s``, from byte ``o``; ``{"byte": b, "length": n}`` is ``n`` times the byte ``b``.
"""

import json
import pathlib
import struct
import zlib
from typing import Any

from formats import (
    ENCODE,
    as_hex,
    attrs,
    block,
    chunk_ends,
    commit,
    copies,
    data_of,
    entry,
    frame,
    levels,
    link_id,
    object_id,
    page,
    record,
    shown,
    some_id,
    stream,
    svarint,
    tree,
    uvarint,
)


def an_entry(type: str, name: bytes, **fields: Any) -> dict[str, Any]:
    nothing = {"owner": None, "attrs": None, "link": None, "size": 0, "content": None, "paged": False, "target": b""}
    mode = {"file": 0o644, "directory": 0o755, "symlink": 0o777, "fifo": 0o600}[type]
    found = {"type": type, "name": name, "mode": mode, "seconds": 1_700_000_000, "nanoseconds": 123_456_789}
    if type == "directory":
        found["content"] = some_id(0)
    if type == "symlink":
        found["target"] = b"there"
    return nothing | found | fields


def a_commit(**fields: Any) -> dict[str, Any]:
    return {
        "root": an_entry("directory", b""), "parents": [], "base": None, "seconds": 1_700_000_000, "nanoseconds": 0,
        "author": b"", "message": b"",
    } | fields  # fmt: skip


def one(*args: Any, **fields: Any) -> dict[str, Any]:
    """A directory with one entry."""
    return {"level": 0, "entries": [an_entry(*args, **fields)]}


def numbered(count: int) -> list[dict[str, Any]]:
    return [an_entry("fifo", b"%03d" % number) for number in range(count)]


FULL = [(b"user." + bytes([0x61 + n]), b"\xaa" * 65_536) for n in range(15)] + [(b"user.p", b"\xaa" * 65_376)]
"""Attributes of 1,048,576 bytes: beside its value each takes 1 + 6 + 3."""

OBJECTS: list[tuple[str, str, Any]] = [
    ("one byte", "blob", b"x"),
    ("the largest small file", "blob", b"\x00" * 131_071),
    ("one chunk", "page", {"level": 0, "extents": [[1, some_id(1)]]}),
    ("the largest chunk, and the numbers where the length takes one byte more", "page",
     {"level": 0, "extents": [[32_768, some_id(1)], [63, some_id(2)], [64, some_id(3)], [8_191, some_id(4)], [8_192, some_id(5)]]}),
    ("a hole", "page", {"level": 0, "extents": [[1, None]]}),
    ("the largest hole", "page", {"level": 0, "extents": [[(1 << 63) - 1, None]]}),
    ("holes between data", "page",
     {"level": 0, "extents": [[4_096, None], [8_192, some_id(1)], [1 << 40, None], [1, some_id(1)]]}),
    ("a page of 256 chunks", "page", {"level": 0, "extents": [[32_768, some_id(7)]] * 256}),
    ("a page of level 1", "page", {"level": 1, "children": [[1, some_id(1)], [8_388_608, some_id(2)]]}),
    ("a page of level 12 with the largest weight", "page", {"level": 12, "children": [[(1 << 63) - 1, some_id(1)]]}),
    ("an empty directory", "tree", {"level": 0, "entries": []}),
    ("an empty file", "tree", one("file", b"empty")),
    ("a file of one byte", "tree", one("file", b"a", size=1, content=some_id(1))),
    ("the largest file that is one blob", "tree", one("file", b"a", size=131_071, content=some_id(1))),
    ("the smallest file that is pages for its size", "tree", one("file", b"a", size=131_072, content=some_id(1), paged=True)),
    ("a sparse file of one byte", "tree", one("file", b"a", size=1, content=some_id(1), paged=True)),
    ("the largest file", "tree", one("file", b"a", size=(1 << 63) - 1, content=some_id(1), paged=True)),
    ("a directory inside", "tree", one("directory", b"d", content=some_id(2))),
    ("a symlink", "tree", one("symlink", b"s", target=b"../else where/\xff")),
    ("the longest target", "tree", one("symlink", b"s", target=b"a" * 4_095)),
    ("a FIFO", "tree", one("fifo", b"p")),
    ("every flag, and the largest owner", "tree",
     one("file", b"f", mode=0o7777, owner=[4_294_967_294, 4_294_967_294], attrs=some_id(3), link=link_id(b"f"), size=3, content=some_id(4))),
    ("root's, without a mode", "tree", one("directory", b"d", mode=0, owner=[0, 0], attrs=some_id(3))),
    ("a linked symlink and a linked FIFO", "tree",
     {"level": 0, "entries": [an_entry("fifo", b"p", link=link_id(b"p")), an_entry("symlink", b"s", link=link_id(b"s"))]}),
    ("the first nanosecond before 1970", "tree", one("fifo", b"p", seconds=-1, nanoseconds=999_999_999)),
    ("the earliest time", "tree", one("fifo", b"p", seconds=-(1 << 63), nanoseconds=0)),
    ("the latest time", "tree", one("fifo", b"p", seconds=(1 << 63) - 1, nanoseconds=999_999_999)),
    ("the longest name", "tree", one("fifo", b"n" * 255)),
    ("names as bytes, in their order", "tree",
     {"level": 0, "entries": [an_entry("fifo", name) for name in (b"\x01", b" ", b"...", b".a", b"A", b"a", b"a.b", b"aa", b"\xc3\xa9", b"\xff", b"\xff\xff")]}),
    ("a page of 256 entries", "tree", {"level": 0, "entries": numbered(256)}),
    ("a page of level 1", "tree", {"level": 1, "children": [[256, b"b" * 255, some_id(1)], [1, b"c", some_id(2)]]}),
    ("a page of level 12 with the largest weight", "tree", {"level": 12, "children": [[(1 << 63) - 1, b"z", some_id(1)]]}),
    ("one attribute without a value", "attrs", {"attributes": [(b"user.a", b"")]}),
    ("the longest name of an attribute and the largest value", "attrs",
     {"attributes": [(b"user." + b"n" * 250, b"\xff" * 65_536)]}),
    ("attributes in their order, with bytes that are no text", "attrs",
     {"attributes": [(b"user.A", b"\x00"), (b"user.a", b"1"), (b"user.a.b", b"2"), (b"user.\xff", b"3")]}),
    ("as many attributes as there may be", "attrs", {"attributes": FULL}),
    ("a first commit", "commit", a_commit()),
    ("a commit with everything", "commit",
     a_commit(root=an_entry("directory", b"", mode=0o1777, owner=[1_000, 100], attrs=some_id(9), content=some_id(8)),
              parents=[some_id(number) for number in (3, 1, 2, 4, 5, 6, 7, 8)], base=some_id(3), seconds=-1, nanoseconds=999_999_999,
              author="Zoë <zoë@example.org>".encode(), message="über 雪\n\nwith a NUL: \0".encode())),
    ("the longest author and message", "commit", a_commit(author=b"a" * 1_024, message=b"m" * 65_536)),
]  # fmt: skip

PATHS = [b"a", b"a/b", b"a.b", b"\xff/\xfe", b"d/" * 40 + b"x"]

E1 = entry(an_entry("fifo", b"b"))
AT = len(b"\x04\x01b")
"""Where the mode of ``E1`` begins."""


def changed(type: str, **fields: Any) -> bytes:
    """A directory with one entry whose fields may be wrong."""
    return tree(one(type, fields.pop("name", b"x"), **fields))


def commit_with(**fields: Any) -> bytes:
    return commit(a_commit(**fields))


HEAD = entry(an_entry("file", b"x"))[:-1]
"""A file without its size and content."""

REJECT: list[tuple[str, str, bytes]] = [
    ("no byte", "page", b""),
    ("no byte", "tree", b""),
    ("no byte", "attrs", b""),
    ("no byte", "commit", b""),
    ("level 13", "page", b"\x0d" + uvarint(1) + some_id(1)),
    ("an empty list of chunks", "page", b"\x00"),
    ("a page of level 1 without entries", "page", b"\x01"),
    ("a chunk of no bytes", "page", page({"level": 0, "extents": [[0, some_id(1)]]})),
    ("a hole of no bytes", "page", page({"level": 0, "extents": [[0, None]]})),
    ("a chunk of 32,769 bytes", "page", page({"level": 0, "extents": [[32_769, some_id(1)]]})),
    ("two holes in a row", "page", page({"level": 0, "extents": [[4_096, None], [4_096, None]]})),
    ("257 chunks", "page", page({"level": 0, "extents": [[1, some_id(1)]] * 257})),
    ("257 children", "page", page({"level": 1, "children": [[1, some_id(1)]] * 257})),
    ("a child of no bytes", "page", page({"level": 1, "children": [[0, some_id(1)]]})),
    ("a child of 2^63 bytes", "page", page({"level": 1, "children": [[1 << 63, some_id(1)]]})),
    ("a chunk's id that is cut", "page", page({"level": 0, "extents": [[1, some_id(1)]]})[:-1]),
    ("a child's id that is cut", "page", page({"level": 1, "children": [[1, some_id(1)]]})[:-1]),
    ("a length in a longer form", "page", b"\x00\x82\x00" + some_id(1)),
    ("a byte behind a page", "page", page({"level": 0, "extents": [[1, some_id(1)]]}) + b"\x02"),
    ("level 13", "tree", b"\x0d" + uvarint(1) + block(b"a") + some_id(1)),
    ("level 255", "tree", b"\xff"),
    ("a page of level 1 without entries", "tree", b"\x01"),
    ("type 0", "tree", b"\x00\x00" + E1[1:]),
    ("type 5", "tree", b"\x00\x05" + E1[1:]),
    ("type 7", "tree", b"\x00\x07" + E1[1:]),
    ("reserved bit 6", "tree", b"\x00\x44" + E1[1:]),
    ("reserved bit 7", "tree", b"\x00\x84" + E1[1:]),
    ("an entry that is cut", "tree", b"\x00" + E1[:-1]),
    ("a byte behind the entries", "tree", b"\x00" + E1 + b"\x04"),
    ("names out of order", "tree", tree({"level": 0, "entries": [an_entry("fifo", b"b"), an_entry("fifo", b"a")]})),
    ("names out of the order of bytes", "tree", tree({"level": 0, "entries": [an_entry("fifo", b"\xc3\xa9"), an_entry("fifo", b"z")]})),
    ("a name twice", "tree", tree({"level": 0, "entries": [an_entry("fifo", b"a"), an_entry("file", b"a")]})),
    ("257 entries", "tree", tree({"level": 0, "entries": numbered(257)})),
    ("an empty name", "tree", changed("fifo", name=b"")),
    ("a name of 256 bytes", "tree", changed("fifo", name=b"n" * 256)),
    ("the name .", "tree", changed("fifo", name=b".")),
    ("the name ..", "tree", changed("fifo", name=b"..")),
    ("a name with a slash", "tree", changed("fifo", name=b"a/b")),
    ("a name with NUL", "tree", changed("fifo", name=b"a\0b")),
    ("a name longer than what is there", "tree", b"\x00\x04\x7fabc"),
    ("a length of a name in a longer form", "tree", b"\x00\x04\x81\x00" + E1[2:]),
    ("a length of a name of 2^63", "tree", b"\x00\x04" + uvarint(1 << 63) + E1[2:]),
    ("a mode of thirteen bits", "tree", changed("fifo", mode=0o10000)),
    ("a mode in a longer form", "tree", b"\x00" + E1[:AT] + b"\x80\x83\x80\x00" + E1[AT + 2 :]),
    ("1,000,000,000 nanoseconds", "tree", changed("fifo", nanoseconds=1_000_000_000)),
    ("seconds of 65 bits", "tree", b"\x00" + E1[: AT + 2] + b"\xff" * 9 + b"\x02" + b"\x00"),
    ("the user that is nobody's number", "tree", changed("fifo", owner=[4_294_967_295, 0])),
    ("the group that is nobody's number", "tree", changed("fifo", owner=[0, 4_294_967_295])),
    ("a linked directory", "tree", changed("directory", link=link_id(b"x"))),
    ("attributes of a symlink", "tree", changed("symlink", attrs=some_id(1))),
    ("attributes of a FIFO", "tree", changed("fifo", attrs=some_id(1))),
    ("a symlink of mode 0o755", "tree", changed("symlink", mode=0o755)),
    ("a symlink of mode 0o1777", "tree", changed("symlink", mode=0o1777)),
    ("a symlink to nowhere", "tree", changed("symlink", target=b"")),
    ("a target of 4,096 bytes", "tree", changed("symlink", target=b"a" * 4_096)),
    ("a target with NUL", "tree", changed("symlink", target=b"a\0")),
    ("a file of 2^63 bytes", "tree", b"\x00" + HEAD + uvarint(1 << 63) + b"\x02" + some_id(1)),
    ("content of form 0", "tree", b"\x00" + HEAD + uvarint(5) + b"\x00" + some_id(1)),
    ("content of form 3", "tree", b"\x00" + HEAD + uvarint(5) + b"\x03" + some_id(1)),
    ("a blob of 131,072 bytes", "tree", b"\x00" + HEAD + uvarint(131_072) + b"\x01" + some_id(1)),
    ("content of an empty file", "tree", b"\x00" + HEAD + uvarint(0) + b"\x01" + some_id(1)),
    ("a file without its content", "tree", b"\x00" + HEAD + uvarint(5)),
    ("a child of no names", "tree", tree({"level": 1, "children": [[0, b"a", some_id(1)]]})),
    ("a child of 2^63 names", "tree", tree({"level": 1, "children": [[1 << 63, b"a", some_id(1)]]})),
    ("children out of order", "tree", tree({"level": 1, "children": [[1, b"b", some_id(1)], [1, b"a", some_id(2)]]})),
    ("children with the same last name", "tree", tree({"level": 1, "children": [[1, b"a", some_id(1)], [1, b"a", some_id(2)]]})),
    ("a child whose last name is empty", "tree", tree({"level": 1, "children": [[1, b"", some_id(1)]]})),
    ("a child whose last name has a slash", "tree", tree({"level": 1, "children": [[1, b"a/b", some_id(1)]]})),
    ("a child whose last name has 256 bytes", "tree", tree({"level": 1, "children": [[1, b"n" * 256, some_id(1)]]})),
    ("257 children", "tree", tree({"level": 1, "children": [[1, b"%03d" % n, some_id(1)] for n in range(257)]})),
    ("more than 65,536 bytes", "tree",
     tree({"level": 0, "entries": [an_entry("symlink", b"%03d" % n, target=b"a" * 4_095) for n in range(16)]})),
    ("a name without the prefix", "attrs", attrs({"attributes": [(b"trusted.overlay.opaque", b"y")]})),
    ("the prefix in capitals", "attrs", attrs({"attributes": [(b"USER.a", b"")]})),
    ("the prefix alone", "attrs", attrs({"attributes": [(b"user.", b"")]})),
    ("a name with NUL", "attrs", attrs({"attributes": [(b"user.a\0", b"")]})),
    ("a name of 256 bytes", "attrs", attrs({"attributes": [(b"user." + b"n" * 251, b"")]})),
    ("a value of 65,537 bytes", "attrs", attrs({"attributes": [(b"user.a", b"v" * 65_537)]})),
    ("names out of order", "attrs", attrs({"attributes": [(b"user.b", b""), (b"user.a", b"")]})),
    ("a name twice", "attrs", attrs({"attributes": [(b"user.a", b"1"), (b"user.a", b"2")]})),
    ("a value that is cut", "attrs", attrs({"attributes": [(b"user.a", b"12")]})[:-1]),
    ("one byte more than 1 MiB", "attrs", attrs({"attributes": [*FULL[:-1], (b"user.p", b"\xaa" * 65_377)]})),
    ("version 0", "commit", b"\x00" + commit_with()[1:]),
    ("version 2", "commit", b"\x02" + commit_with()[1:]),
    ("a root with a name", "commit", commit_with(root=an_entry("directory", b"x"))),
    ("a root that is a file", "commit", commit_with(root=an_entry("file", b""))),
    ("a root that is linked", "commit", commit_with(root=an_entry("directory", b"", link=link_id(b"")))),
    ("nine parents", "commit", commit_with(parents=[some_id(number) for number in range(9)])),
    ("a parent twice", "commit", commit_with(parents=[some_id(1), some_id(2), some_id(1)])),
    ("a mark of 2 before the base", "commit", commit_with(base=some_id(1)).replace(b"\x01" + some_id(1), b"\x02" + some_id(1))),
    ("1,000,000,000 nanoseconds", "commit", commit_with(nanoseconds=1_000_000_000)),
    ("an author of 1,025 bytes", "commit", commit_with(author=b"a" * 1_025)),
    ("a message of 65,537 bytes", "commit", commit_with(message=b"m" * 65_537)),
    ("an author that is not UTF-8", "commit", commit_with(author=b"\xff")),
    ("a message with half a pair of UTF-16", "commit", commit_with(message=b"\xed\xa0\x80")),
    ("a message with a longer form of UTF-8", "commit", commit_with(message=b"\xc0\xaf")),
    ("a message that is cut", "commit", commit_with(message=b"abc")[:-1]),
    ("a byte behind the message", "commit", commit_with() + b"\x00"),
]  # fmt: skip


# ---- chunks --------------------------------------------------------------------------------------------------------


def seeded(length: int, offset: int = 0) -> dict[str, Any]:
    return {"seed": "chunks", "offset": offset, "length": length}


MIB = 1 << 20
CHUNKS: list[tuple[str, list[dict[str, Any]]]] = [
    *((f"{length:,} bytes", [seeded(length)]) for length in (1, 8_191, 8_192, 8_193, 8_194, 8_195)),
    *((f"{length:,} bytes", [seeded(length)]) for length in (16_383, 16_384, 16_385, 32_767, 32_768, 32_769, 131_071)),
    *((f"{length:,} bytes from byte {offset}", [seeded(length, offset)]) for offset, length in ((7, 12_001), (1_000_003, 40_001))),
    ("1 MiB", [seeded(MIB)]),
    ("1 MiB with 10 bytes in front", [{"seed": "edit", "offset": 0, "length": 10}, seeded(MIB)]),
    ("1 MiB with 10 other bytes in the middle",
     [seeded(MIB // 2), {"seed": "edit", "offset": 0, "length": 10}, seeded(MIB // 2 - 10, MIB // 2 + 10)]),
    ("zeros", [{"byte": 0, "length": 100_001}]),
    ("data, then zeros, then data", [seeded(20_000), {"byte": 0, "length": 70_000}, seeded(20_000, 20_000)]),
    *((f"the byte {byte}", [{"byte": byte, "length": 65_536}]) for byte in (1, 0x20, 0xFF)),
]  # fmt: skip


# ---- pages ---------------------------------------------------------------------------------------------------------


def listed(runs: list[list[Any]]) -> list[Any]:
    """Extents from ``[count, length, last byte of the id or null for a hole]``."""
    return [
        [n, None if last is None else b"\x11" * 31 + bytes([last])] for count, n, last in runs for _ in range(count)
    ]


def made(seed: str, count: int, hole_every: int) -> list[Any]:
    """Extents from 36 bytes of the stream each: a number (u32, little-endian) and an id.

    The extent before each multiple of ``hole_every`` (where that is not 0) is a hole of 4,096 × (1 + number % 1,000)
    bytes; every other has 1 + number % 32,768 bytes.
    """
    found: list[Any] = []
    data = stream(seed, 36 * count)
    for at in range(count):
        (number,) = struct.unpack_from("<I", data, 36 * at)
        if hole_every and at % hole_every == hole_every - 1:
            found.append([4_096 * (1 + number % 1_000), None])
        else:
            found.append([1 + number % 32_768, data[36 * at + 4 : 36 * at + 36]])
    return found


FILES: list[tuple[str, dict[str, Any]]] = [
    ("one chunk", {"runs": [[1, 32_768, 1]]}),
    ("a hole alone", {"runs": [[1, 1 << 40, None]]}),
    ("256 chunks without a mark", {"runs": [[256, 32_768, 1]]}),
    ("257 chunks without a mark", {"runs": [[257, 32_768, 1]]}),
    ("a mark as the 31st", {"runs": [[30, 9_000, 1], [1, 9_000, 64], [300, 9_000, 1]]}),
    ("a mark as the 32nd", {"runs": [[31, 9_000, 1], [1, 9_000, 64], [300, 9_000, 1]]}),
    ("a mark as the last", {"runs": [[31, 9_000, 1], [1, 9_000, 0]]}),
    ("the bits of a mark", {"runs": [[31, 9_000, 1], [40, 9_000, 0x20], [1, 9_000, 0xC0], [40, 9_000, 0x3F]]}),
    ("a hole as the 32nd", {"runs": [[31, 9_000, 1], [1, 4_096, None], [300, 9_000, 1]]}),
    ("a hole as the 256th", {"runs": [[255, 9_000, 1], [1, 4_096, None], [10, 9_000, 1]]}),
    ("marks everywhere", {"runs": [[1_100, 9_000, 64]]}),
    ("2,000 extents", {"seed": "file 1", "count": 2_000, "hole_every": 0}),
    ("2,000 extents with holes", {"seed": "file 2", "count": 2_000, "hole_every": 7}),
    ("20,000 extents, three levels", {"seed": "file 3", "count": 20_000, "hole_every": 500}),
]


def named(prefix: str, count: int, type: str, length: int, target: int) -> list[dict[str, Any]]:
    """Entries whose names are the prefix, six decimal digits, and ``x`` up to ``length`` bytes.

    A file has mode 0o644, mtime (n seconds, n nanoseconds), 1 + n % 131,071 bytes, and as its blob's id the 32 bytes
    of the stream of the prefix from byte 32 n; a symlink mode 0o777, mtime 0, and ``target`` times the byte 0x61 + n % 26.
    """
    found = []
    for n in range(count):
        name = f"{prefix}{n:06d}".ljust(length, "x").encode()
        if type == "file":
            content = stream(prefix, 32, 32 * n)
            found.append(an_entry("file", name, seconds=n, nanoseconds=n, size=1 + n % 131_071, content=content))
        else:
            found.append(an_entry("symlink", name, seconds=0, nanoseconds=0, target=bytes([0x61 + n % 26]) * target))
    return found


DIRECTORIES: list[tuple[str, dict[str, Any]]] = [
    ("an empty directory", {"prefix": "f", "count": 0, "type": "file", "length": 0, "target": 0}),
    ("one file", {"prefix": "f", "count": 1, "type": "file", "length": 0, "target": 0}),
    ("300 files", {"prefix": "f", "count": 300, "type": "file", "length": 0, "target": 0}),
    ("5,000 files", {"prefix": "f", "count": 5_000, "type": "file", "length": 0, "target": 0}),
    ("5,000 files with the longest names", {"prefix": "long", "count": 5_000, "type": "file", "length": 255, "target": 0}),
    ("100 symlinks with the longest targets", {"prefix": "s", "count": 100, "type": "symlink", "length": 0, "target": 4_095}),
    ("30,000 files, three levels", {"prefix": "many", "count": 30_000, "type": "file", "length": 0, "target": 0}),
]  # fmt: skip


# ---- records -------------------------------------------------------------------------------------------------------


TEXT = b"canonical bytes of a blob\n" * 4
ZEROS = bytes(100_000)
OLD = stream("old", 4_000)
AGAIN = OLD + b"ED" + OLD[10:1_508]
NEW = b"EDIT" + OLD[:2_000] + b"MORE" + OLD[2_000:]
PATCH = frame(len(NEW), (2, copies(b"EDITMORE", 4, 2_000, [4_004, 4_008])))
OLD_ID = object_id("blob", OLD)
HOLE = page({"level": 0, "extents": [[4_096, None]]})

RECORDS: list[tuple[str, str, int, int, bytes, bytes | None, bytes]] = [
    ("as it is", "blob", 0, 0, b"x", None, record("blob", 0, b"x", b"x")),
    ("an empty directory", "tree", 0, 0, b"\x00", None, record("tree", 0, b"\x00", b"\x00")),
    ("a page", "page", 0, 0, HOLE, None, record("page", 0, HOLE, HOLE)),
    ("zstd: one raw block, size in one byte", "blob", 1, 0, TEXT, None, record("blob", 1, TEXT, frame(len(TEXT), (0, TEXT)))),
    ("zstd: runs, size in four bytes", "blob", 1, 0, ZEROS, None,
     record("blob", 1, ZEROS, frame(len(ZEROS), (1, (b"\x00", 65_536)), (1, (b"\x00", 34_464))))),
    ("zstd: a compressed block, size in two bytes", "blob", 1, 0, AGAIN, None,
     record("blob", 1, AGAIN, frame(len(AGAIN), (0, OLD), (2, copies(b"ED", 2, 1_498, [3_992]))))),
    ("patch: two copies out of its base", "blob", 2, 1, NEW, OLD, record("blob", 2, NEW, PATCH, base=OLD_ID, depth=1)),
    ("patch of the greatest depth", "blob", 2, 4, NEW, OLD, record("blob", 2, NEW, PATCH, base=OLD_ID, depth=4)),
    ("patch that takes nothing of its base", "blob", 2, 1, TEXT, b"b",
     record("blob", 2, TEXT, frame(len(TEXT), (0, TEXT)), base=object_id("blob", b"b"), depth=1)),
    ("patch of a page that takes nothing of its base", "page", 2, 2, HOLE, page({"level": 0, "extents": [[1, None]]}),
     record("page", 2, HOLE, frame(len(HOLE), (0, HOLE)), base=object_id("page", page({"level": 0, "extents": [[1, None]]})), depth=2)),
]  # fmt: skip

PLAIN = frame(len(TEXT), (0, TEXT))
REFUSED: list[tuple[str, bytes | None, bytes]] = [
    ("no byte", None, b""),
    ("a header that is cut", None, record("blob", 0, b"x", b"x")[:47]),
    ("a patch's header that is cut", OLD, record("blob", 2, NEW, PATCH, base=OLD_ID, depth=1)[:79]),
    ("a payload that is cut", None, record("blob", 1, TEXT, PLAIN)[:-1]),
    ("a payload with a byte more than its length", None, record("blob", 1, TEXT, PLAIN) + b"\x00"),
    ("a wrong mark", None, record("blob", 0, b"x", b"x", mark=0xA6)),
    ("a wrong checksum", None, record("blob", 0, b"x", b"x", crc=zlib.crc32(b"x"))),
    ("kind 0", None, record("blob", 0, b"x", b"x", kind=0)),
    ("kind 6", None, record("blob", 0, b"x", b"x", kind=6)),
    ("form 3", None, record("blob", 0, b"x", b"x", form=3)),
    ("depth of what is no patch", None, record("blob", 0, b"x", b"x", depth=1)),
    ("a patch of depth 0", OLD, record("blob", 2, NEW, PATCH, base=OLD_ID, depth=0)),
    ("a patch of depth 5", OLD, record("blob", 2, NEW, PATCH, base=OLD_ID, depth=5)),
    ("no canonical byte", None, record("blob", 0, b"", b"")),
    ("no canonical byte in a frame", None, record("blob", 1, b"", frame(0, (0, b"")))),
    ("a blob of 131,072 bytes", None, record("blob", 1, bytes(131_072), frame(131_072, (1, (b"\x00", 131_072))))),
    ("a page of 65,537 bytes", None, record("page", 1, bytes(65_537), frame(65_537, (1, (b"\x00", 65_537))))),
    ("a canonical length of 2^32 - 1", None, record("blob", 1, TEXT, PLAIN, canonical=0xFFFFFFFF)),
    ("a payload of 2^32 - 1 bytes", None, record("blob", 1, TEXT, PLAIN, length=0xFFFFFFFF)),
    ("a payload 1,025 bytes longer than canonical", None, record("blob", 1, TEXT, PLAIN + bytes(len(TEXT) + 1_025 - len(PLAIN)))),
    ("raw bytes fewer than canonical", None, record("blob", 0, b"xy", b"x")),
    ("raw bytes more than canonical", None, record("blob", 0, b"x", b"xy")),
    ("raw bytes of another id", None, record("blob", 0, b"x", b"x", id=object_id("blob", b"y"))),
    ("the id of another kind", None, record("blob", 0, b"x", b"x", id=object_id("tree", b"x"))),
    ("a frame of another id", None, record("blob", 1, TEXT, frame(len(TEXT), (0, TEXT[::-1])))),
    ("no frame", None, record("blob", 1, TEXT, b"")),
    ("a frame with another magic number", None, record("blob", 1, TEXT, b"\x00" + PLAIN[1:])),
    ("a frame that says it is longer", None, record("blob", 1, TEXT, frame(len(TEXT) + 1, (0, TEXT)))),
    ("a frame that is longer than it says", None, record("blob", 1, TEXT, frame(len(TEXT), (0, TEXT), (0, TEXT)))),
    ("a frame that is shorter than it says", None, record("blob", 1, TEXT, frame(len(TEXT), (0, TEXT[:-1])))),
    ("a frame without its content size", None, record("blob", 1, TEXT, frame(0, (0, TEXT), head=b"\x00\x00"))),
    ("a frame that unpacks to 128 KiB where 5 bytes are said", None,
     record("blob", 1, b"\x00" * 5, frame(5, (1, (b"\x00", 131_072))))),
    ("a frame with a content size of 2^64 - 1", None, record("blob", 1, TEXT, frame(0, (0, TEXT), head=b"\xe0" + b"\xff" * 8))),
    ("a window of 2 TiB without a content size", None, record("blob", 1, TEXT, frame(0, (0, TEXT), head=b"\x00\xf8"))),
    ("a block of the reserved type", None, record("blob", 1, TEXT, frame(len(TEXT), (3, TEXT)))),
    ("the reserved bit of the frame", None, record("blob", 1, TEXT, frame(0, (0, TEXT), head=b"\x28" + bytes([len(TEXT)])))),
    ("a frame that wants a dictionary", None, record("blob", 1, TEXT, frame(0, (0, TEXT), head=b"\x21\x07" + bytes([len(TEXT)])))),
    ("a patch that wants a dictionary by number", OLD,
     record("blob", 2, TEXT, frame(0, (0, TEXT), head=b"\x21\x07" + bytes([len(TEXT)])), base=OLD_ID, depth=1)),
    ("two frames", None, record("blob", 1, TEXT + TEXT, PLAIN + PLAIN)),
    ("a frame and an empty one", None, record("blob", 1, TEXT, PLAIN + frame(0, (0, b"")))),
    ("a frame and a byte", None, record("blob", 1, TEXT, PLAIN + b"\x00")),
    ("a skippable frame before", None, record("blob", 1, TEXT, struct.pack("<II", 0x184D2A50, 4) + b"skip" + PLAIN)),
    ("a skippable frame of the right size", None, record("blob", 1, TEXT, struct.pack("<II", 0x184D2A50, len(TEXT)) + TEXT)),
    ("a copy from before the beginning", None, record("blob", 1, NEW, PATCH)),
    ("a patch with another base", OLD[:-1] + b"\x00",
     record("blob", 2, NEW, PATCH, base=object_id("blob", OLD[:-1] + b"\x00"), depth=1)),
    ("a patch with a base that is too short", OLD[1:], record("blob", 2, NEW, PATCH, base=object_id("blob", OLD[1:]), depth=1)),
    ("a patch without a base", None, record("blob", 2, NEW, PATCH, base=OLD_ID, depth=1)),
]  # fmt: skip


# ---- writing -------------------------------------------------------------------------------------------------------


def numbers() -> dict[str, Any]:
    edges = sorted({(1 << 7 * n) + d for n in range(1, 10) for d in (-1, 0)} | {0, 1, (1 << 63) - 1, (1 << 64) - 1})
    signed = sorted({sign * (1 << bits) + d for bits in (0, 6, 7, 13, 31, 62) for sign in (-1, 1) for d in (-1, 0)})
    signed += [0, -(1 << 63), (1 << 63) - 1]
    refused = [
        ("no byte", b""),
        ("one byte that goes on", b"\x80"),
        ("nine bytes that go on", b"\xff" * 9),
        ("0 in two bytes", b"\x80\x00"),
        ("127 in two bytes", b"\xff\x00"),
        ("1 in ten bytes", b"\x81" + b"\x80" * 8 + b"\x00"),
        ("2^64", b"\x80" * 9 + b"\x02"),
        ("65 bits that are all set", b"\xff" * 9 + b"\x03"),
        ("eleven bytes", b"\xff" * 10 + b"\x01"),
        ("a hundred bytes", b"\x80" * 99 + b"\x01"),
    ]
    return {
        "uvarint": [{"value": value, "hex": uvarint(value).hex()} for value in edges],
        "svarint": [{"value": value, "hex": svarint(value).hex()} for value in signed],
        "refused": [{"name": name, "hex": as_hex(data)} for name, data in refused],
    }


def objects() -> dict[str, Any]:
    found = []
    for name, kind, value in OBJECTS:
        canonical = value if kind == "blob" else ENCODE[kind](value)
        found.append({"name": name, "kind": kind, "hex": canonical, "id": object_id(kind, canonical), "value": value})
    return {"objects": shown(found), "links": shown([{"path": path, "id": link_id(path)} for path in PATHS])}


def pages() -> dict[str, Any]:
    files, directories = [], []
    for name, made_by in FILES:
        extents = listed(made_by["runs"]) if "runs" in made_by else made(**made_by)
        ids, size = levels("page", extents)
        files.append({"name": name, "extents": made_by, "size": size, "root": ids[-1][0], "pages": ids})
    for name, made_by in DIRECTORIES:
        ids, count = levels("tree", named(**made_by))
        directories.append({"name": name, "entries": made_by, "count": count, "root": ids[-1][0], "pages": ids})
    return {"files": shown(files), "directories": shown(directories)}


def records() -> dict[str, Any]:
    good = []
    for name, kind, form, depth, canonical, base, data in RECORDS:
        of_base = None if base is None else {"canonical": base, "id": object_id(kind, base)}
        good.append(
            {"name": name, "kind": kind, "form": form, "depth": depth, "id": object_id(kind, canonical)}
            | {"canonical": canonical, "base": of_base, "record": data}
        )
    store = stream("store", 16)
    header = struct.pack("<8s16sQ", b"ASBPACK1", store, 9_007_199_254_740_993)
    return {
        "pack_header": shown({"store": store, "number": 9_007_199_254_740_993, "hex": header}),
        "records": shown(good),
        "refused": shown([{"name": name, "base": base, "record": data} for name, base, data in REFUSED]),
    }


def main() -> None:
    files = {
        "numbers": numbers(),
        "objects": objects(),
        "reject": {"reject": shown([{"name": name, "kind": kind, "hex": data} for name, kind, data in REJECT])},
        "chunks": {
            "chunks": [{"name": name, "data": parts, "ends": chunk_ends(data_of(parts))} for name, parts in CHUNKS]
        },
        "pages": pages(),
        "records": records(),
    }
    here = pathlib.Path(__file__).parent
    for name, value in files.items():
        (here / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
