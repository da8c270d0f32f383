"""The object database of one store: a directory with the index, the packs and the lock.

Reading and writing as ``ports.py`` wants it::

    with ObjectDatabase.open(path) as database:
        with database.reading():                       # gc waits until it ends
            canonical = database.read(id, Kind.TREE)
        with database.writer() as writer:              # its own pack
            commit = writer.put(Kind.COMMIT, ...)
            writer.seal()                              # synced
            with database.transaction(writer) as change:   # objects and names, all or nothing
                change.move_ref("project", "main", commit, expected=head)

The lock is held by operations, not by open databases, so that gc finds a moment in which a server does nothing. A pack
stays open between two writers of a process; each writer first looks whether gc has closed it meanwhile.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from agent_sandbox.errors import StoreDamagedError, StoreError
from agent_sandbox.store.directory import make_store, read_store
from agent_sandbox.store.index import Index, Known, Transaction, probe
from agent_sandbox.store.locks import StoreLock
from agent_sandbox.store.objects import Kind
from agent_sandbox.store.packs import MAX_PACK, OsFiles, Pack, PackFiles, PackReader, failed, open_directory, pack_name
from agent_sandbox.store.ports import Location
from agent_sandbox.store.records import (
    MAX_DEPTH,
    MAX_HEADER,
    Header,
    decode_header,
    decode_payload,
)
from agent_sandbox.store.writer import PackedWriter

CACHE_BYTES = 16 << 20
"""Canonical bytes of directories, pages and commits that are kept in memory."""
_PACK = re.compile(r"([0-9]{10})\.pack")
_SHOWN = 8
"""Packs that an error names."""


class ObjectDatabase:
    """The objects and names of one store. Safe for threads; several processes may have one store open."""

    def __init__(
        self,
        path: Path,
        store: bytes,
        *,
        wait_seconds: float,
        files: PackFiles | None = None,
        index: str = "index.sqlite",
    ) -> None:
        """Use :meth:`open` or :meth:`create`. ``files`` is where packs are written: for tests. ``index``: its name."""
        self.path = path
        self.id = store
        self.wait_seconds = wait_seconds
        with ExitStack() as undo:
            self._directory = open_directory(path / "packs")
            undo.callback(os.close, self._directory)
            self.lock = StoreLock(path / "lock")
            undo.callback(self.lock.close)
            self.index = Index(path / index, wait_seconds=wait_seconds)
            undo.pop_all()
        self.files = files or OsFiles(self._directory)
        self.reader = PackReader(self._directory)
        self._cache = _Cache(CACHE_BYTES)
        self._mutex = threading.Lock()
        self._idle: Pack | None = None
        self._to_close: list[int] = []

    @classmethod
    def create(cls, path: Path, *, wait_seconds: float = 10.0) -> Self:
        """Make a store in ``path``, which does not exist or is empty, and open it.

        :class:`ConflictError` when there is a store, :class:`InvalidRequestError` when there is something else.
        """
        make_store(path, wait_seconds)
        return cls.open(path, wait_seconds=wait_seconds)

    @classmethod
    def open(cls, path: Path, *, wait_seconds: float = 10.0, files: PackFiles | None = None) -> Self:
        """Open the store in ``path``; ``wait_seconds`` is how long any operation waits for others.

        :class:`NotFoundError` when there is none, :class:`StoreVersionError` for a newer one (nothing was written),
        :class:`StoreDamagedError` when it is incomplete, or its index is not the one of its packs.
        """
        store = read_store(path)
        probe(path / "index.sqlite")
        database = cls(path, store, wait_seconds=wait_seconds, files=files)
        try:
            database.need_numbered()
        except BaseException:
            database.close()
            raise
        return database

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the pack of this process, write the index back, and let go of everything."""
        self.drop_pack()
        with suppress(StoreError):
            if self._to_close:
                with self.transaction():
                    pass
                self.remove_dead()
            self.index.checkpoint()
        self.reader.close()
        self.index.close()
        self.lock.close()
        os.close(self._directory)

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def packs(self) -> Path:
        """The directory of the packs."""
        return self.path / "packs"

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep gc away for a whole operation. :class:`StoreBusyError` when gc holds the store for too long."""
        with self._holding():
            yield

    @contextmanager
    def _holding(self, *, inner: bool = False) -> Iterator[None]:
        with self.lock.shared(self.wait_seconds, inner=inner) as first:
            if first:
                self.reader.refresh()
            yield

    def locate(self, ids: Sequence[bytes]) -> list[Location | None]:
        """See :class:`~agent_sandbox.store.ports.Objects`."""
        with self._holding(inner=True):
            return self.index.locate(ids)

    def read(self, id: bytes, kind: Kind) -> bytes:
        """See :class:`~agent_sandbox.store.ports.Objects`."""
        canonical = self._cache.get(id, kind)
        if canonical is None:
            with self._holding(inner=True):
                header, canonical = self.load(id, kind)
            if header.kind is not Kind.BLOB:
                self._cache.put(id, kind, canonical)
        return canonical

    def load(self, id: bytes, kind: Kind | None = None, above: int = MAX_DEPTH + 1) -> tuple[Header, bytes]:
        """Return header and verified canonical bytes from the disk, whatever is in memory.

        ``above`` bounds the depth of a patch from above: each base lies less deep than what stands on it, so chains
        end. Call it inside :meth:`reading`.
        """
        (place,) = self.index.locate([id])
        if place is None:
            raise StoreDamagedError(f"a damaged store: object {id.hex()} is missing")
        return self.load_at(place, id, kind, above)

    def load_at(
        self, place: Location, id: bytes, kind: Kind | None = None, above: int = MAX_DEPTH + 1
    ) -> tuple[Header, bytes]:
        """Return the same from where the object is known to be."""
        record = self.reader.read(place, 0, place.length)
        header = decode_header(record[:MAX_HEADER])
        if header.id != id or header.size + header.length != place.length:
            raise StoreDamagedError(f"a damaged store: object {id.hex()} is not where the index says")
        if kind is not None and header.kind is not kind:
            raise StoreDamagedError(f"a damaged store: object {id.hex()} is a {header.kind.name}, not a {kind.name}")
        if header.depth >= above:
            raise StoreDamagedError(f"a damaged store: object {id.hex()} is a patch that lies too deep")
        base = self.load(header.base, header.kind, header.depth)[1] if header.base is not None else None
        return header, decode_payload(header, record[header.size :], base)

    # ---- writing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def writer(self) -> Iterator[PackedWriter]:
        """Write objects; see :class:`~agent_sandbox.store.ports.Writer`. Keeps gc away until the block ends.

        What was not sealed and made known by :meth:`transaction` when it ends is given up.
        """
        with self._holding():
            writer = PackedWriter(self)
            try:
                yield writer
            finally:
                writer.leave()

    @contextmanager
    def transaction(self, writer: PackedWriter | None = None) -> Iterator[Transaction]:
        """Change names, and make the objects of a sealed writer known, in one transaction.

        All of it when the block ends well: then it is on the disk. Nothing when it raises or asked for a rollback.
        """
        with self._holding():
            rows: list[Known] = []
            if writer is not None:
                rows = writer.sealed_rows()
            with self._mutex:
                closing = list(self._to_close)
            with self.index.transaction(writer.keep if writer is not None else lambda: None) as change:
                change.close_packs(closing)
                change.add_objects(rows)
                yield change
            if not change.rolled_back:
                with self._mutex:
                    self._to_close = [number for number in self._to_close if number not in closing]
                if writer is not None:
                    writer.known()

    def take_pack(self) -> Pack:
        """Give a pack to append to: the one that this process has open, or a new one."""
        with self._mutex:
            pack, self._idle = self._idle, None
        if pack is not None:
            row = self.index.pack(pack.number)
            if pack.usable and row is not None and not row.closed and not row.dead:
                return pack
            pack.close()
        with self.index.transaction() as change:
            number = change.add_pack()
            if os.path.lexists(self.packs / pack_name(number)):  # undone: a number that was given is no foreign pack's
                raise _foreign(self.path, [number])
        try:
            return Pack(self.files, self.id, number)
        except FileExistsError:
            raise _foreign(self.path, [number]) from None

    def pack_files(self) -> set[int]:
        """Return the numbers of the packs that are there as files."""
        try:
            return {int(found[1]) for file in self.packs.iterdir() if (found := _PACK.fullmatch(file.name))}
        except OSError as error:
            raise failed("list the packs", error) from error

    def need_numbered(self) -> None:
        """Raise :class:`StoreDamagedError` when there are packs with numbers that the index has never given.

        It is then older than they are, or another one, and what it leads to says nothing of what they hold. A number is
        given before its file is made, so files are listed before the index is asked.
        """
        files = self.pack_files()
        last = self.index.last_number()
        if foreign := sorted(number for number in files if number > last):
            raise _foreign(self.path, foreign)

    def give_pack(self, pack: Pack) -> None:
        """Take a pack back from a writer: it is kept for the next one where it can be."""
        with self._mutex:
            if pack.usable and pack.size < MAX_PACK and self._idle is None:
                self._idle = pack
            else:
                self._retire(pack)

    def drop_pack(self) -> None:
        """Close the pack that is kept open, so that the next writer begins a new one."""
        with self._mutex:
            idle, self._idle = self._idle, None
            if idle is not None:
                self._retire(idle)

    def remove_dead(self) -> int:
        """Unlink packs that are marked as dead, and return how many; no location leads there any more.

        :class:`StoreDamagedError` when one does.
        """
        dead = [row.number for row in self.index.packs() if row.dead]
        if dead:
            self.need_empty(dead)
            self.unlink(dead)
        return len(dead)

    def need_empty(self, numbers: Sequence[int]) -> None:
        """Raise :class:`StoreDamagedError` when an object lies in one of these packs."""
        used = {number for (number,) in self.index.query("SELECT DISTINCT pack FROM objects")}
        for number in used.intersection(numbers):
            raise StoreDamagedError(
                f"a damaged index: objects lie in {pack_name(number)}, which is not in use; run check"
            )

    def unlink(self, numbers: Sequence[int]) -> None:
        """Unlink packs, and then remove their rows."""
        try:
            for number in numbers:
                with suppress(FileNotFoundError):
                    self.files.remove(pack_name(number))
            self.files.sync()
        except OSError as error:
            raise failed("remove dead packs", error) from error
        with self.index.transaction() as change:
            change.remove_packs(numbers)

    def _retire(self, pack: Pack) -> None:
        pack.close()
        self._to_close.append(pack.number)


def _foreign(store: Path, numbers: Sequence[int]) -> StoreDamagedError:
    names = ", ".join(pack_name(number) for number in numbers[:_SHOWN])
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return StoreDamagedError(
        f"a damaged store: {store / 'index.sqlite'} is older than {names}{more} in packs/, or of another store; nothing"
        " was changed. Put back the index that belongs to them, or the whole store from a backup, or run rebuild"
    )


class _Cache:
    """Canonical bytes used last, bounded by their sum."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._items: OrderedDict[bytes, tuple[Kind, bytes]] = OrderedDict()
        self._mutex = threading.Lock()

    def get(self, id: bytes, kind: Kind) -> bytes | None:
        with self._mutex:
            item = self._items.get(id)
            if item is None or item[0] is not kind:
                return None
            self._items.move_to_end(id)
            return item[1]

    def put(self, id: bytes, kind: Kind, canonical: bytes) -> None:
        with self._mutex:
            if id in self._items:
                return
            self._items[id] = (kind, canonical)
            self._held += len(canonical)
            while self._held > self._most:
                self._held -= len(self._items.popitem(last=False)[1][1])
