"""Ending every process of an environment, for certain, without its help. Blocks; usually for 2 to 5 ms."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from agent_sandbox.backends.linux.cgroups import Groups
from agent_sandbox.backends.linux.process import Process
from agent_sandbox.errors import BackendError

_END_SECONDS = 10.0
"""How long killed processes may take to be gone; more means a process stuck in the kernel."""
_PAUSE_SECONDS = 0.002


def end_processes(first: Process | None, groups: Groups) -> None:
    """Kill all of the environment's processes and return when none is left.

    ``first`` is its first process, where the runtime knows one: as the first of its pid namespace it ends after all
    others there, so waiting for it is waiting for them. :class:`BackendError` when the kernel holds on to one.
    """
    deadline = time.monotonic() + _END_SECONDS
    with contextlib.ExitStack() as stack:
        pidfd = None if first is None else _open(first)
        groups.kill()
        if pidfd is not None:
            stack.callback(os.close, pidfd)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(_END_SECONDS * 1000)
        while groups.processes():
            if time.monotonic() > deadline:
                raise BackendError("processes of the sandbox do not end; the kernel holds them")
            groups.kill()
            time.sleep(_PAUSE_SECONDS)


def _open(process: Process) -> int | None:
    """A pidfd of exactly this process, or None when it has gone."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.alive():
        return pidfd
    os.close(pidfd)
    return None
