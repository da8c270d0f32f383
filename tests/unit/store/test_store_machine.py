"""Any operations, in any order, by any engine: every name leads to the state that the model has there.

Hypothesis draws the calls. The store is a real directory, open once for each engine, and each call goes through one of
them, so each reads what the others wrote. The model is a table of commits with their whole states (types, modes, times
in nanoseconds, attributes, links, holes, names as bytes; ``trees.state_of``, which knows nothing of the store) and
tables of names. What a merge must give comes from the rules as ``test_merge.py`` has them once more.

The branch that an operation works on, and the state that it takes, are drawn as numbers, modulo what there is.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agent_sandbox.errors import ConflictError, NotFoundError
from agent_sandbox.store import Conflicts, Created, HeadMoved, RefKind, Store, UpToDate
from agent_sandbox.store.objects import Type
from tests.unit.store import trees
from tests.unit.store.engines import ENGINES
from tests.unit.store.states import Node, Tree
from tests.unit.store.test_merge import oracle
from tests.unit.store.trees import State, place, state_of

number = st.integers(0, 1_000)
_TYPES = {"-": Type.FILE, "d": Type.DIRECTORY, "l": Type.SYMLINK, "p": Type.FIFO}


@dataclass
class Known:
    """A commit as the model has it."""

    state: dict[bytes, State]
    nodes: Tree
    parents: tuple[bytes, ...]
    forgotten: bool = False


def nodes_of(directory: Path, state: dict[bytes, State]) -> Tree:
    """The state as :mod:`test_merge` has it: with bytes, without holes."""
    inodes: dict[frozenset[bytes], int] = {}
    out: Tree = {}
    for path, about in state.items():
        data = about.target
        if about.type == "-":
            data = (directory / os.fsdecode(path)).read_bytes()
        inode = inodes.setdefault(about.names, len(inodes) + 1) if about.names else None
        attributes = tuple((os.fsencode(name), value) for name, value in about.attributes)
        out[path] = Node(_TYPES[about.type], data, about.mode, about.mtime_ns, None, attributes, inode)
    return out


def numbered(tree: Tree) -> Tree:
    """The same with the files of several names numbered by their first, to be compared."""
    names = Counter(node.inode for node in tree.values())
    inodes: dict[int, int] = {}
    return {
        path: replace(
            node,
            inode=inodes.setdefault(node.inode, len(inodes) + 1) if node.inode and names[node.inode] > 1 else None,
        )
        for path, node in sorted(tree.items())
    }


class Machine(RuleBasedStateMachine):
    """The store and its model."""

    @initialize(tree=trees.trees())
    def begin(self, tree: list[trees.Edit]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="machine-", dir=place()))
        path = self.root / "store"
        Store.create(path).close()
        self.stores = [Store.open(path, engine=engine) for engine in ENGINES]
        self.commits: dict[bytes, Known] = {}
        self.refs: dict[tuple[str, str], bytes] = {}
        self.tags: set[tuple[str, str]] = set()
        self.layers: dict[str, list[bytes]] = {}
        self.pins: dict[str, bytes] = {}
        self.count = 0
        self.init(0, tree)
        self.fork(0, 0)

    def teardown(self) -> None:
        if not hasattr(self, "stores"):
            return
        try:
            for id, known in self.commits.items():
                if self.stands(id):
                    assert self.checked_out(0, id.hex())[0] == known.state
            assert self.stores[0].check().damages == ()
        finally:
            for store in self.stores:
                store.close()
            trees._remove(os.fsencode(self.root))

    # ---- what the model knows --------------------------------------------------------------------------------------

    def store(self, which: int) -> Store:
        return self.stores[which % len(self.stores)]

    def branch(self, which: int) -> tuple[str, str] | None:
        branches = sorted(set(self.refs) - self.tags)
        return branches[which % len(branches)] if branches else None

    def state(self, which: int) -> tuple[str, bytes] | None:
        """Any reference, with its commit."""
        found = [(f"{project}:{name}", id) for (project, name), id in sorted(self.refs.items())]
        found += [(f"{project}@{n}", id) for project, ids in sorted(self.layers.items()) for n, id in enumerate(ids)]
        found += [(id.hex(), id) for id in self.reachable() if self.stands(id)]
        return found[which % len(found)] if found else None

    def named(self) -> set[bytes]:
        return {*self.refs.values(), *self.pins.values(), *(id for ids in self.layers.values() for id in ids)}

    def above(self, *ids: bytes) -> set[bytes]:
        out, rest = set(ids), list(ids)
        while rest:
            new = set(self.commits[rest.pop()].parents) - out
            out |= new
            rest += new
        return out

    def reachable(self) -> list[bytes]:
        """In the order in which they were made."""
        above = self.above(*self.named())
        return [id for id in self.commits if id in above]

    def stands(self, id: bytes) -> bool:
        """Whether a state must be there."""
        return id in self.named() or (not self.commits[id].forgotten and id in self.above(*self.named()))

    def new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def scratch(self) -> Path:
        return self.root / self.new("dir")

    def checked_out(self, which: int, ref: str) -> tuple[dict[bytes, State], Tree]:
        directory = self.scratch()
        self.store(which).checkout(ref, directory)
        state = state_of(directory)
        nodes = nodes_of(directory, state)
        trees._remove(os.fsencode(directory))
        return state, nodes

    def keep(self, id: bytes, directory: Path, *parents: bytes) -> None:
        state = state_of(directory)
        self.commits[id] = Known(state, nodes_of(directory, state), parents)

    # ---- operations ------------------------------------------------------------------------------------------------

    @rule(which=number, tree=st.none() | trees.trees())
    def init(self, which: int, tree: list[trees.Edit] | None) -> None:
        project = self.new("p")
        directory = self.scratch()
        if tree is None:
            made = self.store(which).init(project)
            self.store(which).checkout(project, directory)
        else:
            trees.build(directory, tree)
            made = self.store(which).init(project, directory)
        self.keep(made.commit, directory)
        self.refs[project, "main"] = made.commit
        self.layers[project] = [made.commit]
        trees._remove(os.fsencode(directory))

    @rule(which=number, other=number, works=st.lists(st.tuples(number, trees.edits()), min_size=1, max_size=3))
    def commit(self, which: int, other: int, works: list[tuple[int, list[trees.Edit]]]) -> None:
        for on, edits in works:
            branch = self.branch(on)
            if branch is not None:
                self.commit_to(which, other, branch, edits)

    def commit_to(self, which: int, other: int, branch: tuple[str, str], edits: list[trees.Edit]) -> None:
        head, ref = self.refs[branch], ":".join(branch)
        directory = self.scratch()
        self.store(other).checkout(ref, directory)
        assert state_of(directory) == self.commits[head].state
        trees.apply(directory, edits)
        made = self.store(which).commit(ref, directory, expected=head)
        if state_of(directory) == self.commits[head].state:
            assert isinstance(made, UpToDate)
            assert made.commit == head
        else:
            assert isinstance(made, Created)
            self.keep(made.commit, directory, head)
            self.refs[branch] = made.commit
            assert self.store(other).commit(ref, directory, expected=head) == HeadMoved(made.commit)
        trees._remove(os.fsencode(directory))

    @rule(which=number, source=number)
    def fork(self, which: int, source: int) -> None:
        found = self.state(source)
        if found is None:
            return
        project, name = sorted(self.layers)[source % len(self.layers)], self.new("b")
        made = self.store(which).fork(found[0], f"{project}:{name}")
        assert made.head == found[1]
        self.refs[project, name] = found[1]

    @rule(which=number, source=number)
    def tag(self, which: int, source: int) -> None:
        found = self.state(source)
        if found is None:
            return
        project, name = sorted(self.layers)[source % len(self.layers)], self.new("t")
        self.store(which).tag(found[0], f"{project}:{name}")
        self.refs[project, name] = found[1]
        self.tags.add((project, name))
        with pytest.raises(ConflictError):
            self.store(which).fork(found[0], f"{project}:{name}")

    @rule(which=number, source=number)
    def pin(self, which: int, source: int) -> None:
        found = self.state(source)
        if found is not None:
            self.store(which).pin("pin", found[0])
            self.pins["pin"] = found[1]

    @rule(which=number, on=number, source=number)
    def reset(self, which: int, on: int, source: int) -> None:
        branch, found = self.branch(on), self.state(source)
        if branch is not None and found is not None:
            assert self.store(which).reset(":".join(branch), found[0]).head == found[1]
            self.refs[branch] = found[1]

    @rule(which=number, on=number)
    def delete(self, which: int, on: int) -> None:
        if self.refs:
            name = sorted(self.refs)[on % len(self.refs)]
            self.store(which).delete(":".join(name))
            del self.refs[name]
            self.tags.discard(name)

    @rule(which=number, on=number)
    def add(self, which: int, on: int) -> None:
        branch = self.branch(on)
        if branch is None:
            return
        head, layers = self.refs[branch], self.layers[branch[0]]
        made = self.store(which).add(":".join(branch))
        if head == layers[-1]:
            assert made == UpToDate(head)
        elif layers[-1] in self.above(head):
            assert made == Created(head)
            layers.append(head)
        else:
            assert made == HeadMoved(layers[-1])

    @rule(which=number, other=number, on=number, mine=trees.edits(), theirs=trees.edits(), again=st.booleans())
    def diverge(
        self, which: int, other: int, on: int, mine: list[trees.Edit], theirs: list[trees.Edit], again: bool
    ) -> None:
        """Two branches of one state, each with a commit, and a merge; ``again`` crosses it with one the other way."""
        branch = self.branch(on)
        if branch is None:
            return
        twin = branch[0], self.new("b")
        self.store(which).fork(":".join(branch), ":".join(twin))
        self.refs[twin] = self.refs[branch]
        self.commit_to(which, other, branch, mine)
        self.commit_to(other, which, twin, theirs)
        before = self.refs[branch]
        self.merge_into(which, other, branch, (":".join(twin), self.refs[twin]))
        if again:
            self.merge_into(other, which, twin, (before.hex(), before))

    @rule(which=number, other=number, on=number, source=number)
    def merge(self, which: int, other: int, on: int, source: int) -> None:
        branch, found = self.branch(on), self.state(source)
        if branch is not None and found is not None:
            self.merge_into(which, other, branch, found)

    def merge_into(self, which: int, other: int, branch: tuple[str, str], found: tuple[str, bytes]) -> None:
        ref, id, head = found[0], found[1], self.refs[branch]
        common = self.above(head) & self.above(id)
        best = [one for one in common if not any(one != two and one in self.above(two) for two in common)]
        times = {entry.id: entry.commit.time_ns for side in (head, id) for entry in self.stores[0].log(side.hex())}
        best.sort(key=lambda one: (-times[one], one))
        target = ":".join(branch)
        if not best or (best[0] not in (head, id) and not self.stands(best[0])):
            with pytest.raises(ConflictError):
                self.store(which).merge(target, ref)
            return
        made = self.store(which).merge(target, ref)
        if best[0] == id:
            assert made == UpToDate(head)
            return
        if best[0] == head:
            assert made == Created(id)
            self.refs[branch] = id
            return
        expected = oracle(*(self.commits[one].nodes for one in (best[0], head, id)))
        if expected is None:
            assert isinstance(made, Conflicts)
            assert made.count == len(made.conflicts) > 0
            assert made.base == best[0]
            return
        assert isinstance(made, Created)
        state, nodes = self.checked_out(other, target)
        self.commits[made.commit] = Known(state, nodes, (head, id))
        self.refs[branch] = made.commit
        assert numbered(nodes) == numbered(expected)

    @rule(which=number, source=number)
    def forget(self, which: int, source: int) -> None:
        found = self.state(source)
        if found is not None:
            self.store(which).forget(found[1].hex())
            self.commits[found[1]].forgotten = True

    @rule(which=number)
    def gc(self, which: int) -> None:
        self.store(which).gc()
        for id in set(self.commits) - set(self.reachable()):
            del self.commits[id]
            with pytest.raises(NotFoundError):
                self.store(which).resolve(id.hex())
        for id, known in self.commits.items():
            if not self.stands(id):
                assert known.forgotten
                with pytest.raises(NotFoundError, match="is gone"):
                    self.store(which).checkout(id.hex(), self.root / "gone")
        assert self.store(which).check().damages == ()

    @rule(which=number)
    def reopen(self, which: int) -> None:
        which %= len(self.stores)
        self.stores[which].close()
        self.stores[which] = Store.open(self.root / "store", engine=ENGINES[which])

    # ---- looking ---------------------------------------------------------------------------------------------------

    @rule(which=number, source=number)
    def checkout(self, which: int, source: int) -> None:
        found = self.state(source)
        if found is not None:
            assert self.checked_out(which, found[0])[0] == self.commits[found[1]].state

    @rule(which=number, one=number, two=number)
    def diff(self, which: int, one: int, two: int) -> None:
        before, after = self.state(one), self.state(two)
        if before is None or after is None:
            return
        # a link id tells a file's first name, so other names that come and go change nothing of an entry
        old, new = (
            {path: replace(s, names=frozenset([min(s.names)] if s.names else [])) for path, s in state.items()}
            for state in (self.commits[id].state for _, id in (before, after))
        )
        expected = {path for path in old.keys() | new.keys() if old.get(path) != new.get(path)}
        changes = list(self.store(which).diff(before[0], after[0]))
        assert {change.path for change in changes} == expected
        for change in changes:
            list(self.store(which).hunks(change))

    @rule(which=number, other=number, source=number)
    def export_and_import(self, which: int, other: int, source: int) -> None:
        found = self.state(source)
        if found is None:
            return
        archive = io.BytesIO()
        self.store(which).export_tar(found[0], archive)
        project, ref = sorted(self.layers)[0], self.new("b")
        self.store(which).fork(found[0], f"{project}:{ref}")
        self.refs[project, ref] = found[1]
        archive.seek(0)
        assert isinstance(self.store(other).import_tar(f"{project}:{ref}", archive), UpToDate)

    @invariant()
    def names_are_those_of_the_model(self) -> None:
        for store in getattr(self, "stores", []):
            assert [project.name for project in store.projects()] == sorted(self.layers)
            for project, ids in self.layers.items():
                assert [layer.commit for layer in store.layers(project)] == ids
                refs = list(store.refs(project))
                assert {(project, ref.name): ref.head for ref in refs} == {
                    name: id for name, id in self.refs.items() if name[0] == project
                }
                tags = {(project, ref.name) for ref in refs if ref.kind is RefKind.TAG}
                assert tags == {name for name in self.tags if name[0] == project}

    @invariant()
    def logs_have_all_ancestors(self) -> None:
        for id in set(self.refs.values()) if hasattr(self, "refs") else ():
            entries = list(self.stores[0].log(id.hex()))
            assert {entry.id for entry in entries} == self.above(id)
            for entry in entries:
                assert entry.commit.parents == self.commits[entry.id].parents
                assert entry.forgotten == (not self.stands(entry.id))


TestStore = Machine.TestCase
TestStore.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
