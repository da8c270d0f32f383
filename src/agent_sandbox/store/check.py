"""check: is everything that a name leads to there, and what was written?

Three passes under the shared lock, so that work goes on meanwhile:

1. The index by SQLite's own checks, and each pack's header and length.
2. Every object that is alive is read from the disk and verified, once, however many states share it; blobs by several
   threads in the order of the packs. What is damaged goes into a scratch table, and the pass goes on.
3. State by state: directories and lists of chunks as a whole, links, and whether all is stored by the rule
   (``shape.py``). Where something is damaged, the paths that lead there are looked for: for every branch, tag, layer
   and pin, and for older commits where none of these shows it.

Nothing is changed; what can be done about damage is the user's to decide.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.damage import Damage, Damages, Finder
from agent_sandbox.store.index import location
from agent_sandbox.store.marks import CONFLICT, Marks, marks
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Kind, decode_attrs
from agent_sandbox.store.packs import pack_name
from agent_sandbox.store.ports import Location, Progress
from agent_sandbox.store.records import PACK_HEADER, pack_header
from agent_sandbox.store.shape import Shapes
from agent_sandbox.store.sqlite import translated
from agent_sandbox.store.walk import commit

_BATCH = 512
_SLICE = 32
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What check saw. Counts and bytes; ``bytes`` is what was read from packs."""

    states: int
    objects: int
    """Objects that a name leads to, or a patch needs."""
    bytes: int
    unreachable: int
    """Objects that gc would remove; those of a commit that runs just now are among them."""
    unreachable_bytes: int
    damages: tuple[Damage, ...]
    damage_count: int
    """How many there are; ``damages`` names the first 10,000."""

    @property
    def clean(self) -> bool:
        """Whether nothing is damaged."""
        return self.damage_count == 0


@dataclass(frozen=True, slots=True)
class _Alive:
    id: bytes
    kind: Kind
    size: int | None
    place: tuple[object, object, object]
    base: bytes | None
    depth: int | None


@dataclass(frozen=True, slots=True)
class _Bad:
    """A damaged object; where ``kind`` and ``length`` are known, it is what says something else of it that is wrong."""

    id: bytes
    why: str
    kind: Kind | None = None
    length: int | None = None


def check(database: ObjectDatabase, *, threads: int = 0, progress: Progress | None = None) -> CheckReport:
    """Verify everything that a name leads to; ``threads`` 0 is one for each core, at most 8.

    Raises the store's errors only where the index as a whole cannot be read.
    """
    workers = threads or min(_MAX_THREADS, os.cpu_count() or 1)
    with database.reading(), translated(database.index.path), marks(database) as live:
        return _Check(database, live, workers, progress or (lambda *_: None)).run()


class _Check:
    def __init__(self, database: ObjectDatabase, live: Marks, workers: int, progress: Progress) -> None:
        self._database = database
        self._live = live
        self._workers = workers
        self._progress = progress
        self._damages = Damages()
        self._bytes = 0

    def run(self) -> CheckReport:
        self._index()
        self._packs()
        live = self._live
        live.execute(
            "CREATE TABLE mark.bad (id BLOB PRIMARY KEY NOT NULL, why TEXT NOT NULL, kind, length) WITHOUT ROWID"
        )
        live.fill(lambda id, kind, error: self._bad([_Bad(id, error.message)]))
        self._bases()
        self._missing()
        objects = self._verify()
        states = self._states()
        unreachable, unreachable_bytes = live.execute(
            "SELECT count(*), coalesce(sum(length), 0) FROM objects WHERE id NOT IN (SELECT id FROM mark.live)"
        ).fetchone()
        found = self._damages
        return CheckReport(
            states, objects, self._bytes, unreachable, unreachable_bytes, tuple(found.first), found.count
        )

    def _index(self) -> None:
        for (line,) in self._live.execute("PRAGMA main.integrity_check(100)").fetchall():
            if line != "ok":
                self._damages.add(Damage("index", None, line))
        for table, *_ in self._live.execute("PRAGMA main.foreign_key_check").fetchall():
            self._damages.add(Damage("index", None, f"a row of {table} whose project is gone"))

    def _packs(self) -> None:
        known = {row.number: row for row in self._database.index.packs()}
        for number, end in self._live.execute(
            "SELECT pack, max(offset + length) FROM objects GROUP BY pack"
        ).fetchall():
            name = pack_name(number)
            if number not in known or known[number].dead:
                self._damages.add(Damage(name, None, "objects lie in a pack that is not in use"))
            try:
                header = self._database.reader.read(Location(number, 0, PACK_HEADER.size), 0, PACK_HEADER.size)
                size = (self._database.packs / name).stat().st_size
            except (StoreDamagedError, OSError) as error:
                self._damages.add(Damage(name, None, f"it cannot be read: {error}"))
                continue
            if header != pack_header(self._database.id, number):
                self._damages.add(Damage(name, None, "its header is not that of this pack"))
            if size < end:
                self._damages.add(Damage(name, None, f"it has {size} bytes where the index knows of {end}"))

    def _bad(self, found: list[_Bad]) -> None:
        rows = [(bad.id, bad.why, bad.kind and int(bad.kind), bad.length) for bad in found]
        with self._live.transaction():
            self._live.executemany("INSERT OR IGNORE INTO mark.bad VALUES (?, ?, ?, ?)", rows)

    def _bases(self) -> None:
        """Bases of living patches are alive too, but what is below them need not be."""
        while True:
            with self._live.transaction():
                added = self._live.execute(
                    "INSERT OR IGNORE INTO mark.live (id, kind)"
                    " SELECT patches.base, live.kind FROM patches JOIN mark.live USING (id)"
                ).rowcount
            if not added:
                return

    def _missing(self) -> None:
        with self._live.transaction():
            self._live.execute(
                "INSERT OR IGNORE INTO mark.bad SELECT id, 'it is missing', NULL, NULL FROM mark.live"
                " WHERE id NOT IN (SELECT id FROM objects)"
            )

    def _alive(self) -> Iterator[list[_Alive]]:
        """Yield living objects in the order in which they lie in the packs."""
        self._live.execute("CREATE TABLE mark.places (pack, offset, id, PRIMARY KEY (pack, offset, id)) WITHOUT ROWID")
        with self._live.transaction():
            self._live.execute(
                "INSERT INTO mark.places SELECT pack, offset, id FROM objects WHERE id IN (SELECT id FROM mark.live)"
            )
        after = (-1, -1, b"")
        while rows := self._live.execute(
            "SELECT places.pack, places.offset, id, kind, size, length, patches.base, patches.depth FROM mark.places"
            " JOIN mark.live USING (id) JOIN objects USING (id) LEFT JOIN patches USING (id)"
            " WHERE (places.pack, places.offset, id) > (?, ?, ?) ORDER BY places.pack, places.offset, id LIMIT ?",
            (*after, _BATCH),
        ).fetchall():
            yield [
                _Alive(id, Kind(kind), size, (pack, offset, length), base, depth)
                for pack, offset, id, kind, size, length, base, depth in rows
            ]
            after = rows[-1][:3]

    def _verify(self) -> int:
        total, total_bytes = self._live.execute(
            "SELECT count(*), coalesce(sum(length), 0) FROM objects WHERE id IN (SELECT id FROM mark.live)"
        ).fetchone()
        done = 0
        with ThreadPoolExecutor(self._workers) as pool:
            for batch in self._alive():
                slices = [batch[start : start + _SLICE] for start in range(0, len(batch), _SLICE)]
                for bad, read in pool.map(self._verify_some, slices):
                    self._bytes += read
                    if bad:
                        self._bad(bad)
                done += len(batch)
                self._progress(done, total, self._bytes, total_bytes)
        return done

    def _verify_some(self, items: list[_Alive]) -> tuple[list[_Bad], int]:
        """Return what is damaged of these, and how many bytes were read."""
        bad: list[_Bad] = []
        read = 0
        for item in items:
            try:
                place = location(*item.place)
                header, canonical = self._database.load_at(place, item.id, None if item.size == CONFLICT else item.kind)
                read += place.length
                if (header.base, header.depth or None) != (item.base, item.depth):
                    raise StoreDamagedError("the index and the pack disagree over what it is a patch of")
                if header.kind is Kind.ATTRS:
                    decode_attrs(canonical)
                if item.size is not None and item.size != len(canonical):
                    said = "not all say the same of it" if item.size == CONFLICT else f"{item.size} are said"
                    why = f"it is a {header.kind.name} of {len(canonical)} bytes, but {said}"
                    bad.append(_Bad(item.id, why, header.kind, len(canonical)))
            except StoreDamagedError as error:
                bad.append(_Bad(item.id, error.message))
        return bad, read

    def _states(self) -> int:
        """Look at each state as a whole; returns how many there are."""
        finder = Finder(self._database, self._live, self._damages)
        shapes = Shapes(self._database)
        (any_bad,) = self._live.execute("SELECT EXISTS (SELECT 1 FROM mark.bad)").fetchone()
        seen = 0
        for where, id, named in self._commits():
            seen += 1
            bad = finder.damaged(id, Kind.COMMIT)
            if bad is not None:
                finder.note(where, id, bad)
                continue
            root = commit(self._database, id).root
            broken = None
            try:
                for fault in shapes.faults(root):
                    self._damages.add(Damage(where, fault.path, fault.why))
            except StoreDamagedError as error:
                broken = error.message
            if (any_bad or broken) and not finder.look(where, root, again=named) and broken:
                self._damages.add(Damage(where, None, broken))
        finder.rest()
        return seen

    def _commits(self) -> Iterator[tuple[str, bytes, bool]]:
        """Yield where a state is to be seen, its commit, and whether that is a name; older commits last."""
        self._live.execute("CREATE TABLE mark.named (id BLOB PRIMARY KEY NOT NULL) WITHOUT ROWID")
        for where, id in self._names():
            self._live.execute("INSERT OR IGNORE INTO mark.named VALUES (?)", (id,))
            yield where, id, True
        last = b""
        while rows := self._live.execute(
            "SELECT id FROM mark.live WHERE kind = ? AND NOT weak AND id > ? AND id NOT IN (SELECT id FROM mark.named)"
            " ORDER BY id LIMIT ?",
            (int(Kind.COMMIT), last, _BATCH),
        ).fetchall():
            for (id,) in rows:
                yield f"commit {id.hex()}", id, False
            last = rows[-1][0]

    def _names(self) -> Iterator[tuple[str, bytes]]:
        index = self._database.index
        for project in index.projects():
            for ref in index.refs(project.name):
                yield f"{project.name}:{ref.name}", ref.head
            for layer in index.layers(project.name):
                yield f"{project.name}@{layer.number}", layer.commit
        for pin in index.pins():
            yield f"pin {pin.name}", pin.commit
