"""Every engine, on random trees: what is captured, laid out and captured again is equal, whoever did which."""

from __future__ import annotations

import time

from hypothesis import HealthCheck, given, settings

from agent_sandbox.store.ports import Engine
from tests.unit.store.engines import capture, checkout, each_pair, memory
from tests.unit.store.trees import Edit, apply, build, edits, scratch, state_of, trees

random = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
CACHE_SECONDS = 0.06
"""Longer than the time before a capture within which nothing is remembered."""


@each_pair
@random
@given(tree=trees(), changes=edits())
def test_what_is_captured_is_laid_out(writer: Engine, reader: Engine, tree: list[Edit], changes: list[Edit]) -> None:
    with scratch() as place:
        store = memory(place)
        build(place / "tree", tree)
        apply(place / "tree", changes)
        captured = capture(writer, place / "tree", store)
        assert not captured.report.left_out_count
        checkout(reader, captured.root, place / "copy", store)
        assert state_of(place / "copy") == state_of(place / "tree")
        assert capture(reader, place / "copy", store).root == captured.root


@each_pair
@random
@given(tree=trees(), changes=edits())
def test_base_and_cache_change_no_identity(
    writer: Engine, reader: Engine, tree: list[Edit], changes: list[Edit]
) -> None:
    with scratch() as place:
        store = memory(place)
        build(place / "tree", tree)
        time.sleep(CACHE_SECONDS)
        old = capture(writer, place / "tree", store, cache=place / "cache")
        again = capture(reader, place / "tree", store, cache=place / "cache", base=old.root)
        assert again.root == old.root
        assert (again.report.read, again.report.stored) == (0, 0)
        assert again.report.bytes == old.report.bytes
        apply(place / "tree", changes)
        new = capture(reader, place / "tree", store, cache=place / "cache", base=old.root)
        (place / "other").mkdir()
        assert capture(writer, place / "tree", memory(place / "other")).root == new.root
        checkout(writer, new.root, place / "copy", store)
        assert state_of(place / "copy") == state_of(place / "tree")
