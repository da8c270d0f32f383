"""How much a store holds. Counts and bytes; nothing is verified and nothing is changed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from agent_sandbox.store import walk
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Entry, Type
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
        total += sum(extent.length for extent in walk.extents(objects, entry) if extent.id is not None)
    return total
