"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from agent_sandbox.cli import completion
from agent_sandbox.types import IsolationClass

SandboxId = Annotated[
    str, typer.Argument(metavar="SANDBOX", help="A sandbox's id.", autocompletion=completion.sandboxes)
]
SnapshotId = Annotated[
    str, typer.Argument(metavar="SNAPSHOT", help="A snapshot's id.", autocompletion=completion.snapshots)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Image = Annotated[str | None, typer.Option("--image", help="Image; the server's default else.")]
Cpus = Annotated[float | None, typer.Option("--cpus", help="Cores.")]
Memory = Annotated[int | None, typer.Option("--memory", "-m", help="Memory, MiB.", metavar="MIB")]
Pids = Annotated[int | None, typer.Option("--pids", help="Most processes and threads, 16 or more.")]
Disk = Annotated[int | None, typer.Option("--disk", help="Disk, MiB.", metavar="MIB")]
Network = Annotated[bool, typer.Option("--network", help="Ask for a network; the server must allow it.")]
Writable = Annotated[
    bool, typer.Option("--writable", help="Make the root filesystem writable; its changes are not kept.")
]
Backend = Annotated[str | None, typer.Option("--backend", help="Which of the server's backends; the first else.")]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="What the workspace begins as: a snapshot's id, PROJECT (its newest layer), PROJECT@N, PROJECT:BRANCH, or"
        " a commit's id; empty else.",
        metavar="STATE",
        autocompletion=completion.states,
    ),
]
MinIsolation = Annotated[
    IsolationClass | None,
    typer.Option(
        "--min-isolation", help="The weakest isolation that is enough; the first backend that has it is used."
    ),
]
Ttl = Annotated[
    int | None, typer.Option("--ttl", help="Seconds until the sandbox is removed.", metavar="SECONDS", min=1)
]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE, or NAME to pass yours on.", metavar="NAME[=VALUE]")
]
Workdir = Annotated[str | None, typer.Option("--workdir", "-w", help="Directory of the command.", metavar="PATH")]
Deadline = Annotated[
    float | None, typer.Option("--timeout", help="Seconds until the command is killed.", metavar="SECONDS")
]
Command = Annotated[list[str], typer.Argument(help="The program and its arguments.", metavar="COMMAND [ARG]...")]

TAKES_COMMAND = {"allow_interspersed_args": False, "ignore_unknown_options": False}
"""Context settings of commands that end with a foreign command line: its options are not ours."""


def usage(argument: Any) -> str:
    """How an argument is written in a usage line."""
    text = str(argument.metavar or argument.name.upper())
    return text if argument.required or text.startswith("[") else f"[{text}]"


def environment(pairs: Sequence[str] | None) -> dict[str, str]:
    """Read ``NAME=VALUE`` pairs; a bare ``NAME`` takes the caller's value. Wrong ones are a usage error."""
    result: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not name or (not equals and name not in os.environ):
            raise typer.BadParameter(f"{pair!r}: give NAME=VALUE, or the NAME of a variable that is set")
        result[name] = value if equals else os.environ[name]
    return result
