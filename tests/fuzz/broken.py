"""Stores that are broken on purpose, and what must hold of them. ``tests/fuzz/store.py`` runs these rounds."""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from agent_sandbox.errors import SandboxError, StoreError
from agent_sandbox.store import objects, walk
from agent_sandbox.store.check import check
from agent_sandbox.store.encoding import uvarint
from agent_sandbox.store.gc import collect
from agent_sandbox.store.marks import below
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Entry, Kind, Type
from agent_sandbox.store.ports import Objects
from tests.unit.store import handmade, vectors

MOST = 2_000
"""Entries, extents and changes of a state that are looked at: one that is not true may be endless."""
EDGES = bytes((0, 1, 2, 3, 4, 0x0C, 0x0D, 0x1F, 0x20, 0x7F, 0x80, 0xFE, 0xFF))


class Finding(Exception):
    """What must not be."""


def mutated(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """The bytes with a few small things wrong."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(9):
            case 0 | 1 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 2 if out:
                out[at % len(out)] = rng.choice(EDGES)
            case 3:
                del out[at : at + rng.randrange(1, 40)]
            case 4:
                out[at:at] = rng.randbytes(rng.randrange(1, 5))
            case 5:
                out[at:at] = out[at : at + rng.randrange(1, 80)]
            case 6:
                other = rng.choice(others)
                out[at:] = other[rng.randrange(len(other)) :]
            case 7 if out:
                out[at % len(out)] |= 0x80
                out[at % len(out) + 1 : at % len(out) + 1] = b"\x00"
            case 8:
                out[at:at] = uvarint(rng.choice((0, 127, 128, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)))
    return bytes(out)


# ---- a good store --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Template:
    """A store to be copied and broken: where it is, and what each object in it is."""

    path: Path
    objects: dict[bytes, tuple[Kind, bytes]]
    below: dict[bytes, list[bytes]]
    """The objects that each one leads to."""
    commits: list[bytes]

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """Give a copy that is removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="fuzz-store-") as scratch:
            path = Path(scratch) / "store"
            shutil.copytree(self.path, path)
            yield path

    def readable(self, database: ObjectDatabase) -> set[bytes]:
        """The objects that can be read; what is read must be right."""
        found = set()
        for id, (kind, canonical) in self.objects.items():
            try:
                if database.load(id, kind)[1] != canonical:
                    raise Finding(f"object {id.hex()} was read as other bytes")
            except StoreError:
                continue
            found.add(id)
        return found


def make_template(path: Path) -> Template:
    """A store with three states: patches of chunks, pages and directories, links, attributes, a large directory."""
    noise = vectors.stream("fuzz", 400_000)
    linked = handmade.Linked(b"link", b"two names")
    many: handmade.Tree = {b"%04d" % number: b"file %d" % number for number in range(300)}
    tree: handmade.Tree = {
        b"large": noise,
        b"link": linked,
        b"dir": {b"link": linked, b"attrs": handmade.WithAttrs(b"x", {b"user.a": b"1", b"user.b": b"2"}), b"sub": {}},
        b"many": many,
    }
    commits = []
    with ObjectDatabase.create(path) as database:
        for edit in range(3):
            tree[b"large"] = noise[: 100_000 * edit] + b"edit" + noise[100_000 * edit :]
            many[b"edit"] = b"%d" % edit
            commits.append(handmade.keep(database, tree, message=f"edit {edit}"))
            database.drop_pack()
        with sqlite3.connect(path / "index.sqlite") as connection:
            ids = [id for (id,) in connection.execute("SELECT id FROM objects")]
        connection.close()
        found = {id: (header.kind, canonical) for id in ids for header, canonical in [database.load(id)]}
    children = {id: [link.id for link in below(kind, canonical)] for id, (kind, canonical) in found.items()}
    return Template(path, found, children, commits)


def only_typed(call: Callable[[], object]) -> bool:
    """Whether the call ended well; what it raises must be typed."""
    try:
        call()
    except SandboxError:
        return False
    return True


# ---- reading -------------------------------------------------------------------------------------------------------


def list_all(store: Objects, root: Entry) -> None:
    """Read all pages of a state, as far as they are not endless."""
    for _, entry in islice(walk.walk(store, root), MOST):
        if entry.type is Type.FILE:
            for _ in islice(walk.extents(store, entry), MOST):
                pass


def read_all(store: Objects, root: Entry) -> None:
    """Read a state as a whole, as far as it is not endless; what is listed must be found by its name."""
    list_all(store, root)
    seen: set[bytes] = set()
    for number, (path, entry) in enumerate(islice(walk.walk(store, root), MOST)):
        if path in seen or (number % 4 == 0 and walk.resolve(store, root, path) != entry):
            raise Finding(f"listed, but not found by its name: {path!r}")
        seen.add(path)
        if entry.attrs is not None:
            objects.decode_attrs(store.read(entry.attrs, Kind.ATTRS))
        if entry.type is not Type.FILE or entry.size >= 1 << 24:
            continue
        if sum(map(len, walk.data(store, entry))) != entry.size:
            raise Finding(f"a file of another size: {path!r}")


def read_commit(store: Objects, id: bytes) -> None:
    """Read the state of a commit."""
    read_all(store, walk.commit(store, id).root)


# ---- pack, index, store --------------------------------------------------------------------------------------------


def break_file(rng: random.Random, path: Path) -> None:
    """Damage a file as disks, copies and people do."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    match rng.randrange(7):
        case 0 | 1:
            for _ in range(rng.choice((1, 1, 3, 20))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 2:
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        case 3:
            del data[at:]
        case 4:
            data[at : at + 4_096] = rng.randbytes(len(data[at : at + 4_096]))
        case 5:
            start = rng.randrange(len(data))
            data[at : at + 300] = data[start : start + len(data[at : at + 300])]
        case 6:
            del data[at : at + rng.randrange(1, 100)]
    path.write_bytes(data)


def look(template: Template, path: Path) -> None:
    """Open a broken store and do everything with it."""
    try:
        database = ObjectDatabase.open(path, wait_seconds=1)
    except SandboxError:
        return
    with database:
        before = template.readable(database)
        try:
            report = check(database, threads=1)
        except StoreError:
            report = None
        if report is not None and report.clean and reachable(database) - before:
            raise Finding("check found nothing in a store of which something cannot be read")
        only_typed(lambda: names(database))
        for commit in template.commits:
            only_typed(partial(read_commit, database, commit))
        collected(template, database)


def collected(template: Template, database: ObjectDatabase) -> None:
    """Run gc: what a name leads to and could be read before can be read afterwards, whatever gc said."""
    needed = template.readable(database) & reachable(database)
    only_typed(lambda: collect(database, wait_seconds=1))
    if needed - template.readable(database):
        raise Finding("gc took what could be read")


def names(database: ObjectDatabase) -> None:
    """Read every name."""
    for project in database.index.projects():
        list(database.index.refs(project.name))
        list(database.index.layers(project.name))
        database.index.last_layer(project.name)
    list(database.index.pins())


def reachable(database: ObjectDatabase) -> set[bytes]:
    """What the names lead to, as far as it can be read; empty where names cannot."""
    found: set[bytes] = set()
    try:
        todo = [
            (ref.head, Kind.COMMIT)
            for project in database.index.projects()
            for ref in database.index.refs(project.name)
        ]
    except StoreError:
        return found
    while todo:
        id, kind = todo.pop()
        if id in found:
            continue
        found.add(id)
        try:
            canonical = database.load(id, kind)[1]
            todo += [(link.id, link.kind) for link in below(kind, canonical)]
        except StoreError:
            continue
    return found


def pack_round(rng: random.Random, template: Template) -> None:
    with template.copy() as path:
        for _ in range(rng.choice((1, 1, 2))):
            pack = rng.choice(sorted((path / "packs").iterdir()))
            if rng.random() < 0.05:
                pack.unlink(missing_ok=True)
                rng.choice((pack.mkdir, lambda pack=pack: pack.symlink_to("/dev/zero"), lambda: None))()
            elif pack.is_file():
                break_file(rng, pack)
        look(template, path)


ROWS = [
    "UPDATE objects SET offset = offset + :n WHERE id = :a",
    "UPDATE objects SET length = max(0, length + :n) WHERE id = :a",
    "UPDATE objects SET length = :n WHERE id = :a",
    "UPDATE objects SET pack = :n WHERE id = :a",
    "UPDATE objects SET offset = (SELECT offset FROM objects WHERE id = :b) WHERE id = :a",
    "REPLACE INTO objects SELECT :a, pack, offset, length FROM objects WHERE id = :b",
    "UPDATE OR REPLACE objects SET id = :b WHERE id = :a",
    "DELETE FROM objects WHERE id = :a AND :n",
    "INSERT OR REPLACE INTO patches (id, base, depth) VALUES (:a, :b, :n)",
    "UPDATE patches SET base = :a WHERE depth != :n",
    "UPDATE patches SET depth = :n",
    "DELETE FROM patches WHERE id > :a",
    "DELETE FROM packs WHERE number = abs(:n) % 4",
    "UPDATE packs SET dead = 1 WHERE number = abs(:n) % 4",
    "UPDATE packs SET number = :n WHERE number = 2",
    "UPDATE refs SET head = :a",
    "UPDATE refs SET base = :n",
    "UPDATE refs SET kind = :n",
    "INSERT INTO pins (name, commit_id) VALUES ('pin', :a)",
    "INSERT OR IGNORE INTO forgotten (commit_id) VALUES (:a)",
    "INSERT INTO layers (project, number, commit_id) VALUES ('p', :n, :a)",
    "UPDATE sqlite_sequence SET seq = :n",
]
NUMBERS = [0, 1, 2, 3, 5, -1, 32, 48, 1_000, 1 << 20, 1 << 31, 1 << 32, 1 << 53, (1 << 63) - 1, -(1 << 63)]


def index_round(rng: random.Random, template: Template) -> None:
    with template.copy() as path:
        index = path / "index.sqlite"
        if rng.random() < 0.3:
            break_file(rng, index)
        else:
            ids = [*template.objects, rng.randbytes(32), rng.randbytes(rng.choice((0, 1, 31, 33)))]
            connection = sqlite3.connect(index, isolation_level=None)
            for _ in range(rng.choice((1, 1, 2, 5))):
                sql = rng.choice(ROWS)
                values = {"n": rng.choice(NUMBERS), "a": rng.choice(ids), "b": rng.choice(ids)}
                try:
                    connection.execute(sql, values)
                except (sqlite3.IntegrityError, sqlite3.OperationalError):  # a row that the schema refuses
                    continue
            connection.close()
        look(template, path)


def store_round(rng: random.Random, template: Template) -> None:
    with template.copy() as path:
        good = (path / "STORE").read_bytes()
        data = rng.choice((
            mutated(rng, good, [good]),
            good.replace(b"format 1", b"format %d" % rng.choice((0, 2, 10, 999_999_999, 1 << 64))),
            good + rng.randbytes(rng.choice((1, 200, 70_000))),
            good[: rng.randrange(len(good))],
        ))  # fmt: skip
        (path / "STORE").write_bytes(data)
        before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
        if only_typed(lambda: ObjectDatabase.open(path).close()):
            if len(data) != len(good) or data[:33] != good[:33]:
                raise Finding(f"it was taken for a store: {data[:100]!r}")
        elif before != {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}:
            raise Finding("something was written before the store was understood")
