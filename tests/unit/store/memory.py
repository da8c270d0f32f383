"""An object database in memory, for tests of what works on objects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import records
from agent_sandbox.store.objects import Kind, identity
from agent_sandbox.store.ports import Location, Row


class MemoryObjects:
    """Objects and Writer in one; records are kept in one pack on disk where ``packs`` is given (the engine
    reads files)."""

    def __init__(self, packs: Path | None = None) -> None:
        self._packs = packs
        self._pack = bytearray(records.pack_header(bytes(16), 1))
        self._at: dict[bytes, Location] = {}
        self._flush()

    @property
    def packs(self) -> Path:
        assert self._packs is not None
        return self._packs

    def _flush(self) -> None:
        if self._packs is not None:
            (self._packs / f"{1:010d}.pack").write_bytes(self._pack)

    @property
    def written(self) -> int:
        return len(self._pack) - records.PACK_HEADER.size

    def locate(self, ids: Sequence[bytes]) -> list[Location | None]:
        return [self._at.get(id) for id in ids]

    def read(self, id: bytes, kind: Kind) -> bytes:
        canonical, found, _ = self._read(id)
        if found is not kind:
            raise StoreDamagedError(f"object {id.hex()} is a {found.name}")
        return canonical

    def _read(self, id: bytes) -> tuple[bytes, Kind, int]:
        if id not in self._at:
            raise StoreDamagedError(f"object {id.hex()} is missing")
        place = self._at[id]
        record = bytes(self._pack[place.offset : place.offset + place.length])
        header = records.decode_header(record[: records.MAX_HEADER])
        base = self._read(header.base)[0] if header.base else None
        return records.decode_payload(header, record[header.size :], base), header.kind, header.depth

    def has(self, ids: Sequence[bytes]) -> list[bool]:
        return [id in self._at for id in ids]

    def put(self, kind: Kind, canonical: bytes, base: bytes | None = None) -> bytes:
        id = identity(kind, canonical)
        if id not in self._at:
            resembles = None
            if base is not None and base in self._at:
                data, found, depth = self._read(base)
                resembles = (base, data, depth) if found is kind else None
            record, depth = records.encode(kind, id, canonical, resembles)
            self.append(record, [Row(id, 0, len(record), base if depth else None, depth)])
        return id

    def append(self, records: bytes, rows: Sequence[Row]) -> None:
        for row in rows:
            self._at[row.id] = Location(1, len(self._pack) + row.offset, row.length)
        self._pack += records

    def flush(self) -> None:
        self._flush()

    def seal(self) -> None:
        self._flush()

    def __len__(self) -> int:
        return len(self._at)
