"""Every call that is about files, built as a value. Modes are permission bits, sent in octal."""

from __future__ import annotations

import math

from agent_sandbox import models
from agent_sandbox.client.call import (
    BYTES,
    TAR,
    Call,
    as_list,
    as_nothing,
    as_number,
    as_shape,
    flag,
    post,
    sandbox_path,
)
from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.types import WORKSPACE

PART_BYTES = 4 * 1024 * 1024
"""What one request reads of a file that is too large for one: below any sensible MAX_FILE_BYTES."""

PIECE_BYTES = 256 * 1024
"""What is read of a local file at once while it is sent."""

ARCHIVE_SECONDS = 3600.0
"""How long an archive may be without a byte: the daemon reads a large tree before it has something to say."""


def read(sandbox_id: str, path: str, offset: int = 0, length: int | None = None) -> Call[bytes]:
    """Read a file, or a part of it; nothing behind its end."""
    target = sandbox_path(sandbox_id, "/files", path=path)
    if offset == 0 and length is None:
        return Call("GET", target, bytes)
    if offset < 0 or (length is not None and length < 1):
        raise InvalidRequestError("an offset must not be negative, and a length at least 1")
    end = "" if length is None else str(offset + length - 1)
    return Call("GET", target, bytes, headers={"Range": f"bytes={offset}-{end}"}, expect=206, instead={416: b""})


def write(sandbox_id: str, path: str, data: bytes | str | None, mode: int) -> Call[models.FileInfo]:
    """Write a file; text as UTF-8. Without ``data`` the client sends a body of its own."""
    content = data.encode() if isinstance(data, str) else data
    target = sandbox_path(sandbox_id, "/files", path=path, mode=octal(mode))
    return Call("PUT", target, as_shape(models.FileInfo), content, BYTES)


def list_files(sandbox_id: str, path: str = WORKSPACE) -> Call[list[models.FileInfo]]:
    """List a directory."""
    target = sandbox_path(sandbox_id, "/files/list", path=path)
    return Call("GET", target, as_list("entries", models.FileInfo.from_json))


def stat(sandbox_id: str, path: str, *, follow: bool) -> Call[models.FileStat]:
    """Look at a file."""
    target = sandbox_path(sandbox_id, "/files/stat", path=path, follow=flag(follow))
    return Call("GET", target, as_shape(models.FileStat))


def mkdir(sandbox_id: str, path: str, mode: int, *, parents: bool) -> Call[models.FileStat]:
    """Make a directory."""
    body = {"path": path, "mode": octal(mode), "parents": parents}
    return post(sandbox_path(sandbox_id, "/files/mkdir"), body, as_shape(models.FileStat))


def move(sandbox_id: str, source: str, target: str, *, replace: bool) -> Call[models.FileStat]:
    """Give a file another name."""
    body = {"from": source, "to": target, "replace": replace}
    return post(sandbox_path(sandbox_id, "/files/move"), body, as_shape(models.FileStat))


def remove(sandbox_id: str, path: str, *, recursive: bool) -> Call[int]:
    """Remove a name."""
    body = {"path": path, "recursive": recursive}
    return post(sandbox_path(sandbox_id, "/files/remove"), body, as_number("removed"))


def chmod(sandbox_id: str, path: str, mode: int) -> Call[models.FileStat]:
    """Change permission bits."""
    body = {"path": path, "mode": octal(mode)}
    return post(sandbox_path(sandbox_id, "/files/chmod"), body, as_shape(models.FileStat))


def archive(sandbox_id: str, path: str) -> Call[bytes]:
    """Read a directory as a tar."""
    return Call("GET", sandbox_path(sandbox_id, "/archive", path=path), bytes, wait=ARCHIVE_SECONDS)


def extract(sandbox_id: str, path: str) -> Call[None]:
    """Extract a tar, which the client sends as the body, into a directory."""
    target = sandbox_path(sandbox_id, "/archive", path=path)
    return Call("PUT", target, as_nothing, None, TAR, wait=ARCHIVE_SECONDS)


def watch(sandbox_id: str, path: str, *, recursive: bool) -> Call[models.WatchEvent]:
    """Watch a directory; ``decode`` reads one line."""
    target = sandbox_path(sandbox_id, "/watch", path=path, recursive=flag(recursive))
    return Call("GET", target, as_shape(models.WatchEvent), wait=math.inf)


def octal(mode: int) -> str:
    """Write permission bits as the server reads them."""
    return f"{mode:03o}"
