"""The first look at a tree: which inodes have several names inside, and how much there is to do.

Only metadata is read. What is kept is one :class:`Group` for each inode with more than one link, since only these need
to know of each other before anything is read: the link id comes from the smallest path of all. Whatever changes between
this look and the reading is noticed there: by a group that is missing, or by one whose names do not add up.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field

from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.store.descent import Descent, Place
from agent_sandbox.store.objects import Entry
from agent_sandbox.store.oserrors import failure, shown
from agent_sandbox.store.walk import MAX_DEPTH

_PASSED = (PermissionError, FileNotFoundError, NotADirectoryError)
"""What the reading reports or notices itself."""


@dataclass(slots=True)
class Group:
    """One inode, no directory, with several links: the smallest of its paths inside, and how many there are."""

    place: Place
    name: bytes
    count: int = 1
    seen: int = 0
    """How many of its names were read."""
    entry: Entry | None = None
    """What it was when its first name was read, until its last name was."""
    signature: tuple[int, ...] = ()

    @property
    def path(self) -> bytes:
        """The smallest path, as bytes compare."""
        return self.place.path(self.name)

    def add(self, place: Place, name: bytes) -> None:
        """Count one more name."""
        self.count += 1
        smaller = name < self.name if place is self.place else place.path(name) < self.path
        if smaller:
            self.place, self.name = place, name


@dataclass(slots=True)
class Scan:
    """What the first look found: names of files, and an estimate of their data by allocated blocks."""

    files: int = 0
    bytes: int = 0
    groups: dict[tuple[int, int], Group] = field(default_factory=dict)


def allocated(about: os.stat_result) -> int:
    """Return about how many bytes of data a file has; a sparse one has less than its size."""
    return min(about.st_size, about.st_blocks * 512)


def linkable(about: os.stat_result) -> bool:
    """Return whether this is an inode that could have more names inside the tree."""
    return about.st_nlink > 1 and stat.S_IFMT(about.st_mode) in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO)


def scan(directory: int) -> Scan:
    """Look at every name under the open directory ``directory`` once.

    Raises :class:`InvalidRequestError` for a tree deeper than 1,000 names; what cannot be opened or has gone is passed
    over.
    """
    found = Scan()
    with Descent(directory) as descent:
        below = [_look(descent, found)]
        while below:
            if not below[-1]:
                below.pop()
                if below:
                    os.close(descent.leave())
                continue
            name = below[-1].pop()
            try:
                about = descent.enter(name)
            except _PASSED:
                continue
            except OSError as error:
                raise failure(error, "open", descent.here.path(name)) from error
            if about.st_dev != descent.device:
                os.close(descent.leave())
                continue
            if len(descent) > MAX_DEPTH:
                path = shown(descent.here.path())
                raise InvalidRequestError(f"deeper than {MAX_DEPTH} directories: {path}; move it or remove it")
            below.append(_look(descent, found))
    return found


def _look(descent: Descent, found: Scan) -> list[bytes]:
    """Note everything in the current directory, and return the names of the directories in it."""
    place, below = descent.here, []
    try:
        with os.scandir(place.fd) as entries:
            for item in entries:
                name = os.fsencode(item.name)
                with suppress(*_PASSED):
                    if item.is_dir(follow_symlinks=False):
                        below.append(name)
                        continue
                    about = item.stat(follow_symlinks=False)
                    if about.st_dev == descent.device:
                        _note(about, place, name, found)
    except OSError as error:
        raise failure(error, "list", place.path()) from error
    return below


def _note(about: os.stat_result, place: Place, name: bytes, found: Scan) -> None:
    file = stat.S_ISREG(about.st_mode)
    found.files += file
    if linkable(about):
        group = found.groups.get((about.st_dev, about.st_ino))
        if group is not None:
            group.add(place, name)
            return
        found.groups[about.st_dev, about.st_ino] = Group(place, name)
    if file:
        found.bytes += allocated(about)
