"""Writing objects: rows are held until their records are synced, then one transaction makes them known.

A writer that failed is of no more use, and neither is its pack; what it had not made known is given up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agent_sandbox.errors import StoreDamagedError, StoreError
from agent_sandbox.store.index import Known
from agent_sandbox.store.objects import Kind, identity
from agent_sandbox.store.packs import MAX_PACK, Pack
from agent_sandbox.store.ports import Location, Row
from agent_sandbox.store.records import encode

if TYPE_CHECKING:
    from agent_sandbox.store.objectdb import ObjectDatabase

MAX_PENDING = 16_384
"""Rows that a writer holds before it makes its objects known by itself: about 4 MiB of memory."""


class PackedWriter:
    """Writes objects into packs of its own; made by :meth:`ObjectDatabase.writer`. For one thread at a time."""

    def __init__(self, database: ObjectDatabase) -> None:
        self._database = database
        self._pack: Pack | None = None
        self._pending: dict[bytes, Known] = {}
        self._sealed = False
        self._broken = False
        self.written = 0
        """Bytes appended to packs."""

    def has(self, ids: Sequence[bytes]) -> list[bool]:
        """See :class:`~agent_sandbox.store.ports.Writer`."""
        unknown = [id for id in ids if id not in self._pending]
        found = dict(zip(unknown, self._database.locate(unknown), strict=True))
        return [id in self._pending or found[id] is not None for id in ids]

    def put(self, kind: Kind, canonical: bytes, base: bytes | None = None) -> bytes:
        """See :class:`~agent_sandbox.store.ports.Writer`."""
        id = identity(kind, canonical)
        if self.has([id])[0]:
            return id
        record, depth = encode(kind, id, canonical, self._resembling(kind, base))
        self.append(record, [Row(id, 0, len(record), base if depth else None, depth)])
        return id

    def append(self, records: bytes, rows: Sequence[Row]) -> None:
        """See :class:`~agent_sandbox.store.ports.Writer`. A row's base is an object that the index knows."""
        self._ready()
        if any(row.offset < 0 or row.length < 1 or row.offset + row.length > len(records) for row in rows):
            raise ValueError("a row outside its records")
        with self._or_broken():
            if self._pack is not None and self._pack.size >= MAX_PACK:
                self.flush()
                self._database.give_pack(self._pack)
                self._pack = None
            if self._pack is None:
                self._pack = self._database.take_pack()
            start = self._pack.size
            self._pack.append(records)
        self.written += len(records)
        for row in rows:
            place = Location(self._pack.number, start + row.offset, row.length)
            self._pending[row.id] = Known(row.id, place, row.base, row.depth)
        if len(self._pending) >= MAX_PENDING:
            self.flush()

    def flush(self) -> None:
        """See :class:`~agent_sandbox.store.ports.Writer`."""
        self._ready()
        if self._pack is None or not self._pending:
            return
        with self._or_broken():
            self._pack.sync()
            with self._database.index.transaction(self.keep) as change:
                change.add_objects(self._pending.values())
        self._pending = {}

    def seal(self) -> None:
        """See :class:`~agent_sandbox.store.ports.Writer`; hand the writer to :meth:`ObjectDatabase.transaction`."""
        self._ready()
        with self._or_broken():
            if self._pack is not None:
                self._pack.sync()
        self._sealed = True

    def sealed_rows(self) -> list[Known]:
        """Return what the next transaction makes known."""
        if not self._sealed or self._broken:
            raise ValueError("the writer is not sealed")
        return list(self._pending.values())

    def keep(self) -> None:
        """Remember that a transaction which leads to all that was appended is about to be tried."""
        if self._pack is not None:
            self._pack.kept = self._pack.size

    def known(self) -> None:
        """The transaction was committed; the writer may go on."""
        self._pending = {}
        self._sealed = False

    def leave(self) -> None:
        """Give up what is not known, and give the pack back."""
        if self._pack is not None:
            self._pack.cut()
            self._database.give_pack(self._pack)
            self._pack = None
        self._broken = True

    def _resembling(self, kind: Kind, base: bytes | None) -> tuple[bytes, bytes, int] | None:
        if base is None or base in self._pending:
            return None
        try:
            header, canonical = self._database.load(base, kind)
        except StoreDamagedError:
            return None
        return base, canonical, header.depth

    def _ready(self) -> None:
        if self._broken:
            raise StoreError("the writer has failed or has ended; begin again")
        if self._sealed:
            raise ValueError("the writer is sealed")

    @contextmanager
    def _or_broken(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._broken = True
            if self._pack is not None:
                self._pack.usable = False
            raise
