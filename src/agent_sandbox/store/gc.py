"""gc: remove what no name leads to, under the exclusive lock.

``spec/store.md`` ("gc", "The order of writes") is the source. The order, each step of which may be the last one:

1. Remove what earlier runs left: dead packs, files without a row, rows without a file. A file whose number the index
   has never given is not of that kind, and ends gc: the index is older than it, or another store's.
2. Mark what is alive (``marks.py``). An object that cannot be read ends gc here, with nothing removed.
3. A living page, tree or commit that is a patch of a dead one is written out in full, because **what the index knows
   has everything below it in the store**: writers do not look below an object that is known. A dead blob has nothing
   below it, so it stays while a patch needs it.
4. One transaction forgets every dead object and marks packs without life as dead; these are unlinked. So a full disk
   gets room before anything is copied; what it takes is room for the index's changed pages.
5. Pack by pack, what lives is copied to a new pack, synced; one transaction moves the rows and marks the old pack as
   dead; it is unlinked.

A pack that another process has open may go in 4 or 5: each writer looks at its pack's row before it appends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from agent_sandbox.errors import StoreBusyError, StoreDamagedError, StoreFullError
from agent_sandbox.store.index import location
from agent_sandbox.store.marks import CONFLICT, Marks, marks
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Kind
from agent_sandbox.store.packs import MAX_PACK, Pack, pack_name
from agent_sandbox.store.ports import Location
from agent_sandbox.store.records import MAX_HEADER, decode_header, encode
from agent_sandbox.store.sqlite import translated

SMALL_PACK = MAX_PACK // 4
"""A pack below this many bytes is small."""
MANY_PACKS = 16
"""Small packs from which on they are put together: each byte is then copied about once for sixteen times less files."""
_BATCH = 512
_HAS_BELOW = (int(Kind.PAGE), int(Kind.TREE), int(Kind.COMMIT))


@dataclass(frozen=True, slots=True)
class GcReport:
    """What gc did. Bytes are sizes of files: packs and index."""

    kept: int
    """Objects that are alive, or that a patch needs."""
    removed: int
    """Objects that are gone."""
    before: int
    after: int
    packs_removed: int
    packs_written: int

    @property
    def freed(self) -> int:
        """Bytes by which the store is smaller."""
        return self.before - self.after


def collect(database: ObjectDatabase, *, wait_seconds: float) -> GcReport:
    """Remove what no name leads to.

    :class:`StoreBusyError` when others use the store for longer than ``wait_seconds``, :class:`StoreDamagedError` when
    something that is alive cannot be read: run check.
    """
    with database.lock.exclusive(wait_seconds):
        return _Gc(database).run()


class _Gc:
    def __init__(self, database: ObjectDatabase) -> None:
        self._database = database
        self._removed_packs = 0
        self._written: set[int] = set()
        self._pack: Pack | None = None

    def run(self) -> GcReport:
        database = self._database
        before = self._bytes()
        try:
            database.drop_pack()
            database.index.quick_check()
            self._clean()
            with translated(database.index.path), marks(database) as live:
                live.fill(_stop)
                self._agree(live)
                removed = self._sweep(live)
                self._copy(live)
                (kept,) = live.execute("SELECT count(*) FROM objects").fetchone()
            with suppress(StoreFullError, StoreBusyError):
                database.index.shrink()
                database.index.checkpoint()
        finally:
            if self._pack is not None:
                self._pack.cut()
                database.give_pack(self._pack)
            database.reader.close()
        return GcReport(kept, removed, before, self._bytes(), self._removed_packs, len(self._written))

    def _bytes(self) -> int:
        index = self._database.index.path
        files = [index, index.with_name(index.name + "-wal"), *self._database.packs.iterdir()]
        total = 0
        for file in files:
            with suppress(FileNotFoundError):
                total += file.stat().st_size
        return total

    def _clean(self) -> None:
        database = self._database
        database.need_numbered()
        self._removed_packs += database.remove_dead()
        rows = {row.number for row in database.index.packs()}
        names = database.pack_files()
        if names ^ rows:
            database.need_empty(sorted(names ^ rows))
            self._unlink(sorted(names - rows))
            with database.index.transaction() as change:
                change.remove_packs(sorted(rows - names))

    def _unlink(self, numbers: Sequence[int]) -> None:
        self._database.unlink(numbers)
        self._removed_packs += len(numbers)

    @staticmethod
    def _agree(live: Marks) -> None:
        """Stop where an object is said to be two things: what is below one of them was perhaps not marked."""
        rows = live.execute("SELECT id FROM mark.live WHERE size = ?", (CONFLICT,)).fetchmany(1)
        for (id,) in rows:
            raise StoreDamagedError(f"a damaged store: not all say the same of object {id.hex()}; run check")

    def _sweep(self, live: Marks) -> int:
        """Forget dead objects, and drop packs without life; returns how many objects went."""
        while True:
            with live.transaction():
                bases = live.execute(
                    "INSERT OR IGNORE INTO mark.live (id, kind)"
                    " SELECT patches.base, live.kind FROM patches JOIN mark.live USING (id)"
                    " WHERE live.kind NOT IN (?, ?, ?)",
                    _HAS_BELOW,
                ).rowcount
            if not bases:
                break
        self._fill_out(live)
        with live.transaction("IMMEDIATE"):
            self._move(live)
            removed = live.execute("DELETE FROM objects WHERE id NOT IN (SELECT id FROM mark.live)").rowcount
            live.execute("DELETE FROM patches WHERE id NOT IN (SELECT id FROM objects)")
            live.execute("DELETE FROM forgotten WHERE commit_id NOT IN (SELECT id FROM objects)")
            live.execute(
                "UPDATE packs SET closed = 1, dead = 1 WHERE number NOT IN (SELECT pack FROM objects) AND number != ?",
                (self._pack.number if self._pack is not None else 0,),
            )
        self._unlink([row.number for row in self._database.index.packs() if row.dead])
        return removed

    def _fill_out(self, live: Marks) -> None:
        """Write living patches of dead objects out in full, where something is below them."""
        live.execute("CREATE TABLE mark.moved (id BLOB PRIMARY KEY NOT NULL, pack, offset, length) WITHOUT ROWID")
        live.execute(
            "CREATE TABLE mark.filled AS SELECT id, live.kind AS kind FROM patches JOIN mark.live USING (id)"
            " WHERE live.kind IN (?, ?, ?) AND base NOT IN (SELECT id FROM mark.live)",
            _HAS_BELOW,
        )
        after = 0
        while rows := live.execute(
            "SELECT rowid, id, kind FROM mark.filled WHERE rowid > ? ORDER BY rowid LIMIT ?", (after, _BATCH)
        ).fetchall():
            moved = []
            for _, id, number in rows:
                canonical = self._database.load(id, Kind(number))[1]
                place = self._append(encode(Kind(number), id, canonical)[0])
                moved.append((id, place.pack, place.offset, place.length))
            with live.transaction():
                live.executemany("INSERT INTO mark.moved VALUES (?, ?, ?, ?)", moved)
            after = rows[-1][0]
        self._sync()

    def _copy(self, live: Marks) -> None:
        """Copy what lives out of packs that are mostly dead, or small ones among many."""
        alive = dict(live.execute("SELECT pack, sum(length) FROM objects GROUP BY pack").fetchall())
        sizes = {number: self._size(number) for number in alive if number not in self._written}
        small = [number for number, size in sizes.items() if size < SMALL_PACK]
        chosen = [
            number
            for number, size in sizes.items()
            if alive[number] * 2 < size or (len(small) >= MANY_PACKS and size < SMALL_PACK)
        ]
        live.execute("CREATE TABLE mark.chosen (pack INTEGER PRIMARY KEY)")
        live.execute(
            "CREATE TABLE mark.places (pack, offset, id, length, PRIMARY KEY (pack, offset, id)) WITHOUT ROWID"
        )
        with live.transaction():
            live.executemany("INSERT INTO mark.chosen VALUES (?)", [(number,) for number in chosen])
            live.execute(
                "INSERT INTO mark.places SELECT pack, offset, id, length FROM objects"
                " WHERE pack IN (SELECT pack FROM mark.chosen)"
            )
        for number in sorted(chosen):
            self._copy_pack(live, number)

    def _copy_pack(self, live: Marks, number: int) -> None:
        with live.transaction():
            live.execute("DELETE FROM mark.moved")
        for rows in self._places(live, number):
            moved = []
            for id, offset, length in rows:
                record = self._database.reader.read(location(number, offset, length), 0, length)
                header = decode_header(record[:MAX_HEADER])
                if header.id != id or header.size + header.length != length:
                    raise StoreDamagedError(
                        f"a damaged store: object {id.hex()} is not where the index says; run check"
                    )
                place = self._append(record)
                moved.append((id, place.pack, place.offset, place.length))
            with live.transaction():
                live.executemany("INSERT INTO mark.moved VALUES (?, ?, ?, ?)", moved)
        self._sync()
        with live.transaction("IMMEDIATE"):
            self._move(live)
            live.execute("UPDATE packs SET closed = 1, dead = 1 WHERE number = ?", (number,))
        self._unlink([number])

    @staticmethod
    def _places(live: Marks, number: int) -> Iterator[list[tuple[bytes, int, int]]]:
        after = (-1, b"")
        while rows := live.execute(
            "SELECT id, offset, length FROM mark.places WHERE pack = ? AND (offset, id) > (?, ?)"
            " ORDER BY offset, id LIMIT ?",
            (number, *after, _BATCH),
        ).fetchall():
            yield rows
            after = (rows[-1][1], rows[-1][0])

    def _move(self, live: Marks) -> None:
        """Let the index lead to the copies; part of the caller's transaction."""
        if self._pack is not None:
            self._pack.kept = self._pack.size
        live.execute(
            "UPDATE objects SET pack = moved.pack, offset = moved.offset, length = moved.length"
            " FROM mark.moved WHERE moved.id = objects.id"
        )
        live.execute("DELETE FROM patches WHERE id IN (SELECT moved.id FROM mark.moved JOIN mark.filled USING (id))")

    def _size(self, number: int) -> int:
        try:
            return (self._database.packs / pack_name(number)).stat().st_size
        except OSError as error:
            raise StoreDamagedError(f"a damaged store: {pack_name(number)} cannot be read; run check") from error

    def _append(self, record: bytes) -> Location:
        if self._pack is not None and self._pack.size >= MAX_PACK:
            self._pack.sync()
            self._pack.kept = self._pack.size
            self._database.give_pack(self._pack)
            self._pack = None
        if self._pack is None:
            self._pack = self._database.take_pack()
            self._written.add(self._pack.number)
        place = Location(self._pack.number, self._pack.size, len(record))
        self._pack.append(record)
        return place

    def _sync(self) -> None:
        if self._pack is not None:
            self._pack.sync()


def _stop(id: bytes, kind: Kind, error: StoreDamagedError) -> None:
    raise StoreDamagedError(f"{error.message}; nothing was removed, run check") from error
