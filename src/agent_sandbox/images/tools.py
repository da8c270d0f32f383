"""Running the tools that images are made with: bounded in time and output, watched while they work, dead when we are.

Argument lists only, nothing on stdin, a small environment. What a tool reads and writes is taken from its
``/proc/PID/io``, once every tenth of a second: that is the progress shown, it tells a slow transfer from one that
hangs, and the callback may raise to end the tool (a disk that fills, an interrupt). ``setpriv --pdeathsig`` ends it
when this process is killed, so that nobody writes into a directory that is being swept. A tool is tried once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from agent_sandbox.errors import BackendError, LimitExceededError

INSTALL = "install them with: apt-get install skopeo umoci"
Tick = Callable[[int, int], None]
"""Called as ``tick(bytes read, bytes written)`` while a tool runs; an exception ends the tool and comes out."""

MAX_OUTPUT_BYTES = 4 << 20
"""Of the standard output: a manifest, for which registries have the same limit."""
_STDERR_BYTES = 16 << 10
_MESSAGE_CHARS = 500
_TICK_SECONDS = 0.1
_STALL_SECONDS = 120.0
"""Without a byte read or written: longer than any name look-up, handshake or flush takes."""
_TOTAL_SECONDS = 6 * 3600.0
"""64 GiB, the largest image, at 3 MB/s."""
_PASSED = (
    *("HOME", "XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *(name for lower in ("http_proxy", "https_proxy", "no_proxy") for name in (lower, lower.upper())),
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOGGED = re.compile(r'level=fatal msg="((?:[^"\\]|\\.)*)"')
_QUERY = re.compile(r"\?[^\s\"']+")


class ToolFailedError(Exception):
    """A tool said no; ``message`` is its own last word, bounded, without the queries of addresses (signed links)."""

    def __init__(self, tool: str, message: str) -> None:
        super().__init__(f"{tool}: {message}")
        self.message = message


def run(
    argv: Sequence[str], scratch: Path, tick: Tick, *, descriptors: Sequence[int] = (), install: str = INSTALL
) -> bytes:
    """Run a tool in ``scratch``, where it also keeps its temporary files; return its standard output.

    ``install`` says how to get the tool.

    :class:`ToolFailedError` when it fails; :class:`BackendError` when it is not installed or makes no progress;
    :class:`LimitExceededError` when it says too much.
    """
    for needed in (argv[0], "setpriv"):
        if shutil.which(needed, path=PATH) is None:
            raise BackendError(f"{needed} is not installed; {install}" + " util-linux" * (needed == "setpriv"))
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *argv],
        cwd=scratch,
        env={**environment, "PATH": PATH, "TMPDIR": str(scratch), "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        umask=0o022,
        pass_fds=descriptors,
    ) as process:
        try:
            output, errors = _watch(process, argv[0], tick)
            code = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if code != 0:
        raise ToolFailedError(argv[0], _last_word(errors) or f"exit code {code}")
    return output


def _watch(process: subprocess.Popen[bytes], tool: str, tick: Tick) -> tuple[bytes, bytes]:
    """Read both streams to their ends."""
    output, errors = bytearray(), bytearray()
    started = moved = time.monotonic()
    seen = (0, 0)
    with selectors.DefaultSelector() as selector:
        for stream, kept in ((process.stdout, output), (process.stderr, errors)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, kept)
        while selector.get_map():
            for key, _ in selector.select(_TICK_SECONDS):
                _take(key.fileobj, key.data, selector)  # type: ignore[arg-type]
            del errors[:-_STDERR_BYTES]
            if len(output) > MAX_OUTPUT_BYTES:
                raise LimitExceededError(f"the image's manifest is larger than {MAX_OUTPUT_BYTES >> 20} MiB")
            now, counts = time.monotonic(), _io(process.pid)
            if counts is None:
                moved = now
            elif counts != seen:
                seen, moved = counts, now
                tick(*counts)
            if now - moved > _STALL_SECONDS or now - started > _TOTAL_SECONDS:
                raise BackendError(f"{tool} made no progress for {now - moved:.0f} s and was ended")
    return bytes(output), bytes(errors)


def _take(stream: IO[bytes], kept: bytearray, selector: selectors.BaseSelector) -> None:
    piece = os.read(stream.fileno(), 1 << 16)
    if piece:
        kept += piece
    else:
        selector.unregister(stream)


def _io(pid: int) -> tuple[int, int] | None:
    """Bytes that a process has read and written so far, by whatever system call; None where that cannot be known."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().split()
        return int(lines[1]), int(lines[3])
    except (OSError, ValueError, IndexError):
        return None


def _last_word(errors: bytes) -> str:
    text = errors.decode(errors="replace")
    logged = _LOGGED.findall(text)
    if logged:
        with contextlib.suppress(ValueError):
            text = json.loads(f'"{logged[-1]}"')
    lines = [line.strip(" \t⨯•") for line in text.splitlines() if line.strip()]
    return _QUERY.sub("?…", lines[-1])[-_MESSAGE_CHARS:] if lines else ""
