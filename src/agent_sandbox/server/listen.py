"""Sockets to listen on, made so that nobody else gets between.

A unix socket lies in a directory of our own with mode 0700 and has mode 0600. A lock beside it, held while the server
lives, says whether a socket file that is already there is in use or left behind: only the holder removes or binds it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_sandbox.errors import ConflictError, InvalidRequestError

BACKLOG = 512
"""Connections that may wait to be accepted: several bursts of parallel clients; the kernel caps it as well."""

MAX_UNIX_PATH_BYTES = 107
"""What ``sun_path`` holds besides its NUL (unix(7))."""


@contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Listen on a unix socket; it is removed at the end.

    :class:`ConflictError` when a server has it, :class:`InvalidRequestError` when its place is not safe.
    """
    if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        raise InvalidRequestError(
            f"the socket path {path} is longer than {MAX_UNIX_PATH_BYTES} bytes; choose a shorter"
        )
    _private_directory(path.parent)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(f"a server already listens on {path}") from None
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            # The directory keeps others out between bind and chmod.
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen(BACKLOG)
            try:
                yield sock
            finally:
                path.unlink(missing_ok=True)
    finally:
        os.close(lock)


@contextmanager
def tcp_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Listen on an address; :class:`ConflictError` when it is taken, else :class:`InvalidRequestError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"cannot listen on {host!r}: {error}; set AGENT_SANDBOX_HOST") from error
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise ConflictError(
                f"cannot listen on {host}:{port}: {error.strerror}; stop what uses it, or set AGENT_SANDBOX_PORT"
            ) from error
        sock.listen(BACKLOG)
        yield sock


def _private_directory(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise InvalidRequestError(f"{path} must be a directory that belongs to the user of the server")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise InvalidRequestError(f"others can enter {path}; run: chmod 700 {path}")
