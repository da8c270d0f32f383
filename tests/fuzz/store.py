"""Feed every reader of the store with broken bytes: ``python -m tests.fuzz.store --seconds 30 --seed 1``.

Each round has its own random numbers, from the seed and its number, so ``--only N`` repeats one that failed. A round is

* **object**: golden objects, mutated, into every decoder. Each is refused, or says what is encoded as the same bytes;
* **record**: golden records, mutated, some with their checksum made right. Each is refused or gives its object;
* **state**: a good state of which one object was mutated and all above it made to fit, so that every id is right and
  the state is one that no writer made. Whoever reads it ends in time and says so, or reads it; the engines lay out the
  same; and where ``check`` finds nothing, everything can be read;
* **pack**, **index**, **store**: a good store with its packs, rows of its index, bytes of its index, or its ``STORE``
  mutated. What is read is right or refused, ``check`` tells what cannot be read, gc takes nothing that could be read;
* **archive**: archives, mutated, as states and as layers. Each is refused, or gives a state as any other.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import objects, records, walk
from agent_sandbox.store.check import check
from agent_sandbox.store.diff import diff
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Child, Entry, Kind, Type
from agent_sandbox.store.ports import Location, Objects, Row
from agent_sandbox.store.shape import Shapes
from tests.fuzz.archives import archive_round
from tests.fuzz.broken import (
    MOST,
    Finding,
    Template,
    collected,
    index_round,
    list_all,
    make_template,
    mutated,
    only_typed,
    pack_round,
    read_all,
    store_round,
)
from tests.unit.store import trees, vectors
from tests.unit.store.engines import ENGINES
from tests.unit.store.memory import MemoryObjects

ROUND_SECONDS = 60
"""A round that takes longer never ends."""
MOST_FILE_BYTES = 1 << 28
"""No file that a round writes may be longer."""
GOOD = [
    (vector["kind"], vectors.unhex(vector["hex"]))
    for vector in vectors.load("objects")["objects"]
    if vector["kind"] != "blob" and len(vector["hex"]) < 3_000
]
GOOD = [(kind, canonical) for kind, canonical in GOOD if len(canonical) < 3_000]
GOOD_BYTES = [canonical for _, canonical in GOOD]
RECORDS = [
    (vectors.unhex(vector["record"]), vectors.unhex(vector["base"]["canonical"]) if vector["base"] else None)
    for vector in vectors.load("records")["records"]
]


# ---- object --------------------------------------------------------------------------------------------------------

_ENCODE: dict[str, list[Callable[[Any], bytes]]] = {
    "page": [objects.encode_extent, objects.encode_page_child],
    "tree": [objects.encode_entry, objects.encode_tree_child],
}


def again(kind: str, canonical: bytes) -> bytes:
    """What the value of the bytes is encoded as."""
    match kind:
        case "attrs":
            return objects.encode_attrs(objects.decode_attrs(canonical))
        case "commit":
            return objects.encode_commit(objects.decode_commit(canonical))
    level, items = objects.decode_page(canonical) if kind == "page" else objects.decode_tree(canonical)
    return bytes((level,)) + b"".join(map(_ENCODE[kind][min(level, 1)], items))


def object_round(rng: random.Random, template: Template) -> None:
    for _ in range(20):
        one_object(rng)


def one_object(rng: random.Random) -> None:
    kind, canonical = rng.choice(GOOD)
    if rng.random() < 0.1:
        kind = rng.choice(("page", "tree", "attrs", "commit"))
    data = mutated(rng, canonical, [other for _, other in GOOD])
    try:
        if again(kind, data) != data:
            raise Finding(f"two forms of one {kind}: {data.hex()}")
    except StoreDamagedError:
        pass


# ---- record --------------------------------------------------------------------------------------------------------


def record_round(rng: random.Random, template: Template) -> None:
    for _ in range(20):
        one_record(rng)


def one_record(rng: random.Random) -> None:
    record, base = rng.choice(RECORDS)
    data = mutated(rng, record[:5_000], [other[:5_000] for other, _ in RECORDS])
    if rng.random() < 0.5:
        size = 76 if len(data) > 2 and data[2] == records.Form.PATCH else 44
        data = data[:size] + zlib.crc32(data[:size]).to_bytes(4, "little") + data[size + 4 :]
    base = rng.choice((base, base, None, b"", b"x", rng.randbytes(100)))
    try:
        header = records.decode_header(data[: records.MAX_HEADER])
        canonical = records.decode_payload(header, data[header.size :], base)
    except StoreDamagedError:
        return
    if objects.identity(header.kind, canonical) != header.id or len(canonical) > objects.MAX_CANONICAL[header.kind]:
        raise Finding("a record gave what is not its object")


# ---- state ---------------------------------------------------------------------------------------------------------


class Loose:
    """Objects in memory, whatever they are."""

    def __init__(self, found: dict[bytes, tuple[Kind, bytes]]) -> None:
        self.found = dict(found)

    @property
    def packs(self) -> Path:
        raise NotImplementedError

    def locate(self, ids: Sequence[bytes]) -> list[Location | None]:
        return [None for _ in ids]

    def read(self, id: bytes, kind: Kind) -> bytes:
        found, canonical = self.found.get(id, (None, b""))
        if found is not kind:
            raise StoreDamagedError("missing, or of another kind")
        return canonical


def lying(rng: random.Random, kind: Kind, canonical: bytes) -> bytes:
    """The page with another weight, last name or page in one of its entries, where it is above others."""
    level, items = objects.decode_page(canonical) if kind is Kind.PAGE else objects.decode_tree(canonical)
    children = [item for item in items if isinstance(item, Child)]
    if not children:
        return canonical
    at = rng.randrange(len(children))
    child = children[at]
    match rng.randrange(5):
        case 0:
            new = replace(child, weight=max(1, child.weight + rng.choice((-1, 1, 256))))
        case 1:
            new = replace(child, id=rng.choice(children).id)
        case 2:
            new = replace(child, last=child.last[:-1] + rng.choice((b"0", b"9", b"", b"zz")))
        case 3:
            new = replace(child, last=rng.choice(children).last)
        case _:
            new = replace(rng.choice(children), last=child.last)
    children[at] = new
    return bytes((level,)) + b"".join(map(_ENCODE[kind.name.lower()][1], children))


def hostile(rng: random.Random, template: Template) -> tuple[bytes, Loose]:
    """A commit in which one or two objects were mutated, and those that lead there made to fit."""
    new = Loose(template.objects)
    by_kind = {
        kind: [id for id, (found, _) in template.objects.items() if found is kind]
        for kind in (Kind.TREE, Kind.PAGE, Kind.ATTRS, Kind.COMMIT)
    }
    above = [id for kind in (Kind.TREE, Kind.PAGE) for id in by_kind[kind] if template.objects[id][1][0] > 0]
    chosen = [*by_kind.values(), above, above]
    targets = {rng.choice(rng.choice(chosen)) for _ in range(rng.choice((1, 1, 2)))}
    done: dict[bytes, bytes] = {}

    def exchanged(rng: random.Random, canonical: bytes) -> bytes:
        """The object with another object, of any kind, in place of one that it leads to."""
        children = [id for id in template.objects if id in canonical]
        return canonical.replace(rng.choice(children), rng.choice(list(template.objects))) if children else canonical

    def remake(id: bytes) -> bytes:
        if id in done:
            return done[id]
        kind, canonical = template.objects[id]
        for child in template.below[id]:
            canonical = canonical.replace(child, remake(child))
        if id in targets:
            how = rng.random()
            if how < 0.2:
                canonical = exchanged(rng, canonical)
            elif how < 0.5 and kind in (Kind.TREE, Kind.PAGE):
                canonical = lying(rng, kind, canonical)
            else:
                canonical = mutated(rng, canonical, GOOD_BYTES)
        done[id] = objects.identity(kind, canonical)
        new.found[done[id]] = kind, canonical
        return done[id]

    return remake(template.commits[-1]), new


def state_round(rng: random.Random, template: Template) -> None:
    id, store = hostile(rng, template)
    try:
        commit = walk.commit(store, id)
    except StoreDamagedError:
        return
    root, old = commit.root, walk.commit(store, template.commits[0]).root
    whole = only_typed(lambda: read_all(store, root))
    only_typed(lambda: list(islice(diff(store, old, root), MOST)))
    only_typed(lambda: list(islice(diff(store, root, old), MOST)))
    if only_typed(lambda: list(Shapes(store).faults(root))) > only_typed(lambda: list_all(store, root)):
        raise Finding("all pages fit each other, and yet it cannot be read")
    for path in (b"dir/link", b"many/0100", b"many/0299", b"large", b"nowhere"):
        only_typed(partial(walk.resolve, store, root, path))
    if rng.random() < 0.2:
        checked_round(template, id, store, whole)


def checked_round(template: Template, id: bytes, store: Loose, whole: bool) -> None:
    """Put the state into a real store, and ask check."""
    with template.copy() as path, ObjectDatabase.open(path) as database:
        with database.writer() as writer:
            for new in store.found.keys() - template.objects.keys():
                kind, canonical = store.found[new]
                try:
                    record, _ = records.encode(kind, new, canonical)
                except ValueError:
                    return
                writer.append(record, [Row(new, 0, len(record))])
            writer.seal()
            with database.transaction(writer) as change:
                change.move_ref("p", "main", id, expected=template.commits[-1])
        clean = check(database, threads=1).clean
        if clean and not whole:
            raise Finding("check found nothing in a state that cannot be read")
        laid_out(database, walk.commit(database, id).root, whole, clean)
        collected(template, database)


def laid_out(database: ObjectDatabase, root: Entry, whole: bool, clean: bool) -> None:
    """Lay the state out by each engine: all do, and do the same, or none does. Where check found nothing, capturing
    what was laid out gives the same state."""
    found = []
    with tempfile.TemporaryDirectory(prefix="fuzz-store-") as scratch:
        for engine in ENGINES:
            target = Path(scratch) / type(engine).__name__
            target.mkdir()
            directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
            try:
                done = only_typed(partial(engine.checkout, root, directory, database))
                if done and clean:
                    store = MemoryObjects()
                    again = engine.capture(directory, store, store).root
                    if plain(store, again) != plain(database, root):
                        raise Finding("another form of a state, in which check found nothing")
            finally:
                os.close(directory)
            if done and not whole:
                raise Finding(f"{target.name} laid out what cannot be read")
            found.append(trees.state_of(target) if done else None)
    if any(state != found[0] for state in found):
        raise Finding("the engines do not do the same")


def plain(store: Objects, root: Entry) -> dict[bytes, Entry]:
    """A state without owners, which are not captured here, and without what depends on where data was cut."""
    found = {}
    for path, entry in [(b"", root), *walk.walk(store, root)]:
        cut = entry.paged or entry.type is Type.DIRECTORY
        found[path] = replace(entry, owner=None, content=None if cut else entry.content)
    return found


# ---- rounds --------------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[int, Callable[[random.Random, Template], None]]] = {
    "object": (20, object_round),
    "record": (10, record_round),
    "state": (60, state_round),
    "pack": (4, pack_round),
    "index": (6, index_round),
    "store": (2, store_round),
    "archive": (60, archive_round),
}


def one(seed: str, number: int, template: Template) -> str:
    """Run one round and return its kind."""
    rng = random.Random(f"{seed}/{number}")
    (kind,) = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])
    signal.alarm(ROUND_SECONDS)
    try:
        KINDS[kind][1](rng, template)
    finally:
        signal.alarm(0)
    return kind


def never_ends(*_: object) -> None:
    raise Finding(f"a round takes more than {ROUND_SECONDS} s")


def main() -> int:
    """Run rounds until the time is over, or one alone; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", default=str(time.time_ns()))
    parser.add_argument("--only", type=int, help="run this round alone")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, never_ends)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz-store-") as scratch:
        template = make_template(Path(scratch) / "store")
        end, number = time.monotonic() + options.seconds, options.only or 0
        while True:
            try:
                kind = one(options.seed, number, template)
            except Exception as error:  # whatever it is, it is the finding
                error.add_note(f"again with: python -m tests.fuzz.store --seed {options.seed} --only {number}")
                raise
            counts[kind] = counts.get(kind, 0) + 1
            number += 1
            if options.only is not None or time.monotonic() > end:
                break
    print(f"seed {options.seed}: {number} rounds, {counts}, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
