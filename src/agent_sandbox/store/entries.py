"""Reading the names of one directory into entries: what is an entry, what has several names, what is left out and why.

Part of the capture (``capture.py`` has the rules). Directories inside are read before; here they only take their place.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from agent_sandbox.errors import ConflictError
from agent_sandbox.store.content import ChangedError
from agent_sandbox.store.descent import Place
from agent_sandbox.store.inodes import Found, InodeReader, UnreadableError, look, signature
from agent_sandbox.store.objects import MAX_NAME, Entry, Type, link_id
from agent_sandbox.store.oserrors import shown
from agent_sandbox.store.outcomes import Left
from agent_sandbox.store.past import PastDirectory
from agent_sandbox.store.ports import Progress, Writer
from agent_sandbox.store.scan import Group, Scan, allocated, linkable
from agent_sandbox.store.statcache import CacheWriter, Remembered, StatCache

MAX_NAMED = 10_000
"""Paths that a report names."""
_BATCH = 256
"""Names whose remembered content is looked up at once."""
_PROGRESS_SECONDS = 0.1


@dataclass(slots=True)
class Tally:
    """What one reading of one directory found; it counts only when the directory did not change meanwhile."""

    files: int = 0
    directories: int = 0
    symlinks: int = 0
    fifos: int = 0
    data: int = 0
    left: list[tuple[bytes, Left]] = field(default_factory=list)
    """Names in the directory, the empty one for itself; the first 10,000."""
    left_count: int = 0
    groups: list[Group] = field(default_factory=list)
    """The group of each name that is in one."""
    begun: list[Group] = field(default_factory=list)
    """Groups of which the first name was read here."""

    def leave_out(self, name: bytes, why: Left) -> None:
        """Count a name that is left out."""
        self.left_count += 1
        if len(self.left) < MAX_NAMED:
            self.left.append((name, why))


@dataclass(slots=True)
class Listing:
    """The names of one directory, and what is known of them."""

    place: Place
    past: PastDirectory
    names: list[bytes] = field(default_factory=list)
    done: dict[bytes, tuple[int, Entry] | Left] = field(default_factory=dict)
    """Directories that were read: inode and entry, or why there is none."""


class EntryReader:
    """Reads the entries of directories, one directory after the other."""

    def __init__(
        self,
        writer: Writer,
        inodes: InodeReader,
        found: Scan,
        device: int,
        *,
        trusted: bytes | None,
        old: StatCache | None,
        new: CacheWriter | None,
        progress: Progress | None,
    ) -> None:
        """``trusted`` is the root tree of the base: the ids of a cache that was written for it need no proof."""
        self._writer = writer
        self._inodes = inodes
        self._scan = found
        self._device = device
        self._old = old
        self._new = new
        self._trusted = old is not None and old.root == trusted
        self._progress = progress
        self._told = time.monotonic()
        self._files = 0
        self._bytes = 0

    def read(self, listing: Listing, tally: Tally) -> Iterator[Entry]:
        """Yield the entries of a directory in the order of its names.

        Raises :class:`ChangedError` when the listing is no longer true, :class:`ConflictError` for what kept changing,
        and the errors of the store.
        """
        for start in range(0, len(listing.names), _BATCH):
            stats: list[tuple[bytes, os.stat_result]] = []
            for name in listing.names[start : start + _BATCH]:
                try:
                    stats.append((name, look(listing.place, name)))
                except UnreadableError:
                    tally.leave_out(name, Left.UNREADABLE)
            remembered = self._remembered([about for _, about in stats])
            for name, about in stats:
                if stat.S_ISDIR(about.st_mode):
                    entry = _directory(listing, name, about, tally)
                else:
                    entry = self._entry(listing, name, about, remembered.get(about.st_ino), tally)
                if entry is not None:
                    yield entry

    def tell(self, *, now: bool = False) -> None:
        """Call the progress when the last call is a while ago, or ``now``."""
        if self._progress is not None and (now or time.monotonic() - self._told > _PROGRESS_SECONDS):
            self._told = time.monotonic()
            # What is read twice, or grew, is no progress beyond what the scan saw.
            files, size = self._scan.files, self._scan.bytes
            self._progress(min(self._files, files), files, min(self._bytes, size), size)

    def _remembered(self, stats: Sequence[os.stat_result]) -> dict[int, Remembered]:
        """What the cache knows of these files, by inode, as far as its objects are there."""
        if self._old is None:
            return {}
        found = {about.st_ino: known for about in stats if (known := self._old.find(about)) is not None}
        if self._trusted:
            return found
        ids = [id for known in found.values() for id in (known.content, known.attrs) if id is not None]
        missing = {id for id, held in zip(ids, self._writer.has(ids), strict=True) if not held}
        return {inode: known for inode, known in found.items() if not missing & {known.content, known.attrs}}

    def _entry(
        self, listing: Listing, name: bytes, about: os.stat_result, known: Remembered | None, tally: Tally
    ) -> Entry | None:
        why = self._why_not(name, about)
        if why is not None:
            tally.leave_out(name, why)
            return None
        group = self._group(listing.place, name, about)
        if group is not None:
            tally.groups.append(group)
            if group.entry is not None:
                if signature(about) != group.signature != signature(look(listing.place, name)):
                    raise ConflictError(f"{shown(listing.place.path(name))} was changed while its names were read")
                self._count(replace(group.entry, name=name), tally)
                return replace(group.entry, name=name)
        try:
            found = self._inodes.read(listing.place, name, about, listing.past, known)
        except UnreadableError:
            tally.leave_out(name, Left.UNREADABLE)
            return None
        if not found.whole:
            tally.leave_out(name, Left.ATTRIBUTES)
        self._remember(found)
        self._count(found.entry, tally)
        tally.data += found.data
        self._bytes += allocated(found.about)
        if group is None or group.count == 1:
            return found.entry
        group.entry = replace(found.entry, link=link_id(group.path))
        group.signature = signature(found.about)
        tally.begun.append(group)
        return group.entry

    def _why_not(self, name: bytes, about: os.stat_result) -> Left | None:
        if len(name) > MAX_NAME:
            return Left.NAME
        if about.st_dev != self._device:
            return Left.OTHER_FILESYSTEM
        kind = stat.S_IFMT(about.st_mode)
        if kind == stat.S_IFSOCK:
            return Left.SOCKET
        return Left.DEVICE if kind in (stat.S_IFCHR, stat.S_IFBLK) else None

    def _group(self, place: Place, name: bytes, about: os.stat_result) -> Group | None:
        if not linkable(about):
            return None
        group = self._scan.groups.get((about.st_dev, about.st_ino))
        if group is None:
            raise ConflictError(f"{shown(place.path(name))} got one more name while the tree was read")
        return group

    def _remember(self, found: Found) -> None:
        entry = found.entry
        if self._new is not None and entry.type is Type.FILE and found.whole:
            self._new.remember(found.about, Remembered(entry.content, entry.paged, found.data, entry.attrs))

    def _count(self, entry: Entry, tally: Tally) -> None:
        match entry.type:
            case Type.FILE:
                tally.files += 1
                self._files += 1
            case Type.SYMLINK:
                tally.symlinks += 1
            case _:
                tally.fifos += 1
        self.tell()


def _directory(listing: Listing, name: bytes, about: os.stat_result, tally: Tally) -> Entry | None:
    found = listing.done.get(name)
    if isinstance(found, Left):
        tally.leave_out(name, found)
        return None
    if found is None or found[0] != about.st_ino:
        listing.done.pop(name, None)
        raise ChangedError
    return found[1]
