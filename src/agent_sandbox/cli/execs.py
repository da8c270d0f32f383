"""``execs``, ``logs``, ``kill``: commands that are kept inside a sandbox."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from agent_sandbox.cli import options, output
from agent_sandbox.cli.connection import connect

if TYPE_CHECKING:
    from agent_sandbox.client import ExecInfo

ExecId = Annotated[str, typer.Argument(metavar="EXEC", help="A command's id, as execs lists it.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(execs)
    app.command()(logs)
    app.command()(kill)


def execs(sandbox_id: options.SandboxId, as_json: options.Json = False) -> None:
    """List the commands of a sandbox that are kept: those that run, and the last that ended."""
    with connect() as client:
        found = [execution.info for execution in client.get(sandbox_id).execs()]
    if as_json:
        output.data([dataclasses.asdict(info) for info in found])
        return
    output.table(
        ("ID", "STATUS", "STARTED", "OUTPUT", "COMMAND"),
        [[info.id, status(info), info.started_at, output.size(info.cursor), " ".join(info.command)] for info in found],
    )


def logs(
    sandbox_id: options.SandboxId,
    exec_id: ExecId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the command ends.")] = False,
    as_json: options.Json = False,
) -> None:
    """Print what is kept of a command's output, the newest 1 MiB.

    With -f it goes on, also over a restart of the server. Leaving does not end the command, whose exit code is not
    passed on.
    """
    with connect() as client, closing(client.get(sandbox_id).get_exec(exec_id).output(follow=follow)) as events:
        if not as_json:
            output.follow(events)
            return
        for event in events:
            output.at_once(json.dumps(dataclasses.asdict(event)))


def kill(
    sandbox_id: options.SandboxId,
    exec_id: ExecId,
    signal: Annotated[str, typer.Option("--signal", "-s", help="Name or number.", metavar="SIGNAL")] = "TERM",
    as_json: options.Json = False,
) -> None:
    """Send a signal to every process of a command."""
    with connect() as client:
        processes = client.get(sandbox_id).get_exec(exec_id).signal(int(signal) if signal.isdigit() else signal)
    if as_json:
        output.data({"processes": processes})


def status(info: ExecInfo) -> str:
    """Say in a few words whether a command runs, or how it ended."""
    if info.status == "running":
        return "running"
    if info.timed_out:
        return "timed out"
    end = "exit ?" if info.exit_code is None else f"exit {info.exit_code}"
    if info.signal is not None:
        end = f"signal {info.signal}"
    return f"{end}, out of memory" if info.oom_killed else end
