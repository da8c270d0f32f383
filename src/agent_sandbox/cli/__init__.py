"""The command line. Importing this package loads nothing; :func:`main` loads the commands."""

from __future__ import annotations

import sys

_EXTRAS = {"typer", "rich", "pydantic", "fastapi", "uvicorn", "msgspec", "zstandard"}


def main() -> None:
    """Run ``agent-sandbox`` and exit with its code; say in one line what to install where an extra is missing."""
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
