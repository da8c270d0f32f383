"""gc: what goes, what stays, what it leaves when it is cut short.

More than 400 lines: a list of cases, each of which reads alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import StoreBusyError, StoreDamagedError, StoreFullError
from agent_sandbox.store import gc, objectdb, writer
from agent_sandbox.store.catalog import Ref, RefKind
from agent_sandbox.store.check import check
from agent_sandbox.store.gc import GcReport, collect
from agent_sandbox.store.marks import below
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Kind
from agent_sandbox.store.packs import OsFiles, PackFile
from agent_sandbox.store.walk import commit, entries
from tests.unit.store.handmade import Hand, Tree, contents, keep

RNG = random.Random(1)
LARGE = RNG.randbytes(300_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def database(path: Path) -> Iterator[ObjectDatabase]:
    with ObjectDatabase.create(path, wait_seconds=0.2) as database:
        yield database


def run(database: ObjectDatabase) -> GcReport:
    report = collect(database, wait_seconds=1)
    found = check(database)
    assert found.damages == ()
    assert found.unreachable == 0
    return report


def state(database: ObjectDatabase, id: bytes) -> dict[bytes, bytes]:
    return dict(contents(database, commit(database, id).root))


def remove(database: ObjectDatabase, name: str) -> None:
    with database.transaction() as change:
        assert change.remove_ref("p", name)


def pack_bytes(database: ObjectDatabase) -> int:
    return sum(file.stat().st_size for file in database.packs.iterdir())


def known(database: ObjectDatabase) -> int:
    ((count,),) = database.index.query("SELECT count(*) FROM objects")
    return int(count)


def test_nothing_goes_that_a_name_leads_to(database: ObjectDatabase) -> None:
    first = keep(database, {b"a": b"1", b"d": {b"large": LARGE}})
    second = keep(database, {b"a": b"2", b"d": {b"large": LARGE}})
    before, packs = known(database), pack_bytes(database)
    report = run(database)
    assert (report.removed, report.kept, report.packs_removed, report.packs_written) == (0, before, 0, 0)
    assert pack_bytes(database) == packs
    assert state(database, first) == {b"a": b"1", b"d/large": LARGE}
    assert state(database, second) == {b"a": b"2", b"d/large": LARGE}


@pytest.mark.parametrize("root", ["branch", "tag", "layer", "pin"])
def test_each_kind_of_name_keeps_a_state_and_its_ancestors(database: ObjectDatabase, root: str) -> None:
    first = keep(database, {b"a": b"1"})
    second = keep(database, {b"a": b"2"})
    keep(database, {b"b": b"3"}, "other")
    with database.transaction() as change:
        if root == "branch":
            change.add_ref(Ref("p", "kept", RefKind.BRANCH, second, None))
        elif root == "tag":
            change.add_ref(Ref("p", "kept", RefKind.TAG, second, None))
        elif root == "layer":
            change.add_layer("p", second)
        else:
            change.set_pin("kept", second)
        change.remove_ref("p", "main")
        change.remove_ref("p", "other")
    report = run(database)
    assert report.removed == 3  # commit, tree and blob of the other branch
    assert state(database, first) == {b"a": b"1"}
    assert state(database, second) == {b"a": b"2"}


def test_base_of_a_commit_is_an_ancestor_of_it(database: ObjectDatabase) -> None:
    layer = keep(database, {b"a": b"1"})
    with database.writer() as held:
        on_it = Hand(database, held).commit({b"b": b"2"}, base=layer)
        held.seal()
        with database.transaction(held) as change:
            change.add_ref(Ref("p", "work", RefKind.BRANCH, on_it, None))
            change.remove_ref("p", "main")
    run(database)
    assert state(database, layer) == {b"a": b"1"}


def test_branch_that_was_removed_goes_with_its_packs(database: ObjectDatabase) -> None:
    keep(database, {b"large": LARGE}, "gone")
    report_before = pack_bytes(database)
    remove(database, "gone")
    report = run(database)
    assert known(database) == 0
    assert list(database.packs.iterdir()) == []
    assert database.index.packs() == []
    assert report.packs_removed == 1
    assert report.freed > report_before - 10_000
    assert report.freed == report.before - report.after


def test_forgotten_commit_stays_without_its_state(database: ObjectDatabase) -> None:
    first = keep(database, {b"old": LARGE})
    second = keep(database, {b"new": b"2"})
    with database.transaction() as change:
        change.forget(first)
    report = run(database)
    assert commit(database, second).parents == (first,)
    assert commit(database, first).parents == ()
    with pytest.raises(StoreDamagedError, match="missing"):
        state(database, first)
    assert state(database, second) == {b"new": b"2"}
    assert report.freed > 250_000
    assert run(database).removed == 0


def test_forgotten_commit_at_which_a_name_is_keeps_its_state(database: ObjectDatabase) -> None:
    first = keep(database, {b"old": b"1"})
    keep(database, {b"new": b"2"})
    with database.transaction() as change:
        change.add_ref(Ref("p", "v1", RefKind.TAG, first, None))
        change.forget(first)
    assert run(database).removed == 0
    assert state(database, first) == {b"old": b"1"}


def test_what_two_states_share_stays_with_the_one_that_is_left(database: ObjectDatabase) -> None:
    keep(database, {b"same": LARGE, b"a": b"1"}, "gone")
    kept = keep(database, {b"same": LARGE, b"b": b"2"})
    remove(database, "gone")
    run(database)
    assert state(database, kept) == {b"same": LARGE, b"b": b"2"}


# ---- patches -------------------------------------------------------------------------------------------------------


def edited(data: bytes, at: int) -> bytes:
    return data[:at] + b"EDIT" + data[at + 4 :]


def many(value: bytes) -> Tree:
    names: Tree = {b"file %03d" % number: b"%d" % number for number in range(30)}
    names[b"file 015"] = value
    return names


def test_base_of_a_living_patch_stays_and_goes_with_it(database: ObjectDatabase) -> None:
    text = RNG.randbytes(50_000)
    keep(database, {b"a": text})
    keep(database, {b"a": edited(text, 100)})
    third = keep(database, {b"a": edited(edited(text, 100), 900)})
    ((patches,),) = database.index.query("SELECT count(*) FROM patches")
    assert patches > 0
    with database.transaction() as change:
        for id in commit(database, third).parents:
            change.forget(id)
            change.forget(commit(database, id).parents[0])
    collect(database, wait_seconds=1)
    assert check(database).clean
    assert state(database, third) == {b"a": edited(edited(text, 100), 900)}


def test_every_known_tree_and_page_has_all_below_it(database: ObjectDatabase) -> None:
    """A living patch of a dead tree or page is written out in full: nobody looks below an object that is known."""
    keep(database, {**many(b"one"), b"large": LARGE})
    last = keep(database, {**many(b"two"), b"large": edited(LARGE, 1000)})
    kinds = {database.load(id)[0].kind for (id,) in database.index.query("SELECT id FROM patches")}
    assert kinds >= {Kind.TREE, Kind.PAGE, Kind.BLOB}
    with database.transaction() as change:
        change.forget(commit(database, last).parents[0])
    report = collect(database, wait_seconds=1)
    assert report.removed > 0
    kinds = {database.load(id)[0].kind for (id,) in database.index.query("SELECT id FROM patches")}
    assert kinds == {Kind.BLOB}
    assert check(database).clean
    assert state(database, last)[b"large"] == edited(LARGE, 1000)
    for id in [id for (id,) in database.index.query("SELECT id FROM objects")]:
        header, canonical = database.load(id)
        if header.kind in (Kind.TREE, Kind.PAGE):
            assert None not in database.locate([link.id for link in below(header.kind, canonical)])
    again = keep(database, {**many(b"one"), b"large": LARGE}, "again", message="again")
    assert check(database).clean
    assert state(database, again)[b"large"] == LARGE


def test_chain_of_patches_stays_readable_after_its_middle_was_written_out(database: ObjectDatabase) -> None:
    ids = [keep(database, many(b"version %d" % number)) for number in range(5)]
    with database.transaction() as change:
        for id in (ids[0], ids[1], ids[3]):
            change.forget(id)
    run(database)
    assert state(database, ids[2])[b"file 015"] == b"version 2"
    assert state(database, ids[4])[b"file 015"] == b"version 4"


# ---- packs ---------------------------------------------------------------------------------------------------------


def test_pack_that_is_mostly_dead_is_written_anew(database: ObjectDatabase) -> None:
    keep(database, {b"large": LARGE}, "gone")
    kept = keep(database, {b"small": b"s" * 1000})
    remove(database, "gone")
    report = run(database)
    assert pack_bytes(database) < 2_000
    assert (report.packs_removed, report.packs_written) == (1, 1)
    assert state(database, kept) == {b"small": b"s" * 1000}


def test_pack_that_is_mostly_alive_is_left_and_its_dead_are_forgotten(database: ObjectDatabase) -> None:
    kept = keep(database, {b"large": LARGE})
    keep(database, {b"small": b"s"}, "gone")
    before = pack_bytes(database)
    remove(database, "gone")
    report = run(database)
    assert report.removed == 3
    assert pack_bytes(database) == before
    assert state(database, kept) == {b"large": LARGE}


def test_small_packs_are_put_together_when_they_are_many(database: ObjectDatabase, path: Path) -> None:
    ids = []
    for number in range(gc.MANY_PACKS - 1):
        with ObjectDatabase.open(path) as other:
            ids.append(keep(other, {b"f": b"%d" % number}))
    run(database)
    assert len(list(database.packs.iterdir())) == gc.MANY_PACKS - 1
    ids.append(keep(database, {b"f": b"last"}))
    report = run(database)
    assert len(list(database.packs.iterdir())) == 1
    assert (report.packs_removed, report.packs_written) == (gc.MANY_PACKS, 1)
    assert state(database, ids[3]) == {b"f": b"3"}
    assert state(database, ids[-1]) == {b"f": b"last"}


def test_copies_go_on_in_a_new_pack_when_one_is_large(
    database: ObjectDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (writer, objectdb, gc):
        monkeypatch.setattr(module, "MAX_PACK", 30_000)
    blobs = [RNG.randbytes(9_000) for _ in range(20)]
    dead = [RNG.randbytes(9_000) for _ in range(60)]
    for module in (writer, objectdb):
        monkeypatch.setattr(module, "MAX_PACK", 10_000_000)
    keep(database, {b"%d" % number: data for number, data in enumerate(dead)}, "gone")
    kept = keep(database, {b"%d" % number: data for number, data in enumerate(blobs)})
    monkeypatch.setattr(objectdb, "MAX_PACK", 30_000)
    remove(database, "gone")
    report = run(database)
    assert report.packs_written >= 5
    assert sorted(state(database, kept).values()) == sorted(blobs)


def test_open_pack_of_this_process_is_not_copied_into_itself(database: ObjectDatabase) -> None:
    keep(database, {b"large": LARGE}, "gone")
    kept = keep(database, {b"small": b"s"})
    remove(database, "gone")
    run(database)
    later = keep(database, {b"small": b"t"})
    run(database)
    assert state(database, kept) == {b"small": b"s"}
    assert state(database, later) == {b"small": b"t"}


def test_open_pack_of_another_process_may_go(database: ObjectDatabase, path: Path) -> None:
    with ObjectDatabase.open(path) as other:
        keep(other, {b"large": LARGE}, "gone")
        remove(database, "gone")
        assert run(database).packs_removed == 1
        kept = keep(other, {b"small": b"s"})
        assert state(database, kept) == {b"small": b"s"}
        run(database)
        later = keep(other, {b"small": b"t"})
    assert state(database, kept) == {b"small": b"s"}
    assert state(database, later) == {b"small": b"t"}


def test_running_commit_of_another_process_keeps_gc_waiting(database: ObjectDatabase, path: Path) -> None:
    with ObjectDatabase.open(path) as other, other.writer() as held:
        kept = Hand(other, held).commit({b"a": b"1"})
        held.flush()
        with pytest.raises(StoreBusyError):
            collect(database, wait_seconds=0.1)
        held.seal()
        with other.transaction(held) as change:
            change.set_pin("kept", kept)
    run(database)
    assert state(database, kept) == {b"a": b"1"}


# ---- what crashes leave --------------------------------------------------------------------------------------------


def test_leftovers_of_every_line_of_the_table_are_mended(database: ObjectDatabase, path: Path) -> None:
    kept = keep(database, {b"a": b"1"})
    with database.index.transaction() as change:
        row_without_file = change.add_pack()
        tail = change.add_pack()
        dead = change.add_pack()
        gone = change.add_pack()
        change.change("UPDATE packs SET closed = 1, dead = 1 WHERE number = ?", (dead,))
        change.remove_packs([gone])
    (database.packs / f"{tail:010d}.pack").write_bytes(b"ASBPACK1 and a torn record")
    (database.packs / f"{dead:010d}.pack").write_bytes(b"rows were moved")
    (database.packs / f"{gone:010d}.pack").write_bytes(b"unlinked, but the disk forgot it")
    (database.packs / "notes.txt").write_bytes(b"not ours")
    report = run(database)
    assert row_without_file not in [row.number for row in database.index.packs()]
    assert sorted(file.name for file in database.packs.iterdir()) == ["0000000001.pack", "notes.txt"]
    assert report.packs_removed == 3
    assert state(database, kept) == {b"a": b"1"}


def test_gc_leaves_a_store_alone_whose_index_is_older_than_its_packs(database: ObjectDatabase) -> None:
    keep(database, {b"gone": b"0"}, "gone")
    remove(database, "gone")
    keep(database, {b"a": b"1"})
    (database.packs / "0000009999.pack").write_bytes(b"perhaps somebody's states")
    left, packs = known(database), pack_bytes(database)
    with pytest.raises(StoreDamagedError, match=r"0000009999\.pack"):
        collect(database, wait_seconds=1)
    assert (known(database), pack_bytes(database)) == (left, packs)


def test_dead_packs_go_also_when_a_writer_closes(database: ObjectDatabase, path: Path) -> None:
    keep(database, {b"a": b"1"})
    with database.index.transaction() as change:
        dead = change.add_pack()
        change.change("UPDATE packs SET closed = 1, dead = 1 WHERE number = ?", (dead,))
    (database.packs / f"{dead:010d}.pack").write_bytes(b"rows were moved")
    with ObjectDatabase.open(path) as other:
        keep(other, {b"a": b"2"})
    assert not (database.packs / f"{dead:010d}.pack").exists()


@pytest.mark.parametrize(
    "damage", ["UPDATE packs SET closed = 1, dead = 1 WHERE number = 1", "DELETE FROM packs WHERE number = 1"]
)
def test_pack_that_holds_objects_is_not_removed_whatever_its_row_says(
    database: ObjectDatabase, path: Path, damage: str
) -> None:
    kept = keep(database, {b"a": b"1"})
    with database.index.transaction() as change:
        change.change(damage)
    with pytest.raises(StoreDamagedError, match="run check"):
        collect(database, wait_seconds=1)
    with ObjectDatabase.open(path) as other:
        keep(other, {b"a": b"2"}, "other")
    assert state(database, kept) == {b"a": b"1"}
    assert not check(database).clean


@pytest.mark.parametrize("kind", [Kind.COMMIT, Kind.TREE, Kind.PAGE])
def test_damaged_store_is_left_as_it_is(database: ObjectDatabase, kind: Kind) -> None:
    keep(database, {b"gone": b"0"}, "gone")
    remove(database, "gone")
    head = keep(database, {b"large": LARGE})
    root = commit(database, head).root
    (large,) = entries(database, root)
    victim = {Kind.COMMIT: head, Kind.TREE: root.content, Kind.PAGE: large.content}[kind]
    with database.index.transaction() as change:
        change.change("DELETE FROM objects WHERE id = ?", (victim,))
    left, packs = known(database), pack_bytes(database)
    with pytest.raises(StoreDamagedError, match="run check"):
        collect(database, wait_seconds=1)
    assert (known(database), pack_bytes(database)) == (left, packs)


class Stop(BaseException):
    """Stands for the end of the process."""


class Counting(OsFiles):
    """Ends the process at the ``stop``-th step of writing, syncing or removing."""

    def __init__(self, directory: int, stop: int) -> None:
        super().__init__(directory)
        self.steps = 0
        self.stop = stop

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.stop:
            raise Stop

    def create(self, name: str) -> PackFile:
        self.step()
        return _CountingFile(super().create(name), self.step)

    def remove(self, name: str) -> None:
        self.step()
        super().remove(name)

    def sync(self) -> None:
        self.step()
        super().sync()


class _CountingFile:
    def __init__(self, file: PackFile, step: Callable[[], None]) -> None:
        self._file = file
        self._step = step

    def write(self, data: bytes | memoryview, offset: int) -> int:
        self._step()
        return self._file.write(data, offset)

    def sync(self) -> None:
        self._step()
        self._file.sync()

    def truncate(self, size: int) -> None:
        self._step()
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


def build(path: Path) -> tuple[dict[str, bytes], dict[bytes, dict[bytes, bytes]]]:
    """A store with dead packs, packs to copy and patches to write out; returns heads and their states."""
    expected = {}
    heads = {}
    with ObjectDatabase.create(path) as database:
        keep(database, {b"large": LARGE}, "gone")
        first = keep(database, many(b"one"))
        heads["main"] = keep(database, many(b"two"))
        with database.transaction() as change:
            change.forget(first)
        remove(database, "gone")
    with ObjectDatabase.open(path) as database:
        keep(database, {b"dead": RNG.randbytes(5_000)}, "gone")
        remove(database, "gone")
        heads["other"] = keep(database, {b"a": b"1"}, "other")
        for head in heads.values():
            expected[head] = state(database, head)
    return heads, expected


def test_gc_may_end_at_every_step(tmp_path: Path) -> None:
    stop = 0
    while True:
        stop += 1
        path = tmp_path / str(stop)
        heads, expected = build(path)
        directory = os.open(path / "packs", os.O_RDONLY)
        files = Counting(directory, stop)
        database = ObjectDatabase.open(path, files=files)
        try:
            collect(database, wait_seconds=1)
        except Stop:
            ended = True
        else:
            ended = False
        # What the process would have done on its way out does not count: the next one opens what is there.
        with ObjectDatabase.open(path) as after:
            found = check(after)
            assert found.damages == (), stop
            for head, content in expected.items():
                assert state(after, head) == content
            assert {ref.name: ref.head for ref in after.index.refs("p")} == heads
            run(after)
            assert pack_bytes(after) < 20_000
            for head, content in expected.items():
                assert state(after, head) == content
        files.stop = 0
        database.close()
        os.close(directory)
        if not ended:
            assert stop > 8
            return


def test_full_disk_gets_room_before_anything_is_copied(database: ObjectDatabase, path: Path) -> None:
    with ObjectDatabase.open(path) as other:
        keep(other, {b"large": LARGE}, "gone")
    with ObjectDatabase.open(path) as other:
        keep(other, {b"large": RNG.randbytes(300_000)}, "gone two")
        kept = keep(other, {b"small": b"s"})
    remove(database, "gone")
    remove(database, "gone two")

    class Full(OsFiles):
        def create(self, name: str) -> PackFile:
            raise OSError(28, os.strerror(28))

    directory = os.open(path / "packs", os.O_RDONLY)
    with ObjectDatabase.open(path, files=Full(directory)) as full, pytest.raises(StoreFullError):
        collect(full, wait_seconds=1)
    os.close(directory)
    assert [file.name for file in database.packs.iterdir()] == ["0000000002.pack"]
    assert state(database, kept) == {b"small": b"s"}
    run(database)
    assert pack_bytes(database) < 1_000
