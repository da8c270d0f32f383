"""Finding a program, and starting it with exact descriptors, apart from this process's session.

Programs take the descriptors to pass on by number (3, 4, …), which in a process full of descriptors only a spawn with
file actions can give without a helper: :func:`os.posix_spawn`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Sequence

from agent_sandbox.errors import BackendError

ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
"""Python ignores the first two and a server's starter may ignore others; a sandbox must not inherit that."""


def find_program(name: str, remedy: str) -> str:
    """The path of a program. :class:`BackendError` with the remedy when it is not there."""
    program = shutil.which(name, path=os.environ.get("PATH", "") + ":" + ENVIRONMENT["PATH"])
    if program is None:
        raise BackendError(f"{name} is not installed; {remedy}")
    return program


def spawn(
    argv: Sequence[str], output: int, descriptors: Sequence[int], remedy: str = "", errors: int | None = None
) -> int:
    """Start ``argv`` in a session of its own and give its pid, which the caller has to reap.

    It has ``/dev/null`` as its input, ``output`` as 1, ``errors`` or the same as 2, and ``descriptors`` from 3 on.
    :class:`BackendError`, with the ``remedy`` where the program is missing, when it cannot be started.
    """
    first_free = 3 + len(descriptors)
    copies: list[int] = []
    try:
        for descriptor in (output, output if errors is None else errors, *descriptors):
            copies.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, first_free))
        actions: list[tuple[int, ...]] = [
            (os.POSIX_SPAWN_DUP2, copies[0], 1),
            (os.POSIX_SPAWN_DUP2, copies[1], 2),
            *((os.POSIX_SPAWN_DUP2, copy, 3 + index) for index, copy in enumerate(copies[2:])),
        ]
        null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        return os.posix_spawn(
            argv[0],
            list(argv),
            ENVIRONMENT,
            file_actions=[null, *actions],
            setsid=True,
            setsigmask=[],
            setsigdef=_SIGNALS,
        )
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENOEXEC):
            raise
        hint = f"; {remedy}" if error.errno == errno.ENOENT and remedy else ""
        raise BackendError(f"cannot start {argv[0]}: {error.strerror}{hint}") from error
    finally:
        for copy in copies:
            os.close(copy)
