"""A store of every format that was released opens as it was left, and one of a later format is not touched."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from agent_sandbox.errors import ConflictError, StoreDamagedError, StoreVersionError
from agent_sandbox.store import Store, UpToDate, walk
from agent_sandbox.store.catalog import RefKind
from agent_sandbox.store.directory import FORMAT
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Entry, Kind, Type, decode_attrs, link_id
from agent_sandbox.store.ports import Engine, Objects
from tests.unit.store import trees, vectors
from tests.unit.store.engines import each_engine

FORMATS = sorted(path.stem for path in vectors.FOLDER.glob("format-*.json"))
each_format = pytest.mark.parametrize("name", FORMATS)


def fixture(name: str, place: Path) -> Path:
    """Give a copy of a fixture store that may be written to."""
    path = place / name
    shutil.copytree(vectors.FOLDER / name, path)
    return path


def states_of(description: dict[str, Any]) -> dict[str, dict[bytes, dict[str, Any]]]:
    """Return what each commit holds, by path."""
    found: dict[str, dict[bytes, dict[str, Any]]] = {}
    for commit in description["commits"]:
        state = dict(found[commit["like"]]) if commit["like"] else {}
        for path in commit["removed"]:
            del state[bytes.fromhex(path)]
        found[commit["id"]] = state | {bytes.fromhex(entry["path"]): entry for entry in commit["entries"]}
    return found


def described(objects: Objects, path: bytes, entry: Entry, firsts: dict[bytes, bytes]) -> dict[str, Any]:
    """Return an entry as the description has it."""
    seconds, nanoseconds = divmod(entry.mtime_ns, 1_000_000_000)
    found: dict[str, Any] = {"path": path.hex(), "type": entry.type.name.lower(), "mode": entry.mode}
    found |= {"seconds": seconds, "nanoseconds": nanoseconds}
    if entry.type is Type.FILE:
        found |= {"size": entry.size, "blake3": blake3(b"".join(walk.data(objects, entry))).hexdigest()}
        extents = list(walk.extents(objects, entry))
        if any(extent.id is None for extent in extents):
            found["data"] = list(runs(extents))
    if entry.target:
        found["target"] = entry.target.hex()
    if entry.attrs is not None:
        attributes = decode_attrs(objects.read(entry.attrs, Kind.ATTRS))
        found["attributes"] = [[name.hex(), value.hex()] for name, value in attributes]
    if entry.link is not None:
        found["first"] = firsts[entry.link].hex()
    if entry.owner is not None:
        found["owner"] = list(entry.owner)
    return found


def runs(extents: list[Any]) -> Iterator[list[int]]:
    """Yield where there is data: offset and length."""
    at, start = 0, None
    for extent in extents:
        if extent.id is not None and start is None:
            start = at
        if extent.id is None and start is not None:
            yield [start, at - start]
            start = None
        at += extent.length
    if start is not None:
        yield [start, at - start]


def test_the_format_that_is_written_has_a_fixture() -> None:
    assert f"format-{FORMAT}" in FORMATS


@each_format
def test_names_and_commits(name: str, tmp_path: Path) -> None:
    told = vectors.load(name)
    with Store.open(fixture(name, tmp_path)) as store:
        for project, expected in zip(store.projects(), told["projects"], strict=True):
            assert (project.name, project.owners) == (expected["name"], expected["owners"])
            assert [ref.name for ref in store.refs(project.name)] == expected["refs"]
            assert [layer.number for layer in store.layers(project.name)] == list(range(expected["layers"]))
        assert {ref: store.resolve(ref).hex() for ref in told["heads"]} == told["heads"]
        assert {ref.name: ref.kind for ref in store.refs("web")} == {"main": RefKind.BRANCH, "v1": RefKind.TAG}
        assert {pin.name: pin.commit.hex() for pin in store.pins()} == told["pins"]
        for ref, log in told["logs"].items():
            assert [item.id.hex() for item in store.log(ref)] == log
    with ObjectDatabase.open(tmp_path / name) as database:
        assert database.id.hex() == told["store"]
        for expected in told["commits"]:
            commit = walk.commit(database, bytes.fromhex(expected["id"]))
            assert [parent.hex() for parent in commit.parents] == expected["parents"]
            assert (commit.base.hex() if commit.base else None) == expected["base"]
            assert divmod(commit.time_ns, 1_000_000_000) == (expected["seconds"], expected["nanoseconds"])
            assert (commit.author, commit.message) == (expected["author"], expected["message"])


@each_format
def test_states(name: str, tmp_path: Path) -> None:
    told = vectors.load(name)
    states = states_of(told)
    with ObjectDatabase.open(fixture(name, tmp_path)) as database:
        for id, expected in states.items():
            root = walk.commit(database, bytes.fromhex(id)).root
            firsts = {link_id(path): path for path in expected}
            paths = [(b"", root), *walk.walk(database, root)]
            found = {path: described(database, path, entry, firsts) for path, entry in paths}
            assert found == expected
        many = walk.resolve(database, walk.commit(database, bytes.fromhex(told["heads"]["web"])).root, b"many")
        assert database.read(many.content or b"", Kind.TREE)[0] == 1, "no directory of several pages"
        assert database.index.query("SELECT count(*) FROM patches WHERE depth > 1") > [(0,)]


@each_format
@each_engine
def test_states_are_laid_out_and_known_again(name: str, engine: Engine, tmp_path: Path) -> None:
    """What is laid out is captured as the same state, by every engine, although another version wrote it."""
    told = vectors.load(name)
    with Store.open(fixture(name, tmp_path), engine=engine) as store, trees.scratch() as place:
        for number, commit in enumerate(told["commits"]):
            store.fork(commit["id"], f"web:again{number}")
            store.checkout(commit["id"], place / str(number))
            if commit["entries"][0].get("owner") is None:
                again = store.commit(f"web:again{number}", place / str(number))
                assert again == UpToDate(bytes.fromhex(commit["id"]), again.report)  # type: ignore[union-attr]


@each_format
def test_it_is_sound_and_goes_on(name: str, tmp_path: Path) -> None:
    told = vectors.load(name)
    with Store.open(fixture(name, tmp_path)) as store, trees.scratch() as place:
        assert store.check().damages == ()
        (place / "new").write_bytes(b"new")
        store.commit("web", place)
        store.gc()
        assert store.check().damages == ()
        assert {ref: store.resolve(ref).hex() for ref in told["heads"] if "@" in ref or ":v" in ref}
        assert b"".join(store.read("web", b"new")) == b"new"
        assert b"".join(store.read("web@0", b"README.md")) == b"# A project\n"


def test_the_same_trees_have_the_same_ids_today() -> None:
    """The program that wrote the newest fixture would write the same description now, with the same ids."""
    with trees.scratch() as place:
        shutil.copy(vectors.FOLDER / "make_store.py", place)
        environment = os.environ | {"TMPDIR": str(place)}
        subprocess.run([sys.executable, "make_store.py"], cwd=place, env=environment, check=True, timeout=120)
        written = json.loads((place / f"format-{FORMAT}.json").read_text())
    assert written == vectors.load(f"format-{FORMAT}")


# ---- later formats -------------------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """What a write anywhere below would change."""
    return {
        str(file.relative_to(path)): (
            file.stat().st_ino,
            file.stat().st_mtime_ns,
            file.read_bytes() if file.is_file() else b"",
        )
        for file in [path, *path.rglob("*")]
    }


def refused(path: Path) -> None:
    before = contents(path)
    with pytest.raises(StoreVersionError, match="update it"):
        Store.open(path)
    assert contents(path) == before


def test_a_store_of_a_later_format_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = fixture("future", tmp_path)
    refused(path)
    before = contents(path)
    with pytest.raises(ConflictError):
        Store.create(path)
    assert contents(path) == before


def test_the_fixture_of_a_later_format_would_open_but_for_its_number(tmp_path: Path) -> None:
    """The number is read before anything else: with the first one it gets as far as the index."""
    path = fixture("future", tmp_path)
    (path / "STORE").write_bytes((path / "STORE").read_bytes().replace(b"format 2", b"format 1"))
    with pytest.raises(StoreDamagedError, match="no SQLite database"):
        Store.open(path)


@each_format
def test_an_index_of_a_later_version_is_refused_and_not_touched(name: str, tmp_path: Path) -> None:
    path = fixture(name, tmp_path)
    connection = sqlite3.connect(path / "index.sqlite")
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    refused(path)
