"""Capture: read a directory tree into objects, by descriptors only.

How it goes
-----------
1. A scan of metadata (``scan.py``): which inodes have several names, and totals for the progress.
2. A walk down, one frame for each open directory. A directory is finished when those in it are: its entries are then
   read in the order of their names and flow into tree pages, so that no list of entries is held.

What makes it safe on a tree that changes
-----------------------------------------
* Every name is resolved by one call relative to an open directory, and no symlink is followed. Neither FIFOs nor
  devices are opened.
* A file is the same (type, device, inode) before and after it is opened, and has the same size, mtime and ctime before
  and after it is read; a directory the same mtime and ctime before it is listed and after its last entry is read.
  Otherwise it is read again, twice at most; then :class:`ConflictError` names it. A directory that is read again takes
  the directories in it as they were read, if they are still the same inodes, so that no attempts multiply.
* An inode with several names is read once. That its names are those of the scan is checked at the end.

Known ugliness: the kernel's clock ticks every 1 to 10 ms, and before Linux 6.13 a second write within the tick of the
first leaves the same ctime, so a file that is written during the capture can be kept half old, half new. The next
capture finds it changed (see ``statcache.py``). Whoever needs one instant stops the writers first.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agent_sandbox.errors import ConflictError, ForbiddenError, InvalidRequestError
from agent_sandbox.store.chunks import put_tree
from agent_sandbox.store.content import ChangedError, keep_tree
from agent_sandbox.store.descent import Descent, Place
from agent_sandbox.store.entries import MAX_NAMED, EntryReader, Listing, Tally
from agent_sandbox.store.inodes import ATTEMPTS, InodeReader, UnreadableError, reading, signature
from agent_sandbox.store.objects import Entry, Type
from agent_sandbox.store.oserrors import failure, shown
from agent_sandbox.store.outcomes import Left, LeftOut, Report
from agent_sandbox.store.past import PastDirectory
from agent_sandbox.store.ports import Captured, Objects, Options, Progress, Writer
from agent_sandbox.store.scan import Scan, scan
from agent_sandbox.store.statcache import CacheWriter, StatCache
from agent_sandbox.store.walk import MAX_DEPTH

MAX_NAMED_BYTES = 16 << 20
"""Bytes of all the paths that a report names."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)


def capture(
    directory: int,
    objects: Objects,
    writer: Writer,
    *,
    base: Entry | None,
    cache: Path | None,
    options: Options,
    progress: Progress | None,
) -> Captured:
    """See :meth:`agent_sandbox.store.ports.Engine.capture`."""
    start = time.time_ns()
    try:
        device = os.fstat(directory).st_dev
        found = scan(directory)
        descent = Descent(directory)
    except PermissionError as error:
        raise ForbiddenError("the directory cannot be read by this user") from error
    except OSError as error:
        raise failure(error, "open", b"") from error
    with ExitStack() as stack:
        stack.enter_context(descent)
        old = new = None
        if cache is not None:
            old = StatCache.open(cache)
            if old is not None:
                stack.callback(old.close)
            with suppress(OSError):  # nowhere to write it: the next capture reads all again
                new = CacheWriter(cache, device, start)
                stack.callback(new.close)
        inodes = InodeReader(writer, owners=options.owners)
        trusted = base.content if base is not None else None
        entries = EntryReader(writer, inodes, found, device, trusted=trusted, old=old, new=new, progress=progress)
        captured = _Capture(descent, writer, inodes, entries, new).run(PastDirectory(objects, base), found)
        if new is not None and captured.root.content is not None:
            new.replace(captured.root.content)
    return captured


@dataclass(slots=True)
class _Frame:
    """One directory on the way down."""

    listing: Listing
    before: os.stat_result
    """What the directory was before it was listed."""
    below: list[bytes] = field(default_factory=list)
    """Directories in it that are not read yet."""
    failures: int = 0


class _Capture:
    """The walk of one capture."""

    def __init__(
        self, descent: Descent, writer: Writer, inodes: InodeReader, entries: EntryReader, cache: CacheWriter | None
    ) -> None:
        self._descent = descent
        self._writer = writer
        self._inodes = inodes
        self._entries = entries
        self._cache = cache
        self._total = Tally()
        self._named: list[LeftOut] = []
        self._named_bytes = 0

    def run(self, past: PastDirectory, found: Scan) -> Captured:
        before = self._writer.written
        frames = [self._open(past)]
        while True:
            frame = frames[-1]
            if frame.below:
                name = frame.below.pop()
                if self._enter(frame, name):
                    frames.append(self._open(frame.listing.past.child(name)))
                continue
            entry = self._finish(frame)
            if entry is None:
                continue
            frames.pop()
            if not frames:
                break
            os.close(self._descent.leave())
            frames[-1].listing.done[entry.name] = (frame.before.st_ino, entry)
        for group in found.groups.values():
            if group.seen != group.count:
                raise ConflictError(f"{shown(group.path)} lost or got a name while the tree was read")
        self._entries.tell(now=True)
        return Captured(entry, self._report(before))

    def _report(self, before: int) -> Report:
        total = self._total
        return Report(
            files=total.files,
            directories=total.directories - 1,
            symlinks=total.symlinks,
            fifos=total.fifos,
            bytes=total.data,
            read=self._inodes.read_bytes,
            stored=self._writer.written - before,
            left_out=tuple(self._named),
            left_out_count=total.left_count,
        )

    def _enter(self, frame: _Frame, name: bytes) -> bool:
        """Go into a directory, or note why not."""
        here = self._descent.here
        try:
            about = self._descent.enter(name)
        except PermissionError:
            frame.listing.done[name] = Left.UNREADABLE
            return False
        except OSError as error:
            if error.errno in _GONE:
                return False  # not in ``done``: the reader finds out
            raise failure(error, "open", here.path(name)) from error
        if about.st_dev != self._descent.device:
            os.close(self._descent.leave())
            frame.listing.done[name] = Left.OTHER_FILESYSTEM
            return False
        if len(self._descent) > MAX_DEPTH:
            raise InvalidRequestError(f"deeper than {MAX_DEPTH} directories: {shown(self._descent.here.path())}")
        return True

    def _open(self, past: PastDirectory) -> _Frame:
        place = self._descent.here
        frame = _Frame(Listing(place, past), os.fstat(place.fd))
        self._list(frame)
        return frame

    def _list(self, frame: _Frame) -> None:
        listing = frame.listing
        listing.names, frame.below = [], []
        try:
            frame.before = os.fstat(listing.place.fd)
            with os.scandir(listing.place.fd) as items:
                for item in items:
                    name = os.fsencode(item.name)
                    listing.names.append(name)
                    with suppress(PermissionError):  # it had to be looked at for its type; the reader reports it
                        if name not in listing.done and item.is_dir(follow_symlinks=False):
                            frame.below.append(name)
        except OSError as error:
            raise failure(error, "list", listing.place.path()) from error
        listing.names.sort()

    def _finish(self, frame: _Frame) -> Entry | None:
        """Read the entries of the current directory and keep it; None when it changed and was listed again."""
        listing, place, tally = frame.listing, frame.listing.place, Tally(directories=1)
        try:
            tree = put_tree(self._entries.read(listing, tally), partial(keep_tree, self._writer, listing.past))
            with reading(place, b""):
                attrs, whole = self._inodes.attributes(place.fd)
                if signature(os.fstat(place.fd)) != signature(frame.before):
                    raise ChangedError
        except ChangedError:
            for group in tally.begun:
                group.entry = None
            if self._cache is not None:
                self._cache.reachable = False
            frame.failures += 1
            if frame.failures == ATTEMPTS:
                raise ConflictError(f"{shown(place.path())} kept changing while it was read") from None
            self._list(frame)
            return None
        except UnreadableError:
            raise ForbiddenError(f"the attributes of {shown(place.path())} cannot be read") from None
        if not whole:
            tally.leave_out(b"", Left.ATTRIBUTES)
        self._add(tally, place)
        about = frame.before
        mode, owner = stat.S_IMODE(about.st_mode), self._inodes.owner(about)
        return Entry(place.name, Type.DIRECTORY, mode, about.st_mtime_ns, owner, attrs, content=tree)

    def _add(self, tally: Tally, place: Place) -> None:
        total = self._total
        total.files += tally.files
        total.directories += tally.directories
        total.symlinks += tally.symlinks
        total.fifos += tally.fifos
        total.data += tally.data
        total.left_count += tally.left_count
        for name, why in tally.left:
            path = place.path(name)
            if len(self._named) == MAX_NAMED or self._named_bytes + len(path) > MAX_NAMED_BYTES:
                break
            self._named.append(LeftOut(path, why))
            self._named_bytes += len(path)
        for group in tally.groups:
            group.seen += 1
            if group.seen >= group.count:
                group.entry = None
