"""Write changes into a directory of this machine, and nowhere else.

The rules
---------
* Every name is taken apart and opened component by component below the directory's descriptor; no link is followed. A
  link or file in the way of a directory is a problem of that one change, which is reported.
* What is here must be what was sent: the same file by inode, times and size, or else the same bytes; the same link; for
  something new, nothing. Otherwise somebody changed it here meanwhile, and it is left as it is.
* A file is written beside its place under a name of ours and then renamed over the old one, or linked where there was
  none, so that it is whole or not there. A signal is taken between two changes.
* Removals come first, the deepest first; a directory goes only when it is empty. Directories get their modes last.
* Permission bits only, no set-id bits. As root, a new entry belongs to whom its directory belongs, a changed one to
  whom it did. Owners and modes are set on descriptors of what was made or compared, never by name: whoever owns the
  directory may put something of root's under the name at any moment. Hard links of a changed file, its
  attributes and ACLs are not carried over.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from agent_sandbox.cli import exit_codes, output, pulling, signals
from agent_sandbox.cli.copying import SHOWN
from agent_sandbox.cli.packing import PIECE_BYTES, Sent
from agent_sandbox.cli.pulling import DIRECTORY, FILE, LINK, Came, Pull, Step

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CHANGED = "it was changed here meanwhile"


def settle(pulls: list[Pull], code: int, *, yes: bool, result: dict[str, Any] | None) -> int:
    """Show what the command changed, ask, write, and return the exit code; ``code`` is the command's.

    With a ``result`` nobody is asked: it is printed as JSON with the changes and how many were ``written``.
    """
    for pull in pulls:
        examine(pull)
    count = pulling.show(pulls, lambda line: print(line, file=sys.stderr) if result is None else None)
    written = 0

    def wrote() -> None:
        nonlocal written
        written += 1

    if count == 0:
        output.note("the command changed nothing that can be written")
    elif not yes and (result is not None or not sys.stdin.isatty() or not sys.stderr.isatty()):
        output.note(f"{count} changes are not written: nobody can be asked, and --yes is not given{_ended(code)}")
        code = exit_codes.NOT_WRITTEN
    elif yes or pulling.ask(pulls, count):
        try:
            for pull in pulls:
                write_back(pull, wrote)
        except signals.Interrupted:
            output.note(f"interrupted: {written} of {count} changes are written, each of them whole")
            raise
        problems = [(pull.directory / step.name, step.problem) for pull in pulls for step in pull.steps if step.problem]
        for path, problem in problems[:SHOWN]:
            output.note(f"not written: {path}: {problem}")
        output.note(f"{written} of {count} changes are written{_ended(code) if problems else ''}")
        code = exit_codes.CONFLICTS if problems else code
    else:
        output.note("nothing was written")
    if result is not None:
        output.data({**result, "changes": pulling.as_data(pulls), "written": written})
    return code


def _ended(code: int) -> str:
    return f"; the command ended with {code}" if code else ""


class Problem(Exception):
    """Why one change is not written."""


def examine(pull: Pull) -> None:
    """Set the problem of each change that could not be written now, because of what is here."""
    made = {step.name for step in pull.steps if step.new is not None and step.new.type == DIRECTORY}
    for step in pull.steps:
        above = step.name.rpartition("/")[0]
        if step.old is None and above in made:
            continue  # its directory is made first
        try:
            with _parent(pull.root, step.parts) as (parent, name):
                _require_as_sent(parent, name, step)
        except (Problem, OSError) as error:
            step.problem = _told(error)


def write_back(pull: Pull, wrote: Callable[[], object]) -> None:
    """Make the directory as it came back; ``wrote`` is called for each change that was written.

    A change that cannot be written gets its ``problem``. A signal leaves the rest unwritten, each change whole.
    """
    for step in pull.steps:
        step.problem = ""
    made: dict[str, tuple[int, int]] = {}
    removals = [step for step in pull.steps if step.new is None or (step.kind == "type" and _in_the_way(step))]
    creations = [step for step in pull.steps if step.new is not None]
    for step in sorted(removals, key=lambda step: -len(step.parts)):
        _do(step, lambda step=step: _remove(pull, step), wrote if step.new is None else None)  # type: ignore[misc]
    for step in creations:
        if not step.problem:
            _do(step, lambda step=step: _create(pull, step, made), wrote)  # type: ignore[misc]
    for step in reversed(creations):
        if not step.problem and step.new is not None and step.new.type == DIRECTORY:
            _do(step, lambda step=step: _set_mode(pull, step, made), None)  # type: ignore[misc]


def _do(step: Step, act: Callable[[], None], wrote: Callable[[], object] | None) -> None:
    with signals.deferred():
        try:
            act()
        except (Problem, OSError) as error:
            step.problem = _told(error)
            return
        if wrote is not None:
            wrote()


def _in_the_way(step: Step) -> bool:
    """Whether the old thing must go before the new one can come: one of them is a directory."""
    assert step.old is not None
    assert step.new is not None
    return stat.S_ISDIR(step.old.stat.st_mode) or step.new.type == DIRECTORY


def _remove(pull: Pull, step: Step) -> None:
    assert step.old is not None
    try:
        with _parent(pull.root, step.parts) as (parent, name):
            if stat.S_ISDIR(step.old.stat.st_mode):
                os.rmdir(name, dir_fd=parent)
            else:
                _require_as_sent(parent, name, step)
                os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass  # it went already
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise Problem("it is not empty here") from error
        raise


def _create(pull: Pull, step: Step, made: dict[str, tuple[int, int]]) -> None:
    """Make what is new; ``made`` gets the identity of each directory."""
    new = step.new
    assert new is not None
    with _parent(pull.root, step.parts) as (parent, name):
        if step.kind == "type" and _in_the_way(step):
            step = Step(step.name, "added", None, new)
        if new.type == DIRECTORY:
            if step.old is None:
                with suppress(FileExistsError):
                    os.mkdir(name, new.mode | 0o700, dir_fd=parent)
                    made[step.name] = _own_directory(parent, name)
        elif step.kind == "metadata":
            found = _require_as_sent(parent, name, step)
            with _held(parent, name) as fd:
                if found is None or _trace(os.fstat(fd)) != _trace(found):
                    raise Problem(CHANGED)
                os.fchmod(fd, new.mode)
        elif new.type == LINK:
            _put(parent, name, step, lambda part: _link(parent, part, new.target, step.old))
        elif new.type == FILE:
            _put(parent, name, step, lambda part: _file(pull, parent, part, new, step.old))


def _set_mode(pull: Pull, step: Step, made: dict[str, tuple[int, int]]) -> None:
    """Set the mode of a directory that was made or sent; one that somebody made here meanwhile keeps its own."""
    assert step.new is not None
    was = made.get(step.name)
    if was is None and step.kind == "metadata" and step.old is not None:
        was = (step.old.stat.st_dev, step.old.stat.st_ino)
    if was is None:
        return
    with _parent(pull.root, step.parts) as (parent, name), _directory(parent, name) as fd:
        if _identity(os.fstat(fd)) != was:
            raise Problem(CHANGED)
        os.fchmod(fd, step.new.mode)


def _put(parent: int, name: str, step: Step, make: Callable[[str], None]) -> None:
    """Make something under a name of ours, then put it in its place."""
    _require_as_sent(parent, name, step)
    part = f".agent-sandbox.{secrets.token_hex(8)}.part"

    def drop() -> None:
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=parent)

    with signals.also_when_forced(drop):
        make(part)
        _require_as_sent(parent, name, step)
        if step.old is not None:
            os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)
            return
        try:
            os.link(part, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
        except FileExistsError as error:
            raise Problem(CHANGED) from error
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)  # a file system without hard links


def _link(parent: int, part: str, target: str, old: Sent | None) -> None:
    os.symlink(target, part, dir_fd=parent)
    path = getattr(os, "O_PATH", 0)  # without it no descriptor of a link is had: it stays root's, which means nothing
    if os.geteuid() != 0 or not path:
        return
    fd = os.open(part, path | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        found = os.fstat(fd)
        if not stat.S_ISLNK(found.st_mode) or found.st_nlink != 1:
            raise Problem(CHANGED)
        owner = os.fstat(parent) if old is None else old.stat
        with suppress(OSError):
            os.chown(f"/proc/self/fd/{fd}", owner.st_uid, owner.st_gid)  # of the link itself, which is where that leads
    finally:
        os.close(fd)


def _file(pull: Pull, parent: int, part: str, new: Came, old: Sent | None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with ExitStack() as stack:
        if new.content is not None:
            source = os.open(new.content, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, source)
        else:
            directory, name = stack.enter_context(_parent(pull.root, tuple(new.same.split("/"))))
            source = stack.enter_context(_held(directory, name))
        target = os.open(part, flags, 0o600, dir_fd=parent)
        stack.callback(os.close, target)
        digest, size = hashlib.blake2b(digest_size=32), 0
        while piece := os.read(source, PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
            if piece.count(0) == len(piece):
                os.lseek(target, size, os.SEEK_SET)
                continue
            view = memoryview(piece)
            while view:
                view = view[os.write(target, view) :]
        os.ftruncate(target, size)
        if digest.digest() != new.digest:
            raise Problem(f"{new.same or 'its copy'}, which has its bytes, was changed here meanwhile")
        _own(target, os.fstat(parent) if old is None else old.stat)
        os.fchmod(target, new.mode)
        with suppress(OverflowError, ValueError, OSError):  # a time that no file system can keep
            os.utime(target, (new.mtime, new.mtime))


def _own(descriptor: int, owner: os.stat_result) -> None:
    if os.geteuid() == 0:
        with suppress(OSError):  # a file system without owners, or one that root is nobody on
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def _own_directory(parent: int, name: str) -> tuple[int, int]:
    """Give a directory that was just made to its parent's owner; return its identity."""
    with _directory(parent, name) as fd:
        with os.scandir(fd) as entries:
            if any(entries):  # another one was put in its place
                raise Problem(CHANGED)
        _own(fd, os.fstat(parent))
        return _identity(os.fstat(fd))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _require_as_sent(parent: int, name: str, step: Step) -> os.stat_result | None:
    """Raise :class:`Problem` unless what is here is what was sent; return its state, None where nothing is."""
    old = step.old
    try:
        now = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        if old is None or step.new is None:
            return None
        raise Problem("it was removed here meanwhile") from None
    if old is None:
        if step.new is None or step.new.type != DIRECTORY or not stat.S_ISDIR(now.st_mode):
            raise Problem("there is something of this name here now")
        return now
    if stat.S_IFMT(now.st_mode) != stat.S_IFMT(old.stat.st_mode):
        raise Problem(CHANGED)
    if stat.S_ISLNK(now.st_mode) and os.readlink(name, dir_fd=parent) != old.target:
        raise Problem(CHANGED)
    if stat.S_ISREG(now.st_mode) and _trace(now) != _trace(old.stat):
        if now.st_size != old.stat.st_size or (now.st_mode ^ old.stat.st_mode) & 0o7777:
            raise Problem(CHANGED)
        with _held(parent, name) as fd, os.fdopen(os.dup(fd), "rb") as file:
            if hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).digest() != old.digest:
                raise Problem(CHANGED)
    return now


def _trace(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode


def content_here(root: int, parts: tuple[str, ...], most: int) -> bytes | None:
    """Read a regular file below a directory; None where there is none, or a larger one."""
    try:
        with _parent(root, parts) as (parent, name), _held(parent, name) as fd, os.fdopen(os.dup(fd), "rb") as file:
            data = file.read(most + 1)
            return data if len(data) <= most else None
    except (Problem, OSError):
        return None


@contextmanager
def _held(parent: int, name: str) -> Iterator[int]:
    """A descriptor of a regular file; no link is followed."""
    fd = os.open(name, _OPEN_FILE, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Problem(CHANGED)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _directory(parent: int, name: str) -> Iterator[int]:
    """A descriptor of a directory; no link is followed."""
    fd = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _parent(root: int, parts: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """A descriptor of the directory that an entry is in, and its name there; no link is followed on the way."""
    fd = os.dup(root)
    try:
        for part in parts[:-1]:
            try:
                below = os.open(part, _OPEN_DIRECTORY, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise Problem("a link or file is in the way of its directory (links are not followed)") from error
                if error.errno == errno.ENOENT:
                    raise Problem("its directory is not here") from error
                raise
            os.close(fd)
            fd = below
        yield fd, parts[-1]
    finally:
        os.close(fd)


def _told(error: Problem | OSError) -> str:
    return str(error) if isinstance(error, Problem) else (error.strerror or str(error))
