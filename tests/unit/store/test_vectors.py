"""The golden vectors of the stored format: every implementation must agree with them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import chunks, objects, records
from agent_sandbox.store.encoding import Reader, svarint, uvarint
from agent_sandbox.store.objects import Kind
from tests.unit.store import vectors
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.vectors import unhex

ENCODE: dict[str, Any] = {
    "page": lambda value: _page(*value),
    "tree": lambda value: _tree(*value),
    "attrs": objects.encode_attrs,
    "commit": objects.encode_commit,
}
DECODE: dict[str, Any] = {
    "page": objects.decode_page,
    "tree": objects.decode_tree,
    "attrs": objects.decode_attrs,
    "commit": objects.decode_commit,
}


def _page(level: int, items: Any) -> bytes:
    return objects.encode_page(level, map(objects.encode_page_child if level else objects.encode_extent, items))


def _tree(level: int, items: Any) -> bytes:
    return objects.encode_tree(level, map(objects.encode_tree_child if level else objects.encode_entry, items))


def by_name(vector: dict[str, Any]) -> str:
    return f"{vector.get('kind', '')} {vector['name']}".strip()


def test_the_vectors_are_what_their_program_writes(tmp_path: Path) -> None:
    for program in ("make_vectors.py", "formats.py"):
        shutil.copy(vectors.FOLDER / program, tmp_path)
    done = subprocess.run(
        [sys.executable, "make_vectors.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in tmp_path.glob("*.json")}
    assert len(written) == 6
    assert written == {name: (vectors.FOLDER / name).read_text() for name in written}


@pytest.mark.parametrize(("name", "encode"), [("uvarint", uvarint), ("svarint", svarint)])
def test_numbers(name: str, encode: Any) -> None:
    found = vectors.load("numbers")[name]
    assert len(found) >= 20
    for vector in found:
        data = bytes.fromhex(vector["hex"])
        assert encode(vector["value"]) == data
        reader = Reader(data, "number")
        assert getattr(reader, name)() == vector["value"]
        assert reader.left == 0


@pytest.mark.parametrize("vector", vectors.load("numbers")["refused"], ids=by_name)
@pytest.mark.parametrize("name", ["uvarint", "svarint"])
def test_numbers_that_are_refused(name: str, vector: dict[str, Any]) -> None:
    with pytest.raises(StoreDamagedError):
        getattr(Reader(unhex(vector["hex"]), "number"), name)()


@pytest.mark.parametrize("vector", vectors.load("objects")["objects"], ids=by_name)
def test_objects(vector: dict[str, Any]) -> None:
    kind, canonical = vector["kind"], unhex(vector["hex"])
    assert objects.identity(Kind[kind.upper()], canonical).hex() == vector["id"]
    assert len(canonical) <= objects.MAX_CANONICAL[Kind[kind.upper()]]
    if kind == "blob":
        return
    value = vectors.value_of(kind, vector["value"])
    assert DECODE[kind](canonical) == value
    assert ENCODE[kind](value) == canonical


@pytest.mark.parametrize("vector", vectors.load("objects")["links"], ids=lambda vector: vector["path"])
def test_link_ids(vector: dict[str, Any]) -> None:
    assert objects.link_id(unhex(vector["path"])).hex() == vector["id"]


@pytest.mark.parametrize("vector", vectors.load("reject")["reject"], ids=by_name)
def test_objects_that_are_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(StoreDamagedError):
        DECODE[vector["kind"]](unhex(vector["hex"]))


@pytest.mark.parametrize("vector", vectors.load("chunks")["chunks"], ids=by_name)
def test_chunks(vector: dict[str, Any]) -> None:
    data = vectors.described(vector["data"])
    assert [end for _, end in chunks.cuts(data)] == vector["ends"]


@pytest.mark.parametrize("vector", vectors.load("pages")["files"], ids=by_name)
def test_pages_of_files(vector: dict[str, Any]) -> None:
    extents = vectors.extents_of(vector["extents"])
    assert sum(extent.length for extent in extents) == vector["size"]
    store = Recorder()
    assert chunks.put_pages(extents, store.put).hex() == vector["root"]
    assert store.levels == vector["pages"]


@pytest.mark.parametrize("vector", vectors.load("pages")["directories"], ids=by_name)
def test_pages_of_directories(vector: dict[str, Any]) -> None:
    entries = vectors.entries_of(vector["entries"])
    assert len(entries) == vector["count"]
    store = Recorder()
    assert chunks.put_tree(entries, store.put).hex() == vector["root"]
    assert store.levels == vector["pages"]


class Recorder(MemoryObjects):
    """Keeps the ids of pages by level, in the order in which they were put."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[list[str]] = []

    def put(self, kind: Kind, canonical: bytes, base: bytes | None = None) -> bytes:
        id = super().put(kind, canonical, base)
        while len(self.levels) <= canonical[0]:
            self.levels.append([])
        self.levels[canonical[0]].append(id.hex())
        return id


def decoded(record: bytes, base: bytes | None) -> bytes:
    header = records.decode_header(record[: records.MAX_HEADER])
    return records.decode_payload(header, record[header.size :], base)


def test_the_header_of_a_pack() -> None:
    vector = vectors.load("records")["pack_header"]
    assert records.pack_header(bytes.fromhex(vector["store"]), vector["number"]).hex() == vector["hex"]


@pytest.mark.parametrize("vector", vectors.load("records")["records"], ids=by_name)
def test_records(vector: dict[str, Any]) -> None:
    data, canonical = unhex(vector["record"]), unhex(vector["canonical"])
    header = records.decode_header(data[: records.MAX_HEADER])
    base = vector["base"]
    assert (header.kind.name.lower(), int(header.form), header.depth) == (
        vector["kind"],
        vector["form"],
        vector["depth"],
    )
    assert (header.id.hex(), header.canonical) == (vector["id"], len(canonical))
    assert header.size + header.length == len(data)
    assert (header.base.hex() if header.base else None) == (base["id"] if base else None)
    assert decoded(data, unhex(base["canonical"]) if base else None) == canonical


@pytest.mark.parametrize("vector", vectors.load("records")["refused"], ids=by_name)
def test_records_that_are_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(StoreDamagedError):
        decoded(unhex(vector["record"]), vectors.optional(vector["base"]))
