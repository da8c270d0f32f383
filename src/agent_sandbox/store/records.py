"""Records: how an object lies in a pack. Header, form, payload; nothing here does I/O.

``spec/store.md`` ("Packs") is the source. :func:`encode` chooses the form, :func:`decode_header` and
:func:`decode_payload` read every form that any writer chose, bounded by what the kind allows before anything is
allocated.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

import zstandard

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.objects import ID_BYTES, MAX_CANONICAL, Kind, identity

PACK_MAGIC = b"ASBPACK1"
PACK_HEADER = struct.Struct("<8s16sQ")
MARK = 0xA7
MAX_DEPTH = 4
SLACK = 1_024
"""A payload may be this much longer than its canonical bytes; a longer one was not written by us."""
_HEAD = struct.Struct("<BBBBII32s")
_CRC = struct.Struct("<I")
MIN_HEADER = _HEAD.size + _CRC.size
MAX_HEADER = MIN_HEADER + ID_BYTES
MAX_RECORD = MAX_HEADER + max(MAX_CANONICAL.values()) + SLACK
LEVEL = 1
"""zstd level: most of the gain at a speed near the disk's."""


class Form(IntEnum):
    """How a payload holds the canonical bytes; the number is stored."""

    RAW = 0
    ZSTD = 1
    PATCH = 2


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says of itself. ``size`` is the length of the header, ``length`` that of the payload."""

    kind: Kind
    form: Form
    depth: int
    canonical: int
    length: int
    id: bytes
    base: bytes | None
    size: int


def pack_header(store: bytes, number: int) -> bytes:
    """Return the first 32 bytes of a pack."""
    return PACK_HEADER.pack(PACK_MAGIC, store, number)


def encode(kind: Kind, id: bytes, canonical: bytes, base: tuple[bytes, bytes, int] | None = None) -> tuple[bytes, int]:
    """Return a whole record and the depth of its patch (0: none).

    ``base`` is id, canonical bytes and depth of an object of the same kind that this one probably resembles.
    The smallest of the forms is taken. Raises :class:`ValueError` for a length that no object of the kind has.
    """
    if not 1 <= len(canonical) <= MAX_CANONICAL[kind]:
        raise ValueError(f"a {kind.name.lower()} of {len(canonical)} bytes")
    payload = zstandard.ZstdCompressor(level=LEVEL).compress(canonical)
    form, depth = (Form.ZSTD, 0) if len(payload) < len(canonical) else (Form.RAW, 0)
    if form is Form.RAW:
        payload = canonical
    if base is not None and base[2] < MAX_DEPTH and base[0] != id and base[1]:
        prefix = zstandard.ZstdCompressionDict(base[1], dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        patch = zstandard.ZstdCompressor(level=3, dict_data=prefix).compress(canonical)
        if len(patch) + ID_BYTES < len(payload):
            payload, form, depth = patch, Form.PATCH, base[2] + 1
    head = _HEAD.pack(MARK, kind, form, depth, len(canonical), len(payload), id)
    if form is Form.PATCH and base is not None:
        head += base[0]
    return head + _CRC.pack(zlib.crc32(head)) + payload, depth


def decode_header(data: bytes) -> Header:
    """Return the header at the front of ``data``: give it 80 bytes, or what is left of the pack."""
    if len(data) < MIN_HEADER:
        raise StoreDamagedError("a damaged pack: it ends inside a record")
    mark, kind, form, depth, canonical, length, id = _HEAD.unpack_from(data)
    size = MIN_HEADER + (ID_BYTES if form == Form.PATCH else 0)
    if mark != MARK or len(data) < size:
        raise StoreDamagedError("a damaged pack: no record where one should be")
    (crc,) = _CRC.unpack_from(data, size - _CRC.size)
    if crc != zlib.crc32(data[: size - _CRC.size]):
        raise StoreDamagedError("a damaged pack: a record's header does not match its checksum")
    try:
        kind, form = Kind(kind), Form(form)
    except ValueError:
        raise StoreDamagedError("a damaged pack: a record of an unknown kind or form") from None
    if not 1 <= canonical <= MAX_CANONICAL[kind] or length > canonical + SLACK:
        raise StoreDamagedError("a damaged pack: a record of a length that its kind does not allow")
    if form is Form.RAW and length != canonical:
        raise StoreDamagedError("a damaged pack: a record of a length that its form does not allow")
    if (form is Form.PATCH) != (1 <= depth <= MAX_DEPTH) or (form is not Form.PATCH and depth):
        raise StoreDamagedError("a damaged pack: a patch of a wrong depth")
    base = data[_HEAD.size : _HEAD.size + ID_BYTES] if form is Form.PATCH else None
    return Header(kind, form, depth, canonical, length, id, base, size)


def decode_payload(header: Header, payload: bytes, base: bytes | None = None) -> bytes:
    """Return the verified canonical bytes; ``base`` is the canonical bytes of ``header.base`` for a patch."""
    damaged = StoreDamagedError(f"a damaged pack: object {header.id.hex()} is not what was written")
    if len(payload) != header.length:
        raise damaged
    if header.form is Form.RAW:
        canonical = payload
    else:
        try:
            frame = zstandard.get_frame_parameters(payload)
            if frame.content_size != header.canonical:
                raise damaged
            prefix = None
            if header.form is Form.PATCH:
                if not base:
                    raise damaged
                prefix = zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            decompressor = zstandard.ZstdDecompressor(dict_data=prefix) if prefix else zstandard.ZstdDecompressor()
            canonical = decompressor.decompress(payload, max_output_size=header.canonical, allow_extra_data=False)
        except zstandard.ZstdError:
            raise damaged from None
    if len(canonical) != header.canonical or identity(header.kind, canonical) != header.id:
        raise damaged
    return canonical
