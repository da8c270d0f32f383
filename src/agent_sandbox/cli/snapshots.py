"""``snapshot``, ``snapshots``, ``rollback``, ``fork``: the history of a workspace."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from agent_sandbox.cli import completion, options, output, signals
from agent_sandbox.cli.connection import connect

Memory = Annotated[
    bool | None,
    typer.Option(
        "--with-memory/--no-memory", help="Whether its processes go on, or the workspace alone; what it has else."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(snapshot)
    app.command()(snapshots)
    app.command()(rollback)
    app.command()(fork)


def snapshot(
    sandbox_id: options.SandboxId,
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name for people.")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Keep what its processes have in memory, too: they can go on from there.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Keep the workspace of a sandbox as it is now, and print the snapshot's id."""
    with connect() as client:
        sandbox = client.get(sandbox_id)
        with signals.awaiting(f"a snapshot may be left behind: see agent-sandbox snapshots {sandbox_id}"):
            made = sandbox.snapshot(name, memory=memory)
            if signals.is_pending():
                client.delete_snapshot(made.id)
            elif as_json:
                output.data(dataclasses.asdict(made))
            else:
                output.line(made.id)


def snapshots(
    sandbox_id: Annotated[
        str | None, typer.Argument(metavar="[SANDBOX]", help="Only its own.", autocompletion=completion.sandboxes)
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Those too that rollbacks made of what they replaced: undo by them.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the snapshots, of one sandbox or all."""
    with connect() as client:
        found = [dataclasses.asdict(item) for item in client.list_snapshots(sandbox_id, auto=auto)]
    if as_json:
        output.data(found)
        return
    output.table(
        ("ID", "SANDBOX", "NAME", "SIZE", "MEMORY", "CREATED"),
        [
            [
                *output.fields(item, "id", "sandbox_id", "name"),
                output.size(item["size_bytes"]),
                output.size(item["memory_bytes"]) if item["memory"] else "-",
                item["created_at"],
            ]
            for item in found
        ],
    )


def rollback(
    sandbox_id: options.SandboxId,
    snapshot_id: options.SnapshotId,
    memory: Memory = None,
    as_json: options.Json = False,
) -> None:
    """Put the workspace of a sandbox back to a snapshot. Its processes end; its id stays.

    The processes of a snapshot with memory go on from where they were.
    """
    with connect() as client:
        sandbox = client.get(sandbox_id).rollback(snapshot_id, memory=memory)
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
    backend: Annotated[
        str | None, typer.Option("--backend", help="Another of the server's backends than the snapshot's.")
    ] = None,
    process_memory: Memory = None,
    ttl: options.Ttl = None,
    as_json: options.Json = False,
) -> None:
    """Start new sandboxes from a snapshot and print their ids.

    The processes of a snapshot with memory go on in each of them.
    """
    made = []
    with connect() as client:
        try:
            for _ in range(count):
                with signals.awaiting("sandboxes may be left behind: see agent-sandbox ls"):
                    made.append(
                        client.fork(
                            snapshot_id,
                            timeout_seconds=ttl,
                            network=network,
                            cpus=cpus,
                            memory_mb=memory,
                            backend=backend,
                            memory=process_memory,
                        )
                    )
        finally:
            # What was made before an error is the caller's too: its ids must be known.
            if as_json:
                output.data([sandbox.data for sandbox in made])
            else:
                for sandbox in made:
                    output.line(sandbox.id)
