"""``image kernel|root``: what microVMs boot, and what they run on.

As the other commands of this family they work on this machine's own files, whether a server runs or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent_sandbox.cli import options, output
from agent_sandbox.cli.image_work import open_store, progress


def register(app: typer.Typer) -> None:
    """Add the commands to those of the image family."""
    for command in (kernel, root):
        app.command()(command)


def kernel(
    image: Annotated[
        Path | None,
        typer.Option(
            "--kernel", help="A bzImage for amd64, or a kernel package of Debian's, instead.", metavar="VMLINUZ"
        ),
    ] = None,
    modules: Annotated[
        Path | None,
        typer.Option("--modules", help="The modules of --kernel: its /lib/modules/VERSION.", metavar="DIR"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Prepare the kernel that microVMs boot: Debian's linux-image-cloud-amd64, downloaded by apt and not installed.

    Every driver that is needed is looked for, and what is missing is said. A server that runs keeps the kernel that it
    started with.
    """
    from agent_sandbox.images.machine import MachineImages

    _, settings = open_store()
    with progress() as report:
        prepared = MachineImages(settings.machine_directory()).prepare_kernel(image, modules, report)
    if not prepared.checked_config:
        output.note(f"there is no config-{prepared.version} beside the kernel: what is never a module was not checked")
    if as_json:
        output.data(
            {
                "version": prepared.version,
                "name": prepared.name,
                "source": prepared.source,
                "modules": list(prepared.modules),
                "config_checked": prepared.checked_config,
            }
        )
    else:
        output.line(f"{prepared.version} from {prepared.source}, {len(prepared.modules)} modules")


def root(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name or digest of an image; the host's programs else.")
    ] = "host",
    as_json: options.Json = False,
) -> None:
    """Make the root filesystem that microVMs run an image from. The first of them makes it otherwise, and waits.

    It is kept until the image is removed; that of the host's programs is made again when these have changed.
    """
    from agent_sandbox.images.machine import MachineImages

    store, settings = open_store()
    resolved = store.resolve(name)
    with progress() as report:
        machines = MachineImages(settings.machine_directory())
        made = machines.rootfs(store.open(resolved.name, resolved.digest), resolved.digest, report)
    size = made.path.stat().st_size
    if as_json:
        output.data({"name": resolved.name, "key": made.key, "path": str(made.path), "bytes": size})
    else:
        output.line(f"{resolved.name} {made.path} {output.size(size)}")
