"""``image import|pull|ls|inspect|rm``: root filesystems on this machine. Those of microVMs are in machine_images.py.

These commands work on the data directory itself, so they run where the server runs, as its user, whether the server
runs or not. What sandboxes and snapshots stand on is read from the server's state and is not removed.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_sandbox.cli import exit_codes, machine_images, options, output
from agent_sandbox.cli.image_work import open_store, progress
from agent_sandbox.errors import ConflictError, InvalidRequestError, SandboxError

if TYPE_CHECKING:
    from agent_sandbox.images import ImageInfo, ImageStore, Source


class Kind(StrEnum):
    """The kinds of sources, as ``--kind`` takes them."""

    DIR = "dir"
    TAR = "tar"
    OCI = "oci"
    DOCKER_ARCHIVE = "docker-archive"
    REGISTRY = "registry"


AuthFile = Annotated[
    Path | None,
    typer.Option(
        "--authfile", help="Registry credentials, as skopeo login writes them; skopeo's default else.", metavar="FILE"
    ),
]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The name that sandboxes ask for, such as debian:12.")
]


app = typer.Typer(help="Manage the images of this machine.", no_args_is_help=True, rich_markup_mode=None)


def register(root: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command("import")(import_)
    for command in (pull, ls, inspect, rm):
        app.command()(command)
    machine_images.register(app)
    root.add_typer(app, name="image")


def import_(
    name: NameArgument,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Directory or tar of a root filesystem, OCI layout, docker save archive, or docker://…",
        ),
    ],
    kind: Annotated[
        Kind | None, typer.Option("--kind", help="What the source is, when it shall not be guessed.")
    ] = None,
    ref: Annotated[
        str, typer.Option("--ref", help="Tag of the image to take from an archive or layout of several.", metavar="TAG")
    ] = "",
    authfile: AuthFile = None,
    as_json: options.Json = False,
) -> None:
    """Import an image under a digest of its content, and let a name lead to it."""
    from agent_sandbox.images import find_source

    store, _ = open_store()
    _import(store, name, find_source(source, kind.value if kind else None, ref, authfile), as_json)


def pull(
    reference: Annotated[
        str,
        typer.Argument(metavar="REFERENCE", help="[docker://][HOST/]PATH[:TAG][@sha256:…]; docker.io without a host."),
    ],
    name: Annotated[str | None, typer.Option("--name", help="The name to give it; the reference itself else.")] = None,
    authfile: AuthFile = None,
    as_json: options.Json = False,
) -> None:
    """Pull an image from a registry, by skopeo."""
    from agent_sandbox.images import find_source
    from agent_sandbox.images.references import parse_registry_reference

    if name is None:
        try:
            name = parse_registry_reference(reference).local_name()
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{error.message}; or give the image a --name") from error
    store, _ = open_store()
    _import(store, name, find_source(reference, "registry", authfile=authfile), as_json)


def ls(as_json: options.Json = False) -> None:
    """List the images. The host image has no digest: it changes with the host."""
    store, _ = open_store()
    found = store.list()
    if as_json:
        output.data([_summary(info) for info in found])
        return
    output.table(
        ("NAME", "DIGEST", "SIZE", "CREATED"),
        [
            [
                info.name or "-",
                info.digest or "-",
                output.size(info.file_bytes) if info.digest else "-",
                _time(info.created_at) if info.created_at else "-",
            ]
            for info in found
        ],
    )


def inspect(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name or digest of an image.")],
    as_json: options.Json = False,
) -> None:
    """Show what is known of an image. Of its config only the environment has an effect: see the how-to page."""
    store, _ = open_store()
    info = store.inspect(name)
    if as_json:
        output.data(_details(info))
        return
    rows: list[tuple[str, object]] = [("name", info.name or "-"), ("digest", info.digest or "-")]
    rows += [("manifest", digest) for digest in info.manifests]
    if info.digest:
        rows += [("size", output.size(info.file_bytes)), ("entries", info.entries), ("created", _time(info.created_at))]
    rows += [("env", f"{key}={value}") for key, value in info.config.env.items()]
    if info.config.user:
        rows.append(("user", f"{info.config.user} (not used: commands run as the sandbox user)"))
    for key, value in _ignored(info).items():
        rows.append((key, f"{value if isinstance(value, str) else ' '.join(value)} (not used)"))
    output.table(("FIELD", "VALUE"), rows)


def rm(
    names: Annotated[list[str], typer.Argument(help="Names or digests of images.", metavar="NAME...")],
    as_json: options.Json = False,
) -> None:
    """Remove images. One that a sandbox or a snapshot stands on stays, and is an error.

    Goes through the whole list; ends with the code of the first error.
    """
    store, settings = open_store()
    state = settings.data_dir / "state.db"
    first, removed = exit_codes.OK, []
    for name in names:
        try:
            store.remove(name, lambda: asyncio.run(_digests_in_use(state)) if state.exists() else ())
        except SandboxError as error:
            output.note(error.message)
            first = first or exit_codes.of(error)
        else:
            removed.append(name)
    if as_json:
        output.data({"removed": removed})
    raise typer.Exit(first)


def _import(store: ImageStore, name: str, source: Source, as_json: bool) -> None:
    with progress() as report:
        info = store.import_image(name, source, report)
    if as_json:
        output.data(_details(info))
    else:
        output.line(f"{info.name} {info.digest} {info.entries} entries, {output.size(info.file_bytes)}")


def _summary(info: ImageInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in ("name", "digest", "file_bytes", "entries", "created_at")}


def _details(info: ImageInfo) -> dict[str, Any]:
    config = info.config
    more = {"env": dict(config.env), "user": config.user, "ignored": _ignored(info), "manifests": list(info.manifests)}
    return {**_summary(info), **more}


def _ignored(info: ImageInfo) -> dict[str, str | list[str]]:
    """What the image asks for and does not get."""
    config = info.config
    found: dict[str, str | list[str]] = {"working_dir": config.working_dir, "entrypoint": list(config.entrypoint)}
    found |= {"command": list(config.command), "volumes": list(config.volumes)}
    return {name: value for name, value in found.items() if value}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


async def _digests_in_use(state: Path) -> set[str]:
    from agent_sandbox.manager.state import StateStore

    store = StateStore(state)
    await store.open()
    try:
        sandboxes = [stored.record for stored in await store.load_sandboxes()]
        snapshots = await store.list_snapshots(None)
    finally:
        await store.close()
    used = {record.spec.image_digest for record in snapshots}
    for sandbox in sandboxes:
        if sandbox is None:
            raise ConflictError("the record of a sandbox cannot be read, and so not what it stands on: remove it first")
        used.add(sandbox.spec.image_digest)
    return used - {""}
