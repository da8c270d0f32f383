"""The digest of a tree: what an imported image is known by.

It is ``sha256:`` and the hexadecimal SHA-256 over the line ``agent-sandbox tree 1`` and, for each directory of a walk
from the root, parents first and names sorted as bytes, the record of the directory itself (the root's path is empty)
and of its other entries. A record is one line and two byte strings::

    TYPE MODE UID GID len(path) len(body)\\n path body

TYPE is ``d``, ``f``, ``l`` or ``p`` (directory, file, symbolic link, FIFO), MODE the permission bits with set-id and
sticky bits in octal, the other numbers decimal. The body is the SHA-256 (32 bytes) of a file's content, the target of a
link, and else empty. Times, attributes and which names share an inode do not count.

When changing this: count the first line up. Stored digests stay as they are.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PIECE = 1 << 20
_TYPES = {stat.S_IFDIR: b"d", stat.S_IFREG: b"f", stat.S_IFLNK: b"l", stat.S_IFIFO: b"p"}


@dataclass(frozen=True, slots=True)
class TreeSummary:
    """A tree's digest, the bytes of its regular files, and its entries."""

    digest: str
    file_bytes: int
    entries: int


def summarize(root: Path, progress: Callable[[int], None]) -> TreeSummary:
    """Walk the tree at ``root``, following no link; ``progress`` gets the bytes read so far."""
    whole = hashlib.sha256(b"agent-sandbox tree 1\n")
    file_bytes = entries = 0
    linked: dict[int, bytes] = {}
    base = os.fsencode(root)
    for top, directories, files, descriptor in os.fwalk(base, onerror=fail):
        above = top[len(base) :].strip(b"/")
        whole.update(_record(os.fstat(descriptor), above, b""))
        entries += 1
        links = [name for name in directories if stat.S_ISLNK(os.lstat(name, dir_fd=descriptor).st_mode)]
        directories[:] = sorted(set(directories) - set(links))
        for name in sorted(files + links):
            state = os.lstat(name, dir_fd=descriptor)
            body = b""
            if stat.S_ISLNK(state.st_mode):
                body = os.readlink(name, dir_fd=descriptor)
            elif stat.S_ISREG(state.st_mode):
                body = linked.get(state.st_ino) or _content(name, descriptor)
                if state.st_nlink > 1:
                    linked[state.st_ino] = body
                file_bytes += state.st_size
                progress(file_bytes)
            whole.update(_record(state, above + b"/" + name if above else name, body))
            entries += 1
    return TreeSummary(f"sha256:{whole.hexdigest()}", file_bytes, entries)


def fail(error: OSError) -> None:
    """End a walk that :func:`os.fwalk` would go on with."""
    raise error


def _record(state: os.stat_result, path: bytes, body: bytes) -> bytes:
    kind, mode = _TYPES[stat.S_IFMT(state.st_mode)], stat.S_IMODE(state.st_mode)
    return b"%s %o %d %d %d %d\n%s%s" % (kind, mode, state.st_uid, state.st_gid, len(path), len(body), path, body)


def _content(name: bytes, directory: int) -> bytes:
    found = hashlib.sha256()
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.digest()
