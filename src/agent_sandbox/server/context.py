"""What a handler reaches through its request."""

from __future__ import annotations

from starlette.requests import HTTPConnection

from agent_sandbox.manager import Manager


def manager_of(connection: HTTPConnection) -> Manager:
    """Find the application's manager."""
    manager: Manager = connection.app.state.manager
    return manager
