"""A person's terminal joined to one in a sandbox.

The local terminal is raw while they are joined: every key goes to the sandbox, ^C, ^D and ^Z too, and its line
discipline there makes of them what a program expects. The local state is put back on every way out: the command's end,
a lost connection, a signal, a second signal. (Nothing can be done about SIGKILL: ``stty sane`` mends it.)

One thread writes what comes; the main one reads keys and hears of signals, since only it may have handlers. SIGWINCH
and SIGCONT wake it through a pipe.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from agent_sandbox.cli import output, signals
from agent_sandbox.errors import InvalidRequestError, SandboxError

if TYPE_CHECKING:
    from agent_sandbox.client import Terminal

KEYS_BYTES = 16 * 1024
"""What is read of a paste at once."""
JOIN_SECONDS = 5.0
"""How long the last output may take once the connection is closed."""


def require_terminal() -> None:
    """Raise :class:`InvalidRequestError` where there is no terminal to work with."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequestError(
            "this needs a terminal for input and output; in a script or pipe use exec -i, or exec without -t"
        )


def size() -> tuple[int, int]:
    """Rows and columns of the terminal; 24 and 80 where it does not say."""
    try:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        lines, columns = 24, 80
    return lines or 24, columns or 80


def join(terminal: Terminal) -> None:
    """Join the local terminal to one in a sandbox, until the command there ends; then it has an ``exit``.

    Raises what breaks the connection. When this terminal goes away, the connection is closed.
    """
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    shown = _Shown(terminal, wake)
    try:
        with _raw() as again, _waking(wake):
            shown.start()
            try:
                _type(terminal, woken, again)
            finally:
                terminal.close()
                shown.join(JOIN_SECONDS)
    finally:
        os.close(woken)
        os.close(wake)
    if terminal.missed:
        output.note(f"{terminal.missed} bytes of output came faster than this terminal took them, and are not shown")
    if shown.error is not None:
        raise shown.error


class _Shown(threading.Thread):
    """Writes what the sandbox's terminal shows; wakes the main thread at the end."""

    def __init__(self, terminal: Terminal, wake: int) -> None:
        super().__init__(name="terminal", daemon=True)
        self._terminal = terminal
        self._wake = os.dup(wake)
        self.error: SandboxError | OSError | None = None

    def run(self) -> None:
        try:
            while data := self._terminal.read():
                view = memoryview(data)
                while view:
                    view = view[os.write(sys.stdout.fileno(), view) :]
        except (SandboxError, OSError) as error:
            self.error = error
        finally:
            os.write(self._wake, b"x")
            os.close(self._wake)


def _type(terminal: Terminal, woken: int, again: object) -> None:
    assert callable(again)
    keys = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([keys, woken], [], [])
        if woken in ready:
            events = os.read(woken, 64)
            if b"x" in events:
                return
            if b"c" in events:
                again()
            terminal.resize(*size())
        if keys in ready:
            data = os.read(keys, KEYS_BYTES)
            if not data:
                return
            try:
                terminal.write(data)
            except SandboxError:
                return  # the other thread meets the same end, with its reason


@contextmanager
def _raw() -> Iterator[object]:
    """Make the terminal raw inside the block; yields what makes it so again after a stop from outside."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    with signals.also_when_forced(lambda: termios.tcsetattr(fd, termios.TCSANOW, before)):
        tty.setraw(fd, termios.TCSADRAIN)
        yield lambda: tty.setraw(fd, termios.TCSANOW)


@contextmanager
def _waking(wake: int) -> Iterator[None]:
    def on_signal(signum: int, frame: FrameType | None) -> None:
        try:
            os.write(wake, b"c" if signum == signal.SIGCONT else b"w")
        except BlockingIOError:
            pass  # enough of them are waiting to be seen

    before = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGWINCH, signal.SIGCONT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
