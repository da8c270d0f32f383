"""Trees that change while they are read or made: a conflict or a true state, and never anything from outside.

More than 400 lines: each moment at which something can change needs a tree and a change of its own.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from agent_sandbox.errors import ConflictError, InvalidRequestError
from agent_sandbox.store import walk
from agent_sandbox.store.objects import Entry, Kind, Type, identity
from agent_sandbox.store.ports import Engine, Location
from agent_sandbox.store.reference import ReferenceEngine
from agent_sandbox.store.statcache import HEADER
from tests.unit.store.engines import capture, checkout, each_engine, let_in, memory, opened, state
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.trees import scratch

SECRET = b"what lies outside of the tree"


class Meddler(MemoryObjects):
    """Calls ``meddle`` with 0, 1, … whenever an engine asks what is held or where something is: in the middle."""

    def __init__(self, packs: Path) -> None:
        super().__init__(packs)
        self.meddle: Callable[[int], None] = lambda number: None
        self._number = 0

    def _now(self) -> None:
        number, self._number = self._number, self._number + 1
        self.meddle(number)

    def has(self, ids: Sequence[bytes]) -> list[bool]:
        self._now()
        return super().has(ids)

    def locate(self, ids: Sequence[bytes]) -> list[Location | None]:
        self._now()
        return super().locate(ids)

    def read(self, id: bytes, kind: Kind) -> bytes:
        self._now()
        return super().read(id, kind)


def meddler(place: Path) -> Meddler:
    (place / "packs").mkdir()
    return Meddler(place / "packs")


def contents(store: MemoryObjects, root: Entry) -> dict[bytes, bytes]:
    found = {}
    for path, entry in walk.walk(store, root):
        if entry.type is Type.FILE:
            found[path] = b"".join(walk.data(store, entry))
    return found


def knows_secret(store: MemoryObjects) -> bool:
    """Whether the secret was read, be it into the state or in vain."""
    return store.has([identity(Kind.BLOB, SECRET)])[0]


@contextmanager
def outside(place: Path) -> Iterator[Path]:
    """A directory beside the tree with files of a secret, which must never be read."""
    directory = place / "outside"
    (directory / "below").mkdir(parents=True)
    for name in ("file", "below/file"):
        (directory / name).write_bytes(SECRET)
    yield directory


# ---- at a chosen moment: the reference, whose order is known ---------------------------------------------------------

REFERENCE = ReferenceEngine()


def swap_for_link(path: Path, target: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to(target)


@pytest.mark.parametrize("moment", range(8))
def test_a_directory_that_becomes_a_link_leads_nowhere(moment: int) -> None:
    with scratch() as place, outside(place) as secret:
        for name in ("a", "b", "c"):
            (place / "tree" / name).mkdir(parents=True)
            (place / "tree" / name / "file").write_text(name)
        store = meddler(place)

        def meddle(number: int) -> None:
            if number == moment:
                swap_for_link(place / "tree" / "b", secret)

        store.meddle = meddle
        root = capture(REFERENCE, place / "tree", store).root
        store.meddle = lambda number: None
        assert not knows_secret(store)
        # The listing changed, so it was read again: what is there now is what was captured.
        assert {path for path, entry in walk.walk(store, root) if entry.type is Type.SYMLINK} <= {b"b"}


@pytest.mark.parametrize("what", ["link", "fifo", "directory", "gone", "other file"])
def test_a_file_that_becomes_something_else_is_seen_as_that(what: str) -> None:
    with scratch() as place, outside(place) as secret:
        tree = place / "tree"
        tree.mkdir()
        for name in ("a", "b", "c"):
            (tree / name).write_text(name)
        store = meddler(place)

        def meddle(number: int) -> None:
            if number != 0:
                return
            (tree / "b").unlink()  # "a" is being kept; "b" was looked at, and is not open yet
            match what:
                case "link":
                    (tree / "b").symlink_to(secret / "file")
                case "fifo":
                    os.mkfifo(tree / "b")
                case "directory":
                    (tree / "b").mkdir()
                    (tree / "b" / "inside").write_text("x")
                case "other file":
                    (tree / "b").write_text("other")

        store.meddle = meddle
        root = capture(REFERENCE, tree, store).root
        store.meddle = lambda number: None
        found = {path: entry.type for path, entry in walk.walk(store, root)}
        expected = {
            "link": {b"b": Type.SYMLINK},
            "fifo": {b"b": Type.FIFO},
            "directory": {b"b": Type.DIRECTORY, b"b/inside": Type.FILE},
            "gone": {},
            "other file": {b"b": Type.FILE},
        }[what]
        assert found == {b"a": Type.FILE, b"c": Type.FILE, **expected}
        assert not knows_secret(store)
        if what == "other file":
            assert contents(store, root)[b"b"] == b"other"


def test_a_file_that_changes_twice_is_read_three_times() -> None:
    with scratch() as place:
        tree = place / "tree"
        store = meddler(place)
        tree.mkdir()
        (tree / "log").write_bytes(bytes(10))
        lengths = iter([11, 12])

        def meddle(number: int) -> None:
            length = next(lengths, None)
            if length is not None:
                (tree / "log").write_bytes(bytes(length))

        store.meddle = meddle
        captured = capture(REFERENCE, tree, store)
        assert contents(store, captured.root) == {b"log": bytes(12)}
        assert captured.report.read == 10 + 11 + 12
        assert (captured.report.files, captured.report.bytes) == (1, 12)


def test_a_fifo_that_takes_the_place_of_a_file_is_not_opened() -> None:
    with scratch() as place:
        tree = place / "tree"
        tree.mkdir()
        for name in ("a", "b"):
            (tree / name).write_text(name)
        store = meddler(place)
        with ExitStack() as stack:
            waiting: list[threading.Event] = []

            def meddle(number: int) -> None:
                if number == 0:
                    (tree / "b").unlink()
                    os.mkfifo(tree / "b")
                    waiting.append(stack.enter_context(let_in(tree / "b")))

            store.meddle = meddle
            capture(REFERENCE, tree, store)
            assert not waiting[0].wait(0.1)


def test_a_file_that_keeps_changing_is_a_conflict_that_names_it() -> None:
    with scratch() as place:
        tree = place / "tree"
        (tree / "logs").mkdir(parents=True)
        (tree / "logs" / "log").write_bytes(b"")
        (tree / "logs" / "log").write_bytes(b"x")
        store = meddler(place)

        def meddle(number: int) -> None:
            with (tree / "logs" / "log").open("ab") as file:
                file.write(b"x")

        store.meddle = meddle
        with pytest.raises(ConflictError, match="logs/log kept changing"):
            capture(REFERENCE, tree, store)


def test_a_file_that_becomes_shorter_is_no_end_of_file_error() -> None:
    with scratch() as place:
        tree = place / "tree"
        tree.mkdir()
        (tree / "file").write_bytes(os.urandom(3 << 20))
        store = meddler(place)

        def meddle(number: int) -> None:
            if number == 5:
                os.truncate(tree / "file", 70_000)

        store.meddle = meddle
        root = capture(REFERENCE, tree, store).root
        assert contents(store, root) == {b"file": (tree / "file").read_bytes()}


def test_a_directory_that_keeps_changing_is_a_conflict_that_names_it() -> None:
    with scratch() as place:
        tree = place / "tree"
        (tree / "busy").mkdir(parents=True)
        (tree / "busy" / "file").write_text("x")
        store = meddler(place)

        def meddle(number: int) -> None:
            (tree / "busy" / f"new{number}").write_text("")

        store.meddle = meddle
        with pytest.raises(ConflictError, match="busy kept changing"):
            capture(REFERENCE, tree, store)


def test_a_directory_that_changes_twice_is_listed_three_times() -> None:
    with scratch() as place:
        tree = place / "tree"
        (tree / "busy" / "inside").mkdir(parents=True)
        for name in ("file", "inside/file"):
            (tree / "busy" / name).write_text(name)
        store = meddler(place)
        made = iter(("second", "third"))

        def meddle(number: int) -> None:
            name = next(made, None)
            if name:
                (tree / "busy" / name).mkdir()
                (tree / "busy" / name / "file").write_text(name)

        store.meddle = meddle
        captured = capture(REFERENCE, tree, store, cache=place / "cache")
        # What was remembered may have been read in vain, so no root vouches for it.
        assert HEADER.unpack((place / "cache").read_bytes()[: HEADER.size])[2] == bytes(32)
        assert contents(store, captured.root) == {
            b"busy/file": b"file",
            b"busy/inside/file": b"inside/file",
            b"busy/second/file": b"second",
            b"busy/third/file": b"third",
        }
        assert (captured.report.files, captured.report.directories) == (4, 4)


@pytest.mark.parametrize("change", ["link", "unlink", "write"])
def test_names_of_an_inode_that_do_not_add_up_are_a_conflict(change: str) -> None:
    with scratch() as place:
        tree = place / "tree"
        (tree / "z").mkdir(parents=True)
        (tree / "a").write_text("alone")
        (tree / "b").write_text("linked")
        os.link(tree / "b", tree / "z" / "b")
        store = meddler(place)

        def meddle(number: int) -> None:
            if number != 1:
                return
            # "z/b" was kept, "z" is being kept; the names beside it were not looked at since the scan.
            match change:
                case "link":
                    os.link(tree / "a", tree / "c")
                case "unlink":
                    (tree / "b").unlink()
                case "write":
                    (tree / "b").write_text("changed")

        store.meddle = meddle
        with pytest.raises(ConflictError, match="name"):
            capture(REFERENCE, tree, store)


def test_an_inode_that_changes_before_its_first_name_is_read_is_no_conflict() -> None:
    with scratch() as place:
        tree = place / "tree"
        tree.mkdir()
        (tree / "a").write_text("first")
        (tree / "b").write_text("linked")
        os.link(tree / "b", tree / "c")
        store = meddler(place)

        def meddle(number: int) -> None:
            if number == 0:  # "a" is being kept; "b" and "c" were looked at together, and are not open yet
                (tree / "b").write_text("changed")

        store.meddle = meddle
        root = capture(REFERENCE, tree, store).root
        assert contents(store, root) == {b"a": b"first", b"b": b"changed", b"c": b"changed"}


def test_a_directory_that_is_moved_out_is_not_followed() -> None:
    # Deeper than descriptors are held, the way back is "..": it must not lead on from where the directory is now.
    with scratch() as place, outside(place) as secret:
        tree = place / "tree"
        deep = tree.joinpath(*["d"] * 60)
        deep.mkdir(parents=True)
        (deep / "file").write_text("x")
        store = meddler(place)

        def meddle(number: int) -> None:
            if number == 0:
                tree.joinpath(*["d"] * 20).rename(secret / "moved")

        store.meddle = meddle
        with pytest.raises(ConflictError, match="moved"):
            capture(REFERENCE, tree, store)


def test_a_tree_that_becomes_too_deep_is_refused() -> None:
    with scratch() as place:
        deep, more = place.joinpath("tree", *["d"] * 600), place.joinpath(*["e"] * 600)
        deep.mkdir(parents=True)
        more.mkdir(parents=True)
        store = meddler(place)

        def meddle(number: int) -> None:
            if number == 0:
                (place / "e").rename(deep / "e")

        store.meddle = meddle
        with pytest.raises(InvalidRequestError, match="1000 directories"):
            capture(REFERENCE, place / "tree", store)


# ---- at any moment: every engine -----------------------------------------------------------------------------------


@contextmanager
def disturbed(disturb: Callable[[random.Random], None]) -> Iterator[None]:
    """Run ``disturb`` again and again in another thread."""
    stop = threading.Event()

    def run() -> None:
        source = random.Random(0)
        while not stop.is_set():
            with suppress(OSError):  # what it wanted to change is not there, or in the way
                disturb(source)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@each_engine
def test_links_swapped_in_never_lead_out(engine: Engine) -> None:
    with scratch() as place, outside(place) as secret:
        tree = place / "tree"
        for name in ("a", "b"):
            (tree / name / "below").mkdir(parents=True)
            for file in ("file", "below/file"):
                (tree / name / file).write_text("inside")

        def disturb(source: random.Random) -> None:
            path, target = source.choice(
                [(tree / "a", secret), (tree / "b" / "below", secret / "below"), (tree / "b" / "file", secret / "file")]
            )
            aside = tree.parent / "aside"
            path.rename(aside)
            path.symlink_to(target)
            path.unlink()
            aside.rename(path)

        seen = 0
        with disturbed(disturb):
            for number in range(60):
                store = memory_in(place, number)
                with suppress(ConflictError):
                    capture(engine, tree, store)
                    seen += 1
                assert not knows_secret(store)
        assert seen


@each_engine
def test_a_file_that_is_written_all_the_time_is_whole_or_a_conflict(engine: Engine) -> None:
    # Each version is one byte value throughout, renamed into place: a mixture would be none of them.
    with scratch() as place:
        tree = place / "tree"
        tree.mkdir()
        (tree / "file").write_bytes(b"a" * 200_000)

        def disturb(source: random.Random) -> None:
            new = place / "new"
            new.write_bytes(bytes([source.randrange(256)]) * 200_000)
            new.rename(tree / "file")

        with disturbed(disturb):
            for number in range(30):
                store = memory_in(place, number)
                with suppress(ConflictError):
                    data = contents(store, capture(engine, tree, store).root)[b"file"]
                    assert len(data) == 200_000
                    assert len(set(data)) == 1
        store = memory_in(place, 30)
        assert len(contents(store, capture(engine, tree, store).root)[b"file"]) == 200_000


@each_engine
def test_a_tree_that_grows_and_shrinks_is_a_conflict_or_a_state(engine: Engine) -> None:
    with scratch() as place:
        tree = place / "tree"
        (tree / "a").mkdir(parents=True)

        def disturb(source: random.Random) -> None:
            name = tree / source.choice("ab") / source.choice("xyz")
            match source.randrange(5):
                case 0:
                    name.parent.mkdir(exist_ok=True)
                    name.write_bytes(b"x" * source.randrange(100))
                case 1:
                    name.unlink()
                case 2:
                    os.link(tree / "a" / "x", name)
                case 3:
                    shutil.rmtree(tree / "b", ignore_errors=True)
                case _:
                    name.parent.rename(tree / source.choice("abc"))

        with disturbed(disturb):
            for number in range(60):
                store = memory_in(place, number)
                with suppress(ConflictError):
                    root = capture(engine, tree, store).root
                    checkout(engine, root, place / "copy", store)
                    assert capture(engine, place / "copy", store).root == root
                    shutil.rmtree(place / "copy")


def memory_in(place: Path, number: int) -> MemoryObjects:
    (place / f"store{number}").mkdir()
    return memory(place / f"store{number}")


# ---- while a state is laid out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", range(0, 80, 7))
@each_engine
def test_nothing_is_laid_out_outside(engine: Engine, moment: int) -> None:
    with scratch() as place, outside(place) as secret:
        store = meddler(place)
        root = state(store, [Entry(b"file", Type.FILE, 0o644, 0, size=6, content=store.put(Kind.BLOB, b"inside"))])
        for depth in range(40):
            inside = Entry(b"d", Type.DIRECTORY, 0o755, 0, content=root.content)
            root = state(store, [inside, Entry(b"%d" % depth, Type.SYMLINK, 0o777, 0, target=b"x")])
        copy = place / "copy"
        copy.mkdir()

        def meddle(number: int) -> None:
            if number == moment:
                path = copy.joinpath(*["d"] * (moment % 20 + 1))
                with suppress(FileNotFoundError):
                    path.rename(place / "aside")
                    path.symlink_to(secret)

        store.meddle = meddle
        before = sorted(secret.rglob("*"))
        with opened(copy) as fd, suppress(ConflictError):
            engine.checkout(root, fd, store)
        assert sorted(secret.rglob("*")) == before
        assert (secret / "file").read_bytes() == SECRET
