"""``serve`` and ``openapi``: the server itself, and the description of what it speaks."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from agent_sandbox.cli import local_server, output
from agent_sandbox.config import load_settings, unknown_variables
from agent_sandbox.errors import ConflictError


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(serve)
    app.command()(openapi)


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    unix: Annotated[
        Path | None,
        typer.Option("--unix", help="Listen on this unix socket, mode 0600, instead of a port.", metavar="PATH"),
    ] = None,
    idle_exit: Annotated[
        float | None,
        typer.Option("--idle-exit", help="Stop after this long without a sandbox or request.", metavar="SECONDS"),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Directory of all state.", metavar="PATH")] = None,
    backends: Annotated[
        str | None, typer.Option(help="Backends to offer, comma-separated; the first is the default.")
    ] = None,
    default_image: Annotated[str | None, typer.Option(help="Image of a sandbox that names none.")] = None,
    allow_network: Annotated[
        bool | None, typer.Option("--allow-network", help="Let sandboxes ask for a network.")
    ] = None,
    max_sandboxes: Annotated[int | None, typer.Option(help="Sandboxes alive at once.")] = None,
    insecure_no_auth: Annotated[bool | None, typer.Option("--insecure-no-auth", help="Serve without keys.")] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the local server instead; its sandboxes stay.")] = False,
) -> None:
    """Run the server in the foreground.

    Every setting has a variable, AGENT_SANDBOX_<NAME>, and may stand in the TOML file that AGENT_SANDBOX_CONFIG names;
    the options here win. Keys come from AGENT_SANDBOX_API_KEYS only, never from the command line.
    """
    settings = load_settings(
        {
            "host": host,
            "port": port,
            "idle_exit_seconds": idle_exit,
            "data_dir": data_dir,
            "backends": backends,
            "default_image": default_image,
            "allow_network": allow_network,
            "max_sandboxes": max_sandboxes,
            "insecure_no_auth": insecure_no_auth,
        }
    )
    if stop:
        output.note("the local server has ended" if local_server.stop(settings.data_dir) else "no local server runs")
        return
    local = local_server.socket_path(settings.data_dir)
    if unix != local and local_server.answers(local):
        raise ConflictError(
            f"the local server, which commands start on demand, uses {settings.data_dir}: end it with "
            "`agent-sandbox serve --stop` (its sandboxes stay), or give this one another --data-dir"
        )
    from agent_sandbox.server import run

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request to a Docker engine
    for name, other in unknown_variables(os.environ).items():
        logging.getLogger(__name__).warning(
            "%s is no setting and ignored%s", name, f": is it {other}?" if other else ""
        )
    # A terminal that goes away ends the server as SIGTERM does: in order.
    signal.signal(signal.SIGHUP, lambda signum, frame: os.kill(os.getpid(), signal.SIGTERM))
    run.serve(settings, uds=unix)


class OneLine(logging.Formatter):
    """What is logged in one line, whatever names it tells: those of a sandbox's files may hold lines and escapes."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format a record, but for its traceback."""
        return output.plain(super().formatMessage(record))


def openapi() -> None:
    """Print the OpenAPI document of the REST API."""
    from agent_sandbox.server.openapi import openapi_document

    with output.writing():
        sys.stdout.write(openapi_document())
