"""``backends``: what the server isolates sandboxes with."""

from __future__ import annotations

import dataclasses

import typer

from agent_sandbox import models
from agent_sandbox.cli import options, output
from agent_sandbox.cli.connection import connect


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(backends)


def backends(as_json: options.Json = False) -> None:
    """List the server's backends: how they isolate, what they can do, whether they answer. The first is the default."""
    with connect() as client:
        found = client.backends()
    if as_json:
        output.data([dataclasses.asdict(item) for item in found])
        return
    output.table(
        ("NAME", "ISOLATION", "HEALTHY", "LAYERS", "MEMORY", "NETWORK", "VERSIONS"),
        [
            (
                item.name,
                item.capabilities.isolation + ("" if item.capabilities.accelerated else " (emulated)"),
                _yes(item.healthy),
                _layers(item.capabilities),
                _yes(item.capabilities.checkpoint),
                ",".join(item.capabilities.network),
                " ".join(f"{name} {version}" for name, version in item.versions.items()) or "-",
            )
            for item in found
        ],
    )
    for item in found:
        if not item.healthy:
            output.note(f"backend {item.name}: {item.message}")
        if note := item.capabilities.notes.get("layered_workspace"):
            output.note(f"backend {item.name}: workspaces: {note}")


def _layers(capabilities: models.BackendCapabilities) -> str:
    note = capabilities.notes.get("layered_workspace", "")
    return (
        "copied"
        if capabilities.layered_workspace and note.startswith("copied")
        else _yes(capabilities.layered_workspace)
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
