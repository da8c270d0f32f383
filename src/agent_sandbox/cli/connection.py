"""Where a command's server is: ``AGENT_SANDBOX_URL``, or the user's local server, started on demand."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agent_sandbox.cli import local_server
from agent_sandbox.config import load_settings

if TYPE_CHECKING:
    from agent_sandbox.client import SandboxClient


def connect() -> SandboxClient:
    """Return a client, a context manager, for the server that this command talks to.

    Raises what :func:`local_server.ensure` raises, and :class:`InvalidRequestError` for settings that cannot be right.
    """
    from agent_sandbox.client import SandboxClient

    url = os.environ.get("AGENT_SANDBOX_URL")
    if url:
        return SandboxClient(url)
    return SandboxClient(uds=local_server.ensure(load_settings().data_dir))
