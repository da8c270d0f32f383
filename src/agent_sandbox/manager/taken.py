"""Reading a workspace as values: where it is read from, and what was kept of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from agent_sandbox.store import Created, HeadMoved, Report, Store, UpToDate
from agent_sandbox.store.ports import Progress
from agent_sandbox.types import ExportReport

MAX_SKIPPED = 100
"""Paths that a snapshot's record names; it counts all of them."""
_SKIPPED_BYTES = 48 << 10
"""Of these paths together: each may have 250 KiB, and the records of all snapshots are read for a list of them."""

Outcome = tuple[Created | UpToDate | HeadMoved, ExportReport | None]


@dataclass(frozen=True)
class Source:
    """A workspace that can be read once: ``read`` makes it the next commit of a branch, in a thread.

    Beside the store's outcome it gives what the backend left out before the store saw it. Its last argument is the
    commit that layers below the workspace show, where that alone is enough. ``paced``: the sandbox decides how long
    reading takes.
    """

    read: Callable[[Store, str, Progress, bytes | None], Outcome]
    paced: bool = False


@dataclass(frozen=True)
class Taken:
    """A state that was kept: its commit in hexadecimal digits, what the capture saw, and what never came to it."""

    commit: str
    report: Report
    exported: ExportReport | None = None

    def skipped(self) -> tuple[tuple[str, str], ...]:
        """The first paths that were left out, with why."""
        room, named = _SKIPPED_BYTES, []
        left = [(os.fsdecode(item.path), item.why.value) for item in self.report.left_out[:MAX_SKIPPED]]
        for path, why in [*(self.exported.skipped if self.exported else ()), *left][:MAX_SKIPPED]:
            room -= len(os.fsencode(path))
            if room < 0:
                break
            named.append((path, why))
        return tuple(named)

    @property
    def skipped_total(self) -> int:
        """How many paths were left out."""
        return self.report.left_out_count + (self.exported.skipped_total if self.exported else 0)


@dataclass(frozen=True)
class Aside:
    """A state that is kept for the moment: ``branch`` names it, and may be moved."""

    branch: str
    taken: Taken
