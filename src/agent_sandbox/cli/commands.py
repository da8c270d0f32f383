"""``run`` and ``exec``: a command in a sandbox, its output live, its exit code ours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, cast

import typer

from agent_sandbox.cli import options, output, signals
from agent_sandbox.cli.connection import connect
from agent_sandbox.errors import ConnectionLostError, NotFoundError

if TYPE_CHECKING:
    from agent_sandbox.client import ExecEvent, Sandbox

TTL_SLACK_SECONDS = 60
"""A one-shot sandbox lives this much longer than its command may: time to create, report and destroy."""


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command(context_settings=options.TAKES_COMMAND)(run)
    app.command("exec", context_settings=options.TAKES_COMMAND)(exec_)


def run(
    command: options.Command,
    image: options.Image = None,
    cpus: options.Cpus = None,
    memory: options.Memory = None,
    pids: options.Pids = None,
    disk: options.Disk = None,
    network: options.Network = False,
    writable: options.Writable = False,
    backend: options.Backend = None,
    env: options.Env = None,
    workdir: options.Workdir = None,
    timeout: options.Deadline = None,
    as_json: options.Json = False,
) -> None:
    """Run one command in a sandbox of its own: create, run with live output, destroy.

    Ends with the command's exit code; 125 when the error is ours. The command's standard input is empty. Ctrl-C kills
    the command and destroys the sandbox, a second one leaves at once.
    """
    variables = options.environment(env)
    ttl = None if timeout is None else math.ceil(timeout) + TTL_SLACK_SECONDS
    with (
        connect() as client,
        signals.owning(
            lambda: client.create(
                image,
                cpus=cpus,
                memory_mb=memory,
                pids_limit=pids,
                disk_mb=disk,
                network=network,
                read_only_rootfs=not writable,
                backend=backend,
                timeout_seconds=ttl,
            ),
            destroy,
            left_behind,
        ) as sandbox,
    ):
        code = follow(sandbox, command, variables, workdir, timeout, as_json=as_json)
    raise typer.Exit(code)


def exec_(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    command: options.Command,
    env: options.Env = None,
    workdir: options.Workdir = None,
    timeout: options.Deadline = None,
    as_json: options.Json = False,
) -> None:
    """Run a command in a sandbox that exists, with live output.

    Ends with the command's exit code; 125 when the error is ours. The command's standard input is empty. Ctrl-C kills
    the command; the sandbox stays.
    """
    variables = options.environment(env)
    if command[0] == "--" and len(command) > 1:  # options end with SANDBOX, so the parser hands this one on
        command = command[1:]
    with connect() as client:
        code = follow(client.get(sandbox_id), command, variables, workdir, timeout, as_json=as_json)
    raise typer.Exit(code)


def follow(
    sandbox: Sandbox,
    command: Sequence[str],
    env: Mapping[str, str],
    workdir: str | None,
    timeout: float | None,
    *,
    as_json: bool = False,
) -> int:
    """Run a command and write its output as it comes, or its whole result as JSON; return its exit code.

    Leaving early (a signal, a closed pipe) closes the stream, which ends the command with all its processes.
    """
    if as_json:
        result = sandbox.exec(command, env=env, workdir=workdir, timeout_seconds=timeout)
        output.data(dataclasses.asdict(result))
        return result.exit_code
    events = sandbox.exec_stream(command, env=env, workdir=workdir, timeout_seconds=timeout)
    with closing(cast("Generator[ExecEvent]", events)):
        for event in events:
            if event.type == "exit" and event.exit_code is not None:
                if event.timed_out:
                    seconds = (event.duration_ms or 0) / 1000
                    output.note(f"the command was killed at its deadline, after {seconds:.1f} s: --timeout sets it")
                return event.exit_code
            output.chunk(event.type, event.data)
    raise ConnectionLostError("the output ended without an exit code; how the command ended is unknown")


def destroy(sandbox: Sandbox) -> None:
    """Destroy a sandbox that may have expired already."""
    try:
        sandbox.destroy()
    except NotFoundError:
        pass


def left_behind(sandbox: Sandbox) -> str:
    """Say how to remove a sandbox that a forced exit leaves."""
    return f"sandbox {sandbox.id} may be left behind: agent-sandbox rm {sandbox.id}"
