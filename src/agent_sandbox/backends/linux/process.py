"""A process of this host, named so that it is never mistaken for a later one."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Process:
    """A process that a pid alone would not name for good: ``start`` is field 22 of proc_pid_stat(5)."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has this pid now, None without one."""
        fields = _stat(pid)
        return cls(pid, int(fields[19])) if fields else None

    def alive(self) -> bool:
        """Whether it still runs; zombies do not."""
        fields = _stat(self.pid)
        return bool(fields) and int(fields[19]) == self.start and fields[0] not in ("Z", "X")


def processes_of(uid: int) -> list[Process]:
    """The processes of this host that run as ``uid``."""
    found = []
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid and (process := Process.of(int(entry.name))):
                found.append(process)
    return found


def _stat(pid: int) -> list[str]:
    """The fields of proc_pid_stat(5) from the third on, none where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()
