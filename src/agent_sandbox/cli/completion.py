"""What the shell completes: ids of sandboxes and snapshots.

A completion never starts a server, never waits long and never fails: where nothing answers at once it has nothing to
offer. The commands' own names and options are completed by Typer (``agent-sandbox --install-completion``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_sandbox.client import SandboxClient

SECONDS = 1.0
"""Longest wait for a server: a person has pressed a key."""


def sandboxes(incomplete: str) -> list[str]:
    """Complete the id of a sandbox."""
    return _ids(incomplete, lambda client: [sandbox.id for sandbox in client.list_sandboxes()])


def snapshots(incomplete: str) -> list[str]:
    """Complete the id of a snapshot."""
    return _ids(incomplete, lambda client: [snapshot.id for snapshot in client.list_snapshots()])


def both(incomplete: str) -> list[str]:
    """Complete the id of either."""
    return [*sandboxes(incomplete), *snapshots(incomplete)]


def projects(incomplete: str) -> list[str]:
    """Complete the name of a project."""
    return _ids(incomplete, lambda client: [project.name for project in client.list_projects()])


def states(incomplete: str) -> list[str]:
    """Complete what a workspace can begin as."""
    return [*snapshots(incomplete), *projects(incomplete)]


def places(incomplete: str) -> list[str]:
    """Complete ``SANDBOX:`` of a path in a sandbox."""
    return [f"{id}:" for id in sandboxes(incomplete)]


def _ids(incomplete: str, ask: Callable[[SandboxClient], list[str]]) -> list[str]:
    try:
        from agent_sandbox.cli import local_server
        from agent_sandbox.client import SandboxClient
        from agent_sandbox.config import load_settings

        url = os.environ.get("AGENT_SANDBOX_URL")
        uds = None if url else local_server.socket_path(load_settings().data_dir)
        with SandboxClient(url, uds=uds, timeout=SECONDS) as client:
            return [id for id in ask(client) if id.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - a message would land in the line that is being typed
        return []
