"""Archives made for tests by other means than the code under test: byte by byte, and by Python's ``tarfile``."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable

from agent_sandbox.store import walk
from agent_sandbox.store.objects import Entry, Kind, Type, decode_attrs
from agent_sandbox.store.ports import Objects

END = bytes(1024)


def raw(
    name: bytes,
    kind: bytes = b"0",
    data: bytes = b"",
    *,
    link: bytes = b"",
    mode: bytes = b"0000644\0",
    mtime: bytes = b"00000000005\0",
    owner: bytes = b"0000000\x000000000\0",
    size: bytes | None = None,
    magic: bytes = b"ustar\x0000",
    tail: bytes = b"",
) -> bytes:
    """One member: its header with every field as given, and its data filled up. ``tail`` is what follows the magic."""
    size = b"%011o\0" % len(data) if size is None else size
    block = b"".join((name.ljust(100, b"\0"), mode, owner, size, mtime, b" " * 8, kind, link.ljust(100, b"\0"), magic))
    block = (block + tail).ljust(512, b"\0")
    assert len(block) == 512
    return block[:148] + b"%06o\0 " % sum(block) + block[156:] + data + bytes(-len(data) % 512)


def pax(records: Iterable[tuple[bytes, bytes]], kind: bytes = b"x") -> bytes:
    """A pax header with these records (POSIX: length, blank, key, equals sign, value, newline)."""
    body = b""
    for key, value in records:
        length = len(key) + len(value) + 4
        while len(b"%d %s=%s\n" % (length, key, value)) != length:
            length += 1
        body += b"%d %s=%s\n" % (length, key, value)
    return raw(b"pax", kind, body)


def with_python(members: Iterable[tuple[tarfile.TarInfo, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive as Python writes it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, encoding="utf-8", errors="surrogateescape") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def listing(objects: Objects, root: Entry) -> dict[str, str]:
    """Each path of a state with a short word for what is there: content, ``-> target``, ``/``, ``|``."""

    def word(entry: Entry) -> str:
        match entry.type:
            case Type.FILE:
                return b"".join(walk.data(objects, entry)).decode(errors="backslashreplace")
            case Type.SYMLINK:
                return "-> " + entry.target.decode(errors="backslashreplace")
            case Type.DIRECTORY:
                return "/"
            case Type.FIFO:
                return "|"

    return {path.decode(errors="backslashreplace"): word(entry) for path, entry in walk.walk(objects, root)}


def attributes(objects: Objects, entry: Entry) -> dict[bytes, bytes]:
    """The extended attributes of an entry."""
    return dict(decode_attrs(objects.read(entry.attrs, Kind.ATTRS))) if entry.attrs else {}
