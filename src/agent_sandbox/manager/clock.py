"""The clock by which sandboxes live."""

from __future__ import annotations

import time
from collections.abc import Callable


def _since_boot() -> float:
    """clock_gettime(2), CLOCK_BOOTTIME: nobody can set it, and it goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Gives seconds since the epoch: the host's clock when this one was made, and the time since.

    A step of the host's clock (somebody sets it, or it is corrected late after a boot) moves no expiry of a server that
    runs. The times that the server shows are this clock's, so they differ by the step until it is started again.
    """

    def __init__(self, wall: Callable[[], float] = time.time, since_boot: Callable[[], float] = _since_boot) -> None:
        self._since_boot = since_boot
        self._boot = wall() - since_boot()

    def __call__(self) -> float:
        return self._boot + self._since_boot()
