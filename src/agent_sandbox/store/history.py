"""Walking commits: the log, and what two lines of commits have in common.

Commits are looked at newest first by their own time. Clocks differ, so time decides what is read first, never what is
right.

:func:`common` colours commits by the sides that they were reached from, until every commit that is left to look at has
both colours. What was not seen then is an ancestor of those. So the best common ancestors are among the commits of both
colours; one that is a parent of another such is none. Where several are left (merges that cross, or clocks that are
wrong), the walk goes on below them and drops those that are found there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from agent_sandbox.errors import LimitExceededError
from agent_sandbox.store import walk
from agent_sandbox.store.objects import Commit
from agent_sandbox.store.ports import Objects

MAX_COMMITS = 100_000
"""Commits that a search reads: a few seconds, and about 50 MB of memory."""
_BOTH = 3


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One commit of a log. ``forgotten``: gc may have taken its tree; who, when and why are there."""

    id: bytes
    commit: Commit
    forgotten: bool


def ancestors(objects: Objects, head: bytes) -> Iterator[tuple[bytes, Commit]]:
    """Yield ``head`` and all its ancestors, each once, newest first of what is known at each moment."""
    seen = {head}
    queue = [_queued(objects, head)]
    while queue:
        _, id, commit = heapq.heappop(queue)
        yield id, commit
        for parent in commit.parents:
            if parent not in seen:
                seen.add(parent)
                heapq.heappush(queue, _queued(objects, parent))


def _queued(objects: Objects, id: bytes) -> tuple[int, bytes, Commit]:
    commit = walk.commit(objects, id)
    return -commit.time_ns, id, commit


def common(objects: Objects, left: bytes, right: bytes) -> list[bytes]:
    """Return the best common ancestors: common to both, and not an ancestor of another one; newest first.

    A commit counts as an ancestor of itself; unrelated lines have none. After a criss-cross of merges there are
    several; of two with the same time the smaller id comes first.
    Raises :class:`LimitExceededError` when the sides lie more than 100,000 commits apart.
    """
    search = _Search(objects)
    search.paint(left, right)
    return sorted(search.best(), key=lambda id: (-search.seen[id][0], id))


class _Search:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.seen: dict[bytes, tuple[int, tuple[bytes, ...]]] = {}
        """Time and parents of every commit that was read."""
        self._colours: dict[bytes, int] = {}
        self._queue: list[tuple[int, bytes]] = []
        self._single: set[bytes] = set()
        """What is in the queue with one colour."""

    def paint(self, left: bytes, right: bytes) -> None:
        """Colour both sides' ancestors until all that are left to look at have both colours."""
        self._colour(left, 1)
        self._colour(right, 2)
        while self._single:
            _, id = heapq.heappop(self._queue)
            self._single.discard(id)
            for parent in self.seen[id][1]:
                self._colour(parent, self._colours[id])

    def best(self) -> set[bytes]:
        """Return the commits of both colours without those that another one leads to."""
        both = [id for id, colour in self._colours.items() if colour == _BOTH]
        below = {parent for id in both for parent in self.seen[id][1]}
        best = set(both) - below
        rest = [id for id in below if self._colours.get(id) != _BOTH]
        while len(best) > 1 and rest and len(self.seen) < MAX_COMMITS:
            id = rest.pop()
            self._read(id)
            for parent in self.seen[id][1]:
                best.discard(parent)
                if parent not in below:
                    below.add(parent)
                    rest.append(parent)
        return best

    def _read(self, id: bytes) -> None:
        if id not in self.seen:
            if len(self.seen) >= MAX_COMMITS:
                raise LimitExceededError(f"these states lie more than {MAX_COMMITS:,} commits apart")
            commit = walk.commit(self._objects, id)
            self.seen[id] = commit.time_ns, commit.parents

    def _colour(self, id: bytes, colour: int) -> None:
        before = self._colours.get(id, 0)
        now = before | colour
        if now == before:
            return
        self._read(id)
        self._colours[id] = now
        heapq.heappush(self._queue, (-self.seen[id][0], id))
        if now == _BOTH:
            self._single.discard(id)
        else:
            self._single.add(id)
