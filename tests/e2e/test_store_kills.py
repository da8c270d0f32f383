"""A slice of ``python -m tests.kills.store``, and proof that it sees what it looks for."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kills.store import PROJECTS, Campaign
from tests.kills.store_truth import Truth
from tests.unit.store.trees import scratch

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def place() -> Iterator[Path]:
    with scratch() as place:
        yield place


def test_a_hundred_kills_lose_nothing_and_leave_nothing(place: Path) -> None:
    campaign = Campaign(place, seed=100)
    campaign.run(100)
    print(campaign.summary())
    assert campaign.findings == []
    assert campaign.kills >= 100
    assert {"commit", "gc", "name", "unname", "forget"} <= set(campaign.ops)
    assert campaign.compared > 100


def sql(store: Path, statement: str, *parameters: object) -> None:
    with closing(sqlite3.connect(store / "index.sqlite")) as index, index:
        assert index.execute(statement, parameters).rowcount


def main_of(truth: Truth) -> tuple[str, bytes]:
    """A branch that was acknowledged to be somewhere, and that no commit was on its way to."""
    project, commit = mains(truth)[0]
    return project, bytes.fromhex(commit)


def mains(truth: Truth) -> list[tuple[str, str]]:
    busy = {project for project, what in truth.pending.items() if what["op"] == "commit"}
    found = [(project, truth.names[f"{project}:main"]) for project in PROJECTS if project not in busy]
    return [(project, commit) for project, commit in found if commit in truth.digests]


def lose_commit(store: Path, truth: Truth) -> None:
    project, head = main_of(truth)
    before = bytes.fromhex(truth.parents[head.hex()])
    sql(store, "UPDATE refs SET head = ? WHERE project = ? AND name = 'main' AND head = ?", before, project, head)


def lose_object(store: Path, truth: Truth) -> None:
    sql(store, "DELETE FROM objects WHERE id = ?", main_of(truth)[1])


def lose_tail(store: Path, truth: Truth) -> None:
    """As a pack whose last write was not synced comes back after a power loss."""
    with closing(sqlite3.connect(store / "index.sqlite")) as index:
        pack, offset, length = index.execute(
            "SELECT pack, offset, length FROM objects WHERE id = ?", (main_of(truth)[1],)
        ).fetchone()
    with (store / "packs" / f"{pack:010d}.pack").open("r+b") as file:
        file.truncate(offset + length - 1)


def other_content(store: Path, truth: Truth) -> None:
    truth.digests[main_of(truth)[1].hex()] = "of something else"


def bring_back(store: Path, truth: Truth) -> None:
    project, head = main_of(truth)
    sql(store, "INSERT INTO refs (project, name, kind, head) VALUES (?, 'deleted', 1, ?)", project, head)


@pytest.mark.parametrize(
    ("meddle", "text"),
    [
        (lose_commit, "acknowledged was"),
        (lose_object, "is missing"),
        (lose_tail, "ends inside a record"),
        (other_content, "is not what was committed"),
        (bring_back, "acknowledged was None"),
    ],
)
def test_what_is_lost_is_found(place: Path, meddle: Callable[[Path, Truth], None], text: str) -> None:
    def once(store: Path, truth: Truth) -> None:
        if mains(truth):
            meddle(store, truth)

    campaign = Campaign(place, seed=5, meddle=once)
    campaign.run(60)
    assert campaign.findings
    assert any(text in finding for finding in campaign.findings), campaign.findings
