"""The command line. Importing this package loads nothing; :func:`main` loads the commands."""

from __future__ import annotations

import os
import sys

_EXTRAS = {"typer", "rich", "pydantic", "fastapi", "uvicorn", "msgspec", "zstandard"}


def main() -> None:
    """Run ``agent-sandbox`` and exit with its code; say in one line what to install where an extra is missing."""
    _open_closed_streams()
    try:
        from agent_sandbox.cli.app import main as run

        code = run()
    except KeyboardInterrupt:
        code = 130
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        extra = "cli" if missing in {"typer", "rich"} else "server"
        from agent_sandbox.installing import remedy

        print(f"agent-sandbox: {missing} is not installed: {remedy(extra)}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _open_closed_streams() -> None:
    """Put the null device in the place of standard streams that the caller closed.

    Python has no object for them, and the next file or socket that is opened would get the number of one.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - it lives as long as the process
