"""``create``, ``ls``, ``inspect``, ``stats``, ``start``, ``stop``, ``rm``: sandboxes that outlive the command."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_sandbox.cli import completion, exit_codes, options, output, signals
from agent_sandbox.cli.commands import destroy
from agent_sandbox.cli.connection import connect
from agent_sandbox.cli.waiting import fetching_told
from agent_sandbox.errors import SandboxError

if TYPE_CHECKING:
    from agent_sandbox.client import SandboxClient

SandboxIds = Annotated[
    list[str], typer.Argument(help="Ids of sandboxes.", metavar="SANDBOX...", autocompletion=completion.sandboxes)
]


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(create)
    for command in (ls, inspect, stats, start, stop, rm):
        app.command()(command)


def create(
    image: options.Image = None,
    cpus: options.Cpus = None,
    memory: options.Memory = None,
    pids: options.Pids = None,
    disk: options.Disk = None,
    network: options.Network = False,
    writable: options.Writable = False,
    backend: options.Backend = None,
    min_isolation: options.MinIsolation = None,
    env: options.Env = None,
    ttl: options.Ttl = None,
    from_: options.From = None,
    as_json: options.Json = False,
) -> None:
    """Create a sandbox and print its id. It is removed when its time is up.

    With --from its workspace begins as a state; everything else is as the other options say.
    """
    with (
        connect() as client,
        fetching_told(client, image),
        signals.awaiting("a sandbox may be left behind: see agent-sandbox ls"),
    ):
        sandbox = client.create(
            image,
            cpus=cpus,
            memory_mb=memory,
            pids_limit=pids,
            disk_mb=disk,
            network=network,
            read_only_rootfs=not writable,
            backend=backend,
            min_isolation=min_isolation,
            timeout_seconds=ttl,
            env=options.environment(env),
            from_=from_,
        )
        if signals.is_pending():
            destroy(sandbox)
            return
        try:
            if as_json:
                output.data(sandbox.data)
            else:
                output.line(sandbox.id)
            output.flush()
        except OSError:
            destroy(sandbox)  # nobody was told its id
            raise


def ls(as_json: options.Json = False) -> None:
    """List the sandboxes."""
    with connect() as client:
        found = [sandbox.data for sandbox in client.list_sandboxes()]
    if as_json:
        output.data(found)
        return
    names = ("id", "status", "image", "cpus", "memory_mb", "expires_at")
    rows = [
        [*output.fields(item, *names), item.get("source_snapshot_id") or item.get("source") or "-"] for item in found
    ]
    output.table(("ID", "STATUS", "IMAGE", "CPUS", "MEMORY MIB", "EXPIRES", "FROM"), rows)


def inspect(
    id: Annotated[
        str,
        typer.Argument(metavar="ID", help="Id of a sandbox (sb…) or snapshot (snap…).", autocompletion=completion.both),
    ],
    as_json: options.Json = False,
) -> None:
    """Show everything that the server knows of a sandbox or snapshot."""
    with connect() as client:
        found = dataclasses.asdict(client.get_snapshot(id)) if id.startswith("snap") else client.get(id).data
    if as_json:
        output.data(found)
        return
    width = max(len(name) for name in found)
    for name, value in found.items():
        output.line(f"{name:<{width}}  {'-' if value is None else value}")


def stats(sandbox_id: options.SandboxId, as_json: options.Json = False) -> None:
    """Show what a sandbox uses now."""
    with connect() as client:
        found = client.get(sandbox_id).stats()
    if as_json:
        output.data(dataclasses.asdict(found))
        return
    rows = [
        ("memory", "-" if found.memory_bytes is None else output.size(found.memory_bytes)),
        ("cpu", "-" if found.cpu_seconds is None else f"{found.cpu_seconds:.2f} s"),
        ("processes", found.processes),
        ("commands kept", found.execs),
        ("output kept", output.size(found.output_bytes)),
        ("daemon's memory", output.size(found.daemon_memory_bytes)),
    ]
    for name, value in rows:
        output.line(f"{name:<15}  {value}")


def start(ids: SandboxIds, as_json: options.Json = False) -> None:
    """Start stopped sandboxes again, with their workspaces and an empty /tmp."""
    _each(ids, lambda client, id: client.get(id).start().data, as_json)


def stop(ids: SandboxIds, as_json: options.Json = False) -> None:
    """End every process of sandboxes and keep their workspaces."""
    _each(ids, lambda client, id: client.get(id).stop().data, as_json)


def rm(
    ids: Annotated[
        list[str],
        typer.Argument(
            help="Ids of sandboxes (sb…) and snapshots (snap…).", metavar="ID...", autocompletion=completion.both
        ),
    ],
    as_json: options.Json = False,
) -> None:
    """Remove sandboxes and snapshots. The snapshots of a removed sandbox stay.

    Goes through the whole list; ends with the code of the first error.
    """

    def remove(client: SandboxClient, id: str) -> dict[str, Any]:
        if id.startswith("snap"):
            client.delete_snapshot(id)
        else:
            client.get(id).destroy()
        return {"id": id, "removed": True}

    _each(ids, remove, as_json, quiet=True)


def _each(
    ids: list[str], act: Callable[[SandboxClient, str], dict[str, Any]], as_json: bool, *, quiet: bool = False
) -> None:
    """Go through the whole list; end with the code of the first error."""
    first, done = exit_codes.OK, []
    with connect() as client:
        for id in ids:
            try:
                done.append(act(client, id))
                if not (as_json or quiet):
                    output.line(id)
            except SandboxError as error:
                output.note(f"{id}: {error.message}")
                first = first or exit_codes.of(error)
    if as_json:
        output.data(done)
    raise typer.Exit(first)
