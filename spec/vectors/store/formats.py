"""What ``make_vectors.py`` writes with: the stored format from first principles, for no other use.

Values are as the JSON files have them, with bytes where those have hex.
"""

import hashlib
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any

from blake3 import blake3

KIND = {"blob": 1, "page": 2, "tree": 3, "attrs": 4, "commit": 5}
TYPE = {"file": 1, "directory": 2, "symlink": 3, "fifo": 4}


# ---- numbers, ids, data --------------------------------------------------------------------------------------------


def uvarint(value: int) -> bytes:
    assert 0 <= value < 1 << 64
    out = b""
    while value >= 128:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def svarint(value: int) -> bytes:
    return uvarint(2 * value if value >= 0 else -2 * value - 1)


def block(data: bytes) -> bytes:
    return uvarint(len(data)) + data


def object_id(kind: str, canonical: bytes) -> bytes:
    return blake3(b"agent-sandbox/store/1/" + kind.encode() + b"\n" + canonical).digest()


def link_id(path: bytes) -> bytes:
    return blake3(b"agent-sandbox/store/1/link\n" + path).digest()[:16]


def stream(seed: str, length: int, offset: int = 0) -> bytes:
    return blake3(seed.encode()).digest(length=length, seek=offset)


def some_id(number: int) -> bytes:
    return stream(f"id {number}", 32)


def as_hex(data: bytes) -> str:
    """Hex, with runs of 16 and more equal bytes written short."""
    out, at = "", 0
    for run in re.finditer(rb"(.)\1{15,}", data, re.DOTALL):
        out += data[at : run.start()].hex() + f"({run[1].hex()}*{len(run[0])})"
        at = run.end()
    return out + data[at:].hex()


def data_of(parts: list[dict[str, Any]]) -> bytes:
    return b"".join(
        stream(part["seed"], part["length"], part["offset"])
        if "seed" in part
        else bytes([part["byte"]]) * part["length"]
        for part in parts
    )


# ---- objects -------------------------------------------------------------------------------------------------------


def entry(value: dict[str, Any]) -> bytes:
    flags = TYPE[value["type"]]
    flags += 8 if value["attrs"] is not None else 0
    flags += 16 if value["link"] is not None else 0
    flags += 32 if value["owner"] is not None else 0
    out = bytes([flags]) + block(value["name"]) + uvarint(value["mode"])
    out += svarint(value["seconds"]) + uvarint(value["nanoseconds"])
    if value["owner"] is not None:
        out += uvarint(value["owner"][0]) + uvarint(value["owner"][1])
    out += (value["attrs"] or b"") + (value["link"] or b"")
    if value["type"] == "file":
        out += uvarint(value["size"])
        if value["size"]:
            out += (b"\x02" if value["paged"] else b"\x01") + value["content"]
    elif value["type"] == "directory":
        out += value["content"]
    elif value["type"] == "symlink":
        out += block(value["target"])
    return out


def tree(value: dict[str, Any]) -> bytes:
    if value["level"] == 0:
        return b"\x00" + b"".join(map(entry, value["entries"]))
    return bytes([value["level"]]) + b"".join(uvarint(w) + block(last) + id for w, last, id in value["children"])


def page(value: dict[str, Any]) -> bytes:
    if value["level"] == 0:
        return b"\x00" + b"".join(
            uvarint(2 * n + 1) if id is None else uvarint(2 * n) + id for n, id in value["extents"]
        )
    return bytes([value["level"]]) + b"".join(uvarint(weight) + id for weight, id in value["children"])


def attrs(value: dict[str, Any]) -> bytes:
    return b"".join(block(name) + block(data) for name, data in value["attributes"])


def commit(value: dict[str, Any]) -> bytes:
    out = b"\x01" + entry(value["root"]) + bytes([len(value["parents"])]) + b"".join(value["parents"])
    out += b"\x00" if value["base"] is None else b"\x01" + value["base"]
    out += svarint(value["seconds"]) + uvarint(value["nanoseconds"])
    return out + block(value["author"]) + block(value["message"])


ENCODE: dict[str, Callable[[dict[str, Any]], bytes]] = {"page": page, "tree": tree, "attrs": attrs, "commit": commit}


# ---- chunks and pages ----------------------------------------------------------------------------------------------

GEAR = [int.from_bytes(hashlib.md5(bytes([b]) * 64, usedforsecurity=False).digest()[:8], "big") for b in range(256)]


def chunk_length(data: bytes) -> int:
    """How long the first chunk of this run of data is."""
    if len(data) <= 8_192:
        return len(data)
    end = min(len(data), 32_768)
    centre = min(end, 16_384)
    h = 0
    i = 8_192
    while i < centre - centre % 2:
        h = (h * 2 + GEAR[data[i]]) % 2**64
        if h & 0x0000D90F03530000 == 0:
            return i
        i += 1
    while i < end - end % 2:
        h = (h * 2 + GEAR[data[i]]) % 2**64
        if h & 0x0000D90303530000 == 0:
            return i
        i += 1
    return end


def chunk_ends(data: bytes) -> list[int]:
    ends = [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + chunk_length(data[ends[-1] : ends[-1] + 32_768]))
    return ends[1:]


def cut_pages(
    items: list[Any], encode: Callable[[Any], bytes], mark: Callable[[Any], int | None], by_size: bool
) -> list[list[Any]]:
    pages: list[list[Any]] = [[]]
    size = 1
    for item in items:
        pages[-1].append(item)
        size += len(encode(item))
        count, last = len(pages[-1]), mark(item)
        if count == 256 or (by_size and size >= 32_768) or (count >= 32 and last is not None and last % 64 == 0):
            pages.append([])
            size = 1
    return [found for found in pages if found]


def levels(kind: str, items: list[Any]) -> tuple[list[list[bytes]], int]:
    """The ids of the pages of each level, the root's last, and the weight of all."""

    def extent_bytes(item: Any) -> bytes:
        return page({"level": 0, "extents": [item]})[1:]

    def child_bytes(item: Any) -> bytes:
        value = {"level": 1, "children": [item]}
        return (page(value) if kind == "page" else tree(value))[1:]

    found: list[list[bytes]] = []
    level = 0
    while True:
        if level:
            pages = cut_pages(items, child_bytes, lambda item: item[-1][-1], kind == "tree")
        elif kind == "page":
            pages = cut_pages(items, extent_bytes, lambda item: item[1][-1] if item[1] else None, False)
        else:
            pages = cut_pages(items, entry, lambda item: blake3(item["name"]).digest()[-1], True) or [[]]
        found.append([])
        children: list[Any] = []
        for items in pages:
            name = "children" if level else "extents" if kind == "page" else "entries"
            id = object_id(kind, ENCODE[kind]({"level": level, name: items}))
            found[-1].append(id)
            if kind == "page":
                children.append([sum(item[0] for item in items), id])
            elif level:
                children.append([sum(item[0] for item in items), items[-1][1], id])
            else:
                children.append([len(items), items[-1]["name"] if items else b"", id])
        if len(children) == 1:
            return found, children[0][0]
        items, level = children, level + 1


# ---- records -------------------------------------------------------------------------------------------------------


def frame(content: int, *blocks: tuple[int, bytes | tuple[bytes, int]], head: bytes | None = None) -> bytes:
    """A zstd frame (RFC 8878) of one segment with its content size; blocks are (type, data), the last one marked.

    Type 0 is raw, 1 a run (a byte and how often), 2 compressed.
    """
    if head is None:
        head = (
            b"\x20" + struct.pack("<B", content)
            if content < 256
            else b"\x60" + struct.pack("<H", content - 256)
            if content < 65_792
            else b"\xa0" + struct.pack("<I", content)
        )
    out = struct.pack("<I", 0xFD2FB528) + head
    for number, (type, data) in enumerate(blocks):
        size = data[1] if isinstance(data, tuple) else len(data)
        last = number == len(blocks) - 1
        out += struct.pack("<I", last | type << 1 | size << 3)[:3] + (data[0] if isinstance(data, tuple) else data)
    return out


def copies(literals: bytes, each: int, length: int, offsets: list[int]) -> bytes:
    """The data of a compressed block: for each offset ``each`` of the literals, then ``length`` bytes from there.

    Lengths and offsets are coded with one symbol each (RLE mode), so the bits are their extra bits alone, written so
    that a reader from the back meets offset, match length, literal length of the first copy first.
    """
    assert len(literals) == each * len(offsets) < 32
    assert each < 16
    assert 1_027 <= length < 2_051
    code = (offsets[0] + 3).bit_length() - 1
    bits, count = 0, 0
    for offset in reversed(offsets):
        assert (offset + 3).bit_length() - 1 == code
        bits |= (length - 1_027) << count
        bits |= (offset + 3 - (1 << code)) << count + 10
        count += 10 + code
    bits |= 1 << count
    sequences = bytes([len(offsets), 0b01_01_01_00, each, code, 46])
    return bytes([len(literals) << 3]) + literals + sequences + bits.to_bytes(count // 8 + 1, "little")


def record(
    kind: str, form: int, canonical: bytes, payload: bytes, /, *, base: bytes = b"", depth: int = 0, **wrong: Any
) -> bytes:
    """A whole record; ``wrong`` puts other values into its fields."""
    head = struct.pack(
        "<BBBBII32s",
        wrong.get("mark", 0xA7),
        wrong.get("kind", KIND[kind]),
        wrong.get("form", form),
        depth,
        wrong.get("canonical", len(canonical)),
        wrong.get("length", len(payload)),
        wrong.get("id", object_id(kind, canonical)),
    )
    head += base
    return head + struct.pack("<I", wrong.get("crc", zlib.crc32(head))) + payload


# ---- JSON ----------------------------------------------------------------------------------------------------------


def shown(value: Any) -> Any:
    """The value as JSON has it: bytes as hex."""
    if isinstance(value, bytes):
        return as_hex(value)
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return value
