"""A lost, damaged or older index made anew from the packs: what stands comes back, what does not hurts nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import ConflictError, NotFoundError, StoreDamagedError, StoreVersionError
from agent_sandbox.store import rebuild as module
from agent_sandbox.store.check import check
from agent_sandbox.store.gc import collect
from agent_sandbox.store.index import Index
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Kind
from agent_sandbox.store.rebuild import REBUILT, RebuildReport, rebuild
from agent_sandbox.store.records import MIN_HEADER
from agent_sandbox.store.walk import commit, extents, resolve
from tests.unit.store.handmade import Tree, contents, keep

RNG = random.Random(3)
LARGE = RNG.randbytes(300_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ObjectDatabase.create(tmp_path / "store").close()
    return tmp_path / "store"


def state(database: ObjectDatabase, id: bytes) -> dict[bytes, bytes]:
    return dict(contents(database, commit(database, id).root))


def commits(path: Path, *trees: Tree, name: str = "main") -> list[bytes]:
    """Commit one tree after another in a process of its own, so to say: a pack for each."""
    made = []
    for tree in trees:
        with ObjectDatabase.open(path) as database:
            made.append(keep(database, tree, name))
    return made


def lose(path: Path) -> None:
    (path / "index.sqlite").unlink()


def whole(path: Path) -> ObjectDatabase:
    """Open a store that was rebuilt: nothing in it is damaged, and gc finds nothing wrong."""
    database = ObjectDatabase.open(path)
    report = check(database)
    assert report.damages == ()
    collect(database, wait_seconds=1)
    assert check(database).damages == ()
    return database


def layers(database: ObjectDatabase) -> list[bytes]:
    return [layer.commit for layer in database.index.layers(REBUILT)]


EDITED = LARGE[:100_000] + b"edit" + LARGE[100_004:]
HISTORY: list[Tree] = [
    {b"a": b"1", b"d": {b"large": LARGE}},
    {b"a": b"2", b"d": {b"large": EDITED}},
    {b"a": b"3", b"d": {b"large": EDITED, b"more": {b"x": b"4"}}},
]


def test_lost_index_with_pins_from_elsewhere(path: Path) -> None:
    made = commits(path, *HISTORY)
    (other,) = commits(path, {b"side": b"line"}, name="side")
    with ObjectDatabase.open(path) as database:
        states = {id: state(database, id) for id in (*made, other)}
    lose(path)
    (path / "index.sqlite-wal").write_bytes(b"of the index that is lost")
    (path / "index.sqlite-shm").write_bytes(b"too")
    (path / "cache").mkdir()
    (path / "cache" / "stat-0").write_bytes(b"")
    report = rebuild(path, pins={"middle": made[1]})
    assert (report.packs, report.states, report.incomplete, report.pins, report.unnamed) == (4, 4, 0, 1, 2)
    assert (report.damaged, report.names, report.lost) == (0, 0, ())
    assert list((path / "cache").iterdir()) == []
    with whole(path) as database:
        assert {id: state(database, id) for id in states} == states
        pin = database.index.pin("middle")
        assert pin is not None
        assert pin.commit == made[1]
        assert set(layers(database)) == {made[2], other}
        head = database.index.ref(REBUILT, "main")
        assert head is not None
        assert head.head == layers(database)[-1]
        last = max(database.pack_files())
        new = keep(database, {b"after": b"it"})
        assert max(database.pack_files()) > last
        assert state(database, new) == {b"after": b"it"}


def test_what_can_be_read_of_a_damaged_index_names_its_states(path: Path) -> None:
    made = commits(path, *HISTORY)
    with ObjectDatabase.open(path) as database, database.transaction() as change:
        change.add_layer("p", made[0])
        change.add_layer("p", made[1])
        change.set_pin("kept", made[1])
        change.set_pin("gone", made[1])
        change.forget(made[0])
        change.change("UPDATE pins SET commit_id = ? WHERE name = 'gone'", (bytes(32),))
        change.change("DELETE FROM objects")
    with pytest.raises(StoreDamagedError), ObjectDatabase.open(path) as database:
        state(database, made[0])
    report = rebuild(path)
    assert (report.names, report.unnamed, report.lost, report.lost_count) == (4, 0, ("pin gone",), 1)
    with whole(path) as database:
        names = database.index
        assert [layer.commit for layer in names.layers("p")] == made[:2]
        assert [pin.name for pin in names.pins()] == ["kept"]
        assert [ref.head for ref in names.refs("p")] == [made[2]]
        assert names.is_forgotten(made[0])
        assert names.project(REBUILT) is None


@pytest.mark.parametrize("broken", ["no database", "pages of rows", "empty index"])
def test_old_index_of_no_use_is_kept_aside(path: Path, broken: str) -> None:
    made = commits(path, *HISTORY)
    index = path / "index.sqlite"
    if broken == "no database":
        index.write_bytes(b"zeros" * 100)
    elif broken == "pages of rows":
        with index.open("r+b") as file:
            file.seek(4_096)
            file.write(b"\xff" * (index.stat().st_size - 4_096))
    else:
        index.unlink()
        Index.create(index)
    before = index.read_bytes()
    report = rebuild(path)
    assert (report.states, report.names) == (3, 0)
    assert (path / "index.sqlite.old").read_bytes() == before
    assert not (path / "index.sqlite.new").exists()
    with whole(path) as database:
        assert layers(database) == [made[2]]
        assert state(database, made[0])[b"a"] == b"1"


def test_older_index_keeps_its_names_and_what_came_later_is_found(path: Path) -> None:
    first = commits(path, HISTORY[0])
    before = (path / "index.sqlite").read_bytes()
    later = commits(path, *HISTORY[1:])
    (path / "index.sqlite").write_bytes(before)
    with pytest.raises(StoreDamagedError, match="rebuild"):
        ObjectDatabase.open(path)
    assert rebuild(path).names == 1
    with whole(path) as database:
        assert [ref.head for ref in database.index.refs("p")] == first
        assert layers(database) == later[-1:]


def test_numbers_that_were_given_are_not_given_again(path: Path) -> None:
    commits(path, HISTORY[0])
    with ObjectDatabase.open(path) as database, database.index.transaction() as change:
        for _ in range(5):
            number = change.add_pack()
            change.remove_packs([number])
    rebuild(path)
    with ObjectDatabase.open(path) as database:
        assert database.index.last_number() >= number


def corrupt(database: ObjectDatabase, id: bytes) -> None:
    (place,) = database.locate([id])
    assert place is not None
    with (database.packs / f"{place.pack:010d}.pack").open("r+b") as file:
        file.seek(place.offset + MIN_HEADER + place.length // 4)
        file.write(bytes(8))


def test_states_with_something_damaged_do_not_come_back_and_the_others_do(path: Path) -> None:
    """Also those whose pages are patches of pages of the ones that do not."""
    made = commits(path, {b"large": LARGE, b"bad": RNG.randbytes(5_000)}, {b"large": EDITED}, HISTORY[2])
    with ObjectDatabase.open(path) as database:
        states = [state(database, id) for id in made]
        patches = database.index.query("SELECT count(*) FROM patches")
        assert patches > [(0,)]
        bad = resolve(database, commit(database, made[0]).root, b"bad").content
        assert bad is not None
        corrupt(database, bad)
    lose(path)
    pins = {f"pin{number}": id for number, id in enumerate(made)}
    report = rebuild(path, pins=pins)
    assert (report.states, report.incomplete, report.pins, report.lost) == (2, 1, 2, ("pin pin0",))
    assert report.damaged == 1
    with whole(path) as database:
        assert [state(database, id) for id in made[1:]] == states[1:]
        assert not database.index.has_state(made[0])
        assert commit(database, made[0]).parents == ()


def test_patch_of_a_page_that_leads_nowhere_is_written_out(path: Path) -> None:
    first, second = commits(path, {b"large": LARGE + RNG.randbytes(100_000)}, {b"large": EDITED})
    with ObjectDatabase.open(path) as database:
        expected = state(database, second)
        old = {id for (id,) in database.index.query("SELECT base FROM patches")}
        pages = [id for id in old if database.load(id)[0].kind in (Kind.PAGE, Kind.TREE, Kind.COMMIT)]
        assert pages, "the test has no patch of a page"
        only = set(chunks(database, first)) - set(chunks(database, second)) - old
        corrupt(database, only.pop())
    lose(path)
    report = rebuild(path, pins={"second": second})
    assert (report.states, report.pins) == (1, 1)
    with whole(path) as database:
        assert state(database, second) == expected
        assert not any(database.locate(pages))


def chunks(database: ObjectDatabase, id: bytes) -> Iterator[bytes]:
    for extent in extents(database, resolve(database, commit(database, id).root, b"large")):
        assert extent.id is not None
        yield extent.id


def test_state_whose_past_is_lost_is_kept_without_one(path: Path) -> None:
    """gc could not walk from its commit, which is told as lost; a new one has its files, message and time."""
    rewritten: Tree = {b"d": {b"large": LARGE[:9_000]}, b"of": b"now"}
    (first,) = commits(path, {b"a": b"1"})
    made = [first, *commits(path, rewritten, {**rewritten, b"of": b"later"})]
    with ObjectDatabase.open(path) as database:
        states = [state(database, id) for id in made]
        roots = {commit(database, id).root for id in made[1:]}
        (place,) = database.locate([first])
        assert place is not None
        assert place.pack == 1
    (path / "packs" / "0000000001.pack").unlink()
    lose(path)
    report = rebuild(path, pins={"two": made[1], "three": made[2]})
    assert (report.states, report.incomplete, report.without_past, report.unnamed) == (0, 2, 2, 2)
    assert report.lost == ("pin two", "pin three")
    for again in range(2):
        with whole(path) as database:
            kept = [commit(database, id) for id in layers(database)]
            assert {item.root for item in kept} == roots
            assert [item.parents for item in kept] == [(), ()]
            assert sorted(state(database, id)[b"of"] for id in layers(database)) == [b"later", b"now"]
            assert states[1] in [state(database, id) for id in layers(database)]
        report = rebuild(path)
        assert (report.states, report.without_past, report.unnamed) == (2, 0, 0), again


def test_commit_whose_past_and_files_are_lost_is_told(path: Path) -> None:
    made = commits(path, HISTORY[0], HISTORY[1])
    (other,) = commits(path, {b"z": b"other"}, name="other")
    (path / "packs" / "0000000001.pack").unlink()
    lose(path)
    report = rebuild(path, pins={"two": made[1], "other": other})
    assert (report.pins, report.lost, report.states) == (1, ("pin two",), 1)
    with whole(path) as database:
        assert state(database, other) == {b"z": b"other"}


def test_torn_end_and_foreign_pack(path: Path) -> None:
    made = commits(path, HISTORY[0])
    pack = path / "packs" / "0000000001.pack"
    with pack.open("ab") as file:
        file.write(pack.read_bytes()[32:90])
    (path / "packs" / "0000000007.pack").write_bytes(b"ASBPACK1" + bytes(300))
    lose(path)
    report = rebuild(path, pins={"one": made[0]})
    assert (report.damaged, report.unread_packs, report.pins) == (1, 1, 1)
    assert (path / "packs" / "0000000007.pack.unread").exists()
    with whole(path) as database:
        assert database.index.last_number() >= 7
    assert (path / "packs" / "0000000007.pack.unread").exists()


def test_broken_off_before_the_end_it_begins_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = commits(path, *HISTORY)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_swap", fail)
        with pytest.raises(Stop):
            rebuild(path)
    with ObjectDatabase.open(path) as database:
        assert check(database).clean, "the old index is where it was"
    (path / "index.sqlite").rename(path / "index.sqlite.old")
    assert rebuild(path).names == 1
    with whole(path) as database:
        assert [ref.head for ref in database.index.refs("p")] == made[-1:]


class Stop(BaseException):
    """Stands for the end of the process."""


def fail(*_: object) -> None:
    raise Stop


def test_what_was_rebuilt_is_rebuilt_to_the_same(path: Path) -> None:
    made = commits(path, *HISTORY)
    lose(path)
    first = rebuild(path)
    again = rebuild(path)
    assert (again.objects, again.states, again.names, again.unnamed) == (first.objects, 3, 2, 0)
    with whole(path) as database:
        assert layers(database) == made[-1:]


def test_store_that_another_process_has_open_is_left_alone(path: Path) -> None:
    commits(path, HISTORY[0])
    program = (
        "import sys; from pathlib import Path; from agent_sandbox.store import Store\n"
        "with Store.open(Path(sys.argv[1])) as store:\n"
        "    print(len(list(store.projects())), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        with pytest.raises(ConflictError, match="open"):
            rebuild(path)
        process.communicate(b"")
    assert rebuild(path).states == 1


def test_no_store_and_a_newer_one_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError):
        rebuild(tmp_path / "empty")
    (path / "STORE").write_text("agent-sandbox store\nformat 2\nid " + "0" * 32 + "\n")
    with pytest.raises(StoreVersionError):
        rebuild(path)
    assert not (path / "index.sqlite.new").exists()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_damaged_what_comes_back_is_right(path: Path, seed: int) -> None:
    """A byte of a pack changed or the end cut off: each name has its state, or is told as lost; all else is clean."""
    rng = random.Random(seed)
    tree: Tree = {f"f{n}".encode(): rng.randbytes(rng.randrange(1, 3_000)) for n in range(40)}
    tree[b"large"] = LARGE
    made: list[bytes] = []
    for _ in range(5):
        tree = {**tree, f"f{rng.randrange(40)}".encode(): rng.randbytes(50), b"large": RNG.randbytes(40) + LARGE}
        made += commits(path, tree)
    with ObjectDatabase.open(path) as database:
        states = {id: state(database, id) for id in made}
    pack = path / "packs" / f"{rng.randrange(1, 6):010d}.pack"
    data = bytearray(pack.read_bytes())
    if seed % 3:
        data[rng.randrange(32, len(data))] ^= 0x55
    else:
        del data[rng.randrange(32, len(data)) :]
    pack.write_bytes(data)
    lose(path)
    report: RebuildReport = rebuild(path, pins={f"p{number}": id for number, id in enumerate(made)})
    assert report.damaged + report.lost_count > 0
    with whole(path) as database:
        for number, id in enumerate(made):
            if f"pin p{number}" in report.lost:
                assert not database.index.has_state(id)
            else:
                assert state(database, id) == states[id]
