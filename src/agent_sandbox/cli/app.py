"""The command line: one Typer application, one file per command family, one place where errors become exit codes.

A family imports what it needs inside its functions: ``--help`` loads neither the HTTP client nor the server, and
``run`` not the server. Completion is Typer's: ``--install-completion``, ``--show-completion``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from agent_sandbox import __version__
from agent_sandbox.cli import (
    backends,
    commands,
    conformance,
    doctor,
    execs,
    exit_codes,
    files,
    history,
    images,
    options,
    output,
    projects,
    quickstart,
    sandboxes,
    serve,
    signals,
    snapshots,
    store,
)
from agent_sandbox.errors import SandboxError, UnauthorizedError

app = typer.Typer(
    name="agent-sandbox",
    help="Run the code of AI agents in disposable sandboxes: snapshot, roll back, fork.",
    epilog=exit_codes.HELP,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"agent-sandbox {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


class _Command(TyperCommand):
    """A command whose usage line shows its arguments as the reference page does, without Typer's braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *map(options.usage, arguments)]


for family in (
    quickstart,
    commands,
    execs,
    sandboxes,
    files,
    snapshots,
    history,
    projects,
    images,
    store,
    serve,
    backends,
    doctor,
    conformance,
):
    family.register(app)
for _group in (app, projects.app, images.app, store.app):
    for _registered in _group.registered_commands:
        _registered.cls = _Command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; every error becomes one line on the standard error.

    Errors of the server and of bad values are :class:`SandboxError`; wrong usage is Typer's own message and code 2.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own_code = arguments[:1] in (["run"], ["exec"], ["shell"])
    try:
        with signals.handled():
            try:
                app(arguments, prog_name="agent-sandbox")
            finally:
                output.flush()
    except SystemExit as done:
        if isinstance(done.__context__, BrokenPipeError):  # Typer makes an exit with 1 of it
            output.close_broken_stdout()
            return exit_codes.BROKEN_PIPE
        return done.code if isinstance(done.code, int) else exit_codes.FAILED
    except SandboxError as error:
        output.note(error.message)
        if isinstance(error, UnauthorizedError):
            output.note("set AGENT_SANDBOX_API_KEY to one of the keys that the server was started with")
        for line in error.details.get("lines", ()) if isinstance(error, exit_codes.LocalServerError) else ():
            print(f"    {output.plain(line)}", file=sys.stderr)
        return exit_codes.OURS if own_code else exit_codes.of(error)
    except signals.Interrupted as interrupted:
        return interrupted.exit_code
    except BrokenPipeError:
        output.close_broken_stdout()
        return exit_codes.BROKEN_PIPE
    except OSError as error:
        output.drop_unwritten()
        output.note(f"{error.filename or 'this machine'}: {error.strerror or error}")
        return exit_codes.OURS if own_code else exit_codes.FAILED
    return exit_codes.OK
