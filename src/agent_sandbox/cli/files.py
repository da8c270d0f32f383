"""``cp``: files and directories between this machine and a sandbox.

The sandbox is hostile: its listings are input. When copying out, a name is used only if it is one plain path
component, paths are built from the names and never taken from the listing, and every file is opened relative to a
descriptor of its directory, without following links: nothing lands outside the target, whatever the listing says and
whatever already lies there. Links and special files are left out, and said so.

Files and listings travel by the plain file calls, so a directory that is empty cannot be made in a sandbox yet, and a
mode is kept on the way in only (the reply of a listing carries none).
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_sandbox.cli import output
from agent_sandbox.cli.connection import connect
from agent_sandbox.errors import InvalidRequestError, NotFoundError, PayloadTooLargeError
from agent_sandbox.types import WORKSPACE

if TYPE_CHECKING:
    from agent_sandbox.client import Sandbox

MAX_ENTRIES = 100_000
MAX_DEPTH = 100
MAX_TOTAL_BYTES = 10 << 30
"""Bounds of one copy: a hostile sandbox can list a tree without an end. The size is the largest disk by default."""
MAX_FILE_BYTES = 1 << 30
"""A file is held in memory while it is sent; the server's own limit is far lower by default (MAX_FILE_BYTES)."""
SHOWN = 10

_REMOTE = re.compile(r"(sb[a-z0-9]+):(.*)", re.DOTALL)


@dataclass
class Copied:
    """What one copy has done so far, held against its bounds."""

    files: int = 0
    bytes: int = 0
    entries: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    tick: Callable[[], object] = lambda: None

    def entry(self, depth: int) -> None:
        """Count one more name; :class:`PayloadTooLargeError` above a bound."""
        self.entries += 1
        if self.entries > MAX_ENTRIES or depth > MAX_DEPTH:
            raise PayloadTooLargeError(f"the tree has more than {MAX_ENTRIES} entries or {MAX_DEPTH} levels")

    def file(self, size: int) -> None:
        """Count one more file; :class:`PayloadTooLargeError` above the bound."""
        self.files += 1
        self.bytes += size
        if self.bytes > MAX_TOTAL_BYTES:
            raise PayloadTooLargeError(f"the tree holds more than {output.size(MAX_TOTAL_BYTES)}")
        self.tick()

    def skip(self, path: str, reason: str) -> None:
        """Note a name that is left out."""
        self.skipped.append((path, reason))


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(cp)


def cp(
    source: Annotated[str, typer.Argument(help="PATH or SANDBOX:PATH.")],
    target: Annotated[str, typer.Argument(help="SANDBOX:PATH or PATH; exactly one of the two is in a sandbox.")],
) -> None:
    """Copy a file, or a directory with all that is in it, into a sandbox or out of it.

    A path in a sandbox is relative to /workspace. Links, special files and (on the way in) empty directories are left
    out and reported. Where the target is a directory, the source goes into it.
    """
    there, here = _REMOTE.fullmatch(source), _REMOTE.fullmatch(target)
    if (there is None) == (here is None):
        raise typer.BadParameter("exactly one of the two must be SANDBOX:PATH")
    with connect() as client, _progress() as done:
        if here is not None:
            upload(client.get(here[1]), Path(source), _inside(here[2]), done)
        elif there is not None:
            download(client.get(there[1]), _inside(there[2]), Path(target), done)
    for path, reason in done.skipped[:SHOWN]:
        output.note(f"left out {path}: {reason}")
    if len(done.skipped) > SHOWN:
        output.note(f"left out {len(done.skipped) - SHOWN} more")
    output.note(f"copied {done.files} {'file' if done.files == 1 else 'files'}, {output.size(done.bytes)}")


def upload(sandbox: Sandbox, source: Path, target: str, done: Copied) -> None:
    """Copy a local file or tree to an absolute path in a sandbox.

    :class:`NotFoundError` when there is no source, :class:`InvalidRequestError` when it is a device, pipe or socket.
    """
    if not source.exists():
        raise NotFoundError(f"there is no {source}")
    if not source.is_dir() and not source.is_file():
        raise InvalidRequestError(f"{source} is neither a regular file nor a directory")
    if target.endswith("/") or _is_directory(sandbox, target):
        target = posixpath.join(target, source.absolute().name)
    if not source.is_dir():
        _send(sandbox, os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), target, os.fspath(source), done)
        return
    for folder, names, files, folder_fd in os.fwalk(source, follow_symlinks=False):
        relative = os.path.relpath(folder, source)
        depth = 0 if relative == "." else relative.count(os.sep) + 1
        if not names and not files:
            done.skip(folder, "an empty directory")
        for name in [*names, *files]:
            done.entry(depth)
            shown, mode = os.path.join(folder, name), os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode  # noqa: PTH118
            if stat.S_ISREG(mode):
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
                _send(sandbox, fd, posixpath.normpath(posixpath.join(target, relative, name)), shown, done)
            elif not stat.S_ISDIR(mode):
                done.skip(shown, "not a regular file")


def download(sandbox: Sandbox, source: str, target: Path, done: Copied) -> None:
    """Copy a file or tree from an absolute path in a sandbox. :class:`NotFoundError` when there is no source."""
    name = posixpath.basename(posixpath.normpath(source))
    try:
        entries = sandbox.list_files(source)
    except InvalidRequestError:
        entries = None
    if target.is_dir() or (entries is None and os.fspath(target).endswith("/")):
        if not is_plain(name):
            raise InvalidRequestError(f"{source!r} has no name of its own: say a target that does not exist yet")
        target /= name
    if entries is None:
        with _directory(target.absolute().parent) as parent_fd:
            _receive(sandbox, source, parent_fd, target.name, done)
        return
    target.mkdir(parents=True, exist_ok=True)
    with _directory(target) as target_fd:
        _receive_tree(sandbox, source, entries, target_fd, done, 0)


def is_plain(name: str) -> bool:
    """Whether a name from a listing is one path component that cannot lead anywhere else."""
    return name not in {"", ".", ".."} and "/" not in name and "\0" not in name


def _receive_tree(sandbox: Sandbox, source: str, entries: list[Any], target_fd: int, done: Copied, depth: int) -> None:
    for entry in entries:
        done.entry(depth)
        if not is_plain(entry.name):
            done.skip(posixpath.join(source, entry.name), "a name that leads elsewhere")
            continue
        path = posixpath.join(source, entry.name)
        if entry.type == "file":
            _receive(sandbox, path, target_fd, entry.name, done)
        elif entry.type == "directory":
            try:
                os.mkdir(entry.name, dir_fd=target_fd)
            except FileExistsError:
                pass
            with _directory(entry.name, target_fd) as child_fd:
                _receive_tree(sandbox, path, sandbox.list_files(path), child_fd, done, depth + 1)
        else:
            done.skip(path, "a symbolic link" if entry.type == "symlink" else "not a regular file")


def _receive(sandbox: Sandbox, path: str, parent_fd: int, name: str, done: Copied) -> None:
    data = sandbox.read_file(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o644, dir_fd=parent_fd)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {name}: {error.strerror} (links are not followed)") from error
    with os.fdopen(fd, "wb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidRequestError(f"cannot write {name}: it is there and no regular file")
        file.truncate()
        file.write(data)
    done.file(len(data))


def _send(sandbox: Sandbox, fd: int, target: str, shown: str, done: Copied) -> None:
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            done.skip(shown, "not a regular file")
            return
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise PayloadTooLargeError(f"{shown} is larger than {output.size(MAX_FILE_BYTES)}")
    sandbox.write_file(target, data, mode=stat.S_IMODE(status.st_mode) & 0o777)
    done.file(len(data))


def _inside(path: str) -> str:
    """The absolute path in the sandbox; a trailing slash stays, since it says "into this directory"."""
    joined = posixpath.join(WORKSPACE, path)
    return posixpath.normpath(joined) + ("/" if path.endswith("/") and path.strip("/") else "")


def _is_directory(sandbox: Sandbox, path: str) -> bool:
    try:
        sandbox.list_files(path)
    except (InvalidRequestError, NotFoundError):
        return False
    return True


@contextmanager
def _directory(path: str | Path, parent_fd: int | None = None) -> Iterator[int]:
    """A descriptor of a directory; below another one no link is followed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if parent_fd is None else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags, dir_fd=parent_fd)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot use {path} as a directory: {error.strerror} (links are not followed)"
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _progress() -> Iterator[Copied]:
    """Yield the counters of a copy; on a terminal they are shown while it runs."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    done = Copied()
    console = Console(stderr=True)
    if not console.is_terminal:
        yield done
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("copying")
        done.tick = lambda: bar.update(task, description=f"{done.files} files, {output.size(done.bytes)}")
        yield done
