"""Drives one ``sandboxd`` over a connected socket.

The daemon on the other end is hostile input: a sandbox may have taken it over. So

* each reply is checked against the shape that ``spec/wire.md`` gives (``replies``), and a name or count that cannot be
  right ends in :class:`~agent_sandbox.errors.BackendError`;
* what the daemon can make this process hold is bounded (``limits``): the credit window for each open stream, unsent
  bytes for the connection, the caller's limit for a whole reply;
* no wait is without a limit: so many seconds without progress for files and archives, the command's own deadline and
  some seconds for commands. Attachments, watches, tunnels and standard input may idle for ever, but only while the
  daemon answers PING.
"""

from agent_sandbox.guest.channel import Carrier
from agent_sandbox.guest.commands import Program
from agent_sandbox.guest.guest import Guest
from agent_sandbox.guest.limits import HELLO_SECONDS
from agent_sandbox.guest.replies import ERRORS, EXEC_ID, GuestInfo, GuestStalled
from agent_sandbox.guest.tunnel import GuestTunnel

__all__ = [
    "ERRORS",
    "EXEC_ID",
    "HELLO_SECONDS",
    "Carrier",
    "Guest",
    "GuestInfo",
    "GuestStalled",
    "GuestTunnel",
    "Program",
]
