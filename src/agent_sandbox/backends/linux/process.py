"""A process of this host, named so that it is never mistaken for a later one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """A process that a pid alone would not name for good: ``start`` is field 22 of proc_pid_stat(5)."""

    pid: int
    start: int

    def alive(self) -> bool:
        """Whether it still runs; zombies do not."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        fields = text[text.rindex(")") + 2 :].split()
        return int(fields[19]) == self.start and fields[0] not in ("Z", "X")
