"""Reach a port of a machine through the socket that its monitor leaves on the host (Firecracker's vsock device).

The monitor takes one line, ``CONNECT <port>``, and answers ``OK <number>`` once somebody in the machine listens there;
where nobody does, it closes the connection. A machine that boots does not listen yet, so that is tried again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from agent_sandbox.errors import BackendError

PORT = 1024
"""Where a machine's daemon listens."""
_LINE_BYTES = 32
"""Of the answer: ``OK 4294967295`` and its end are 14."""
_PAUSE_SECONDS = 0.02
_PATIENCE_SECONDS = 1.0
"""For the first answer, then twice as long each time: one comes in a moment, or not until somebody asks again."""


def connect_to(path: Path) -> socket.socket:
    """Connect, without blocking, to a socket in a directory that its owner may have changed since.

    A link in its place is not followed, and its path may be longer than an address (unix(7)).
    :class:`BackendError` when there is no socket, :class:`OSError` as connect(2) gives it.
    """
    try:
        place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise BackendError("the machine's monitor has no socket") from None
    try:
        if not stat.S_ISSOCK(os.fstat(place).st_mode):
            raise BackendError("what lies in the place of the monitor's socket is none")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(f"/proc/self/fd/{place}")
        except BaseException:
            connection.close()
            raise
        return connection
    finally:
        os.close(place)


async def dial(connect: Callable[[], socket.socket], seconds: float, port: int = PORT) -> socket.socket:
    """Return a connection to a machine's port, tried for so many seconds; ``connect`` gives one to its monitor.

    :class:`BackendError` when nobody listens there in time, or what answers is no monitor; and what ``connect`` raises.
    """
    patience = _PATIENCE_SECONDS
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    connection = connect()
                except BlockingIOError:  # as many wait for the monitor already as it lets
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                try:
                    async with asyncio.timeout(patience) as waiting:
                        if await _asked(connection, port):
                            return connection
                except TimeoutError:
                    connection.close()
                    if not waiting.expired():
                        raise
                    patience *= 2
                    continue
                except BaseException:
                    connection.close()
                    raise
                connection.close()
                await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError:
        raise BackendError(f"the sandbox's daemon did not listen within {seconds:g} s") from None


async def _asked(connection: socket.socket, port: int) -> bool:
    """Ask a monitor for a port; False when nobody listens."""
    loop = asyncio.get_running_loop()
    line = b""
    try:
        await loop.sock_sendall(connection, b"CONNECT %d\n" % port)
        # One at a time: what comes behind the line is the daemon's.
        while not line.endswith(b"\n"):
            byte = await loop.sock_recv(connection, 1)
            if not byte:
                return False
            line += byte
            if len(line) > _LINE_BYTES:
                break
    except (ConnectionResetError, BrokenPipeError):
        return False
    number = line.removeprefix(b"OK ").removesuffix(b"\n")
    if not (line.startswith(b"OK ") and line.endswith(b"\n") and number.isdigit()):
        raise BackendError("the machine's monitor does not answer as one")
    return True


__all__ = ["PORT", "connect_to", "dial"]
