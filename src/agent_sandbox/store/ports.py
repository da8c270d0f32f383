"""The seams inside the store: what keeps objects, and what does the byte work over a directory tree.

Two sides, so that either can be exchanged and tested alone::

    Store ──► Engine (reference.py: Python; native.py: Rust)   capture, checkout, difference
      │          │ uses
      └──► Objects (objectdb.py)                                 locate, read, write records, sync, make known

An :class:`Engine` never opens the index or a pack for writing. It asks :class:`Objects` where things are and
hands it whole
records. So there is one place that appends and syncs, and faults are injected in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent_sandbox.errors import ConflictError
from agent_sandbox.store.objects import Entry, Kind
from agent_sandbox.store.outcomes import Report


@dataclass(frozen=True, slots=True)
class Location:
    """Where a record lies: pack number, offset of its header in bytes, length of header and payload in bytes."""

    pack: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Row:
    """One record inside a buffer of records that :meth:`Writer.append` takes; ``offset`` is relative to the buffer."""

    id: bytes
    offset: int
    length: int
    base: bytes | None = None
    depth: int = 0


class Objects(Protocol):
    """Read side of the object database. Every method may be called from several threads."""

    @property
    def packs(self) -> Path:
        """The directory of the packs; a pack's file is ``f"{number:010d}.pack"``."""

    def locate(self, ids: Sequence[bytes]) -> list[Location | None]:
        """Return where each object is, or None; one call for many ids is one query for about 500 of them."""

    def read(self, id: bytes, kind: Kind) -> bytes:
        """Return verified canonical bytes; :class:`StoreDamagedError` when it is missing, damaged or of
        another kind."""


class Writer(Protocol):
    """Write side: one pack, one thread at a time. Made by ``ObjectDatabase.writer()``, a context manager.

    Leaving it without :meth:`seal` gives up what was not yet made known. What :meth:`append` took is readable through
    ``locate``/``read`` only after :meth:`flush` or :meth:`seal`; :meth:`has` knows of it at once.
    """

    @property
    def written(self) -> int:
        """Bytes of records that this writer appended so far."""

    def has(self, ids: Sequence[bytes]) -> list[bool]:
        """Return for each id whether the store, or this writer, already holds it."""

    def put(self, kind: Kind, canonical: bytes, base: bytes | None = None) -> bytes:
        """Keep one object and return its id; ``base`` is the id of one that it probably resembles."""

    def append(self, records: bytes, rows: Sequence[Row]) -> None:
        """Append whole records, encoded elsewhere; now and then :meth:`flush` by itself. Ids that are already held are
        an error of the caller, not checked."""

    def flush(self) -> None:
        """Sync the pack and make its objects known. :meth:`append` does it itself, so that memory does not grow with an
        import."""

    def seal(self) -> None:
        """Sync the pack; its rows go into the index with the transaction that the caller makes next
        (``index.seal``)."""


Progress = Callable[[int, int, int, int], None]
"""Called now and then, from the thread that called: files done, files in all, bytes done, bytes in all."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a tree is captured or laid out."""

    owners: bool = False
    """Record uid and gid (capture), apply them (checkout; needs root)."""
    owner: tuple[int, int] | None = None
    """uid and gid for every entry that records none, or whose own is not applied (checkout, difference; needs root)."""
    threads: int = 0
    """Workers of the engine; 0 is one for each core, at most 8."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What a capture found: the root entry, whose trees and blobs are in the writer, and the report."""

    root: Entry
    report: Report


@dataclass(frozen=True, slots=True)
class Upper:
    """The upper directory of a mounted overlay, and the commit that the layers below it show: not the head of its
    branch, which moves with every snapshot."""

    directory: Path
    below: bytes


class OverlayRefusedError(ConflictError):
    """The upper directory of an overlay does not tell the state, or this engine cannot read it: capture the merged
    view. Nothing was kept that the state needs, and nothing is wrong."""


class Engine(Protocol):
    """The byte work over directory trees. Everything goes by descriptors; no symlink is ever followed."""

    def capture(
        self,
        directory: int,
        objects: Objects,
        writer: Writer,
        *,
        base: Entry | None = None,
        lower: int | None = None,
        cache: Path | None = None,
        overlay: bool = False,
        options: Options | None = None,
        progress: Progress | None = None,
    ) -> Captured:
        """Read the tree under the open directory ``directory`` into ``writer``.

        ``base`` is the root of the state that it was made from: chunks and pages that replace its own are kept
        as patches. ``lower`` is an open directory that has the content of ``base``, such as its checkout, and keeps it
        meanwhile: large files may be compared with it and cut again only where they differ.
        ``cache`` is the stat cache of this directory: a file whose device, inode, size, mtime and ctime are as
        remembered is not
        read again; a missing or unreadable cache only costs time. It is replaced at the end.
        ``overlay``: the directory is the upper one of an overlay whose lower ones show exactly ``base``, mounted with
        ``redirect_dir=on,index=on,metacopy=off``. The state is that of the merged view, and only what changed is looked
        at: the report counts what the upper directory has. ``lower`` is not used. :class:`OverlayRefusedError` when it
        cannot be told from the upper directory: a name of a linked file of ``base`` was changed, removed or moved, also
        inside of a directory; ``base`` is missing or damaged, or has owners where none are to be recorded, or the other
        way round; this process does not see ``trusted`` attributes.
        Raises :class:`ConflictError` when an entry changes type, size or times while it is read (twice tried), and the
        errors of the store. :class:`InvalidRequestError` for a tree deeper than 1,000 directories.
        """

    def checkout(
        self,
        root: Entry,
        directory: int,
        objects: Objects,
        *,
        options: Options | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Lay the tree out under the open, empty directory ``directory``, whose own mode, mtime and attributes
        it sets last."""

    def difference(
        self, old: Entry, new: Entry, directory: int, objects: Objects, *, options: Options | None = None
    ) -> None:
        """Lay out, under the open, empty ``directory``, the overlay layer that makes ``old`` look like ``new``.

        Whiteouts are character devices 0/0, a directory that replaces something is marked
        ``trusted.overlay.opaque=y``: needs
        root. A file whose metadata alone changed is laid out whole. Linked files appear with all of their
        names when one changed.
        """

    def data_bytes(self, root: Entry, objects: Objects, *, known: tuple[Entry, int] | None = None) -> int:
        """Count the bytes of data in the files below ``root``: holes not counted, a file with several names once.

        ``known``: the root of another state with its count; only what differs from that is read, where this is enough.
        """
