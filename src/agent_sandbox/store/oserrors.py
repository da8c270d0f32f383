"""What an error of the system means where a tree is read or laid out: one table."""

from __future__ import annotations

import errno

from agent_sandbox.errors import (
    ConflictError,
    ForbiddenError,
    LimitExceededError,
    SandboxError,
    StoreError,
    StoreFullError,
)

MEANINGS: dict[int, type[SandboxError]] = {
    errno.ENOSPC: StoreFullError,
    errno.EDQUOT: StoreFullError,
    errno.EACCES: ForbiddenError,
    errno.EPERM: ForbiddenError,
    errno.EROFS: ForbiddenError,
    errno.EMFILE: LimitExceededError,
    errno.ENFILE: LimitExceededError,
    # Somebody else changes the same directory:
    errno.EEXIST: ConflictError,
    errno.ENOENT: ConflictError,
    errno.ENOTDIR: ConflictError,
    errno.EISDIR: ConflictError,
    errno.ENOTEMPTY: ConflictError,
    errno.ELOOP: ConflictError,
    errno.ESTALE: ConflictError,
}
"""Every other number (EIO, EFBIG, ENOTSUP, EMLINK, ENAMETOOLONG, …) is :class:`StoreError`: this file system cannot."""
_SHOWN = 400


def shown(path: bytes) -> str:
    """Return a path, relative to the workspace, as messages show it: printable and at most about 400 characters."""
    text = path.decode(errors="backslashreplace")
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 2 :]}"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text or "the directory itself"


def failure(error: OSError, doing: str, path: bytes) -> SandboxError:
    """Return the error to raise where ``doing`` (a verb) something with ``path`` failed."""
    kind = MEANINGS.get(error.errno or 0, StoreError)
    return kind(f"cannot {doing} {shown(path)}: {error.strerror or error}")
