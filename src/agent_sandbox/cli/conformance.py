"""``conformance``: ask a backend for everything that the contract promises, or show what a platform offers to one.

The kit runs as a program of its own (``python -m agent_sandbox.conformance``), which this one becomes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agent_sandbox import installing
from agent_sandbox.cli import exit_codes, output
from agent_sandbox.errors import InvalidRequestError

MAX_PROBE_BYTES = 1024 * 1024
"""A probe's report is some 10 KB; it comes from a machine that nobody knows yet."""
_NEEDS = ("pytest", "pytest_asyncio", "pytest_timeout")
_MARKS = {"yes": "yes", "no": "NO", "look": "look", "outside": "-"}


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(conformance)


def conformance(
    backend: Annotated[
        str | None, typer.Option("--backend", help="The backend to ask, by its name.", metavar="NAME")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Image of its sandboxes; the default one else.", metavar="IMAGE")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page to this file.", metavar="FILE")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", help="An item (B14, F7, R2) or a check (Suite.test_*); may be repeated.", metavar="WHAT"
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="What to call this configuration; the backend's name else.", metavar="NAME"),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds until one check has failed.", metavar="SECONDS", min=1)
    ] = 300.0,
    probe: Annotated[
        Path | None,
        typer.Option("--probe", help="Show what `sandboxd probe --json` wrote on some platform.", metavar="FILE"),
    ] = None,
) -> None:
    """Run the conformance kit against a backend: B1 to B17, the method contract, the faults, the refusals.

    The backend is made from the settings, as serve makes it, but with data directories of the kit's own. Prints a table
    of items and ends with 1 when something fails that is not a known failure, or a known failure passes. It takes
    minutes. With --probe it runs nothing, and shows what a platform offers to a backend that is not written yet.
    """
    if (backend is None) == (probe is None):
        raise typer.BadParameter("give either --backend NAME or --probe FILE")
    if probe is not None:
        show_probe(read_probe(probe))
        raise typer.Exit(exit_codes.OK)
    missing = [module for module in _NEEDS if importlib.util.find_spec(module) is None]
    if missing:
        raise InvalidRequestError(
            f"the conformance kit needs {', '.join(missing)}; install it with: {installing.remedy('conformance')}"
        )
    words = ["-m", "agent_sandbox.conformance", "--backend", str(backend), "--timeout", str(timeout)]
    for option, value in (("--image", image), ("--json", json), ("--html", html), ("--name", name)):
        words += [] if value is None else [option, str(value)]
    for wanted in only or ():
        words += ["--only", wanted]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words])  # noqa: S606


def read_probe(path: Path) -> dict[str, Any]:
    """Read a probe's report. Raises :class:`InvalidRequestError` for what is none, or is of another format."""
    import json as codec

    try:
        with path.open("rb") as file:
            data = file.read(MAX_PROBE_BYTES + 1)
        if len(data) > MAX_PROBE_BYTES:
            raise ValueError(f"it is larger than {MAX_PROBE_BYTES} bytes")
        report = codec.loads(data)
        if report["format"] != 1:
            raise ValueError(f"its format is {report['format']!r}, and this version reads format 1")
        for check in report["checks"]:
            if check["verdict"] not in _MARKS:
                raise ValueError(f"{check['verdict']!r} is no verdict")
            [str(check[field]) for field in ("item", "check", "detail")]
        return {**report, "platform": dict(report["platform"])}
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{path} is no report of `sandboxd probe --json`: {error}") from error


def show_probe(report: dict[str, Any]) -> None:
    """Print a probe's report as a table, and what it adds up to."""
    output.table(
        ("ITEM", "HERE", "WHAT", "DETAIL"),
        ((check["item"], _MARKS[check["verdict"]], check["check"], check["detail"]) for check in report["checks"]),
    )
    print()
    output.line(", ".join(f"{name} {value}" for name, value in report["platform"].items()))
    absent = [check for check in report["checks"] if check["verdict"] == "no"]
    output.line(
        f"{len(absent)} of what a daemon-driven backend could use is not here: "
        + (", ".join(f"{check['check']} ({check['item']})" for check in absent) or "nothing")
    )
