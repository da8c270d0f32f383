"""A difference, really mounted over the old state, looks like the new one (needs root).

The options are those that workspaces are mounted with; what overlayfs does with whiteouts, opaque directories and
merged metadata is in the kernel's Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from agent_sandbox.store.objects import Kind
from agent_sandbox.store.ports import Engine, Location
from tests.unit.store.engines import capture, checkout, difference, each_engine, each_pair, memory
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.trees import Data, Edit, Looks, Make, State, apply, build, edits, scratch, state_of, trees

pytestmark = pytest.mark.real


@contextmanager
def mounted(options: str, at: Path) -> Iterator[Path]:
    at.mkdir()
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


def seen(lower: Path, layer: Path, place: Path) -> list[dict[bytes, State]]:
    """What a sandbox sees where the layer is a further lower one, and where it is the upper one."""
    with mounted(f"lowerdir={layer}:{lower},redirect_dir=on,metacopy=off", place / "stack") as merged:
        stacked = state_of(merged)
    (place / "work").mkdir()
    options = f"lowerdir={lower},upperdir={layer},workdir={place / 'work'},redirect_dir=on,index=on,metacopy=off"
    with mounted(options, place / "over") as merged:
        return [stacked, state_of(merged)]


@each_pair
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=trees(), changes=edits())
def test_a_difference_makes_old_look_like_new(
    writer: Engine, reader: Engine, tree: list[Edit], changes: list[Edit]
) -> None:
    with scratch() as place:
        store = memory(place)
        build(place / "tree", tree)
        old = capture(writer, place / "tree", store).root
        apply(place / "tree", changes)
        new = capture(writer, place / "tree", store, base=old).root
        checkout(writer, old, place / "lower", store)
        difference(reader, old, new, place / "layer", store)
        for state in seen(place / "lower", place / "layer", place):
            assert state == state_of(place / "tree")


class Watched(MemoryObjects):
    """Notes which objects are asked for."""

    def __init__(self, packs: Path) -> None:
        super().__init__(packs)
        self.asked: set[bytes] = set()

    def locate(self, ids: Sequence[bytes]) -> list[Location | None]:
        self.asked.update(ids)
        return super().locate(ids)

    def read(self, id: bytes, kind: Kind) -> bytes:
        self.asked.add(id)
        return super().read(id, kind)


@each_engine
def test_each_kind_of_change(engine: Engine) -> None:
    with scratch() as place:
        tree = place / "tree"
        for directory in ("same", "touched", "to-file", "gone", "deep/er"):
            (tree / directory).mkdir(parents=True)
            (tree / directory / "file").write_text(directory)
        for name in ("file", "to-directory", "gone-file", "mode-only"):
            (tree / name).write_text(name)
        os.setxattr(tree / "touched", "user.a", b"1")
        store = memory(place)
        old = capture(engine, tree, store).root

        (tree / "touched").chmod(0o711)
        os.setxattr(tree / "touched", "user.a", b"2")
        subprocess.run(["rm", "-r", tree / "to-file", tree / "gone"], check=True)
        (tree / "to-file").write_text("file")
        for name in ("to-directory", "gone-file"):
            (tree / name).unlink()
        (tree / "to-directory").mkdir()
        (tree / "to-directory" / "inside").write_text("")
        (tree / "mode-only").chmod(0o600)
        (tree / "deep" / "er" / "new").mkdir()
        new = capture(engine, tree, store).root

        checkout(engine, old, place / "lower", store)
        layer = place / "layer"
        difference(engine, old, new, layer, store)
        found = {str(path.relative_to(layer)) for path in layer.rglob("*")}
        assert found == {
            *("touched", "to-file", "gone", "gone-file", "to-directory", "to-directory/inside", "mode-only"),
            *("deep", "deep/er", "deep/er/new"),
        }
        for name in ("gone", "gone-file"):
            about = (layer / name).lstat()
            assert (stat.S_ISCHR(about.st_mode), about.st_rdev) == (True, 0)
        assert os.getxattr(layer / "to-directory", "trusted.overlay.opaque") == b"y"
        for name in ("touched", "deep", "deep/er", "deep/er/new"):
            assert "trusted.overlay.opaque" not in os.listxattr(layer / name)
        for state in seen(place / "lower", layer, place):
            assert state == state_of(tree)


@each_engine
def test_a_directory_becomes_a_file_and_back(engine: Engine) -> None:
    with scratch() as place:
        store = memory(place)
        build(
            place / "one", [Make(0, b"a", None, False, Looks(0o755, 1)), Make(1, b"b", Data(5), False, Looks(0o644, 2))]
        )
        build(place / "two", [Make(0, b"a", Data(7), False, Looks(0o600, 3))])
        one, two = (capture(engine, place / name, store).root for name in ("one", "two"))
        for old, new, name in ((one, two, "two"), (two, one, "one")):
            with scratch() as inner:
                checkout(engine, old, inner / "lower", store)
                difference(engine, old, new, inner / "layer", store)
                for state in seen(inner / "lower", inner / "layer", inner):
                    assert state == state_of(place / name)


@each_engine
def test_a_file_that_got_a_name_appears_with_all_of_them(engine: Engine) -> None:
    with scratch() as place:
        tree = place / "tree"
        (tree / "a" / "deep").mkdir(parents=True)
        (tree / "a" / "deep" / "file").write_text("linked")
        (tree / "b").mkdir()
        os.link(tree / "a" / "deep" / "file", tree / "b" / "file")
        store = memory(place)
        old = capture(engine, tree, store).root
        os.link(tree / "b" / "file", tree / "c")
        new = capture(engine, tree, store).root
        checkout(engine, old, place / "lower", store)
        difference(engine, old, new, place / "layer", store)
        for state in seen(place / "lower", place / "layer", place):
            assert state == state_of(tree)
            assert state[b"c"].names == {b"a/deep/file", b"b/file", b"c"}


@each_engine
def test_equal_directories_are_not_opened(engine: Engine) -> None:
    with scratch() as place:
        tree = place / "tree"
        for name in ("same", "other"):
            (tree / name / "below").mkdir(parents=True)
            (tree / name / "below" / "file").write_text(name)
        (tree / "one").write_text("1")
        os.link(tree / "one", tree / "two")
        (place / "packs").mkdir()
        store = Watched(place / "packs")
        old = capture(engine, tree, store).root
        (tree / "one").write_text("2")
        (tree / "other" / "below" / "file").write_text("changed")
        (tree / "same").chmod(0o700)
        new = capture(engine, tree, store).root
        same = capture(engine, tree / "same", store).root.content
        store.asked.clear()
        difference(engine, old, new, place / "layer", store)
        assert new.content in store.asked
        assert same not in store.asked
        assert sorted(path.name for path in (place / "layer").iterdir()) == ["one", "other", "same", "two"]


@each_engine
def test_a_difference_of_nothing_has_the_root_s_metadata(engine: Engine) -> None:
    with scratch() as place:
        build(place / "tree", [Make(0, b"a", Data(1), False, Looks(0o644, 1))])
        store = memory(place)
        root = capture(engine, place / "tree", store).root
        changed = replace(root, mode=0o2750, mtime_ns=-5)
        difference(engine, root, changed, place / "layer", store)
        assert list((place / "layer").iterdir()) == []
        assert state_of(place / "layer")[b""] == State("d", 0o2750, -5)
