"""The random trees: they are what they say, and their description sees every difference."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.store.trees import Data, Edit, apply, build, content, edits, scratch, state_of, trees, write


@given(tree=trees(), changes=edits())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_same_edits_make_the_same_tree(tree: list[Edit], changes: list[Edit]) -> None:
    with scratch() as place:
        for name in ("one", "two"):
            build(place / name, tree)
            apply(place / name, changes)
        one, two = state_of(place / "one"), state_of(place / "two")
        assert one.keys() == two.keys()
        for path in one:
            assert one[path].digest == two[path].digest
            assert one[path].names == two[path].names


def test_a_description_sees_every_difference() -> None:
    def touch(path: Path) -> None:
        os.utime(path, ns=(0, 1))

    def punch(path: Path) -> None:  # equal bytes and times, other holes
        path.write_bytes(bytes(8_192))
        touch(path)

    def link(path: Path) -> None:
        (path.parent / "b").unlink()
        os.link(path, path.parent / "b")

    with scratch() as place:

        def fresh(name: str) -> Path:
            (place / name).mkdir()
            for file in ("a", "b"):
                os.truncate(os.open(place / name / file, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC), 8_192)
                touch(place / name / file)
            touch(place / name)
            return place / name

        plain = state_of(fresh("plain"))
        assert plain == state_of(fresh("same"))
        changes: dict[str, Callable[[Path], None]] = {
            "mode": lambda path: path.chmod(0o4755),
            "mtime": lambda path: os.utime(path, ns=(0, 2)),
            "attribute": lambda path: os.setxattr(path, "user.a", b""),
            "hole": punch,
            "link": link,
            "size": lambda path: os.truncate(path, 8_193),
        }
        for name, change in changes.items():
            tree = fresh(name)
            change(tree / "a")
            os.utime(tree, ns=(0, 1))
            assert state_of(tree) != plain, name


@pytest.mark.parametrize("seed", [2, 3])
def test_holes_are_left_out(seed: int) -> None:
    with scratch() as place:
        file = os.open(place / "a", os.O_CREAT | os.O_WRONLY)
        data = Data(20_000, seed, ((1, 2), (4, 9)))
        write(file, data)
        os.close(file)
        found = state_of(place)[b"a"]
        assert found.size == 20_000
        assert found.runs == ((0, 4_096), (12_288, 16_384))
        assert (place / "a").read_bytes()[12_288:16_384] == content(data)[12_288:16_384]
