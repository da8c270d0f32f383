"""What packs hold, found again without an index: every record, read and verified, and which states are whole.

::

    scan      every pack from front to end: mark.found, where a record seems to be
    admit     records that are what they say go into the index, bases before their patches
    judge     what leads to something that is not there is no use: it would break "what the index knows has everything
              below it", on which every writer relies
    remove    such trees and pages leave the index; a patch of one is written out in full before

Of a record that is there twice the least deep one is taken: a patch's depth is more than its base's was when it was
written, and gc makes bases full, never the reverse. A record that is damaged hides none behind it: the next one is
looked for byte by byte, by its mark and the checksum of its header.

A commit is *rooted* when every ancestor's commit is there: without, gc could not walk from it. It *stands* when its
tree is whole as well. One that is rooted and does not stand is kept as a forgotten one, as gc leaves them. Of one that
is not rooted and whose tree is whole the state is kept by another commit, which has no past.

It reads every byte that the store has, on one thread; what is known of each record is in a scratch table on disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import walk
from agent_sandbox.store.index import Known
from agent_sandbox.store.marks import Link, Marks, below
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Kind, encode_commit
from agent_sandbox.store.packs import MAX_PACK, Pack, failed, pack_name
from agent_sandbox.store.ports import Location, Progress
from agent_sandbox.store.records import (
    MARK,
    MAX_HEADER,
    PACK_HEADER,
    Header,
    decode_header,
    encode,
    pack_header,
)

_BATCH = 256
_WINDOW = 1 << 20
"""Bytes that are searched at a time."""
_SCHEMA = """
CREATE TABLE mark.found (depth, pack, offset, id, length, PRIMARY KEY (depth, pack, offset)) WITHOUT ROWID;
CREATE TABLE mark.made (id BLOB PRIMARY KEY NOT NULL, kind INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE mark.leads (below, above, PRIMARY KEY (below, above)) WITHOUT ROWID;
CREATE TABLE mark.follows (parent, child, PRIMARY KEY (parent, child)) WITHOUT ROWID;
CREATE TABLE mark.broken (id BLOB PRIMARY KEY NOT NULL) WITHOUT ROWID;
CREATE TABLE mark.rootless (id BLOB PRIMARY KEY NOT NULL) WITHOUT ROWID;
CREATE TABLE mark.pastless (id BLOB PRIMARY KEY NOT NULL) WITHOUT ROWID;
"""


@dataclass(slots=True)
class Salvage:
    """What was found. ``unread`` are packs whose beginning is not that of a pack of this store."""

    packs: int = 0
    objects: int = 0
    damaged: int = 0
    """Places where a record should be and none is that can be read; an end that a crash left counts too."""
    states: int = 0
    incomplete: int = 0
    """Commits whose state is not whole: something is damaged or missing, or gc had taken it."""
    rootless: int = 0
    """Commits whose state is whole and whose past is lost; each state is kept by a new commit that has none."""
    unread: tuple[int, ...] = ()


def salvage(database: ObjectDatabase, live: Marks, progress: Progress) -> Salvage:
    """Fill the empty index of ``database``; afterwards ``mark.broken`` and ``mark.rootless`` tell of commits.

    Call it under the exclusive lock. What does not stand is forgotten, and names are the caller's to make.
    """
    live.script(_SCHEMA)
    work = _Salvage(database, live, progress)
    work.scan()
    work.admit()
    work.judge()
    work.remove()
    return work.report


class _Salvage:
    def __init__(self, database: ObjectDatabase, live: Marks, progress: Progress) -> None:
        self._database = database
        self._live = live
        self._progress = progress
        self.report = Salvage()

    # ---- what there is ---------------------------------------------------------------------------------------------

    def scan(self) -> None:
        numbers = sorted(self._database.pack_files())
        unread: list[int] = []
        for number in numbers:
            path = self._database.packs / pack_name(number)
            records = _records(path, pack_header(self._database.id, number))
            if records is None:
                unread.append(number)
                continue
            with self._database.index.transaction() as change:
                change.change("INSERT INTO packs (number, closed) VALUES (?, 1)", (number,))
            self.report.packs += 1
            with self._live.transaction():
                for found in records:
                    if found is None:
                        self.report.damaged += 1
                        continue
                    offset, header = found
                    self._live.execute(
                        "INSERT INTO mark.found VALUES (?, ?, ?, ?, ?)",
                        (header.depth, number, offset, header.id, header.size + header.length),
                    )
        if unread:  # their numbers are taken all the same
            with self._database.index.transaction() as change:
                change.change("INSERT OR IGNORE INTO packs (number) VALUES (?)", (unread[-1],))
                change.remove_packs(unread)
        self.report.unread = tuple(unread)

    def admit(self) -> None:
        total, total_bytes = self._live.execute("SELECT count(*), coalesce(sum(length), 0) FROM mark.found").fetchone()
        done = done_bytes = 0
        after = (-1, -1, -1)
        while rows := self._live.execute(
            "SELECT depth, pack, offset, id, length FROM mark.found WHERE (depth, pack, offset) > (?, ?, ?)"
            " AND depth = (SELECT min(depth) FROM mark.found WHERE (depth, pack, offset) > (?, ?, ?))"
            " ORDER BY depth, pack, offset LIMIT ?",
            (*after, *after, _BATCH),
        ).fetchall():
            after = rows[-1][:3]
            known = self._database.locate([row[3] for row in rows])
            admitted: dict[bytes, tuple[Known, Kind]] = {}
            for (_, pack, offset, id, length), place in zip(rows, known, strict=True):
                done, done_bytes = done + 1, done_bytes + length
                if place is not None or id in admitted:
                    continue
                place = Location(pack, offset, length)
                try:
                    header, canonical = self._database.load_at(place, id)
                    for _ in below(header.kind, canonical):
                        pass
                except StoreDamagedError:
                    self.report.damaged += 1
                else:
                    admitted[id] = (Known(id, place, header.base, header.depth), header.kind)
            with self._database.index.transaction() as change:
                change.add_objects(known for known, _ in admitted.values())
            made = [(id, int(kind)) for id, (_, kind) in admitted.items() if kind not in (Kind.BLOB, Kind.ATTRS)]
            with self._live.transaction():
                self._live.executemany("INSERT INTO mark.made VALUES (?, ?)", made)
            self.report.objects += len(admitted)
            self._progress(done, total, done_bytes, total_bytes)

    # ---- what is whole ---------------------------------------------------------------------------------------------

    def judge(self) -> None:
        for batch in self._made():
            links = [(id, link) for id, kind in batch for link in below(kind, self._database.load(id, kind)[1])]
            places = self._database.locate([link.id for _, link in links])
            with self._live.transaction():
                for (id, link), place in zip(links, places, strict=True):
                    self._note(id, link, place is not None)
        for table, above, below_ in (("broken", "leads.above", "leads.below"), ("rootless", "child", "parent")):
            edges = "leads" if table == "broken" else "follows"
            more = 1
            while more:
                with self._live.transaction():
                    more = self._live.execute(
                        f"INSERT OR IGNORE INTO mark.{table} SELECT {above} FROM mark.{edges}"  # noqa: S608 (as above)
                        f" JOIN mark.{table} ON {below_} = {table}.id"
                    ).rowcount

    def _note(self, id: bytes, link: Link, is_there: bool) -> None:
        if link.kind is Kind.COMMIT:
            self._live.execute("INSERT OR IGNORE INTO mark.follows VALUES (?, ?)", (link.id, id))
            if not is_there:
                self._live.execute("INSERT OR IGNORE INTO mark.rootless VALUES (?)", (id,))
        elif not is_there:
            self._live.execute("INSERT OR IGNORE INTO mark.broken VALUES (?)", (id,))
        elif link.kind in (Kind.TREE, Kind.PAGE):
            self._live.execute("INSERT OR IGNORE INTO mark.leads VALUES (?, ?)", (link.id, id))

    def _made(self) -> Iterator[list[tuple[bytes, Kind]]]:
        last = b""
        while rows := self._live.execute(
            "SELECT id, kind FROM mark.made WHERE id > ? ORDER BY id LIMIT ?", (last, _BATCH)
        ).fetchall():
            yield [(id, Kind(kind)) for id, kind in rows]
            last = rows[-1][0]

    # ---- what is not -----------------------------------------------------------------------------------------------

    def remove(self) -> None:
        live, commit = self._live, int(Kind.COMMIT)
        live.execute("CREATE TABLE mark.gone (id BLOB PRIMARY KEY NOT NULL) WITHOUT ROWID")
        with live.transaction():
            live.execute(
                "INSERT INTO mark.gone SELECT id FROM mark.broken JOIN mark.made USING (id) WHERE kind != ?"
                " UNION SELECT id FROM mark.rootless",
                (commit,),
            )
        self._fill_out()
        self._keep_rootless()
        with live.transaction("IMMEDIATE"):
            live.execute("DELETE FROM objects WHERE id IN (SELECT id FROM mark.gone)")
            live.execute("DELETE FROM patches WHERE id IN (SELECT id FROM mark.gone)")
            live.execute(
                "INSERT INTO forgotten SELECT id FROM mark.broken JOIN mark.made USING (id) JOIN objects USING (id)"
                " WHERE kind = ?",
                (commit,),
            )
        (self.report.states,) = live.execute(
            "SELECT count(*) FROM mark.made JOIN objects USING (id) WHERE kind = ?"
            " AND id NOT IN (SELECT commit_id FROM forgotten) AND id NOT IN (SELECT id FROM mark.pastless)",
            (commit,),
        ).fetchone()
        (commits,) = live.execute("SELECT count(*) FROM mark.made WHERE kind = ?", (commit,)).fetchone()
        self.report.incomplete = commits - self.report.rootless - self.report.states

    def _keep_rootless(self) -> None:
        """Make a commit without a past for each state that is whole and has lost its own."""
        last = b""
        while rows := self._live.execute(
            "SELECT id FROM mark.rootless WHERE id > ? AND id NOT IN (SELECT id FROM mark.broken) ORDER BY id LIMIT ?",
            (last, _BATCH),
        ).fetchall():
            last = rows[-1][0]
            with self._database.writer() as writer:
                made = []
                for (id,) in rows:
                    alone = replace(walk.commit(self._database, id), parents=(), base=None)
                    made.append(writer.put(Kind.COMMIT, encode_commit(alone)))
                writer.seal()
                with self._database.transaction(writer):
                    pass
            with self._live.transaction():
                for id in made:
                    if self._live.execute(
                        "INSERT OR IGNORE INTO mark.made VALUES (?, ?)", (id, int(Kind.COMMIT))
                    ).rowcount:
                        self._live.execute("INSERT INTO mark.pastless VALUES (?)", (id,))
                        self.report.rootless += 1

    def _fill_out(self) -> None:
        """Write patches of what goes out in full; they are trees, pages and commits, as their bases are."""
        rows = self._live.execute(
            "SELECT id FROM patches WHERE base IN (SELECT id FROM mark.gone) AND id NOT IN (SELECT id FROM mark.gone)"
        ).fetchall()
        if not rows:
            return
        pack = self._database.take_pack()
        moved: list[tuple[int, int, int, bytes]] = []
        for (id,) in rows:
            if pack.size >= MAX_PACK:
                self._end(pack)
                pack = self._database.take_pack()
            header, canonical = self._database.load(id)
            record = encode(header.kind, id, canonical)[0]
            moved.append((pack.number, pack.size, len(record), id))
            pack.append(record)
        self._end(pack)
        with self._live.transaction("IMMEDIATE"):
            self._live.executemany("UPDATE objects SET pack = ?, offset = ?, length = ? WHERE id = ?", moved)
            self._live.executemany("DELETE FROM patches WHERE id = ?", [row[3:] for row in moved])

    def _end(self, pack: Pack) -> None:
        pack.sync()
        pack.kept = pack.size
        self._database.give_pack(pack)
        self._database.drop_pack()


def _records(path: Path, beginning: bytes) -> Iterator[tuple[int, Header] | None] | None:
    """Yield offset and header of each record of a pack, and None for each place where a record should be and is not.

    None when the pack does not begin as it should. :class:`StoreError` when the file cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise failed(f"open {path}", error) from error
    try:
        if os.pread(fd, PACK_HEADER.size, 0) != beginning:
            os.close(fd)
            return None
    except OSError as error:
        os.close(fd)
        raise failed(f"read {path}", error) from error
    return _read(fd, path)


def _read(fd: int, path: Path) -> Iterator[tuple[int, Header] | None]:
    try:
        size, offset = os.fstat(fd).st_size, PACK_HEADER.size
        while offset < size:
            header = _header(os.pread(fd, MAX_HEADER, offset))
            if header is not None and offset + header.size + header.length <= size:
                yield offset, header
                offset += header.size + header.length
                continue
            yield None
            offset = _next(fd, offset + 1, size)
    except OSError as error:
        raise failed(f"read {path}", error) from error
    finally:
        os.close(fd)


def _next(fd: int, offset: int, size: int) -> int:
    """Return where the next header is behind ``offset``, or the end of the file."""
    while offset < size:
        data = os.pread(fd, _WINDOW + MAX_HEADER, offset)
        at = data.find(MARK, 0, _WINDOW)
        while at >= 0:
            header = _header(data[at : at + MAX_HEADER])
            if header is not None and offset + at + header.size + header.length <= size:
                return offset + at
            at = data.find(MARK, at + 1, _WINDOW)
        offset += _WINDOW
    return size


def _header(data: bytes) -> Header | None:
    try:
        return decode_header(data)
    except StoreDamagedError:
        return None
