"""Walking commits, against the plain definition over random graphs with random clocks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import LimitExceededError
from agent_sandbox.store import history
from agent_sandbox.store.history import ancestors, common
from agent_sandbox.store.objects import Commit, Kind, encode_commit
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.states import build, tree


class Graph:
    """Commits of one empty tree."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.root = build(self.objects, tree())
        self.parents: dict[bytes, list[bytes]] = {}
        self.times: dict[bytes, int] = {}

    def add(self, parents: Iterable[bytes] = (), time: int | None = None) -> bytes:
        parents = list(dict.fromkeys(parents))
        time = len(self.parents) if time is None else time
        commit = Commit(self.root, tuple(parents), None, time, "", str(len(self.parents)))
        id = self.objects.put(Kind.COMMIT, encode_commit(commit))
        self.parents[id], self.times[id] = parents, time
        return id

    def above(self, id: bytes) -> set[bytes]:
        """The commit with all its ancestors."""
        out, rest = {id}, [id]
        while rest:
            for parent in self.parents[rest.pop()]:
                if parent not in out:
                    out.add(parent)
                    rest.append(parent)
        return out


def graphs(times: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[tuple[Graph, list[bytes]]]:
    """Random graphs, each commit with up to three earlier ones as parents; ``times`` is what its clock said."""

    def make(shape: list[tuple[list[int], int]]) -> tuple[Graph, list[bytes]]:
        graph, ids = Graph(), list[bytes]()
        for number, (parents, time) in enumerate(shape):
            back = [ids[-1 - parent] for parent in parents if parent < len(ids)]
            ids.append(graph.add(back, number if times is None else time))
        return graph, ids

    one = st.tuples(st.lists(st.integers(0, 5), max_size=3), st.just(0) if times is None else times)
    return st.lists(one, min_size=1, max_size=16).map(make)


@given(graphs() | graphs(st.integers(0, 3)) | graphs(st.integers(-9, 9)), st.integers(0, 15), st.integers(0, 15))
@settings(deadline=None)
def test_common_ancestors_are_those_of_the_definition(drawn: tuple[Graph, list[bytes]], one: int, two: int) -> None:
    graph, ids = drawn
    left, right = ids[one % len(ids)], ids[two % len(ids)]
    both = graph.above(left) & graph.above(right)
    best = {id for id in both if not any(id != other and id in graph.above(other) for other in both)}
    found = common(graph.objects, left, right)
    assert found == sorted(best, key=lambda id: (-graph.times[id], id))
    assert common(graph.objects, right, left) == found


def test_a_criss_cross_has_two() -> None:
    graph = Graph()
    start = graph.add()
    a, b = graph.add([start], 5), graph.add([start], 6)
    left, right = graph.add([a, b]), graph.add([b, a])
    assert common(graph.objects, left, right) == [b, a]


def test_unrelated_lines_have_none() -> None:
    graph = Graph()
    assert common(graph.objects, graph.add(), graph.add()) == []


@given(graphs() | graphs(st.integers(-9, 9)))
@settings(deadline=None)
def test_the_log_has_every_ancestor_once_and_begins_with_the_head(drawn: tuple[Graph, list[bytes]]) -> None:
    graph, ids = drawn
    found = [id for id, _ in ancestors(graph.objects, ids[-1])]
    assert found[0] == ids[-1]
    assert len(found) == len(set(found))
    assert set(found) == graph.above(ids[-1])


@given(graphs())
@settings(deadline=None)
def test_the_log_is_newest_first_where_clocks_are_right(drawn: tuple[Graph, list[bytes]]) -> None:
    graph, ids = drawn
    times = [commit.time_ns for _, commit in ancestors(graph.objects, ids[-1])]
    assert times == sorted(times, reverse=True)


class Counting(MemoryObjects):
    reads = 0

    def read(self, id: bytes, kind: Kind) -> bytes:
        self.reads += 1
        return super().read(id, kind)


def test_only_what_lies_between_is_read() -> None:
    graph = Graph()
    head = graph.add()
    for _ in range(300):
        head = graph.add([head])
    left, right = graph.add([head]), graph.add([head])
    counting = Counting()
    counting._at, counting._pack = graph.objects._at, graph.objects._pack
    assert common(counting, left, right) == [head]
    assert counting.reads <= 4
    counting.reads = 0
    assert next(ancestors(counting, left))[0] == left
    assert counting.reads == 1


def test_a_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_COMMITS", 50)
    graph = Graph()
    start = head = graph.add()
    for _ in range(60):
        head = graph.add([head])
    with pytest.raises(LimitExceededError, match="commits apart"):
        common(graph.objects, head, graph.add([start]))
