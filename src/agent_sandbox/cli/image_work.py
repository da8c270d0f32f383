"""What the commands of the image family share: the store they work on, and progress on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agent_sandbox.cli.exit_codes import NeedsRootError
from agent_sandbox.config import Settings, load_settings

if TYPE_CHECKING:
    from agent_sandbox.images import ImageStore
    from agent_sandbox.images.sources import Progress


def open_store() -> tuple[ImageStore, Settings]:
    """The images of this machine, and the settings that say where. :class:`NeedsRootError` for others than root."""
    from agent_sandbox.images import ImageStore

    settings = load_settings()
    if os.geteuid() != 0:
        raise NeedsRootError("images are kept in the server's data directory, which needs root: run with sudo")
    return ImageStore(settings.data_dir, *settings.sandbox_ids(), settings.machine_directory()), settings


@contextmanager
def progress() -> Iterator[Progress]:
    """Yield what work on images reports to; on a terminal it is a progress bar on the standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda phase, done, total: None
        return
    columns = (TextColumn("{task.description:<8}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                for task in tasks.values():
                    bar.stop_task(task)
                tasks[phase] = bar.add_task(phase)
            bar.update(tasks[phase], completed=done, total=total or None)

        yield report
