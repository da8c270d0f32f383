"""The daemon's executable as sandboxes have it open: kept by its content, whatever becomes of the original.

::

    DATA_DIR/<backend>/daemons/<digest>     0755

An upgrade replaces the file that sandboxes are started from, perhaps in the moment of a start, and a sandbox that goes
on from a checkpoint needs the very program that is in its memory. So each is started from a copy that nobody writes,
and a checkpoint names that. The functions block for a few milliseconds.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path

from agent_sandbox.errors import ConflictError

_KEPT = 32
"""Copies of 2 MB each: a checkpoint older than that many releases of the daemon cannot go on."""
_DIGEST_CHARACTERS = 32


class Daemons:
    """The copies in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, program: Path) -> Path:
        """Copy ``program``, unless there is a copy; return that."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy = self._directory / hashlib.sha256(program.read_bytes()).hexdigest()[:_DIGEST_CHARACTERS]
        if not copy.exists():
            aside = self._directory / f".new-{secrets.token_hex(8)}"
            try:
                shutil.copyfile(program, aside)
                aside.chmod(0o755)
                aside.replace(copy)
            finally:
                aside.unlink(missing_ok=True)
        os.utime(copy)
        self._evict()
        return copy

    def find(self, digest: str) -> Path:
        """The copy of this digest. :class:`ConflictError` when it is not kept any more."""
        copy = self._directory / digest
        if len(digest) != _DIGEST_CHARACTERS or not digest.isalnum() or not copy.is_file():
            raise ConflictError("the checkpoint is of another release, whose daemon is not kept any more")
        return copy

    def _evict(self) -> None:
        for stale in self._directory.glob(".new-*"):
            stale.unlink(missing_ok=True)
        newest_first = sorted(self._directory.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest_first[_KEPT:]:
            path.unlink(missing_ok=True)
