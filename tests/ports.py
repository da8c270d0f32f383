"""Ports of the loopback for servers that tests start."""

from __future__ import annotations

import random
import socket

_PORTS = range(15_000, 32_000)
"""Below those that the kernel gives to connections (``ip_local_port_range`` begins at 32768): such a port could be
taken by any client before its server listens on it."""
_RANDOM = random.SystemRandom()
"""Hypothesis sets the seed of the common one, so that two processes would look at the same ports."""


def free_port() -> int:
    """Return a port of the loopback that nobody listens on now."""
    for _ in range(1_000):
        port = _RANDOM.choice(_PORTS)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
