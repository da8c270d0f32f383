"""Archives that are broken on purpose: read as states and as layers. ``tests/fuzz/store.py`` runs this round.

What comes out is refused with a typed error, or is a state as any other: it can be read, it is stored by the rule, and
its own archive gives it again.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import tarfile
from collections.abc import Callable
from functools import partial

import zstandard

from agent_sandbox.store.layers import read_layer, write_layer
from agent_sandbox.store.objects import Entry, Type
from agent_sandbox.store.ports import Captured
from agent_sandbox.store.shape import Shapes
from agent_sandbox.store.tarin import read_tar
from agent_sandbox.store.tarinput import Limits
from agent_sandbox.store.tarout import write_tar
from tests.fuzz.broken import Finding, Template, mutated, only_typed, read_all
from tests.unit.store import states, tars
from tests.unit.store.memory import MemoryObjects

LIMITS = Limits(entries=1_000, memory=1 << 20, bytes=1 << 24)
_FIFO = states.Node(Type.FIFO, mode=0o600)
_OLD = states.tree(
    {
        b"a/\xff": states.file(b"not a text", mtime_ns=-1),
        b"a/link": states.file(b"two", inode=1),
        b"long/" + b"n" * 200 + b"/" + b"m" * 200: states.file(b"x" * 600),
        b"b": states.file(b"two", inode=1),
        b"s": states.symlink(b"t" * 300),
        b"p": _FIFO,
        b"sparse": states.file(bytes(8_192) + b"data" * 1_024 + bytes(4_096), holes=True),
        b"x": states.file(b"1", attributes=((b"user.a", b"\x00=\n"), (b"user.b", b""))),
        b"d": states.DIRECTORY,
    }
)
_NEW = states.tree(
    {path: node for path, node in _OLD.items() if path not in (b"p", b"x")} | {b"d": _FIFO, b"new": _FIFO}
)
BASE = MemoryObjects()
ROOT = states.build(BASE, _OLD)


def _written() -> list[bytes]:
    whole, layer = io.BytesIO(), io.BytesIO()
    write_tar(BASE, ROOT, whole)
    write_layer(BASE, ROOT, states.build(BASE, _NEW), layer)
    return [whole.getvalue(), layer.getvalue()]


def _by_hand() -> list[bytes]:
    old = [(tarfile.TarInfo("n" * 150 + "/f"), b"data"), (tarfile.TarInfo("./d/e"), b"")]
    link = tarfile.TarInfo("l")
    link.type, link.linkname = tarfile.LNKTYPE, "n" * 150 + "/f"
    return [
        tars.with_python([*old[:1], (link, b"")], tarfile.GNU_FORMAT),
        tars.with_python(old, tarfile.USTAR_FORMAT),
        tars.raw(b"a/.wh.b") + tars.raw(b"c/.wh..wh..opq") + tars.raw(b"c/d", data=b"x") + tars.END,
        tars.pax([(b"path", b"p" * 300), (b"mtime", b"-1.5"), (b"SCHILY.xattr.user.a", b"v")])
        + tars.raw(b"q")
        + tars.END,
    ]


ARCHIVES = _written() + _by_hand()
_ZSTD = zstandard.ZstdCompressor()
_PACK: list[Callable[[bytes], bytes]] = [gzip.compress, bz2.compress, lzma.compress, _ZSTD.compress]


def with_checksums(data: bytes) -> bytes:
    """The archive with the checksum of every block made right that looks like a header."""
    out = bytearray(data)
    for at in range(0, len(out) - 511, 512):
        if out[at + 257 : at + 262] == b"ustar":
            out[at + 148 : at + 156] = b" " * 8
            out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + 512])
    return bytes(out)


def shuffled(rng: random.Random, data: bytes) -> bytes:
    """The archive with some blocks doubled, dropped or moved, or those of another one between them."""
    blocks = [data[at : at + 512] for at in range(0, len(data), 512)]
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, length = rng.randrange(len(blocks) + 1), rng.choice((1, 2, 3, 5))
        match rng.randrange(4):
            case 0:
                del blocks[at : at + length]
            case 1:
                blocks[at:at] = blocks[at : at + length]
            case 2:
                moved = blocks[at : at + length]
                del blocks[at : at + length]
                to = rng.randrange(len(blocks) + 1)
                blocks[to:to] = moved
            case 3:
                other = rng.choice(ARCHIVES)
                start = 512 * rng.randrange(len(other) // 512)
                blocks[at:at] = [other[start : start + 512]]
    return b"".join(blocks) or bytes(512)


def numbers(rng: random.Random, data: bytes) -> bytes:
    """The archive with another number in one header."""
    out = bytearray(data)
    headers = [at for at in range(0, len(out) - 511, 512) if out[at + 257 : at + 262] == b"ustar"]
    if not headers:
        return data
    at = rng.choice(headers) + rng.choice((100, 108, 116, 124, 136, 156))
    new = rng.choice((b"77777777777\0", b"00000000000\0", b"-0000000001\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"x"))
    out[at : at + len(new)] = new
    return bytes(out)


def archive_round(rng: random.Random, template: Template) -> None:
    data = rng.choice(ARCHIVES)
    for _ in range(rng.choice((1, 1, 2))):
        match rng.randrange(3):
            case 0:
                data = mutated(rng, data, ARCHIVES)
            case 1:
                data = shuffled(rng, data)
            case 2:
                data = numbers(rng, data)
    if rng.random() < 0.7:
        data = with_checksums(data)
    if rng.random() < 0.2:
        data = rng.choice(_PACK)(data)
        if rng.random() < 0.5:
            data = mutated(rng, data, [data])
    for read in (read_state, read_on_top):
        found: list[tuple[MemoryObjects, Captured]] = []
        if only_typed(partial(read, data, found)):
            looked_at(*found[0])


def read_state(data: bytes, found: list[tuple[MemoryObjects, Captured]]) -> None:
    """Read an archive as a state."""
    store = MemoryObjects()
    found.append((store, read_tar(io.BytesIO(data), store, store, limits=LIMITS)))


def read_on_top(data: bytes, found: list[tuple[MemoryObjects, Captured]]) -> None:
    """Read an archive as a layer."""
    store = MemoryObjects()
    root = states.build(store, _OLD)
    found.append((store, read_layer(io.BytesIO(data), store, store, root, limits=LIMITS)))


def looked_at(store: MemoryObjects, captured: Captured) -> None:
    """A state out of an archive is one as any other."""
    root: Entry = captured.root
    read_all(store, root)
    if faults := list(Shapes(store).faults(root)):
        raise Finding(f"it is not stored by the rule: {faults[0]}")
    out = io.BytesIO()
    write_tar(store, root, out)
    out.seek(0)
    other = MemoryObjects()
    again = read_tar(out, other, other)
    if again.root != root:
        raise Finding("its own archive gives another state")
