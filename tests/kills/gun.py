"""The kills: drawn from the seed, fired at a moment, after a request went out, or right after a reply came in."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LONGEST_LOAD_SECONDS = 8.0
"""A kill that waits for a certain request is fired by then in any case."""

How = Literal["moment", "sent", "replied"]


@dataclass(frozen=True)
class Plan:
    """One kill. ``worker`` is sent to do ``op`` after ``warm`` other requests; ``delay`` is in seconds.

    ``again`` is when the next server is killed too, in seconds after its start, while it finds its sandboxes again.
    """

    how: How
    op: str
    worker: int
    warm: int
    delay: float
    again: float | None

    @classmethod
    def draw(cls, rng: random.Random, ops: Sequence[str], workers: int) -> Plan:
        """Draw the next one."""
        ways: tuple[How, ...] = ("moment", "sent", "sent", "replied", "replied")
        how = rng.choice(ways)
        op, worker, warm = rng.choice(ops), rng.randrange(workers), rng.randrange(12)
        delay = rng.uniform(0.1, 3.0) if how == "moment" else rng.uniform(0.0, 0.25) * rng.random()
        return cls(how, op, worker, warm, delay, rng.uniform(0.2, 2.0) if rng.random() < 0.15 else None)

    def __str__(self) -> str:
        when = {
            "moment": f"{self.delay * 1000:.0f} ms into the load",
            "sent": f"{self.delay * 1000:.0f} ms after a {self.op} was sent",
            "replied": f"right after the reply of a {self.op}",
        }[self.how]
        return when + (f", and {self.again * 1000:.0f} ms into the next start" if self.again is not None else "")


class Gun:
    """Kills one server process, once. The workers tell it what they send and what comes back."""

    def __init__(self, plan: Plan, pid: int) -> None:
        self.plan = plan
        self.fired = threading.Event()
        self._pid = pid
        self._lock = threading.Lock()
        self._timers = [threading.Timer(plan.delay if plan.how == "moment" else LONGEST_LOAD_SECONDS, self.fire)]
        self._timers[0].start()

    def sent(self, worker: int, op: str) -> None:
        """A worker sends a request now."""
        if self.plan.how == "sent" and (worker, op) == (self.plan.worker, self.plan.op):
            self._timers.append(threading.Timer(self.plan.delay, self.fire))
            self._timers[-1].start()

    def replied(self, worker: int, op: str) -> None:
        """A worker has got the reply."""
        if self.plan.how == "replied" and (worker, op) == (self.plan.worker, self.plan.op):
            self.fire()

    def fire(self) -> None:
        """Kill it."""
        with self._lock:
            if not self.fired.is_set():
                os.kill(self._pid, signal.SIGKILL)
                self.fired.set()

    def put_away(self) -> None:
        """End the timers; :meth:`fire` has been called or never will be."""
        for timer in self._timers:
            timer.cancel()
            timer.join()
