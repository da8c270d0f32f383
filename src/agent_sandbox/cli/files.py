"""``cp`` and ``watch``: files and directories between this machine and a sandbox.

The sandbox is hostile: its listings and archives are input. A directory beneath ``/workspace`` comes out as an archive,
which ``unpacking.py`` writes without ever leaving the target; modes, symbolic links and empty directories are kept. One
from elsewhere comes name by name: a name is used only if it is one plain path component, paths are built from the names
and never taken from the listing, and every file is opened relative to a descriptor of its directory, without following
links; links and special files are left out there, and said so.

A copy that fails or is interrupted leaves nothing behind: files and new directories are made aside and take their place
at the end. What goes into a directory that exists already is written there entry by entry, each of them whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import posixpath
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_sandbox.cli import completion, copying, options, output, signals
from agent_sandbox.cli.connection import connect
from agent_sandbox.cli.copying import Copied
from agent_sandbox.errors import ConflictError, InvalidRequestError, NotFoundError, PayloadTooLargeError, SandboxError
from agent_sandbox.types import WORKSPACE

if TYPE_CHECKING:
    from agent_sandbox.client import FileStat, Sandbox

_REMOTE = re.compile(r"(sb[a-z0-9]+):(.*)", re.DOTALL)

Place = Annotated[str, typer.Argument(metavar="SOURCE", help="PATH or SANDBOX:PATH.", autocompletion=completion.places)]


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(cp)
    app.command()(watch)


def cp(
    source: Place,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="SANDBOX:PATH or PATH; exactly one of the two is in a sandbox.",
            autocompletion=completion.places,
        ),
    ],
    as_json: options.Json = False,
) -> None:
    """Copy a file, or a directory with all that is in it, into a sandbox or out of it.

    A path in a sandbox is relative to /workspace. Where the target is a directory, the source goes into it. Modes,
    symbolic links and empty directories are kept. Devices and sockets, and on the way out of a sandbox links that lead
    out of the copy, are left out and reported. What comes out and names programs for git and other version control to
    run is told: look at it first. An interrupted copy leaves nothing behind, unless it was filling a
    directory that was there.
    """
    there, here = _REMOTE.fullmatch(source), _REMOTE.fullmatch(target)
    if (there is None) == (here is None):
        raise typer.BadParameter("exactly one of the two must be SANDBOX:PATH")
    with connect() as client, copying.progress() as done:
        if here is not None:
            upload(client.get(here[1]), Path(source), _inside(here[2]), done)
        elif there is not None:
            with output.writing(target):
                download(client.get(there[1]), _inside(there[2]), Path(target), done)
    if as_json:
        left_out = [{"path": path, "reason": reason} for path, reason in done.skipped]
        programs = done.noticed.told()
        output.data({"files": done.files, "bytes": done.bytes, "left_out": left_out, "runs_programs": programs})
    else:
        done.report()


def watch(
    sandbox_id: options.SandboxId,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory in the sandbox.")] = WORKSPACE,
    flat: Annotated[bool, typer.Option("--flat", help="Leave out what is in directories below.")] = False,
    as_json: options.Json = False,
) -> None:
    """Print what changes in a directory of a sandbox, a line for each change, until Ctrl-C."""
    with connect() as client, closing(client.get(sandbox_id).watch(_inside(path), recursive=not flat)) as events:
        for event in events:
            if as_json:
                output.at_once(json.dumps(dataclasses.asdict(event)))
            elif event.type == "ready":
                output.note(f"watching {path}")
            elif event.type == "lost":
                output.note("more changed than could be told: look again at everything")
            else:
                shown = event.path if event.to is None else f"{event.path} -> {event.to}"
                output.at_once(output.plain(f"{event.type} {shown}{'/' if event.directory else ''}"))


def upload(sandbox: Sandbox, source: Path, target: str, done: Copied) -> None:
    """Copy a local file or tree to an absolute path in a sandbox.

    :class:`NotFoundError` when there is no source, :class:`InvalidRequestError` when it is a device, pipe or socket.
    """
    from agent_sandbox.cli.packing import pack_directory, total_bytes

    if not source.exists():
        raise NotFoundError(f"there is no {source}")
    if not source.is_dir() and not source.is_file():
        raise InvalidRequestError(f"{source} is neither a regular file nor a directory")
    found = _stat(sandbox, target)
    if target.endswith("/") or (found is not None and found.type == "directory"):
        target = posixpath.join(target, source.absolute().name)
        found = _stat(sandbox, target)
    if not source.is_dir():
        if found is not None and found.type == "directory":
            raise ConflictError(f"{target} is a directory")
        _send(sandbox, source, target, done)
        return
    done.expect(total_bytes(source))
    if found is not None:
        if found.type != "directory":
            raise ConflictError(f"{target} is there and no directory")
        sandbox.upload_archive(target, pack_directory(source, done))
        return
    parent, name = posixpath.split(target)
    if parent != WORKSPACE:
        sandbox.mkdir(parent)
    aside = posixpath.join(parent, f".{name[:100]}.{secrets.token_hex(4)}.part")
    with signals.owning(
        lambda: sandbox.mkdir(aside),
        lambda _: _remove_if_there(sandbox, aside),
        lambda _: f"a part of the copy may be left at {sandbox.id}:{aside}",
    ):
        sandbox.upload_archive(aside, pack_directory(source, done))
        with signals.deferred():
            sandbox.move(aside, target, replace=False)


def download(sandbox: Sandbox, source: str, target: Path, done: Copied) -> None:
    """Copy a file or tree from an absolute path in a sandbox. :class:`NotFoundError` when there is no source."""
    found = _stat(sandbox, source)
    if found is None:
        raise NotFoundError(f"there is no {source} in the sandbox")
    name = posixpath.basename(posixpath.normpath(source))
    if target.is_dir() or (found.type != "directory" and os.fspath(target).endswith("/")):
        if not is_plain(name):
            raise InvalidRequestError(f"{source!r} has no name of its own: say a target that does not exist yet")
        target /= name
    done.noticed.below = target.absolute().parts[1:]
    if found.type != "directory":
        if target.is_dir() and not target.is_symlink():
            raise ConflictError(f"{target} is a directory")
        done.expect(found.size)
        done.noticed.see((), stat.S_IFREG)
        _receive_file(sandbox, source, found, target, done)
        return
    archived = source == WORKSPACE or source.startswith(WORKSPACE + "/")
    if target.is_symlink() or target.exists():
        with _directory(target) as fd:
            _fill(sandbox, source, fd, done, archived=archived, new=False)
        return
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _aside(target.absolute()) as (aside, fd):
        _fill(sandbox, source, fd, done, archived=archived)
        aside.rename(target)


def _fill(sandbox: Sandbox, source: str, target_fd: int, done: Copied, *, archived: bool, new: bool = True) -> None:
    from agent_sandbox.cli.unpacking import unpack

    if archived:
        with closing(sandbox.stream_archive(source)) as pieces:
            unpack(pieces, target_fd, done, new_root=new)
    else:
        _receive_tree(sandbox, source, sandbox.list_files(source), target_fd, done, 0)


@contextmanager
def _aside(target: Path) -> Iterator[tuple[Path, int]]:
    """A new directory beside the target, opened; it goes if it has not taken the target's place by the end.

    Who owns the directory that it is in may put another in its place: that one is neither opened nor filled.
    """
    with signals.deferred():
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".part"))
    try:
        with _directory(target.parent) as parent, _directory(aside.name, parent) as fd:
            with os.scandir(fd) as entries:
                if any(entries):
                    raise ConflictError(f"cannot copy to {target}: {aside} was exchanged meanwhile")
            os.fchmod(fd, 0o755)
            yield aside, fd
    finally:
        if aside.exists():
            with signals.deferred():
                shutil.rmtree(aside, ignore_errors=True)


class _Counted:
    """A local file that counts what is written to it."""

    def __init__(self, file: Any, done: Copied) -> None:
        self._file, self._done = file, done

    def write(self, data: bytes) -> int:
        self._done.piece(len(data))
        written: int = self._file.write(data)
        return written


def _receive_file(sandbox: Sandbox, source: str, found: FileStat, target: Path, done: Copied) -> None:
    """Write a file aside, then put it in the target's place, whatever non-directory is there; no link is followed."""
    if target.exists() and not target.is_file() and not target.is_symlink():
        raise InvalidRequestError(f"cannot write {target}: it is there and no regular file")
    mode = int(found.mode, 8) & 0o777 if re.fullmatch("[0-7]{1,4}", found.mode) else 0o644
    with tempfile.NamedTemporaryFile(
        dir=target.absolute().parent, prefix=f".{target.name[:100]}.", delete=False
    ) as file:
        try:
            sandbox.download(source, _Counted(file, done))  # type: ignore[arg-type]
            os.fchmod(file.fileno(), mode)
            file.close()
            Path(file.name).replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(file.name).unlink()
            raise
    done.file()


def _send(sandbox: Sandbox, source: Path, target: str, done: Copied) -> None:
    from agent_sandbox.cli.packing import PIECE_BYTES, pack_file

    with os.fdopen(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequestError(f"{source} is not a regular file")
        done.expect(found.st_size)
        pieces = iter(lambda: file.read(PIECE_BYTES), b"")
        try:
            sandbox.upload(target, done.counted(pieces), mode=stat.S_IMODE(found.st_mode) & 0o777)
            done.file()
            return
        except PayloadTooLargeError:
            done.bytes = 0
    # Above the server's limit on one file; its limit on an archive is higher.
    parent, name = posixpath.split(target)
    sandbox.upload_archive(parent, pack_file(source, name, done))


def _stat(sandbox: Sandbox, path: str) -> FileStat | None:
    try:
        return sandbox.stat(path)
    except NotFoundError:
        return None


def _remove_if_there(sandbox: Sandbox, path: str) -> None:
    with contextlib.suppress(SandboxError):
        sandbox.remove(path, recursive=True)


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
            done.noticed.see(tuple(part for part in path.split("/") if part), stat.S_IFREG)
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
    done.piece(len(data))
    done.file()


def _inside(path: str) -> str:
    """The absolute path in the sandbox; a trailing slash stays, since it says "into this directory"."""
    joined = posixpath.join(WORKSPACE, path)
    return posixpath.normpath(joined) + ("/" if path.endswith("/") and path.strip("/") else "")


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
