"""Layout: make a state appear under an empty directory, as a whole or as an overlay layer above an older state.

Rules
-----
* Everything is made by name relative to an open directory that was made here, exclusively, and no symlink is followed.
* While it is filled, a directory has mode 0700. Its own mode, attributes and times come last, from the bottom up, so
  that what is made inside does not change them, and locked directories (0500) can be filled without being root.
* The names of one inode are links to one file in a directory for this purpose, which is removed at the end. So neither
  descriptors nor paths of first names are kept, and a first name may lie in a directory that is locked by then.
* A symlink's mode is the system's. Neither umask nor what the file system inherits matters.

A state is verified object by object and may still be hostile: two names of one inode that disagree, a depth or lengths
that cannot be: :class:`StoreDamagedError`. What this file system cannot hold is :class:`StoreError`.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from agent_sandbox.errors import ConflictError, SandboxError, StoreDamagedError, StoreError
from agent_sandbox.store import walk
from agent_sandbox.store.descent import Descent, Place
from agent_sandbox.store.making import Maker, making, set_mode
from agent_sandbox.store.objects import Entry, Type
from agent_sandbox.store.oserrors import failure, shown
from agent_sandbox.store.ports import Objects, Options, Progress

OPAQUE = ("trusted.overlay.opaque", b"y")
"""On a directory: it hides what the layers below have there (Documentation/filesystems/overlayfs.rst)."""
_PROGRESS_SECONDS = 0.1


class Forced(dict[bytes, "Forced"]):
    """Names that are laid out although they are equal in both states; below a directory, the names in it."""


NOTHING = Forced()


@dataclass(slots=True)
class _Frame:
    """One directory that is being filled."""

    entry: Entry
    pairs: Iterator[tuple[bytes, Entry | None, Entry | None]]
    forced: Forced
    opaque: bool = False


def paired(
    objects: Objects, old: Entry | None, new: Entry | None
) -> Iterator[tuple[bytes, Entry | None, Entry | None]]:
    """Yield each name in one of two directories, sorted, with its entry in each; what is no directory has none."""
    left, right = _entries(objects, old), _entries(objects, new)
    one, two = next(left, None), next(right, None)
    while one is not None or two is not None:
        if two is None or (one is not None and one.name < two.name):
            assert one is not None, "one of them is left"
            yield one.name, one, None
            one = next(left, None)
        elif one is None or two.name < one.name:
            yield two.name, None, two
            two = next(right, None)
        else:
            yield one.name, one, two
            one, two = next(left, None), next(right, None)


def _entries(objects: Objects, directory: Entry | None) -> Iterator[Entry]:
    if directory is None or directory.type is not Type.DIRECTORY:
        return iter(())
    return walk.entries(objects, directory)


def lay_out(
    root: Entry,
    directory: int,
    objects: Objects,
    *,
    old: Entry | None = None,
    forced: Forced = NOTHING,
    options: Options,
    progress: Progress | None = None,
) -> None:
    """Lay out ``root``, or above ``old`` what differs, with whiteouts, and what is ``forced``.

    See :meth:`~agent_sandbox.store.ports.Engine.checkout` and :meth:`~agent_sandbox.store.ports.Engine.difference`.
    """
    try:
        descent = Descent(directory)
    except OSError as error:
        raise failure(error, "open", b"") from error
    with descent:
        with making(descent.here, b""), os.scandir(descent.here.fd) as inside:
            if next(inside, None) is not None:
                raise ConflictError("the directory to lay out in is not empty")
        count = _Count(objects, root, progress)
        maker = Maker(objects, options, wrote=count.wrote)
        links = _Links(descent.here, maker)
        try:
            _Layout(descent, objects, maker, links, count).fill(old, root, forced)
        except BaseException:
            with suppress(SandboxError):
                links.remove()
            raise
        links.remove()
        maker.dress(descent.here, b"", descent.here.fd, root)
        count.tell(now=True)


class _Layout:
    """The walk of one layout."""

    def __init__(self, descent: Descent, objects: Objects, maker: Maker, links: _Links, count: _Count) -> None:
        self._descent = descent
        self._objects = objects
        self._maker = maker
        self._links = links
        self._count = count

    def fill(self, old: Entry | None, root: Entry, forced: Forced) -> None:
        frames = [self._frame(old, root, forced)]
        while True:
            frame = frames[-1]
            name, before, entry = next(frame.pairs, (b"", None, None))
            if not name:
                frames.pop()
                if not frames:
                    return
                self._leave(frame)
            elif entry is None:
                self._maker.whiteout(self._descent.here, name)
            elif before == entry and name not in frame.forced:
                continue
            elif entry.type is Type.DIRECTORY:
                self._enter(name)
                frames.append(self._frame(before, entry, frame.forced.get(name, NOTHING)))
            elif entry.link is None:
                self._maker.make(self._descent.here, entry)
            else:
                self._links.make(self._descent.here, entry)
            if entry is not None and entry.type is Type.FILE:
                self._count.made()

    def _frame(self, old: Entry | None, entry: Entry, forced: Forced) -> _Frame:
        opaque = old is not None and old.type is not Type.DIRECTORY
        if old is not None and old.content == entry.content and not forced:
            return _Frame(entry, iter(()), forced, opaque)
        return _Frame(entry, paired(self._objects, old, entry), forced, opaque)

    def _enter(self, name: bytes) -> None:
        here = self._descent.here
        if len(self._descent) == walk.MAX_DEPTH:
            raise StoreDamagedError(f"a damaged directory: deeper than {walk.MAX_DEPTH} names")
        with making(here, name):
            os.mkdir(name, 0o700, dir_fd=here.fd)
            try:
                about = self._descent.enter(name)
            except PermissionError:  # a umask that takes the owner's own rights
                spot = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here.fd)
                try:
                    set_mode(spot, 0o700)
                finally:
                    os.close(spot)
                about = self._descent.enter(name)
            if about.st_mode & 0o700 != 0o700:
                os.fchmod(self._descent.here.fd, 0o700)

    def _leave(self, frame: _Frame) -> None:
        place = self._descent.here
        file = self._descent.leave()
        try:
            if frame.opaque:
                with making(place, b""):
                    os.setxattr(file, *OPAQUE)
            self._maker.dress(place, b"", file, frame.entry)
        finally:
            os.close(file)


class _Links:
    """Inodes with several names: each lies once in a directory of its own until the end, under its link id."""

    def __init__(self, root: Place, maker: Maker) -> None:
        self._root = root
        self._maker = maker
        self._name = b".links-" + secrets.token_hex(8).encode()
        self._place: Place | None = None
        self._made: dict[bytes, Entry] = {}
        self._full: set[bytes] = set()

    def make(self, place: Place, entry: Entry) -> None:
        """Make one name of an inode, and the inode itself when it is the first."""
        assert entry.link is not None, "it has several names"
        store = self._open()
        inode = replace(entry, name=entry.link.hex().encode())
        made = self._made.setdefault(entry.link, inode)
        if made is inode:
            self._maker.make(store, inode)
        elif made != inode:
            raise StoreDamagedError(f"a damaged directory: {shown(place.path(entry.name))} differs from its other name")
        if entry.link in self._full:
            raise StoreError(f"this file system does not allow as many links as {shown(place.path(entry.name))} has")
        with making(place, entry.name):
            try:
                os.link(inode.name, entry.name, src_dir_fd=store.fd, dst_dir_fd=place.fd, follow_symlinks=False)
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                # As many links as the file system allows, all of them inside: the last takes the place of ours.
                os.rename(inode.name, entry.name, src_dir_fd=store.fd, dst_dir_fd=place.fd)
                self._full.add(entry.link)

    def _open(self) -> Place:
        if self._place is None:
            with making(self._root, b""):
                os.mkdir(self._name, 0o700, dir_fd=self._root.fd)
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(self._name, flags, dir_fd=self._root.fd)
                set_mode(fd, 0o700)
                self._place = Place(self._root, self._name, fd, (0, 0))
        return self._place

    def remove(self) -> None:
        """Remove the directory."""
        if self._place is None:
            return
        place, self._place = self._place, None
        try:
            with making(self._root, self._name):
                for link in self._made:
                    with suppress(FileNotFoundError):
                        os.unlink(link.hex(), dir_fd=place.fd)
                os.rmdir(self._name, dir_fd=self._root.fd)
        finally:
            os.close(place.fd)


class _Count:
    """Tells the progress; totals by a walk over the state's directories, only when somebody listens.

    Bytes are those of sizes, holes too, and an inode counts once.
    """

    def __init__(self, objects: Objects, root: Entry, progress: Progress | None) -> None:
        self._progress = progress
        self._files = self._all_files = 0
        self._bytes = self._all_bytes = 0
        self._told = time.monotonic()
        directories = [root] if progress is not None else []
        links: set[bytes | None] = set()
        while directories:
            for entry in walk.entries(objects, directories.pop()):
                if entry.type is Type.DIRECTORY:
                    directories.append(entry)
                elif entry.type is Type.FILE:
                    self._all_files += 1
                    self._all_bytes += entry.size if entry.link not in links else 0
                    links |= {entry.link} - {None}

    def made(self) -> None:
        """Count one name of a file."""
        self._files += 1
        self.tell()

    def wrote(self, count: int) -> None:
        """Count bytes of a file."""
        self._bytes += count
        self.tell()

    def tell(self, *, now: bool = False) -> None:
        """Call the progress when the last call is a while ago, or ``now``."""
        if self._progress is not None and (now or time.monotonic() - self._told > _PROGRESS_SECONDS):
            self._told = time.monotonic()
            self._progress(self._files, self._all_files, self._bytes, self._all_bytes)
