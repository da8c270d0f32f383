"""Interrupts that clean up: the first one unwinds, the second one forces.

A command that owns something (a sandbox, snapshots) runs inside :func:`handled`. SIGINT, SIGTERM and SIGHUP raise
:class:`Interrupted` at once, except inside :func:`deferred`, where the first is kept until the block is left: a request
whose effect we must know (a create, a destroy) is not torn. The second signal ends the process there and then, which
is said to who waits after the first one for longer than :data:`SAID_SECONDS`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import ClassVar, TypeVar

from agent_sandbox.cli import output

T = TypeVar("T")

SAID_SECONDS = 2.0

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked us to stop. Not an :class:`Exception`, so that nothing swallows it on its way out."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


class _State:
    depth = 0
    received = 0
    pending = 0
    held: ClassVar[list[str]] = []
    """What a second signal would leave behind, one line for each thing that is owned."""
    last_acts: ClassVar[list[Callable[[], object]]] = []
    """What even a second signal does before it ends the process."""


@contextmanager
def handled() -> Iterator[None]:
    """Turn signals into :class:`Interrupted` inside the block, and give the old handlers back after it."""
    _State.depth = _State.received = _State.pending = 0
    _State.held.clear()
    _State.last_acts.clear()
    # One that the caller's caller ignores (nohup, a background job) stays ignored.
    wanted = [signum for signum in _HANDLED if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, _on_signal) for signum in wanted}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Keep the first signal until the block is left; then raise it, unless the block raised something itself."""
    _State.depth += 1
    try:
        yield
    finally:
        _State.depth -= 1
    if _State.pending and _State.depth == 0:
        signum, _State.pending = _State.pending, 0
        raise Interrupted(signum)


@contextmanager
def awaiting(left_behind: str) -> Iterator[None]:
    """Defer signals while something is made that the caller is to be told of, and is told inside the block.

    ``left_behind`` says what may remain when a second signal does not wait for it.
    """
    with deferred():
        _State.held.append(left_behind)
        try:
            yield
        finally:
            _State.held.pop()


def is_pending() -> bool:
    """Whether a signal has come inside :func:`deferred` and waits for its end."""
    return _State.pending != 0


@contextmanager
def owning(make: Callable[[], T], release: Callable[[T], object], left_behind: Callable[[T], str]) -> Iterator[T]:
    """Hold something made inside the block: a signal, an error and the normal end all release it.

    ``left_behind`` says what remains when a second signal cuts the release short.
    """
    made: list[T] = []
    try:
        with deferred():
            made.append(make())
            _State.held.append(left_behind(made[0]))
        yield made[0]
    finally:
        if made:
            with deferred():
                release(made[0])
            _State.held.pop()


@contextmanager
def also_when_forced(act: Callable[[], object]) -> Iterator[None]:
    """Do ``act`` at the end of the block, and also when a second signal ends the process inside it."""
    _State.last_acts.append(act)
    try:
        yield
    finally:
        _State.last_acts.remove(act)
        act()


def _on_signal(signum: int, frame: FrameType | None) -> None:
    _State.received += 1
    if _State.received > 1:
        for act in reversed(_State.last_acts):
            with suppress(Exception):
                act()
        for line in ("", *(f"agent-sandbox: {text}" for text in _State.held)):
            os.write(sys.stderr.fileno(), f"{line}\n".encode(errors="replace"))
        os._exit(128 + signum)
    if _State.depth:
        _State.pending = signum
        timer = threading.Timer(SAID_SECONDS, _say_why_not_yet)
        timer.daemon = True
        timer.start()
    else:
        raise Interrupted(signum)


def _say_why_not_yet() -> None:
    if _State.pending:
        output.note(
            "ends when the server has answered, so that nothing is left behind; a second interrupt does not wait"
        )
