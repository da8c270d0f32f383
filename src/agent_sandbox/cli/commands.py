"""``run``, ``exec`` and ``shell``: a command in a sandbox, its output live and exact, its exit code ours."""

from __future__ import annotations

import dataclasses
import math
import os
import posixpath
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_sandbox.cli import copying, interactive, options, output, pulling, signals, writing_back
from agent_sandbox.cli.connection import connect
from agent_sandbox.cli.waiting import fetching_told
from agent_sandbox.errors import ConflictError, NotFoundError, SandboxError
from agent_sandbox.types import WORKSPACE

if TYPE_CHECKING:
    from agent_sandbox.cli.packing import Sent
    from agent_sandbox.cli.pulling import Pull
    from agent_sandbox.client import ExecOutputEvent, Execution, Sandbox, SandboxClient, Terminal

TTL_SLACK_SECONDS = 60
"""A one-shot sandbox lives this much longer than its command may: time to create, report and destroy."""

INPUT_BYTES = 64 * 1024
"""What is read of standard input at once: what a pipe holds."""

Interactive = Annotated[bool, typer.Option("--interactive", "-i", help="Pass standard input on.")]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal, joined to this one; for people.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command(context_settings=options.TAKES_COMMAND)(run)
    app.command("exec", context_settings=options.TAKES_COMMAND)(exec_)
    app.command()(shell)


def run(
    command: options.Command,
    interactive_: Interactive = False,
    tty: Tty = False,
    volume: Annotated[
        list[str] | None,
        typer.Option("--volume", "-v", help="Copy a local directory in first.", metavar="DIR[:PATH]"),
    ] = None,
    pull_changes: Annotated[
        bool,
        typer.Option("--pull-changes", help="Show what the command changed in each -v DIR, and ask to write it there."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="With --pull-changes: write without asking, for scripts.")
    ] = False,
    from_: options.From = None,
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
    workdir: options.Workdir = None,
    timeout: options.Deadline = None,
    as_json: options.Json = False,
) -> None:
    """Run one command in a sandbox of its own: create, run with live output, destroy.

    Ends with the command's exit code; 125 when the error is ours. Standard input is empty without -i. Ctrl-C kills the
    command and destroys the sandbox, a second one leaves at once. -v copies DIR to PATH (/workspace when left out).

    With --pull-changes what the command changed there is shown when it has ended, and written back into DIR if you say
    so, or with --yes. What was changed in DIR meanwhile is left as it is and reported (123). Where nobody can be asked,
    nothing is written (122). Links that lead out of DIR, special files, and the configuration and hooks of git and
    other version control are never written.
    """
    variables = options.environment(env)
    volumes = [_volume(text) for text in volume or ()]
    _check_use(tty, as_json)
    _check_pull(pull_changes, yes, volumes)
    ttl = None if timeout is None else math.ceil(timeout) + TTL_SLACK_SECONDS
    with ExitStack() as stack:
        pulls = stack.enter_context(pulling.opened(volumes if pull_changes else ()))
        place = stack.enter_context(pulling.aside()) if pull_changes else None
        result: dict[str, Any] = {}
        with (
            connect() as client,
            signals.owning(
                lambda: _create(
                    client,
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
                    from_=from_,
                ),
                destroy,
                left_behind,
            ) as sandbox,
        ):
            for pull in pulls if from_ is not None else ():
                _require_empty(sandbox, pull.path)
            for at, (directory, path) in enumerate(volumes):
                bring(sandbox, directory, path, pulls[at].sent if pulls else None)
            code = follow(
                sandbox,
                command,
                variables,
                workdir,
                timeout,
                as_json=as_json,
                interactive_=interactive_,
                tty=tty,
                told=result.update if pulls else output.data,
            )
            if place is not None:
                take_back(sandbox, pulls, place)
        if pulls:
            code = writing_back.settle(pulls, code, yes=yes, result=result if as_json else None)
    raise typer.Exit(code)


def _create(client: SandboxClient, image: str | None, **options: Any) -> Sandbox:
    with fetching_told(client, image):
        return client.create(image, **options)


def exec_(
    sandbox_id: options.SandboxId,
    command: options.Command,
    interactive_: Interactive = False,
    tty: Tty = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the command's id and leave it running: see logs, kill.")
    ] = False,
    env: options.Env = None,
    workdir: options.Workdir = None,
    timeout: options.Deadline = None,
    as_json: options.Json = False,
) -> None:
    """Run a command in a sandbox that exists, with live output.

    Ends with the command's exit code; 125 when the error is ours. Standard input is empty without -i. Ctrl-C kills the
    command, which is its terminal's own affair with -t; the sandbox stays.
    """
    variables = options.environment(env)
    if command[0] == "--" and len(command) > 1:  # options end with SANDBOX, so the parser hands this one on
        command = command[1:]
    if detach and (interactive_ or tty):
        raise typer.BadParameter("-d leaves the command alone: it goes with neither -i nor -t")
    _check_use(tty, as_json)
    with connect() as client:
        sandbox = client.get(sandbox_id)
        if detach:
            with signals.awaiting(f"a command may be left running: see agent-sandbox execs {sandbox_id}"):
                started = sandbox.start_exec(command, env=variables, workdir=workdir, timeout_seconds=timeout)
                if signals.is_pending():
                    _forget(started)
                elif as_json:
                    output.data(dataclasses.asdict(started.info))
                else:
                    output.line(started.info.id)
            return
        code = follow(
            sandbox, command, variables, workdir, timeout, as_json=as_json, interactive_=interactive_, tty=tty
        )
    raise typer.Exit(code)


def shell(
    sandbox_id: options.SandboxId,
    command: Annotated[
        str | None, typer.Option("--command", "-c", help="A shell line in place of a login shell.", metavar="LINE")
    ] = None,
    workdir: options.Workdir = None,
) -> None:
    """Work in a sandbox: a shell on a terminal, joined to this one.

    Ends with the shell's exit code; 125 when the error is ours. Needs a terminal.
    """
    interactive.require_terminal()
    with connect() as client:
        sandbox = client.get(sandbox_id)
        with signals.deferred():
            terminal = sandbox.terminal(
                command, size=interactive.size(), workdir=workdir, term=os.environ.get("TERM") or None
            )
        with terminal:
            interactive.join(terminal)
        code = _terminal_code(terminal)
    raise typer.Exit(code)


def follow(
    sandbox: Sandbox,
    command: Sequence[str],
    env: Mapping[str, str],
    workdir: str | None,
    timeout: float | None,
    *,
    as_json: bool = False,
    interactive_: bool = False,
    tty: bool = False,
    told: Callable[[dict[str, Any]], object] = output.data,
) -> int:
    """Run a command and write its output as it comes, or have its whole result ``told``; return its exit code.

    Leaving early (a signal, a closed pipe) closes the stream, which ends the command with all its processes.
    """
    if tty:
        return _on_terminal(sandbox, command, env, workdir, timeout)
    with signals.deferred():
        execution = sandbox.start_exec(
            command, env=env, workdir=workdir, timeout_seconds=timeout, stdin=interactive_, detach=False
        )
    with closing(execution.output()) as events:
        feeding = execution.feeding(_standard_input()) if interactive_ else nullcontext()
        with feeding:
            if as_json:
                code, result = _result(events)
            else:
                code = output.follow(events, deadline_hint=True)
    _forget(execution)
    if as_json:
        told(result)
    return code


def _result(events: Iterable[ExecOutputEvent]) -> tuple[int, dict[str, Any]]:
    """Collect what a command said and how it ended, as a plain ``exec`` tells it, and whether it ran out of memory.

    Its exit code comes first.
    """
    from agent_sandbox.client.exec_requests import Collected

    collected = Collected()
    for event in events:
        if (result := collected.take(event)) is not None:
            return result.exit_code, {**dataclasses.asdict(result), "oom_killed": event.oom_killed}
    raise AssertionError("a stream ends with an exit or raises")


def bring(sandbox: Sandbox, directory: Path, path: str, sent: dict[str, Sent] | None = None) -> None:
    """Copy a local directory into a new sandbox; ``sent`` gets what is in it."""
    from agent_sandbox.cli.packing import pack_directory, total_bytes

    with copying.progress() as done:
        done.expect(total_bytes(directory))
        sandbox.upload_archive(path, pack_directory(directory, done, sent))
    for name, reason in done.skipped[: copying.SHOWN]:
        output.note(f"left out {name}: {reason}")


def take_back(sandbox: Sandbox, pulls: list[Pull], place: Path) -> None:
    """Read what the directories have become in a sandbox, before it goes."""
    for pull in pulls:
        with copying.progress() as done, closing(sandbox.stream_archive(pull.path)) as pieces:
            pulling.take_back(pull, pieces, place, done)


def destroy(sandbox: Sandbox) -> None:
    """Destroy a sandbox that may have expired already."""
    try:
        sandbox.destroy()
    except NotFoundError:
        pass


def left_behind(sandbox: Sandbox) -> str:
    """Say how to remove a sandbox that a forced exit leaves."""
    return f"sandbox {sandbox.id} may be left behind: agent-sandbox rm {sandbox.id}"


def _on_terminal(
    sandbox: Sandbox, command: Sequence[str], env: Mapping[str, str], workdir: str | None, timeout: float | None
) -> int:
    """Run a command on a terminal joined to ours. Its variables may be secret, so they do not go by the address."""
    variables = {"TERM": os.environ.get("TERM") or "xterm-256color", **env}
    size = interactive.size()
    with signals.owning(
        lambda: sandbox.start_exec(command, env=variables, workdir=workdir, timeout_seconds=timeout, tty=size),
        _forget,
        lambda execution: f"a command may be left running: agent-sandbox kill {sandbox.id} {execution.id}",
    ) as execution:
        if execution.info.status == "running":
            try:
                with signals.deferred():
                    terminal = sandbox.attach_terminal(execution.id, size=size)
                with terminal:
                    interactive.join(terminal)
                return _terminal_code(terminal)
            except (NotFoundError, ConflictError):
                pass  # it ended before we came: what it said is kept
        with closing(execution.output()) as events:
            return output.follow(events, deadline_hint=True)


def _terminal_code(terminal: Terminal) -> int:
    """The exit code of what ran on a terminal; 129 (hangup) when the connection was closed from here."""
    from agent_sandbox.client.exec_requests import exit_status

    if terminal.exit is None:
        return 129
    if terminal.exit.message:
        output.note(terminal.exit.message)
    output.why_killed(terminal.exit)
    return exit_status(terminal.exit)


def _forget(execution: Execution) -> None:
    try:
        execution.delete()
    except SandboxError:
        pass  # it has been forgotten already, or its sandbox has gone


def _standard_input() -> Iterator[bytes]:
    while piece := os.read(sys.stdin.fileno(), INPUT_BYTES):
        yield piece


def _check_use(tty: bool, as_json: bool) -> None:
    if tty and as_json:
        raise typer.BadParameter("--json goes with no terminal")
    if tty:
        interactive.require_terminal()


def _check_pull(pull_changes: bool, yes: bool, volumes: list[tuple[Path, str]]) -> None:
    if yes and not pull_changes:
        raise typer.BadParameter("--yes goes with --pull-changes")
    if pull_changes and not volumes:
        raise typer.BadParameter("--pull-changes needs a -v DIR to write to")
    if pull_changes and len({path for _, path in volumes}) < len(volumes):
        raise typer.BadParameter("with --pull-changes each -v needs a PATH of its own")


def _require_empty(sandbox: Sandbox, path: str) -> None:
    """What was there before would be taken for the command's work."""
    try:
        found = sandbox.list_files(path)
    except NotFoundError:
        return
    if found:
        raise ConflictError(f"{path} is not empty: with --from and --pull-changes say -v DIR:PATH with a new PATH")


def _volume(text: str) -> tuple[Path, str]:
    directory, colon, path = text.rpartition(":")
    if not colon:
        directory, path = text, ""
    if not Path(directory).is_dir():
        raise typer.BadParameter(f"{directory!r} is no directory")
    return Path(directory), posixpath.normpath(posixpath.join(WORKSPACE, path))
