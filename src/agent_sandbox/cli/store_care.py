"""``store export|import|check|gc|rebuild|stats|forget``: archives of states, and the care of the store."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import typer

from agent_sandbox.cli import exit_codes, options, output, store
from agent_sandbox.errors import InvalidRequestError

Archive = Annotated[Path, typer.Argument(metavar="FILE", help="A tar, plain or compressed; - is the standard stream.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command("import")(import_)
    for command in (export, forget, check, gc, rebuild, stats):
        app.command()(command)


def export(
    context: typer.Context,
    state: store.State,
    file: Archive,
    layer_over: Annotated[
        str | None,
        typer.Option("--layer-over", help="Write an OCI layer: only what differs from this state.", metavar="STATE"),
    ] = None,
) -> None:
    """Write a state as a tar (PAX, exact to the nanosecond), or as an OCI image layer over another state."""
    if str(file) == "-":
        with output.writing():
            _export(context, state, layer_over, sys.stdout.buffer)
        return
    if file.is_dir():
        raise InvalidRequestError(f"{file} is a directory; name a file")
    if file.exists() and not file.is_file():  # a device or a pipe is written to, not replaced
        with output.writing(str(file)), file.open("wb") as out:
            _export(context, state, layer_over, out)
        return
    part = file.with_name(f".{file.name[:100]}.{secrets.token_hex(4)}")
    try:
        with output.writing(str(file)), part.open("xb") as out:
            _export(context, state, layer_over, out)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _export(context: typer.Context, state: str, base: str | None, out: BinaryIO) -> None:
    with store.opened(context) as opened:
        if base is None:
            opened.export_tar(state, out)
        else:
            opened.export_layer(state, base, out)


def import_(
    context: typer.Context,
    branch: store.BranchName,
    file: Archive,
    layer: Annotated[bool, typer.Option("--layer", help="The file is an OCI layer: apply it on the branch.")] = False,
    message: store.Message = "",
    author: store.Author = "",
    quiet: store.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Make the content of a tar the branch's next state, without unpacking it anywhere."""
    source = cast("BinaryIO", sys.stdin.buffer) if str(file) == "-" else file.open("rb")
    with source, store.opened(context) as opened, store.bar("importing", quiet) as progress:
        take = opened.import_layer if layer else opened.import_tar
        result = take(branch, source, author=author, message=message, progress=progress)
    store.outcome(result, as_json, quiet)


def forget(context: typer.Context, state: store.State) -> None:
    """Let gc take the content of one commit, although later ones were made from it; the log goes on showing it."""
    with store.opened(context) as opened:
        opened.forget(state)


def check(context: typer.Context, quiet: store.Quiet = False, as_json: options.Json = False) -> None:
    """Read everything and compare it with its hashes; ends with 1 when something is damaged."""
    with store.opened(context) as opened, store.bar("checking", quiet) as progress:
        report = opened.check(progress=progress)
    if as_json:
        output.data(_plain(report))
    else:
        for damage in report.damages:
            output.line(": ".join((damage.where, *([store.shown(damage.path)] if damage.path else []), damage.why)))
        if not quiet:
            verdict = "clean" if report.clean else f"{report.damage_count} DAMAGED"
            output.note(f"{report.states} states, {report.objects} objects, {output.size(report.bytes)}: {verdict}")
    if not report.clean:
        raise typer.Exit(exit_codes.FAILED)


def gc(context: typer.Context, as_json: options.Json = False) -> None:
    """Remove what nothing leads to any more. Waits for those who use the store, 10 seconds at most."""
    with store.opened(context) as opened:
        report = opened.gc()
    if as_json:
        output.data(_plain(report))
    else:
        output.line(f"{output.size(report.freed)} freed: {report.removed} objects removed, {report.kept} kept")


def rebuild(context: typer.Context, quiet: store.Quiet = False, as_json: options.Json = False) -> None:
    """Make a lost or damaged index anew from the packs. Nobody may use the store; names are restored where they can be.

    The names come from the old index, as far as it can be read, and of a server's store from the server's database.
    States that have none any more become layers of the project "rebuilt". Ends with 1 when a name's state is gone.
    """
    from agent_sandbox.manager.recall import recalled
    from agent_sandbox.store.rebuild import rebuild as run

    path = store.location(context)
    with ExitStack() as stack:
        pins = stack.enter_context(recalled(path.parent)) if path.name == "store" else {}
        progress = stack.enter_context(store.bar("reading", quiet))
        report = run(path, pins=pins, progress=progress)
    if as_json:
        output.data(_plain(report))
    else:
        for name in report.lost:
            output.line(f"{name}: its state is gone")
        if not quiet:
            output.note(
                f"{report.objects} objects in {report.packs} packs, {report.damaged} places damaged,"
                f" {report.unread_packs} packs not of this store"
            )
            output.note(
                f"{report.states} states, {report.incomplete} incomplete, {report.without_past} of these in their past"
                f" alone; {report.names + report.pins} names restored,"
                f" {report.lost_count} lost, {report.unnamed} states without a name: layers of the project rebuilt"
            )
    if report.lost_count:
        raise typer.Exit(exit_codes.FAILED)


def stats(context: typer.Context, as_json: options.Json = False) -> None:
    """Count what the store holds."""
    with store.opened(context) as opened:
        found = _plain(opened.stats())
    if as_json:
        output.data(found)
    else:
        output.table(("WHAT", "COUNT"), [[name.replace("_", " "), value] for name, value in found.items()])


def _plain(report: Any) -> dict[str, Any]:
    def value(item: Any) -> Any:
        if isinstance(item, bytes):
            return store.shown(item) if item.isascii() or len(item) != 32 else item.hex()
        if isinstance(item, (list, tuple)):
            return [value(part) for part in item]
        if isinstance(item, dict):
            return {str(key): value(part) for key, part in item.items()}
        return item

    return {name: value(item) for name, item in dataclasses.asdict(report).items()}
