"""``store …``: the versioned store by itself, for directories of this machine.

The store is a directory: ``--store``, ``AGENT_SANDBOX_STORE``, or ``store`` in the data directory; several processes
may use one. A state is named ``PROJECT`` (its branch main), ``PROJECT:NAME`` (branch or tag), ``PROJECT@N`` (layer), or
by a commit's id.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_sandbox.cli import exit_codes, options, output
from agent_sandbox.config import load_settings
from agent_sandbox.errors import ConflictError, NotFoundError

if TYPE_CHECKING:
    from agent_sandbox.store import Change, Created, Entry, HeadMoved, Report, Store, UpToDate

app = typer.Typer(
    help="Keep directories with their history: commit, fork, diff, merge, check out.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

State = Annotated[
    str, typer.Argument(metavar="STATE", help="PROJECT, PROJECT:NAME (branch or tag), PROJECT@LAYER, or a commit's id.")
]
BranchName = Annotated[str, typer.Argument(metavar="BRANCH", help="PROJECT:NAME; PROJECT alone is its branch main.")]
Message = Annotated[str, typer.Option("--message", "-m", help="What changed, for people.")]
Author = Annotated[str, typer.Option("--author", help="Who did it.", envvar="AGENT_SANDBOX_AUTHOR", show_envvar=True)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def register(root: typer.Typer) -> None:
    """Add the commands of this family."""
    from agent_sandbox.cli import store_care

    for command in (init, commit, checkout, fork, diff, log, merge, add, tag, rm, ls, files, cat):
        app.command()(command)
    store_care.register(app)
    root.add_typer(app, name="store")


@app.callback()
def _where(
    context: typer.Context,
    store: Annotated[
        Path | None,
        typer.Option("--store", help="Directory of the store.", envvar="AGENT_SANDBOX_STORE", metavar="DIR"),
    ] = None,
) -> None:
    context.obj = store


def location(context: typer.Context) -> Path:
    """The directory of the store that this command works on."""
    return context.obj or load_settings().data_dir / "store"


@contextmanager
def opened(context: typer.Context) -> Iterator[Store]:
    """Open the store; :class:`NotFoundError` with the remedy when there is none."""
    from agent_sandbox.store import Store

    path = location(context)
    if not path.exists():
        raise NotFoundError(f"there is no store at {path}; make one with: agent-sandbox store init PROJECT [DIR]")
    with Store.open(path) as store:
        yield store


def shown(name: bytes) -> str:
    """A path for people and JSON: UTF-8 where it is, escapes where not."""
    return os.fsdecode(name)


def _counts(report: Report) -> dict[str, Any]:
    return {
        "files": report.files,
        "directories": report.directories,
        "symlinks": report.symlinks,
        "fifos": report.fifos,
        "bytes": report.bytes,
        "read_bytes": report.read,
        "stored_bytes": report.stored,
        "left_out": [{"path": shown(item.path), "why": item.why.value} for item in report.left_out],
        "left_out_count": report.left_out_count,
    }


def outcome(result: Created | UpToDate | HeadMoved, as_json: bool, quiet: bool = False) -> None:
    """Print what a commit came to; a moved head is a :class:`ConflictError`."""
    from agent_sandbox.store import Created, HeadMoved

    if isinstance(result, HeadMoved):
        raise ConflictError(f"the head moved meanwhile, to {result.head.hex()[:12]}; nothing was changed: do it again")
    made = isinstance(result, Created)
    report = result.report
    for item in report.left_out[:10] if not quiet else ():
        output.note(f"left out {shown(item.path)}: {item.why.value}")
    if report.left_out_count > 10 and not quiet:
        output.note(f"left out {report.left_out_count - 10} more")
    if as_json:
        output.data({"outcome": "created" if made else "up_to_date", "commit": result.commit.hex(), **_counts(report)})
    elif not quiet:
        output.line(result.commit.hex())
        if not made:
            output.note("nothing had changed")
        elif report.files or report.directories:
            files = "1 file" if report.files == 1 else f"{report.files} files"
            output.note(
                f"{files}, {output.size(report.bytes)}; read {output.size(report.read)}, "
                f"stored {output.size(report.stored)}"
            )


@contextmanager
def bar(description: str, quiet: bool = False) -> Iterator[Callable[[int, int, int, int], None] | None]:
    """Yield a progress callback that draws a bar on a terminal, or None where nobody looks."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(description, total=None, counts="")

        def update(files: int, all_files: int, done: int, everything: int) -> None:
            # Small files cost by number, large ones by bytes: a file counts as 16 KiB more than it holds.
            total = everything + (all_files << 14)
            counts = f"{files:,} of {all_files:,} files" if all_files else f"{files:,} files, {output.size(done)}"
            drawn.update(task, completed=done + (files << 14), total=total or None, counts=counts)

        yield update


def _made_or_opened(path: Path, quiet: bool) -> Store:
    """Make the store where there is none. It stays whatever happens next: somebody else may have begun to use it."""
    from agent_sandbox.store import Store

    try:
        return Store.open(path)
    except NotFoundError:
        pass
    try:
        made = Store.create(path)
    except ConflictError:  # somebody else made it a moment ago
        return Store.open(path)
    if not quiet:
        output.note(f"a new store: {path}")
    return made


def init(
    context: typer.Context,
    project: Annotated[str, typer.Argument(metavar="PROJECT", help="The name of the new project.")],
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="What it begins with; nothing else.")
    ] = None,
    owners: Annotated[bool, typer.Option("--owners", help="Record users and groups of files.")] = False,
    message: Message = "",
    author: Author = "",
    quiet: Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Make a project, empty or from a directory, and the store with the first one."""
    from agent_sandbox.store.landing import opened

    path = location(context)
    if directory is not None:
        with opened(directory):
            pass  # no store is made for a directory that is not there
    with _made_or_opened(path, quiet) as store, bar("importing", quiet) as progress:
        made = store.init(project, directory, owners=owners, author=author, message=message, progress=progress)
    outcome(made, as_json, quiet)


def commit(
    context: typer.Context,
    branch: BranchName,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to keep as it is now.")],
    message: Message = "",
    author: Author = "",
    quiet: Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Keep a directory as the branch's next state; what did not change is not read again."""
    with opened(context) as store, bar("committing", quiet) as progress:
        result = store.commit(branch, directory, author=author, message=message, progress=progress)
    outcome(result, as_json, quiet)


def checkout(
    context: typer.Context,
    state: State,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; it must not exist, or be empty.")],
    quiet: Quiet = False,
) -> None:
    """Lay a state out as a directory."""
    with opened(context) as store, bar("checking out", quiet) as progress:
        store.checkout(state, directory, progress=progress)


def fork(
    context: typer.Context,
    state: State,
    branch: Annotated[str, typer.Argument(metavar="BRANCH", help="The new branch, PROJECT:NAME.")],
) -> None:
    """Begin a branch at a state. Nothing is copied."""
    with opened(context) as store:
        made = store.fork(state, branch)
        output.line(f"{made.project}:{made.name}")


_MARKS = {"added": "A", "removed": "D", "modified": "M", "type": "T", "metadata": "m"}


def _size(entry: Entry | None) -> int | None:
    from agent_sandbox.store import Type

    return entry.size if entry is not None and entry.type is Type.FILE else None


def _change(change: Change) -> dict[str, Any]:
    return {
        "path": shown(change.path),
        "kind": change.kind.value,
        "old_size": _size(change.old),
        "new_size": _size(change.new),
    }


def diff(
    context: typer.Context,
    old: State,
    new: Annotated[str, typer.Argument(metavar="STATE", help="The later one.")],
    text: Annotated[bool, typer.Option("--text", "-t", help="Show the lines of text files that differ.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show what differs: A added, D removed, M content, T another type, m mode, time or attributes."""
    with opened(context) as store:
        if as_json:
            output.data([_change(change) for change in store.diff(old, new)])
            return
        for change in store.diff(old, new):
            sizes = [output.size(size) for size in (_size(change.old), _size(change.new)) if size is not None]
            where = shown(change.path) or "."
            output.line(f"{_MARKS[change.kind.value]} {where}" + (f"  ({' → '.join(sizes)})" if sizes else ""))
            for line in store.hunks(change) if text else ():
                output.line(line.removesuffix("\n"))


def log(
    context: typer.Context,
    state: State,
    limit: Annotated[int, typer.Option("--limit", "-n", help="At most this many.", min=1)] = 50,
    as_json: options.Json = False,
) -> None:
    """Show the commits that led to a state, newest first."""
    with opened(context) as store:
        found = list(store.log(state, limit))
    if as_json:
        output.data(
            [
                {
                    "commit": item.id.hex(),
                    "parents": [parent.hex() for parent in item.commit.parents],
                    "time": _time(item.commit.time_ns),
                    "author": item.commit.author,
                    "message": item.commit.message,
                    "forgotten": item.forgotten,
                }
                for item in found
            ]
        )
        return
    output.table(
        ("COMMIT", "TIME", "AUTHOR", "MESSAGE"),
        [
            [
                item.id.hex()[:12] + (" (forgotten)" if item.forgotten else ""),
                _time(item.commit.time_ns),
                item.commit.author or "-",
                item.commit.message.partition("\n")[0] or "-",
            ]
            for item in found
        ],
    )


def _time(nanoseconds: int) -> str:
    try:
        return datetime.fromtimestamp(nanoseconds // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError):
        return f"{nanoseconds // 1_000_000_000} s"


def merge(
    context: typer.Context,
    branch: BranchName,
    state: Annotated[str, typer.Argument(metavar="STATE", help="What to bring into it.")],
    message: Message = "",
    author: Author = "",
    as_json: options.Json = False,
) -> None:
    """Bring a state into a branch, entry by entry. Conflicts change nothing, are listed, and end with 1."""
    from agent_sandbox.store import Conflicts

    with opened(context) as store:
        result = store.merge(branch, state, author=author, message=message)
    if not isinstance(result, Conflicts):
        outcome(result, as_json)
        return
    if as_json:
        output.data(
            {
                "outcome": "conflicts",
                "base": result.base.hex(),
                "count": result.count,
                "conflicts": [
                    {"path": shown(item.path), "kinds": [kind.value for kind in item.kinds]}
                    for item in result.conflicts
                ],
            }
        )
    else:
        for item in result.conflicts:
            output.line(f"{', '.join(kind.value for kind in item.kinds)}: {shown(item.path)}")
        output.note(f"{result.count} conflicts; nothing was changed")
    raise typer.Exit(exit_codes.FAILED)


def add(context: typer.Context, branch: BranchName, as_json: options.Json = False) -> None:
    """Publish a branch's head as the next layer of its project."""
    with opened(context) as store:
        result = store.add(branch)
    outcome(result, as_json)


def tag(
    context: typer.Context,
    state: State,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag; a tag never moves.")],
) -> None:
    """Give a state a name that stays."""
    with opened(context) as store:
        made = store.tag(state, name)
        output.line(f"{made.project}:{made.name}")


def rm(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="PROJECT:NAME, a branch or tag.")],
    project: Annotated[bool, typer.Option("--project", help="NAME is a project: remove all of it.")] = False,
) -> None:
    """Remove a branch, tag or project. What nothing leads to any more goes with the next gc."""
    with opened(context) as store:
        if project:
            store.delete_project(name)
        else:
            store.delete(name)


def _name(project: str, name: str, kind: str, commit: bytes) -> dict[str, str]:
    return {"project": project, "name": name, "kind": kind, "commit": commit.hex()}


def ls(
    context: typer.Context,
    project: Annotated[str | None, typer.Argument(metavar="[PROJECT]", help="Its branches, tags, layers.")] = None,
    as_json: options.Json = False,
) -> None:
    """List branches, tags and layers, of one project or all."""
    with opened(context) as store:
        rows = [
            row
            for name in ([project] if project else [item.name for item in store.projects()])
            for row in (
                *(_name(name, item.name, item.kind.name.lower(), item.head) for item in store.refs(name)),
                *(_name(name, f"@{item.number}", "layer", item.commit) for item in store.layers(name)),
            )
        ]
    if as_json:
        output.data(rows)
        return
    output.table(
        ("PROJECT", "NAME", "KIND", "COMMIT"),
        [[*output.fields(row, "project", "name", "kind"), str(row["commit"])[:12]] for row in rows],
    )


def files(
    context: typer.Context,
    state: State,
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="A directory of it; its top else.")] = "",
    as_json: options.Json = False,
) -> None:
    """List a directory of a state."""
    from agent_sandbox.store import Type

    with opened(context) as store:
        found = list(store.entries(state, os.fsencode(path)))
    if as_json:
        output.data(
            [
                {
                    "name": shown(entry.name),
                    "type": entry.type.name.lower(),
                    "mode": f"{entry.mode:04o}",
                    "size": entry.size,
                    "mtime_ns": entry.mtime_ns,
                    "target": shown(entry.target) if entry.type is Type.SYMLINK else None,
                }
                for entry in found
            ]
        )
        return
    marks = {Type.FILE: "-", Type.DIRECTORY: "d", Type.SYMLINK: "l", Type.FIFO: "p"}
    output.table(
        ("MODE", "SIZE", "MODIFIED", "NAME"),
        [
            [
                f"{marks[entry.type]}{entry.mode:04o}",
                output.size(entry.size) if entry.type is Type.FILE else "-",
                _time(entry.mtime_ns),
                shown(entry.name) + (f" -> {shown(entry.target)}" if entry.type is Type.SYMLINK else ""),
            ]
            for entry in found
        ],
    )


def cat(
    context: typer.Context,
    state: State,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file of it.")],
) -> None:
    """Write a file of a state to the standard output."""
    with opened(context) as store:
        for piece in store.read(state, os.fsencode(path)):
            output.raw("stdout", piece)
