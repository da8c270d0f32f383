"""The checkout cache: what is built, what is shared, what stays, what goes."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.errors import StoreBusyError, StoreError
from agent_sandbox.store import Store
from agent_sandbox.store.checkouts import MAX_DEPTH, Checkouts
from agent_sandbox.store.native import NativeEngine
from agent_sandbox.store.objects import Entry
from agent_sandbox.store.trees import remove_tree

pytestmark = pytest.mark.real  # files get an owner

OWNER = (1000, 1000)


class Counting(NativeEngine):
    """The engine, and how often it laid something out."""

    def __init__(self) -> None:
        self.whole = 0
        self.differences = 0
        self.fail = False

    def checkout(self, *args: Any, **options: Any) -> None:
        self.whole += 1
        if self.fail:
            raise StoreError("as asked")
        super().checkout(*args, **options)

    def difference(self, old: Entry, new: Entry, *args: Any, **options: Any) -> None:
        self.differences += 1
        super().difference(old, new, *args, **options)


class Place:
    """A store with one branch, and a cache beside it."""

    def __init__(self, directory: Path) -> None:
        self.engine = Counting()
        self.store = Store.create(directory / "store", engine=self.engine)
        self.store.init("p")
        self.tree = directory / "tree"
        self.tree.mkdir()
        self.directory = directory / "checkouts"
        self.in_use: set[str] = set()
        self.cache = self.open()

    def open(self, max_bytes: int = 1 << 40) -> Checkouts:
        cache = self.store.checkouts(self.directory, max_bytes=max_bytes, in_use=lambda: self.in_use)
        cache.start()
        return cache

    def commit(self, **files: str) -> bytes:
        for name, text in files.items():
            (self.tree / name).write_text(text)
        self.store.commit("p", self.tree)
        return self.store.resolve("p")

    def layers(self, commit: bytes, owner: tuple[int, int] = OWNER) -> tuple[Path, ...]:
        with self.cache.lease(commit, owner) as layers:
            return layers

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.store.close()


def seen(layers: tuple[Path, ...], at: Path) -> dict[str, str]:
    """What an overlay of the layers shows."""
    at.mkdir()
    lower = ":".join(map(str, (*layers, *([at] if len(layers) == 1 else []))))  # a lone lower needs another one
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", f"lowerdir={lower}", at], check=True)
    try:
        return {path.name: path.read_text() for path in at.iterdir()}
    finally:
        subprocess.run(["umount", at], check=True)


def test_a_state_is_built_once_and_shared(place: Place) -> None:
    commit = place.commit(a="one")
    (layer,) = place.layers(commit)
    assert (layer / "a").read_text() == "one"
    assert ((layer / "a").stat().st_uid, layer.stat().st_gid) == OWNER
    for _ in range(50):
        assert place.layers(commit) == (layer,)
    assert (place.engine.whole, place.engine.differences) == (1, 0)
    (other,) = place.layers(commit, (7, 8))
    assert other != layer
    assert ((other / "a").stat().st_uid, (other / "a").stat().st_gid) == (7, 8)


def test_each_layer_begins_in_another_part_of_the_disk(place: Place) -> None:
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", place.directory], check=True, capture_output=True, text=True
    ).stdout
    if kind.strip() != "ext2/ext3":
        pytest.skip(f"the flag is ext4's; this is {kind.strip()}")
    shown = subprocess.run(["lsattr", "-d", place.directory], check=True, capture_output=True, text=True).stdout
    assert "T" in shown.split()[0]


def test_what_changed_is_one_more_layer_and_the_stack_stays_shallow(place: Place, tmp_path: Path) -> None:
    first = place.commit(a="one", b="two")
    place.layers(first)
    (place.tree / "b").unlink()
    second = place.commit(a="new")
    layers = place.layers(second)
    assert len(layers) == 2
    assert (place.engine.whole, place.engine.differences) == (1, 1)
    assert seen(layers, tmp_path / "merged") == {"a": "new"}
    for number in range(2 * MAX_DEPTH):
        layers = place.layers(place.commit(c=str(number)))
        assert len(layers) <= MAX_DEPTH
        assert seen(layers, tmp_path / f"merged-{number}") == {"a": "new", "c": str(number)}
    assert place.engine.whole == 1


def test_a_layer_outlives_its_state_and_is_nothing_to_build_on_then(place: Place, tmp_path: Path) -> None:
    first = place.commit(a="one", b="two")
    place.layers(first)
    second = place.commit(a="newer")
    place.layers(second)
    third = place.commit(a="newest")
    for commit in (first, second):
        place.store.forget(commit.hex())
    assert place.store.gc().removed > 0
    layers = place.layers(third)
    assert (layers[0] / "a").read_text() == "newest"
    assert (place.engine.whole, place.engine.differences, len(layers)) == (2, 1, 1)
    # One of them alone is passed over for the one before it.
    fourth = place.commit(a="four")
    place.layers(fourth)
    fifth = place.commit(a="five")
    place.store.forget(fourth.hex())
    place.store.gc()
    layers = place.layers(fifth)
    assert seen(layers, tmp_path / "merged") == {"a": "five", "b": "two"}
    assert len(layers) == 2
    assert str(layers[1]) == str(place.layers(third)[0])


def test_gc_waits_for_a_layer_that_is_being_built(place: Place) -> None:
    commit = place.commit(a="one")
    building, go_on = threading.Event(), threading.Event()
    lay_out = place.engine.checkout

    def checkout(*args: Any, **options: Any) -> None:
        building.set()
        assert go_on.wait(30)
        lay_out(*args, **options)

    place.engine.checkout = checkout  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        layers = pool.submit(place.layers, commit)
        assert building.wait(30)
        try:
            with pytest.raises(StoreBusyError):
                place.store.gc(wait_seconds=0.05)
        finally:
            go_on.set()
        assert (layers.result()[0] / "a").read_text() == "one"
    place.store.gc()


def test_a_build_that_fails_leaves_nothing(place: Place) -> None:
    commit = place.commit(a="one")
    place.engine.fail = True
    with pytest.raises(StoreError, match="as asked"):
        place.layers(commit)
    assert place.names() == []
    place.engine.fail = False
    assert len(place.layers(commit)) == 1


def test_threads_that_want_the_same_build_it_once(place: Place) -> None:
    commit = place.commit(**{f"f{number}": "x" * 1_000 for number in range(300)})
    found: list[tuple[Path, ...]] = []
    threads = [threading.Thread(target=lambda: found.append(place.layers(commit))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert place.engine.whole == 1


def test_what_an_earlier_process_built_is_found_and_what_it_left_half_is_removed(place: Place) -> None:
    first = place.commit(a="one")
    layers = place.layers(first)
    (place.directory / ".new-0123").mkdir()
    (place.directory / ".gone-0123").mkdir()
    (place.directory / "half" / "tree").mkdir(parents=True)
    place.cache = place.open()
    assert place.names() == [layers[0].parent.name]
    assert place.layers(first) == layers
    assert place.engine.whole == 1


@pytest.mark.parametrize("synced", [False, True])
def test_after_another_boot_only_what_was_synced_counts(place: Place, synced: bool) -> None:
    (layer,) = place.layers(place.commit(a="one"))
    if synced:
        place.cache.tidy()
    marker = layer.parent / "done"
    text = json.loads(marker.read_text())
    assert text["synced"] is synced
    marker.write_text(json.dumps(text | {"boot": "another"}))
    place.cache = place.open()
    assert layer.exists() is synced


def test_what_a_power_loss_may_have_torn_goes_though_somebody_stands_on_it(place: Place) -> None:
    (layer,) = place.layers(place.commit(a="one"))
    assert place.cache.unsynced
    marker = layer.parent / "done"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"boot": "another"}))
    place.in_use = {str(layer)}
    place.cache = place.open()
    assert not layer.exists()


def test_what_is_synced_is_known(place: Place) -> None:
    place.layers(place.commit(a="one"))
    place.cache.tidy()
    assert not place.cache.unsynced


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b'{"version": 2}', b"\xff" * 9_000])
def test_a_marker_that_makes_no_sense_is_none(place: Place, damage: bytes) -> None:
    commit = place.commit(a="one")
    (layer,) = place.layers(commit)
    (layer.parent / "done").write_bytes(damage)
    place.cache = place.open()
    assert place.names() == []
    assert place.layers(commit) == (layer,)


def test_a_layer_whose_lower_layer_is_gone_is_none(place: Place) -> None:
    first = place.commit(a="one")
    (lower,) = place.layers(first)
    second = place.commit(a="two")
    place.layers(second)
    lower.parent.rename(place.directory / ".gone-by-hand")
    assert len(place.layers(second)) == 1
    place.cache = place.open()
    assert len(place.layers(second)) == 1


def test_the_oldest_go_when_there_is_too_much_but_not_what_is_used(place: Place) -> None:
    commits = [place.commit(**{f"f{number}": os.urandom(300_000).hex()}) for number in range(4)]
    place.tree.joinpath("own").write_text("")
    apart: list[Path] = []
    for commit in commits:  # each whole: no ancestor is there when it is built
        layers = place.layers(commit, (len(apart), 0))
        assert len(layers) == 1
        apart.append(layers[0])
    place.cache = place.open(max_bytes=0)
    place.in_use = {str(apart[1])}
    with ExitStack() as held:
        held.enter_context(place.cache.lease(commits[2], (2, 0)))
        assert place.cache.tidy() == 2
        assert [layer.exists() for layer in apart] == [False, True, True, False]
    place.in_use = set()
    assert place.cache.tidy() == 2
    assert place.names() == []


def test_nothing_goes_when_it_is_unknown_what_is_used(place: Place) -> None:
    (layer,) = place.layers(place.commit(a="one"))

    def unknown() -> set[str]:
        raise StoreError("nobody knows")

    place.cache = place.open(max_bytes=0)
    place.cache._in_use = unknown
    with pytest.raises(StoreError):
        place.cache.tidy()
    assert layer.exists()


def test_a_state_as_deep_as_one_may_be_is_measured_and_evicted(place: Place) -> None:
    """A thousand directories inside each other: as many as Python has frames, and more than a path may be long."""
    here = os.open(place.tree, os.O_RDONLY)
    for _ in range(999):
        os.mkdir("n" * 200, dir_fd=here)
        below = os.open("n" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    place.layers(place.commit())
    assert place.cache.tidy() == 0
    assert place.cache.size() > 999 * 4_096
    place.cache = place.open(max_bytes=0)
    assert place.cache.tidy() == 1
    assert place.names() == []
    remove_tree(place.tree)


def test_what_a_layer_was_before_it_was_built_anew_goes_once_nobody_stands_on_it(place: Place) -> None:
    commit = place.commit(a="one")
    place.layers(commit)
    (low,) = place.layers(commit)
    place.commit(b="two")
    high, _ = place.layers(place.store.resolve("p"))
    remove_tree(low.parent)  # by hand: the upper one is built anew too, since it cannot stand without
    place.in_use = {str(high)}
    assert high in place.layers(place.store.resolve("p"))
    place.cache.tidy()
    (old,) = [name for name in place.names() if name.startswith(".old-")]
    assert (place.directory / old / "tree" / "b").read_text() == "two", "somebody may have it mounted"
    place.cache = place.open()
    place.cache.tidy()
    assert old in place.names(), "as it may be after a restart"
    place.in_use = set()
    place.cache.tidy()
    assert old not in place.names()
    assert not [name for name in place.names() if name.startswith(".gone-")]


def test_layers_that_somebody_removed_keep_tidy_from_nothing(place: Place) -> None:
    gone = [place.layers(place.commit(**{f"f{number}": "x" * 5_000}))[0] for number in range(2)]
    for layer in gone:
        remove_tree(layer.parent)
    (kept,) = place.layers(place.commit(g="y"), (7, 8))
    place.cache.tidy()
    assert not place.cache.unsynced
    assert json.loads((kept.parent / "done").read_text())["synced"] is True
    remove_tree(kept.parent)
    place.cache._max_bytes = 0
    place.cache.tidy()
    assert place.cache.size() == 0


def test_two_that_tidy_at_once_disturb_each_other_in_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.layers(place.commit(a="one"))
    sync, meeting = place.cache._sync, threading.Barrier(2)

    def together(layer: Any) -> int:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)
        return sync(layer)

    real = Path.replace

    def late(self: Path, target: Path) -> Path:
        if self.name == ".done.new":
            time.sleep(0.1)
        return real(self, target)

    monkeypatch.setattr(place.cache, "_sync", together)
    monkeypatch.setattr(Path, "replace", late)
    with ThreadPoolExecutor(2) as threads:
        for tidied in [threads.submit(place.cache.tidy) for _ in range(2)]:
            assert tidied.result() == 0
    assert not place.cache.unsynced
