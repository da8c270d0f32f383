"""A backend in memory: no process, no root, no isolation. Most tests use it.

Only the daemon is made up: the server's side of it is the real :class:`GuestBackend` and the real wire over a socket
pair. Its workspace is a dictionary, its programs the few in :data:`PROGRAMS`, its shell knows ``;``, ``&&``, quotes,
``>``, ``>>``, ``>&2`` and ``$NAME``. A terminal is a size that ``stty size`` tells and a byte 3 that interrupts;
``echo-server`` is what can be dialled. What it cannot do ends in exit code 127; tests that need more use a real
backend.

The environments live in the object, not in the connections: a second manager over the same backend finds them again,
as after a restart of the server. ``failures`` makes the next call of a method fail.
"""

from agent_sandbox.backends.fake.backend import FakeBackend

__all__ = ["FakeBackend"]
