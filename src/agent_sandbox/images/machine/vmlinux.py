"""The kernel inside a bzImage, unpacked: an ELF file that a monitor starts at its 32-bit entry (PVH).

A bzImage unpacks itself before the kernel proper begins, which under emulation takes a second of each start. Here it is
unpacked once. Where that cannot be done, for a packing that is not known or a kernel without such an entry, machines
boot the image as it is, and nobody but the clock notices.

The payload's place is in the header (boot protocol 2.08, Documentation/arch/x86/boot.rst); what packs it is told by its
first bytes, as in arch/x86/boot/compressed. The entry is announced by the ELF note ``XEN_ELFNOTE_PHYS32_ENTRY``.

LZ4 is unpacked by hand: the kernel uses the "legacy" frame (a magic, then blocks of up to 8 MiB with their length), and
no library of ours reads LZ4. A block is a row of: a token, literals, and a match to copy from what is there already.
"""

from __future__ import annotations

import bz2
import io
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Final

from agent_sandbox.images.sources import ZSTD_MAGIC, ZstdError, open_zstd

MAX_BYTES = 256 << 20
"""Unpacked; a distribution's kernel has 30 to 80 MiB."""
_LZ4_LEGACY = b"\x02\x21\x4c\x18"
_BLOCK_BYTES = 8 << 20
_SIZE_BYTES = 4
"""The end of a packed kernel is its size: the kernel's build appends it where the packing does not (arch/x86/boot/
compressed/mkpiggy.c). So a kernel that was cut off is noticed, however it is packed."""
_EM_X86_64, _PT_NOTE = 62, 4
_PVH_NOTE: Final = 18
_MAX_SEGMENTS = 1000


def unpack(image: bytes) -> bytes | None:
    """The kernel in the bzImage ``image``, or None where it cannot be unpacked or started so."""
    offset, packed = struct.unpack_from("<II", image, 0x248)
    start = ((image[0x1F1] or 4) + 1) * 512 + offset
    payload = image[start : start + packed]
    size = int.from_bytes(payload[-_SIZE_BYTES:], "little")
    for magic, packer in _PACKERS.items():
        if payload.startswith(magic) and size <= MAX_BYTES:
            try:
                kernel = packer(payload, size)
                return kernel if len(kernel) == size and _starts(kernel) else None
            except (ValueError, IndexError, struct.error, OSError, EOFError, lzma.LZMAError, zlib.error, ZstdError):
                return None
    return None


def unpack_lz4(payload: bytes, size: int) -> bytes:
    """What the legacy frames of LZ4 in ``payload`` hold. :class:`ValueError`, :class:`IndexError` when damaged.

    It ends once ``size`` bytes are there.
    """
    whole = bytearray()
    at = 0
    while len(whole) < size:
        length = int.from_bytes(payload[at : at + 4], "little")
        at += 4
        if payload[at - 4 : at] == _LZ4_LEGACY:
            continue
        if not 0 < length <= len(payload) - at:
            raise ValueError("an LZ4 block is cut off")
        whole += _lz4_block(payload[at : at + length])
        at += length
    return bytes(whole)


def _lz4_block(block: bytes) -> bytes:
    done = bytearray()
    at, end = 0, len(block)
    while at < end:
        token = block[at]
        at += 1
        length = token >> 4
        if length == 15:
            while (more := block[at]) == 255:
                length += 255
                at += 1
            length += more
            at += 1
        done += block[at : at + length]
        at += length
        if at >= end:
            break
        distance = block[at] | block[at + 1] << 8
        at += 2
        length = (token & 15) + 4
        if length == 19:
            while (more := block[at]) == 255:
                length += 255
                at += 1
            length += more
            at += 1
        start = len(done) - distance
        if start < 0 or not distance or len(done) + length > _BLOCK_BYTES:
            raise ValueError("an LZ4 block is damaged")
        if distance >= length:
            done += done[start : start + length]
        else:
            pattern = done[start:]
            done += (pattern * (length // distance + 1))[:length]
    return bytes(done)


def _zstd(payload: bytes, size: int) -> bytes:
    return open_zstd(io.BytesIO(payload[:-_SIZE_BYTES])).read(size)


_PACKERS: dict[bytes, Callable[[bytes, int], bytes]] = {
    _LZ4_LEGACY: unpack_lz4,
    ZSTD_MAGIC: _zstd,
    b"\xfd7zXZ\x00": lambda payload, size: lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(payload, size),
    b"\x1f\x8b": lambda payload, size: zlib.decompressobj(wbits=31).decompress(payload, size),
    b"BZh": lambda payload, size: bz2.BZ2Decompressor().decompress(payload, size),
}


def _starts(kernel: bytes) -> bool:
    """Whether this is an ELF file for amd64 with the note of a 32-bit entry; elf(5)."""
    if kernel[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", kernel, 18)[0] != _EM_X86_64:
        return False
    table = struct.unpack_from("<Q", kernel, 32)[0]
    entry_bytes, count = struct.unpack_from("<HH", kernel, 54)
    if entry_bytes != 56 or count > _MAX_SEGMENTS:
        return False
    for number in range(count):
        kind, offset, size = struct.unpack_from("<I4xQ16xQ", kernel, table + 56 * number)
        if kind == _PT_NOTE and _has_entry(kernel[offset : offset + size]):
            return True
    return False


def _has_entry(notes: bytes) -> bool:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        at += 12
        if kind == _PVH_NOTE and notes[at : at + name_size] == b"Xen\0":
            return True
        at += name_size + -name_size % 4 + size + -size % 4
    return False
