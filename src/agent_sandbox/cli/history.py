"""``diff``, ``changes``, ``log``, ``export``, ``merge``: what happened to a workspace, and to bring two together."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from agent_sandbox.cli import completion, exit_codes, options, output
from agent_sandbox.cli.connection import connect

if TYPE_CHECKING:
    from agent_sandbox.client import ChangeInfo, ChangeList

MARKS = {"added": "A", "removed": "D", "modified": "M", "type": "T", "metadata": "m"}

Text = Annotated[bool, typer.Option("--text", "-t", help="Show the lines of text files that differ.")]
Limit = Annotated[
    int | None, typer.Option("--limit", "-n", help="At most this many paths; 1000 else.", min=1, max=10_000)
]


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(diff)
    app.command()(changes)
    app.command()(log)
    app.command()(export)
    app.command()(merge)


def diff(
    old: options.SnapshotId,
    new: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="The later one.", autocompletion=completion.snapshots)],
    text: Text = False,
    limit: Limit = None,
    as_json: options.Json = False,
) -> None:
    """Show what differs between two snapshots.

    A added, D removed, M content, T another type, m mode, time or attributes.
    """
    with connect() as client:
        _show(client.diff(old, new, text=text, limit=limit), as_json)


def changes(
    sandbox_id: options.SandboxId, text: Text = False, limit: Limit = None, as_json: options.Json = False
) -> None:
    """Show what changed in a workspace since the last snapshot or rollback, or since its beginning; marks as of diff.

    The sandbox's processes stand still while its workspace is read.
    """
    with connect() as client:
        _show(client.get(sandbox_id).changes(text=text, limit=limit), as_json)


def log(
    snapshot_id: options.SnapshotId,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", help="At most this many states; 100 else.", min=1, max=1000)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show the states that led to a snapshot, newest first, with the snapshots that keep them."""
    with connect() as client:
        states = client.log(snapshot_id, limit)
    if as_json:
        output.data([dataclasses.asdict(state) for state in states])
        return
    rows = []
    for state in states:
        snapshots = " ".join(state.snapshot_ids) or ("-" if state.kept else "(deleted)")
        rows.append([state.commit[:12], state.created_at, snapshots])
    output.table(("STATE", "CREATED", "SNAPSHOTS"), rows)


def export(
    snapshot_id: options.SnapshotId,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The tar to write; - is the standard output.")],
    as_json: options.Json = False,
) -> None:
    """Write a snapshot as a tar archive, names relative to the workspace. A file is written whole or not at all."""
    if file == "-" and as_json:
        raise typer.BadParameter("--json and the archive cannot both go to the standard output")
    with connect() as client:
        if file == "-":
            with closing(client.stream_snapshot(snapshot_id)) as pieces:
                for piece in pieces:
                    output.raw("stdout", piece)
            return
        with output.writing(file):
            size = client.download_snapshot(snapshot_id, file)
    if as_json:
        output.data({"snapshot_id": snapshot_id, "file": file, "bytes": size})


def merge(sandbox_id: options.SandboxId, snapshot_id: options.SnapshotId, as_json: options.Json = False) -> None:
    """Bring a snapshot's changes into a sandbox, such as the work of a fork; print the snapshot of the result.

    What both changed is told apart by their last common state. The sandbox's processes end. Conflicts change nothing,
    are listed, and end with 1. The workspace as it was is kept as a snapshot, too.
    """
    with connect() as client:
        done = client.get(sandbox_id).merge(snapshot_id)
    if as_json:
        output.data(dataclasses.asdict(done))
    elif done.outcome == "merged":
        output.line(done.snapshot_id or "")
        output.note(f"as it was: {done.before_snapshot_id}")
    elif done.outcome == "up_to_date":
        output.note("the workspace has this snapshot in its history already; nothing was changed")
    else:
        for conflict in done.conflicts:
            output.line(f"{', '.join(conflict.kinds)}: {conflict.path}")
        output.note(f"{done.conflict_count} conflicts; nothing was changed")
    if done.outcome == "conflicts":
        raise typer.Exit(exit_codes.FAILED)


def _show(found: ChangeList, as_json: bool) -> None:
    if as_json:
        output.data(dataclasses.asdict(found))
        return
    for change in found.changes:
        output.line(f"{MARKS.get(change.kind, '?')} {change.path}{_sizes(change)}")
        for line in (change.text or "").split("\n")[:-1]:
            print("\t".join(map(output.plain, line.split("\t"))))  # tabs are text's own, and patch needs them
    if found.truncated:
        output.note(f"there is more than these {len(found.changes)}: --limit shows up to 10000")
    if found.text_truncated:
        output.note("the text of some is left out: there is more than 1 MiB, or it takes too long")


def _sizes(change: ChangeInfo) -> str:
    sizes = [output.size(size) for size in (change.old_size, change.new_size) if size is not None]
    return f"  ({' → '.join(sizes)})" if sizes else ""
