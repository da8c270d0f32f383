"""``create``, ``ls``, ``rm``: sandboxes that outlive the command."""

from __future__ import annotations

from typing import Annotated

import typer

from agent_sandbox.cli import exit_codes, options, output
from agent_sandbox.cli.connection import connect
from agent_sandbox.errors import SandboxError


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(create)
    app.command()(ls)
    app.command()(rm)


def create(
    image: options.Image = None,
    cpus: options.Cpus = None,
    memory: options.Memory = None,
    pids: options.Pids = None,
    disk: options.Disk = None,
    network: options.Network = False,
    writable: options.Writable = False,
    backend: options.Backend = None,
    env: options.Env = None,
    ttl: options.Ttl = None,
    as_json: options.Json = False,
) -> None:
    """Create a sandbox and print its id. It is removed when its time is up."""
    with connect() as client:
        sandbox = client.create(
            image,
            cpus=cpus,
            memory_mb=memory,
            pids_limit=pids,
            disk_mb=disk,
            network=network,
            read_only_rootfs=not writable,
            backend=backend,
            timeout_seconds=ttl,
            env=options.environment(env),
        )
    if as_json:
        output.data(sandbox.data)
    else:
        output.line(sandbox.id)


def ls(as_json: options.Json = False) -> None:
    """List the sandboxes."""
    with connect() as client:
        found = [sandbox.data for sandbox in client.list_sandboxes()]
    if as_json:
        output.data(found)
        return
    names = ("id", "status", "image", "cpus", "memory_mb", "expires_at", "source_snapshot_id")
    output.table(
        ("ID", "STATUS", "IMAGE", "CPUS", "MEMORY MIB", "EXPIRES", "FROM"),
        [output.fields(item, *names) for item in found],
    )


def rm(
    ids: Annotated[list[str], typer.Argument(help="Ids of sandboxes (sb…) and snapshots (snap…).", metavar="ID...")],
) -> None:
    """Remove sandboxes and snapshots. The snapshots of a removed sandbox stay.

    Goes through the whole list; ends with the code of the first error.
    """
    first = exit_codes.OK
    with connect() as client:
        for id in ids:
            try:
                if id.startswith("snap"):
                    client.delete_snapshot(id)
                else:
                    client.get(id).destroy()
            except SandboxError as error:
                output.note(f"{id}: {error.message}")
                first = first or exit_codes.of(error)
    raise typer.Exit(first)
