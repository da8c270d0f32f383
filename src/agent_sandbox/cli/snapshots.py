"""``snapshot``, ``snapshots``, ``rollback``, ``fork``: the history of a workspace."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from agent_sandbox.cli import completion, options, output
from agent_sandbox.cli.connection import connect


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(snapshot)
    app.command()(snapshots)
    app.command()(rollback)
    app.command()(fork)


def snapshot(
    sandbox_id: options.SandboxId,
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name for people.")] = None,
    as_json: options.Json = False,
) -> None:
    """Keep the workspace of a sandbox as it is now, and print the snapshot's id."""
    with connect() as client:
        made = client.get(sandbox_id).snapshot(name)
    if as_json:
        output.data(dataclasses.asdict(made))
    else:
        output.line(made.id)


def snapshots(
    sandbox_id: Annotated[
        str | None, typer.Argument(metavar="[SANDBOX]", help="Only its own.", autocompletion=completion.sandboxes)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the snapshots, of one sandbox or all."""
    with connect() as client:
        found = [dataclasses.asdict(item) for item in client.list_snapshots(sandbox_id)]
    if as_json:
        output.data(found)
        return
    output.table(
        ("ID", "SANDBOX", "NAME", "SIZE", "CREATED"),
        [
            [*output.fields(item, "id", "sandbox_id", "name"), output.size(item["size_bytes"]), item["created_at"]]
            for item in found
        ],
    )


def rollback(sandbox_id: options.SandboxId, snapshot_id: options.SnapshotId, as_json: options.Json = False) -> None:
    """Put the workspace of a sandbox back to a snapshot. Its processes end; its id stays."""
    with connect() as client:
        sandbox = client.get(sandbox_id).rollback(snapshot_id)
    if as_json:
        output.data(sandbox.data)
    else:
        output.line(sandbox.id)


def fork(
    snapshot_id: options.SnapshotId,
    count: Annotated[int, typer.Option("--count", "-c", help="How many sandboxes.", min=1, max=1000)] = 1,
    cpus: options.Cpus = None,
    memory: options.Memory = None,
    network: Annotated[
        bool | None,
        typer.Option("--network/--no-network", help="Change the network; as in the snapshot's sandbox else."),
    ] = None,
    ttl: options.Ttl = None,
    as_json: options.Json = False,
) -> None:
    """Start new sandboxes from a snapshot and print their ids."""
    made = []
    with connect() as client:
        try:
            for _ in range(count):
                made.append(client.fork(snapshot_id, timeout_seconds=ttl, network=network, cpus=cpus, memory_mb=memory))
        finally:
            # What was made before an error is the caller's too: its ids must be known.
            if as_json:
                output.data([sandbox.data for sandbox in made])
            else:
                for sandbox in made:
                    output.line(sandbox.id)
