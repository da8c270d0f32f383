"""The three-way choice for one path: what two sides made of a common entry.

Each field is merged apart: what one side changed is taken, what both changed alike is taken, what both changed
differently is a conflict. The rules beyond that:

* **Equal bytes never conflict.** Content is compared by id, and where one side has other holes, byte by byte; of two
  forms of the same bytes that both sides made, the one with the smaller id is taken, so that order does not matter.
* **mtime.** Where both changed it, the later one is taken: a tool like make then does too much, never too little. Only
  beside another conflict of the same file it is told as one.
* **Removed and changed** is a conflict, whatever of a file was changed. Of a directory its own mtime does not count,
  since it is a trace of what happened inside; and which names are one file is never a change of the file.
* **Another type on one side** is taken where the other side changed nothing, at or below the path.
* What both sides added, or made into the same other type, is merged as if there had been nothing before.

Content of files is not merged line by line: the store knows bytes, and a wrong guess inside a file would be silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import walk
from agent_sandbox.store.diff import content, diff
from agent_sandbox.store.objects import Entry, Extent, Kind, Type
from agent_sandbox.store.outcomes import ConflictKind
from agent_sandbox.store.ports import Objects


@dataclass(frozen=True, slots=True)
class Choice:
    """What a path becomes: an entry, or None where it goes; or how the sides disagree.

    A directory without ``content`` has to be merged inside.
    """

    entry: Entry | None
    kinds: tuple[ConflictKind, ...] = ()


def choose(objects: Objects, base: Entry | None, left: Entry | None, right: Entry | None) -> Choice:
    """Return what becomes of one path. A directory removed on one side and changed on the other is not for this
    function (:func:`lost` says which paths of it are in the way)."""
    if left == right or right == base:
        return Choice(left)
    if left == base:
        return Choice(right)
    if left is None or right is None:
        kept = left or right
        assert base is not None, "added on one side alone is no question"
        assert kept is not None, "removed on both sides is no question"
        return Choice(None) if unlinked(base) == unlinked(kept) else Choice(None, (ConflictKind.DELETED_CHANGED,))
    if left.type is not right.type:
        if base is not None and left.type is base.type and not _changed(objects, base, left):
            return Choice(right)
        if base is not None and right.type is base.type and not _changed(objects, base, right):
            return Choice(left)
        return Choice(None, (ConflictKind.TYPE,))
    return _fields(objects, base if base is not None and base.type is left.type else None, left, right)


def lost(objects: Objects, base: Entry, kept: Entry) -> Iterator[bytes]:
    """Yield the paths, relative to a directory, that were changed or added in it and would go with it.

    Of what was added, the highest path alone.
    """
    for change in diff(objects, base, kept, whole=True):
        old, new = change.old, change.new
        if new is None:
            continue
        if old is not None and old.type is new.type:
            same = replace(old, content=new.content, mtime_ns=new.mtime_ns) if new.type is Type.DIRECTORY else old
            if unlinked(same) == unlinked(new):
                continue
        yield change.path


def unlinked(entry: Entry) -> Entry:
    """Return the entry as if it were the only name of its file."""
    return entry if entry.link is None else replace(entry, link=None)


def _changed(objects: Objects, base: Entry, side: Entry) -> bool:
    if base.type is Type.DIRECTORY:
        return any(True for _ in lost(objects, base, side))
    return unlinked(base) != unlinked(side)


def _fields(objects: Objects, base: Entry | None, left: Entry, right: Entry) -> Choice:
    """Merge two entries of the same type."""
    directory = left.type is Type.DIRECTORY
    sides = {
        ConflictKind.CONTENT: _side(base, left, right, content) or _same_bytes(objects, base, left, right),
        ConflictKind.MODE: _side(base, left, right, lambda entry: entry.mode),
        ConflictKind.ATTRIBUTES: _side(base, left, right, lambda entry: entry.attrs),
        ConflictKind.OWNER: _side(base, left, right, lambda entry: entry.owner),
    }
    time = _side(base, left, right, lambda entry: entry.mtime_ns)
    kinds = {kind for kind, side in sides.items() if side is None and not (directory and kind is ConflictKind.CONTENT)}
    if kinds and time is None and not directory:
        kinds.add(ConflictKind.MTIME)
    taken = {kind: side or left for kind, side in sides.items()}
    merged = replace(
        taken[ConflictKind.CONTENT],
        mode=taken[ConflictKind.MODE].mode,
        mtime_ns=time.mtime_ns if time else max(left.mtime_ns, right.mtime_ns),
        owner=taken[ConflictKind.OWNER].owner,
        attrs=taken[ConflictKind.ATTRIBUTES].attrs,
    )
    if directory and sides[ConflictKind.CONTENT] is None:
        merged = replace(merged, content=None)
    return Choice(merged, tuple(kind for kind in ConflictKind if kind in kinds))


def _side(base: Entry | None, left: Entry, right: Entry, of: Callable[[Entry], object]) -> Entry | None:
    """The side whose value is taken, or None where both changed it, each in its way."""
    if of(left) == of(right) or (base is not None and of(base) == of(right)):
        return left
    return right if base is not None and of(base) == of(left) else None


def _same_bytes(objects: Objects, base: Entry | None, left: Entry, right: Entry) -> Entry | None:
    """The side whose content is taken where ids differ and bytes do not."""
    if equal_bytes(objects, left, right):
        return min(left, right, key=content)
    if base is not None and equal_bytes(objects, base, right):
        return left
    return right if base is not None and equal_bytes(objects, base, left) else None


# ---- bytes ---------------------------------------------------------------------------------------------------------


def equal_bytes(objects: Objects, one: Entry, two: Entry) -> bool:
    """Return whether two entries are files with the same bytes, holes being zeros.

    Reads only where chunks differ: that a hole is zeros as long as another hole costs nothing.
    """
    if one.type is not Type.FILE or two.type is not Type.FILE or one.size != two.size:
        return False
    if content(one) == content(two):
        return True
    if not (one.paged or two.paged):
        return False
    pieces = _Pieces(objects, one), _Pieces(objects, two)
    left = one.size
    while left:
        length = min(piece.left for piece in pieces)
        if pieces[0].place != pieces[1].place and pieces[0].take(length) != pieces[1].take(length):
            return False
        for piece in pieces:
            piece.skip(length)
        left -= length
    return True


class _Pieces:
    """Goes through a file, chunk by chunk."""

    def __init__(self, objects: Objects, file: Entry) -> None:
        self._objects = objects
        self._extents = walk.extents(objects, file)
        self._data: bytes | None = None
        self._next()

    def _next(self) -> None:
        self._extent = next(self._extents, Extent(0, None))
        self._at = 0
        self._data = None

    @property
    def left(self) -> int:
        """Bytes left in this chunk or hole."""
        return self._extent.length - self._at

    @property
    def place(self) -> tuple[bytes | None, int]:
        """Chunk and offset in it; the same for all holes."""
        return self._extent.id, self._at if self._extent.id is not None else 0

    def take(self, length: int) -> bytes:
        """The next bytes; a hole is asked for no more than a chunk has."""
        if self._extent.id is None:
            return bytes(length)
        if self._data is None:
            self._data = self._objects.read(self._extent.id, Kind.BLOB)
            if len(self._data) != self._extent.length:
                raise StoreDamagedError("a damaged list of chunks: a chunk of another length")
        return self._data[self._at : self._at + length]

    def skip(self, length: int) -> None:
        """Go on."""
        self._at += length
        if not self.left:
            self._next()
