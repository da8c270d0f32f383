"""``image import|ls|rm``: root filesystems on this machine.

These commands work on the data directory itself, so they run where the server runs, as its user, whether the server
runs or not. What sandboxes and snapshots stand on is read from the server's state and is not removed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_sandbox.cli import options, output
from agent_sandbox.cli.exit_codes import NeedsRootError
from agent_sandbox.config import Settings, load_settings
from agent_sandbox.errors import ConflictError

if TYPE_CHECKING:
    from agent_sandbox.images import ImageStore
    from agent_sandbox.images.sources import Progress


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    image = typer.Typer(help="Manage the images of this machine.", no_args_is_help=True, rich_markup_mode=None)
    image.command("import")(import_)
    image.command("ls")(ls)
    image.command("rm")(rm)
    app.add_typer(image, name="image")


def import_(
    name: Annotated[str, typer.Argument(help="The name that sandboxes ask for, such as debian:12.")],
    source: Annotated[Path, typer.Argument(help="A directory or tar archive of a root filesystem.")],
    as_json: options.Json = False,
) -> None:
    """Import a root filesystem under a digest of its content, and let a name lead to it."""
    store, _ = _store()
    with _progress() as progress:
        info = store.import_image(name, source, progress)
    if as_json:
        output.data(dataclasses.asdict(info))
    else:
        output.line(f"{info.name} {info.digest} {info.entries} entries, {output.size(info.file_bytes)}")


def ls(as_json: options.Json = False) -> None:
    """List the images. The host image has no digest: it changes with the host."""
    store, _ = _store()
    found = store.list()
    if as_json:
        output.data([dataclasses.asdict(info) for info in found])
        return
    output.table(
        ("NAME", "DIGEST", "SIZE", "CREATED"),
        [
            [
                info.name or "-",
                info.digest or "-",
                output.size(info.file_bytes) if info.digest else "-",
                datetime.fromtimestamp(info.created_at, UTC).isoformat(timespec="seconds") if info.created_at else "-",
            ]
            for info in found
        ],
    )


def rm(names: Annotated[list[str], typer.Argument(help="Names or digests of images.", metavar="NAME...")]) -> None:
    """Remove images. One that a sandbox or a snapshot stands on stays, and is an error."""
    store, settings = _store()
    state = settings.data_dir / "state.db"
    for name in names:
        store.remove(name, asyncio.run(_digests_in_use(state)) if state.exists() else ())


def _store() -> tuple[ImageStore, Settings]:
    from agent_sandbox.images import ImageStore

    settings = load_settings()
    if os.geteuid() != 0:
        raise NeedsRootError("images are kept in the server's data directory, which needs root: run with sudo")
    return ImageStore(settings.data_dir, *settings.sandbox_ids()), settings


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


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield what an import reports to; on a terminal it is a progress bar on the standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda phase, done, total: None
        return
    with Progress(TextColumn("{task.description:<8}"), BarColumn(), DownloadColumn(), console=console) as bar:
        task = bar.add_task("read")
        yield lambda phase, done, total: bar.update(task, description=phase, completed=done, total=total or None)
