"""Ranges of host ids: which are taken on this host, and by which environment.

All servers on a host share one directory. A taken range is a symbolic link in it: its name is the first id of the
range, its target the directory of the environment that has it. So a claim is made in one step, is never half-written,
and says whose it is. The directory outlives reboots, as the files that a stopped sandbox's ids own do.

A claim whose environment's directory has gone (removed by hand, or by a server that was killed) counts as free once
nothing else is. The lowest free range is taken. The functions block for well under a millisecond.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from agent_sandbox.errors import LimitExceededError

SIZE = 65_536
"""Ids of a range: all that a program in a sandbox can name in 16 bits, ``nobody`` included."""
END = 0x7FFE_0000
"""No range reaches here: ids from here on are systemd's, and those above 2^31 upset programs that count in 32 bits."""


class IdRanges:
    """The claims in ``directory``, for ranges from id ``first`` on, a multiple of 65,536."""

    def __init__(self, directory: Path, first: int) -> None:
        self._directory = directory
        self._first = first

    def prepare(self) -> None:
        """Make the directory where there is none."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def claim(self, owner: Path) -> int:
        """Take the lowest free range for the environment in ``owner``, which exists; return its first id.

        :class:`LimitExceededError` when all are taken.
        """
        with self._locked():
            taken = {path.name for path in self._directory.iterdir()}
            names = [str(base) for base in range(self._first, END - SIZE + 1, SIZE)]
            free = (name for name in names if name not in taken)
            name = next(free, None) or next((name for name in names if not self._alive(name)), None)
            if name is None:
                raise LimitExceededError(
                    f"all {len(names)} ranges of host ids are taken; destroy sandboxes or lower "
                    "AGENT_SANDBOX_ID_RANGE_BASE"
                )
            self._write(name, owner)
            return int(name)

    def keep(self, base: int, owner: Path) -> bool:
        """Claim the range at ``base`` that a record says ``owner`` has; False when another environment has it."""
        name = str(base)
        with self._locked():
            if self._owner(name) == str(owner):
                return True
            if self._owner(name) is not None and self._alive(name):
                return False
            self._write(name, owner)
            return True

    def find(self, owner: Path) -> int | None:
        """The first id of the range that ``owner`` has, None where it has none."""
        with contextlib.suppress(FileNotFoundError), self._locked():
            for path in self._directory.iterdir():
                if self._owner(path.name) == str(owner):
                    return int(path.name)
        return None

    def release(self, owner: Path) -> None:
        """Give back whatever ``owner`` has."""
        with contextlib.suppress(FileNotFoundError), self._locked():
            for path in self._directory.iterdir():
                if self._owner(path.name) == str(owner):
                    path.unlink()

    def _owner(self, name: str) -> str | None:
        try:
            return str((self._directory / name).readlink())
        except OSError:
            return None

    def _alive(self, name: str) -> bool:
        owner = self._owner(name)
        return owner is not None and Path(owner).is_dir()

    def _write(self, name: str, owner: Path) -> None:
        path = self._directory / name
        path.unlink(missing_ok=True)
        path.symlink_to(owner)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
