"""Where a checkout lands: a new directory that is there as a whole or not at all, or an empty one that was there.

A new one is built beside its place, in the same parent directory under a hidden random name, and renamed when it is
whole. Whatever ends the work before, an error or Ctrl-C, takes what was built away again. A directory that was there
cannot be swapped in one step (it may be a mount, or the caller may stand in it), so it is filled in place, and emptied
where that fails.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agent_sandbox.errors import ConflictError, InvalidRequestError, NotFoundError
from agent_sandbox.store.descent import Descent
from agent_sandbox.store.making import set_mode
from agent_sandbox.store.oserrors import failure

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SPOT = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    """Open a directory that the caller named.

    :class:`NotFoundError` when there is none, :class:`InvalidRequestError` when it is something else.
    """
    try:
        fd = os.open(directory, _OPEN)
    except FileNotFoundError:
        raise NotFoundError(f"there is no directory {directory}") from None
    except NotADirectoryError:
        raise InvalidRequestError(f"{directory} is no directory") from None
    except OSError as error:
        raise failure(error, "open", os.fsencode(directory)) from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def landing(directory: Path) -> Iterator[int]:
    """Give an open, empty directory that is at ``directory`` when the block ends well; else all is as before.

    :class:`ConflictError` when something is there, or turns up meanwhile; :class:`NotFoundError` without its parent.
    """
    directory = directory.absolute()
    try:
        about = directory.stat()
    except FileNotFoundError:
        if directory.is_symlink():
            raise ConflictError(f"{directory} is a symbolic link that leads nowhere") from None
        with _beside(directory) as fd:
            yield fd
        return
    except OSError as error:
        raise failure(error, "look at", os.fsencode(directory)) from error
    if not stat.S_ISDIR(about.st_mode):
        raise ConflictError(f"{directory} exists and is no directory")
    with opened(directory) as fd:
        with os.scandir(fd) as names:
            if any(names):
                raise ConflictError(f"{directory} is not empty")
        try:
            yield fd
        except BaseException as error:
            with _noted(error, directory):
                clear(fd)
                os.fchmod(fd, stat.S_IMODE(about.st_mode))
                os.utime(fd, ns=(about.st_atime_ns, about.st_mtime_ns))
            raise


@contextmanager
def _beside(directory: Path) -> Iterator[int]:
    hidden = f".{directory.name[:100]}.{secrets.token_hex(8)}"
    with opened(directory.parent) as parent:
        try:
            try:
                os.mkdir(hidden, 0o700, dir_fd=parent)
                fd = os.open(hidden, _OPEN | os.O_NOFOLLOW, dir_fd=parent)
            except OSError as error:
                raise failure(error, "make", os.fsencode(directory)) from error
            try:
                yield fd
            finally:
                os.close(fd)
            try:
                os.rename(hidden, directory.name, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError as error:
                raise failure(error, "make", os.fsencode(directory)) from error
        except BaseException as error:
            with _noted(error, directory.with_name(hidden)):
                _remove(parent, os.fsencode(hidden))
            raise


@contextmanager
def _noted(error: BaseException, where: Path) -> Iterator[None]:
    """Say with an error that what was built could not be removed; the error itself matters more."""
    try:
        yield
    except OSError as failed:
        error.add_note(f"what was built is left in {where}: {failed.strerror}")


def _remove(parent: int, name: bytes) -> None:
    with suppress(FileNotFoundError):
        fd = os.open(name, _OPEN | os.O_NOFOLLOW, dir_fd=parent)
        try:
            clear(fd)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=parent)


def clear(directory: int) -> None:
    """Remove everything in an open directory, however deep, and also what is locked against its owner."""
    with Descent(directory) as descent:
        todo = [_files_removed(descent.here.fd)]
        while todo:
            if todo[-1]:
                name = todo[-1].pop()
                try:
                    descent.enter(name)
                except PermissionError:
                    _unlock(descent.here.fd, name)
                    descent.enter(name)
                todo.append(_files_removed(descent.here.fd))
                continue
            todo.pop()
            if todo:
                name = descent.here.name
                os.close(descent.leave())
                os.rmdir(name, dir_fd=descent.here.fd)


def _files_removed(directory: int) -> list[bytes]:
    """Remove what is no directory from an open one, and return the names of the directories."""
    os.fchmod(directory, 0o700)
    with os.scandir(directory) as names:
        found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in names]
    for name, is_directory in found:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
    return [name for name, is_directory in found if is_directory]


def _unlock(parent: int, name: bytes) -> None:
    spot = os.open(name, _SPOT, dir_fd=parent)
    try:
        set_mode(spot, 0o700)
    finally:
        os.close(spot)
