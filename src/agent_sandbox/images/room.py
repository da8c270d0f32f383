"""How large an image, or what is made of one, may get: as large as the disk allows without filling it.

There is no setting. The work ends with :class:`~agent_sandbox.errors.LimitExceededError` once it has left less than a
twentieth of the file system free (at most 5 GiB), of its bytes or of its inodes: running sandboxes and their snapshots
live on the same disk. It is looked at while the image is written, since what a compressed layer holds is not known
before, and its word for it is not taken.
"""

from __future__ import annotations

import os
from pathlib import Path

from agent_sandbox.errors import LimitExceededError

_SHARE = 20
_MOST_RESERVED_BYTES = 5 << 30


class Room:
    """The room for an image below ``directory``; ``what`` is its name in messages."""

    def __init__(self, directory: Path, what: str = "the image") -> None:
        self._directory = directory
        self._what = what

    def check(self, coming: int = 0) -> None:
        """Raise :class:`LimitExceededError` when there is not enough left, ``coming`` more bytes counted as written."""
        state = os.statvfs(self._directory)
        reserved = min(state.f_blocks * state.f_frsize // _SHARE, _MOST_RESERVED_BYTES)
        if state.f_bavail * state.f_frsize - coming < reserved:
            raise LimitExceededError(
                f"{self._what} is too large for the disk, of which {reserved >> 20} MiB stay free; remove images or"
                " snapshots, or use a larger disk for AGENT_SANDBOX_DATA_DIR"
            )
        if state.f_files and state.f_favail < state.f_files // _SHARE:
            raise LimitExceededError(
                f"{self._what} has too many files for the disk, of which {state.f_files // _SHARE} inodes stay free"
            )
