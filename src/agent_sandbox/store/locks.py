"""The lock of a store: shared by whoever reads or writes, exclusive for gc.

Between processes it is ``flock`` on ``lock``, which the kernel lets go of with the process. Inside one process many
threads share one descriptor, so holds are counted here, and three rules keep them from waiting for each other:

* A thread that holds the store gets it again at once (operations call each other).
* ``inner`` holds (one read, one look-up) go through while any operation of the process holds the store: they come from
  the worker threads of such an operation.
* A new operation waits behind a gc of this process that waits already, so that a busy server cannot starve it.

Every wait ends: with the lock, or with :class:`StoreBusyError`.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_sandbox.errors import StoreBusyError, StoreError

_POLL_SECONDS = 0.02
"""``flock`` has no wait with an end; this is how often it is asked again."""


class StoreLock:
    """The lock file ``path``, which exists. Safe for threads; not to be carried over a ``fork``."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise StoreError(f"cannot open the lock {path}: {error.strerror}") from error
        self._path = path
        self._changed = threading.Condition()
        self._holders: Counter[int] = Counter()
        self._owner: int | None = None
        self._waiting = 0

    @contextmanager
    def shared(self, wait_seconds: float, *, inner: bool = False) -> Iterator[bool]:
        """Hold the store against gc; yields whether nobody in this process held it before.

        :class:`StoreBusyError` when gc holds it for longer than ``wait_seconds``.
        """
        me = threading.get_ident()
        with self._changed:
            nested = bool(self._holders[me]) or self._owner == me or (inner and self._holders.total() > 0)
            first = not self._holders.total() and self._owner is None
            if not nested:
                self._wait(
                    wait_seconds, lambda: self._owner is None and not self._waiting and self._shared(), "gc holds it"
                )
                first = not self._holders.total()
            self._holders[me] += 1
        try:
            yield first
        finally:
            with self._changed:
                self._holders[me] -= 1
                if not self._holders[me]:
                    del self._holders[me]
                if not self._holders.total() and self._owner is None:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
                self._changed.notify_all()

    @contextmanager
    def exclusive(self, wait_seconds: float) -> Iterator[None]:
        """Hold the store alone. :class:`StoreBusyError` when others use it for longer than ``wait_seconds``."""
        me = threading.get_ident()
        with self._changed:
            self._waiting += 1
            try:
                self._wait(
                    wait_seconds,
                    lambda: self._owner is None and not self._holders.total() and self._flock(fcntl.LOCK_EX),
                    "others use it",
                )
            finally:
                self._waiting -= 1
                self._changed.notify_all()
            self._owner = me
        try:
            yield
        finally:
            with self._changed:
                self._owner = None
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                self._changed.notify_all()

    def close(self) -> None:
        """Let go of everything."""
        os.close(self._fd)

    def _shared(self) -> bool:
        return self._holders.total() > 0 or self._flock(fcntl.LOCK_SH)

    def _flock(self, how: int) -> bool:
        try:
            fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreError(f"cannot lock {self._path}: {error.strerror}") from error
        return True

    def _wait(self, seconds: float, ready: Callable[[], bool], why: str) -> None:
        until = time.monotonic() + seconds
        while not ready():
            left = until - time.monotonic()
            if left <= 0:
                raise StoreBusyError(f"the store {self._path.parent} is busy: {why}; try again later")
            self._changed.wait(min(left, _POLL_SECONDS))
