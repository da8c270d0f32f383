"""Foreign errors of this backend, translated in one table.

What the operating system says about the host's own resources becomes the caller's situation; the system's words stay in
the message, paths below the data directory do not.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator

from agent_sandbox.errors import BackendError, LimitExceededError, SandboxError

_FULL = "the server's disk is full; free some space or lower disk_mb"
_DESCRIPTORS = "the server has no file descriptors left; raise its limit (ulimit -n) or run fewer sandboxes"
_MEMORY = "the server has no memory or processes left; run fewer sandboxes"
_ROOT = "the server lacks a privilege that sandboxes need; run it as root outside of containers"

TABLE: dict[int, tuple[type[SandboxError], str]] = {
    errno.ENOSPC: (LimitExceededError, _FULL),
    errno.EDQUOT: (LimitExceededError, _FULL),
    errno.EMFILE: (LimitExceededError, _DESCRIPTORS),
    errno.ENFILE: (LimitExceededError, _DESCRIPTORS),
    errno.ENOMEM: (LimitExceededError, _MEMORY),
    errno.EAGAIN: (LimitExceededError, _MEMORY),
    errno.EPERM: (BackendError, _ROOT),
    errno.EACCES: (BackendError, _ROOT),
    errno.EROFS: (BackendError, "the server's data directory is on a read-only file system"),
    errno.ENODEV: (BackendError, "the kernel lacks a file system that sandboxes need (ext4, overlay, loop devices)"),
    errno.ENXIO: (BackendError, "the kernel lacks loop devices; load them with: modprobe loop"),
    errno.EBUSY: (BackendError, "a resource of the host is busy"),
}


def translate(error: BaseException, doing: str) -> SandboxError:
    """Turn ``error``, met while ``doing`` something, into one that may leave the backend."""
    if isinstance(error, SandboxError):
        return error
    if isinstance(error, OSError):
        kind, text = TABLE.get(error.errno or 0, (BackendError, "the host refused"))
        words = os.strerror(error.errno) if error.errno else type(error).__name__
        return kind(f"{doing} failed: {text} ({words})")
    return BackendError(f"{doing} failed: {type(error).__name__}: {error}")


@contextlib.asynccontextmanager
async def translated(doing: str) -> AsyncIterator[None]:
    """Let only errors of our own tree out of a block; ``doing`` says in words what failed."""
    try:
        yield
    except Exception as error:
        ours = translate(error, doing)
        if ours is error:
            raise
        raise ours from error
