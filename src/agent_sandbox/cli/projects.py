"""``project …``: lines of published states on the server, which sandboxes can start from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from agent_sandbox.cli import completion, copying, exit_codes, options, output
from agent_sandbox.cli.connection import connect
from agent_sandbox.errors import InvalidRequestError, SandboxError

app = typer.Typer(
    help="Manage the server's projects: states that sandboxes start from.", no_args_is_help=True, rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The project.", autocompletion=completion.projects)]


def register(root: typer.Typer) -> None:
    """Add the commands of this family."""
    for command in (init, ls, log, add, rm):
        app.command()(command)
    root.add_typer(app, name="project")


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the new project.")],
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Its first layer: a directory, or a tar, plain or compressed."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Make a project on the server. Sandboxes start from it with --from NAME, and share its files.

    Sockets and devices are left out and reported.
    """
    from agent_sandbox.cli.packing import PIECE_BYTES, pack_directory, total_bytes

    if source is not None and not source.is_dir() and not source.is_file():
        raise InvalidRequestError(f"{source} is neither a directory nor a tar")
    with connect() as client, copying.progress() as done:
        if source is None:
            made = client.create_project(name)
        elif source.is_dir():
            done.expect(total_bytes(source))
            made = client.create_project(name, pack_directory(source, done))
        else:
            done.expect(source.stat().st_size)
            with source.open("rb", buffering=0) as file:
                made = client.create_project(name, done.counted(iter(lambda: file.read(PIECE_BYTES), b"")))
    for path, reason in done.skipped[: copying.SHOWN]:
        output.note(f"left out {path}: {reason}")
    if len(done.skipped) > copying.SHOWN:
        output.note(f"left out {len(done.skipped) - copying.SHOWN} more")
    if as_json:
        output.data(dataclasses.asdict(made))
    else:
        output.line(f"{made.name}@0")


def ls(as_json: options.Json = False) -> None:
    """List the projects."""
    with connect() as client:
        found = client.list_projects()
    if as_json:
        output.data([dataclasses.asdict(project) for project in found])
        return
    output.table(
        ("NAME", "NEWEST", "STATE", "CREATED"),
        [
            [item.name, f"{item.name}@{layer.number}", layer.commit[:12], layer.created_at]
            for item in found
            for layer in item.layers[:1]
        ],
    )


def log(
    name: Name,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", help="At most this many layers; 100 else.", min=1, max=1000)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show the layers of a project, newest first."""
    with connect() as client:
        found = client.get_project(name, limit)
    if as_json:
        output.data(dataclasses.asdict(found))
        return
    output.table(
        ("LAYER", "STATE", "CREATED"),
        [[f"{found.name}@{layer.number}", layer.commit[:12], layer.created_at] for layer in found.layers],
    )


def add(
    name: Name,
    state: Annotated[
        str,
        typer.Argument(
            metavar="STATE", help="A sandbox (as it is now), a snapshot, or a commit.", autocompletion=completion.both
        ),
    ],
    as_json: options.Json = False,
) -> None:
    """Publish a state as the next layer of a project, and print the layer.

    It must come from the newest one: where somebody else has published meanwhile, this is refused, and what to do is
    said. Publishing a state again changes nothing.
    """
    with connect() as client:
        done = client.add_layer(name, state)
    if as_json:
        output.data(dataclasses.asdict(done))
        return
    output.line(f"{name}@{done.layer.number}")
    if done.outcome == "up_to_date":
        output.note("the state is this layer already; nothing was changed")


def rm(
    names: Annotated[
        list[str], typer.Argument(help="Projects.", metavar="NAME...", autocompletion=completion.projects)
    ],
    as_json: options.Json = False,
) -> None:
    """Remove projects with their layers. Sandboxes that started from them live on; snapshots stay.

    Goes through the whole list; ends with the code of the first error.
    """
    first, removed = exit_codes.OK, []
    with connect() as client:
        for name in names:
            try:
                client.delete_project(name)
                removed.append(name)
            except SandboxError as error:
                output.note(f"{name}: {error.message}")
                first = first or exit_codes.of(error)
    if as_json:
        output.data({"removed": removed})
    raise typer.Exit(first)
