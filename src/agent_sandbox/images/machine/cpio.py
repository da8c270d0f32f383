"""A cpio archive of the form newc, which the kernel unpacks as its first root file system.

A pure function, the same bytes for the same entries: no times, owners or inode numbers of this host. The form is that
of the kernel's Documentation/driver-api/early-userspace/buffer-format.rst: for each entry a header of 110 characters
(magic and thirteen hexadecimal numbers), the name with a NUL, the content, both padded to four bytes; the last entry is
called ``TRAILER!!!``.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass

_MAGIC = b"070701"
_TRAILER = b"TRAILER!!!"
_LARGEST = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Entry:
    """A directory or a regular file, owned by root. ``mode`` is the type and permission bits of stat(2)."""

    path: str
    mode: int
    content: bytes = b""


def directory(path: str) -> Entry:
    """A directory that everybody may read."""
    return Entry(path, stat.S_IFDIR | 0o755)


def file(path: str, content: bytes, mode: int = 0o644) -> Entry:
    """A regular file."""
    return Entry(path, stat.S_IFREG | mode, content)


def pack(entries: Iterable[Entry]) -> bytes:
    """The archive of the entries, parents before what is in them. :class:`ValueError` for paths that it cannot hold."""
    packed = bytearray()
    for number, entry in enumerate(entries, start=1):
        name = entry.path.encode()
        if not name or name.startswith(b"/") or b"\0" in name or name == _TRAILER or len(entry.content) > _LARGEST:
            raise ValueError(f"no entry of a cpio archive: {entry.path!r}")
        _add(packed, name, entry.content, number, entry.mode, links=2 if stat.S_ISDIR(entry.mode) else 1)
    _add(packed, _TRAILER, b"", 0, 0, links=1)
    return bytes(packed)


def _add(packed: bytearray, name: bytes, content: bytes, number: int, mode: int, links: int) -> None:
    owner_and_time, devices = (0, 0), (0, 0, 0, 0)
    fields = (number, mode, *owner_and_time, links, 0, len(content), *devices, len(name) + 1, 0)
    packed += _MAGIC + b"".join(b"%08X" % field for field in fields)
    for part in (name + b"\0", content):
        packed += part
        packed += bytes(-len(packed) % 4)
