"""How long a server that starts is waited for: as long as it works, and never for ever.

A quiet machine needs a second. One that is emulated, twice even, needs a minute for Python's imports alone, and nobody
can say ahead how slow it is; but a process that uses the processor gets on, and one that uses none for
:data:`QUIET_SECONDS` hangs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_sandbox.cli import output

QUIET_SECONDS = 20.0
"""How long it may use no processor at all: a slow disk is waited for that long."""
LONGEST_SECONDS = 300.0
"""Longest wait in all: some five times what a machine in an emulated machine was seen to take."""
TOLD_SECONDS = 10.0
"""When somebody who waits is told for what."""
_LOOK_SECONDS = 1.0


class Patience:
    """Whether to wait any longer for a process. Pure: seconds of a clock and ticks of its work come in."""

    def __init__(self, now: float) -> None:
        self._moved = now
        self._looked = float("-inf")
        self._end = now + LONGEST_SECONDS
        self._ticks = -1

    def wants_look(self, now: float) -> bool:
        """Whether the ticks should be read again."""
        return now - self._looked >= _LOOK_SECONDS

    def look(self, now: float, ticks: int) -> None:
        """Take what the process has worked up to now."""
        self._looked = now
        if ticks != self._ticks:
            self._ticks, self._moved = ticks, now

    def lasts(self, now: float) -> bool:
        """Whether there is any left."""
        return now < self._end and now - self._moved < QUIET_SECONDS


def worked(session: int) -> int:
    """Return the clock ticks that the processes of a session, and the ended ones among their children, have used.

    See proc_pid_stat(5). 0 when there are none.
    """
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(int(field) for field in fields[11:15])
    return ticks


@contextmanager
def told(text: str) -> Iterator[None]:
    """Print a note when the block takes longer than :data:`TOLD_SECONDS`."""
    timer = threading.Timer(TOLD_SECONDS, output.note, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
