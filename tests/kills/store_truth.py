"""What must be in the store after a kill, and the look whether it is.

``Truth`` lives in the parent, which never opens the store; :func:`look` runs in a process of its own, so that nothing
that it has open or started is carried into the next worker.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.packs import pack_name
from agent_sandbox.store.reference import ReferenceEngine
from agent_sandbox.store.store import Store
from agent_sandbox.store.walk import commit as load
from tests.kills.store_worker import ENGINES, digest_of

_FILES = {"STORE", "lock", "packs", "cache", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm"}


@dataclass
class Truth:
    """What was acknowledged: names and where they are, and what each commit holds.

    ``pending`` is what each project's worker had begun when it died: it may have happened or not, but not half.
    """

    names: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    maybe_forgotten: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)
    """Commits that nobody has compared yet."""
    pending: dict[str, dict[str, Any]] = field(default_factory=dict)
    acknowledged: int = 0

    def heard(self, project: str, line: dict[str, Any]) -> None:
        """Take one line of a worker."""
        if "try" in line:
            self.pending[project] = line["try"]
            if line["try"]["op"] == "forget":
                self.maybe_forgotten.add(line["try"]["commit"])
            return
        what = line["done"]
        del self.pending[project]
        self.acknowledged += 1
        match what["op"]:
            case "commit" if "commit" in line:
                self.committed(what, line["commit"])
            case "name":
                self.names[what["name"]] = what["commit"]
            case "unname":
                del self.names[what["name"]]
            case "forget":
                self.forgotten.add(what["commit"])

    def committed(self, what: dict[str, Any], commit: str) -> None:
        """A commit is on a branch."""
        self.names[what["ref"]] = commit
        self.parents[commit] = what["old"]
        self.digests[commit] = what["digest"]
        self.fresh.add(commit)

    def of(self, project: str) -> dict[str, str]:
        """The names of one project."""
        return {name: commit for name, commit in self.names.items() if re.fullmatch(rf"(pin )?{project}[:@.].*", name)}

    def states(self) -> set[str]:
        """Commits whose whole state must be there: what names are at, and what is before, unless it was forgotten."""
        held = set(self.names.values())
        for commit in list(held):
            older = self.parents.get(commit)
            while older is not None and older not in held:
                if older not in self.forgotten | self.maybe_forgotten:
                    held.add(older)
                older = self.parents.get(older)
        return held


def look(truth: Truth, store: Path, scratch: Path, rng: random.Random, engines: Sequence[str]) -> dict[str, Any]:
    """Open the store and compare. Returns ``findings``, the names that are there, and what was settled."""
    findings: list[str] = []
    settled: dict[str, Any] = {}
    engine = ENGINES[rng.choice(engines)]()
    with ObjectDatabase.open(store) as database:
        opened = Store(database, engine)
        findings += _check(opened, "after the kill")
        if findings:
            return {"findings": findings, "settled": settled, "compared": 0}
        there = dict(_names(opened))
        settled = _settle(truth, database, there, findings)
        for name in sorted(there.keys() | truth.names.keys()):
            if there.get(name) != truth.names.get(name):
                findings.append(f"{name} is at {there.get(name)}, acknowledged was {truth.names.get(name)}")
        states = truth.states()
        compared = states & truth.fresh | set(rng.sample(sorted(states), min(3, len(states))))
        for number, commit in enumerate(sorted(compared & truth.digests.keys())):
            place = scratch / str(number)
            opened.checkout(commit, place)
            if digest_of(place) != truth.digests[commit]:
                findings.append(f"commit {commit} is not what was committed")
        if rng.random() < 0.3:
            opened.gc()
            findings += _tidy(opened, database)
            for commit in rng.sample(sorted(states & truth.digests.keys()), min(2, len(states & truth.digests.keys()))):
                place = scratch / f"after gc {commit}"
                opened.checkout(commit, place)
                if digest_of(place) != truth.digests[commit]:
                    findings.append(f"commit {commit} is not what was committed, after gc")
    return {"findings": findings, "settled": settled, "compared": len(compared)}


def _check(store: Store, when: str) -> list[str]:
    report = store.check()
    return [f"check {when}: {damage}" for damage in report.damages]


def _names(store: Store) -> Iterator[tuple[str, str]]:
    for project in store.projects():
        for ref in store.refs(project.name):
            yield f"{project.name}:{ref.name}", ref.head.hex()
        for layer in store.layers(project.name):
            yield f"{project.name}@{layer.number}", layer.commit.hex()
    for pin in store.pins():
        yield f"pin {pin.name}", pin.commit.hex()


def _settle(
    truth: Truth, database: ObjectDatabase, there: dict[str, str], findings: list[str]
) -> dict[str, dict[str, Any]]:
    """Find out whether what was begun has happened; returns the lines that were not said any more."""
    lines: dict[str, dict[str, Any]] = {}
    for project, what in list(truth.pending.items()):
        line: dict[str, Any] | None = None
        match what["op"]:
            case "commit":
                head = there.get(what["ref"])
                if head is not None and head != what["old"]:
                    if load(database, bytes.fromhex(head)).parents != (bytes.fromhex(what["old"]),):
                        findings.append(f"{what['ref']} moved to {head}, which does not stand on {what['old']}")
                    line = {"done": what, "commit": head}
            case "name" if there.get(what["name"]) == what["commit"]:
                line = {"done": what}
            case "unname" if what["name"] not in there:
                line = {"done": what}
            case "forget":
                if database.index.is_forgotten(bytes.fromhex(what["commit"])):
                    line = {"done": what}
        if line is not None:
            lines[project] = line
            truth.heard(project, line)
    return lines


def _tidy(store: Store, database: ObjectDatabase) -> list[str]:
    """After gc nothing is left over, and all is still there."""
    findings = _check(store, "after gc")
    unreachable = store.check().unreachable
    if unreachable:
        findings.append(f"{unreachable} objects that nothing leads to are left after gc")
    files = {file.name for file in database.packs.iterdir()}
    rows = {pack_name(row.number) for row in database.index.packs()}
    if files != rows:
        findings.append(f"packs {sorted(files ^ rows)} are left after gc, as a file or as a row alone")
    left = {file.name for file in database.path.iterdir()} - _FILES
    if left:
        findings.append(f"{sorted(left)} are left in the store after gc")
    return findings


def begin(store: Path, projects: list[str], scratch: Path) -> dict[str, Any]:
    """Make a store with empty projects; returns their names."""
    with Store.create(store, engine=ReferenceEngine()) as made:
        scratch.mkdir()
        for project in projects:
            made.init(project, scratch)
        names = dict(_names(made))
        with suppress(OSError):
            scratch.rmdir()
    return {"names": names}
