"""How much a store holds. Counts and bytes; nothing is verified and nothing is changed.

The bytes of a state, counted from those of another one
-------------------------------------------------------
A file counts once, whatever the number of its names, and the names may be anywhere. So the difference of two states
(``diff.py``) tells the sum only where it has every name of each linked file in it. It does where no changed path was a
name of a linked file before, and where the path that a new link id is made from is among the changed ones: then the
group is new, and so are all of its names. Otherwise everything is counted. Of two versions of a large file only the
pages that differ are read. ``crates/engine/src/count.rs`` does the same for the store; this is its reference.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from agent_sandbox.store import walk
from agent_sandbox.store.diff import diff
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Child, Entry, Extent, Type, link_id
from agent_sandbox.store.ports import Objects


@dataclass(frozen=True, slots=True)
class Stats:
    """``records`` is bytes that the index knows of; ``packs`` and ``index`` are sizes of files."""

    projects: int
    branches: int
    tags: int
    layers: int
    pins: int
    objects: int
    patches: int
    records: int
    pack_files: int
    packs: int
    index: int


def stats(database: ObjectDatabase) -> Stats:
    """Count what is in the store."""
    with database.reading():
        query = database.index.query
        ((projects, branches, tags, layers, pins, patches),) = query(
            "SELECT (SELECT count(*) FROM projects), (SELECT count(*) FROM refs WHERE kind = 1),"
            " (SELECT count(*) FROM refs WHERE kind = 2), (SELECT count(*) FROM layers),"
            " (SELECT count(*) FROM pins), (SELECT count(*) FROM patches)"
        )
        ((objects, records),) = query("SELECT count(*), coalesce(sum(length), 0) FROM objects")
        sizes = []
        for file in database.packs.iterdir():
            with suppress(FileNotFoundError):
                sizes.append(file.stat().st_size)
        index = 0
        for suffix in ("", "-wal"):
            path = database.index.path
            with suppress(FileNotFoundError):
                index += path.with_name(path.name + suffix).stat().st_size
        return Stats(projects, branches, tags, layers, pins, objects, patches, records, len(sizes), sum(sizes), index)


def data_bytes(objects: Objects, root: Entry) -> int:
    """Count the bytes of data in the files below a root: holes not counted, a file with several names once."""
    total, seen = 0, set[bytes]()
    for _, entry in walk.walk(objects, root):
        if entry.type is not Type.FILE or entry.link in seen:
            continue
        if entry.link is not None:
            seen.add(entry.link)
        total += _data(objects, entry)
    return total


def data_bytes_after(objects: Objects, old: Entry, count: int, new: Entry) -> int:
    """Count as :func:`data_bytes` the files below ``new``, reading what differs from ``old``, which has ``count``."""
    begun, linked = set[bytes](), set[bytes]()
    for change in diff(objects, old, new):
        before, after = _file(change.old), _file(change.new)
        if before is not None and before.link is not None:
            return data_bytes(objects, new)
        if after is not None and (link := after.link) is not None:
            if link_id(change.path) == link:
                begun.add(link)
            if link in linked:
                after = None
            linked.add(link)
        count += _growth(objects, before, after)
    return count if begun == linked else data_bytes(objects, new)


def _file(entry: Entry | None) -> Entry | None:
    return entry if entry is not None and entry.type is Type.FILE else None


def _data(objects: Objects, file: Entry) -> int:
    if not file.paged:
        return file.size
    return sum(extent.length for extent in walk.extents(objects, file) if extent.id is not None)


def _growth(objects: Objects, old: Entry | None, new: Entry | None) -> int:
    """How many more bytes of data a file has than another one."""
    if old is not None and new is not None:
        if (old.content, old.size) == (new.content, new.size):
            return 0
        if old.paged and new.paged:
            return _page_growth(objects, old, new)
    return (_data(objects, new) if new else 0) - (_data(objects, old) if old else 0)


def _page_growth(objects: Objects, old: Entry, new: Entry) -> int:
    sides = [_Items(objects, old), _Items(objects, new)]
    while True:
        if sides[0].level == sides[1].level:
            common = sides[0].items & sides[1].items
            for side in sides:
                side.items -= common
            if sides[0].level == 0:
                return sides[1].data() - sides[0].data()
        level = max(side.level for side in sides)
        for side in sides:
            if side.level == level:
                side.descend()


class _Items:
    """What pages of a file name, all of one level; at first its root's."""

    def __init__(self, objects: Objects, file: Entry) -> None:
        assert file.content is not None, "an empty file has no pages"
        self._objects = objects
        self.level, items = walk.open_page(objects, file.content, None, file.size)
        self.items: Counter[Extent | Child] = Counter(items)

    def descend(self) -> None:
        """Go on with what the pages of the level below name."""
        below: Counter[Extent | Child] = Counter()
        for item, times in self.items.items():
            assert isinstance(item, Child)
            for inner in walk.open_page(self._objects, item.id, self.level - 1, item.weight)[1]:
                below[inner] += times
        self.items, self.level = below, self.level - 1

    def data(self) -> int:
        return sum(
            item.length * times
            for item, times in self.items.items()
            if isinstance(item, Extent) and item.id is not None
        )
