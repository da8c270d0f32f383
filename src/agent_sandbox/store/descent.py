"""Going down a directory tree and up again by descriptors: no symlink is followed, and no path is ever resolved.

A directory is opened by one name relative to its parent's descriptor. Only the 32 lowest descriptors are held, so
that a tree of 1,000 levels needs no more; on the way up a parent is opened again as ``..`` of its child, and must then
be the inode that it was: a directory that was moved elsewhere meanwhile does not lead there.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from agent_sandbox.errors import ConflictError
from agent_sandbox.store.oserrors import failure, shown

HELD = 32
"""Descriptors that are held at once, the root's not counted."""
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Place:
    """One directory on the way down. Its path is made when asked for: 1,000 of them would be megabytes."""

    __slots__ = ("fd", "inode", "name", "parent")

    def __init__(self, parent: Place | None, name: bytes, fd: int, inode: tuple[int, int]) -> None:
        self.parent = parent
        self.name = name
        self.fd = fd
        """Open descriptor, or -1."""
        self.inode = inode

    def path(self, name: bytes = b"") -> bytes:
        """Return the path of ``name`` in this directory, or of itself, relative to the root."""
        names = [name] if name else []
        place = self
        while place.parent is not None:
            names.append(place.name)
            place = place.parent
        return b"/".join(reversed(names))


class Descent:
    """The directories from the root to the current one. A context manager that closes what it opened."""

    def __init__(self, directory: int) -> None:
        """Begin in the open directory ``directory``, opened anew, so that its own position stays."""
        fd = os.open(b".", _FLAGS, dir_fd=directory)
        about = os.fstat(fd)
        self.device = about.st_dev
        self._places = [Place(None, b"", fd, (about.st_dev, about.st_ino))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for place in self._places:
            if place.fd >= 0:
                os.close(place.fd)
                place.fd = -1

    def __len__(self) -> int:
        """How many names the path of the current directory has."""
        return len(self._places) - 1

    @property
    def here(self) -> Place:
        """The current directory, which is open."""
        return self._places[-1]

    def enter(self, name: bytes) -> os.stat_result:
        """Go into the directory ``name`` and return what it is; raises :class:`OSError` when it cannot be opened."""
        fd = os.open(name, _FLAGS, dir_fd=self.here.fd)
        about = os.fstat(fd)
        self._places.append(Place(self.here, name, fd, (about.st_dev, about.st_ino)))
        if len(self) > HELD:
            above = self._places[-HELD - 1]
            if above.fd >= 0:
                os.close(above.fd)
                above.fd = -1
        return about

    def leave(self) -> int:
        """Go back to the parent; return the descriptor of the directory that was left, for the caller to close.

        Raises :class:`ConflictError` when the directory is no longer inside its parent.
        """
        left, above = self._places[-1], self._places[-2]
        if above.fd < 0:
            try:
                fd = os.open(b"..", _FLAGS, dir_fd=left.fd)
            except OSError as error:
                raise failure(error, "go back from", left.path()) from error
            about = os.fstat(fd)
            if (about.st_dev, about.st_ino) != above.inode:
                os.close(fd)
                raise ConflictError(f"{shown(left.path())} was moved meanwhile")
            above.fd = fd
        self._places.pop()
        return left.fd
