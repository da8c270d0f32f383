"""A person at a terminal: a pseudoterminal with a shell on it, keys typed and the screen read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

SECONDS = 15.0
PROMPT = "outer> "

_SEQUENCES = re.compile(r"\x1b(\[[0-9;?>=!]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[()][0-9A-B]|[=>78MNODEHc])")


class Person:
    """Works in ``bash`` on a pseudoterminal of its own; everything ends with the block."""

    def __init__(self, environ: Mapping[str, str], rows: int = 24, cols: int = 80) -> None:
        self._master, self._slave = pty.openpty()
        self.resize(rows, cols)
        self._seen = ""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", "bash", "--norc", "--noprofile", "-i"],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**environ, "PS1": PROMPT, "TERM": "xterm-256color", "HISTFILE": "/dev/null"},
        )
        self.expect(PROMPT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._slave)
        os.close(self._master)  # which hangs up
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def type(self, keys: str) -> None:
        """Type keys; ``\\r`` is Enter."""
        os.write(self._master, keys.encode())

    def enter(self, line: str) -> None:
        """Type a line."""
        self.type(line + "\r")

    def resize(self, rows: int, cols: int) -> None:
        """Change the size of the window."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("4H", rows, cols, 0, 0))

    def expect(self, pattern: str, seconds: float = SECONDS) -> re.Match[str]:
        """Wait until the screen shows a pattern; what comes before and the match itself are used up."""
        deadline = time.monotonic() + seconds
        while True:
            plain = _SEQUENCES.sub("", self._seen)
            found = re.search(pattern, plain)
            if found:
                self._seen = plain[found.end() :]
                return found
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} never came; the screen's last: {plain[-1500:]!r}"
            if select.select([self._master], [], [], left)[0]:
                try:
                    self._seen += os.read(self._master, 65536).decode(errors="replace")
                except OSError as gone:
                    raise AssertionError(f"the terminal went away; its last: {plain[-1500:]!r}") from gone

    def modes(self) -> list[Any]:
        """What the terminal is set to, as ``stty -g`` would tell."""
        return termios.tcgetattr(self._slave)
