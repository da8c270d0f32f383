"""Merging, against the rules written down once more over dictionaries, pair by pair for hard links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import LimitExceededError
from agent_sandbox.store import links, walk
from agent_sandbox.store.chunks import put_tree
from agent_sandbox.store.merge import MAX_CONFLICTS, Merged, merge
from agent_sandbox.store.objects import Entry, Kind, Type
from agent_sandbox.store.outcomes import Conflict, ConflictKind
from agent_sandbox.store.shape import Shapes
from tests.unit.store import states
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.states import DIRECTORY, Edit, Node, Tree, build, file, put, remove, symlink, tree


def merged(base: Tree, left: Tree, right: Tree) -> Tree | dict[bytes, tuple[str, ...]]:
    """The state that comes out, or the kinds of conflict by path; the same in both directions, and canonical."""
    objects = MemoryObjects()
    roots = build(objects, base), build(objects, left), build(objects, right)
    done = merge(objects, objects, *roots)
    assert merge(objects, objects, roots[0], roots[2], roots[1]) == done
    if done.root is None:
        assert done.count == len(done.conflicts) > 0
        return {conflict.path: tuple(map(str, conflict.kinds)) for conflict in done.conflicts}
    state = states.read(objects, done.root)
    assert build(objects, state) == done.root
    assert list(Shapes(objects).faults(done.root)) == []
    return state


def of(state: Tree) -> Tree:
    """A state as :func:`merged` returns it: with the inodes numbered by the reader."""
    objects = MemoryObjects()
    return states.read(objects, build(objects, state))


# ---- one path ------------------------------------------------------------------------------------------------------

X, Y, Z = file(b"x"), file(b"y"), file(b"z")


@pytest.mark.parametrize(
    ("base", "left", "right", "result"),
    [
        (X, Y, X, Y),  # one side changed it
        (X, Y, Y, Y),  # both alike
        (X, None, X, None),
        (X, None, None, None),
        (None, Y, None, Y),
        (None, Y, Y, Y),
        (X, replace(X, mode=0o600), replace(X, data=b"y"), file(b"y", mode=0o600)),  # mode and content apart
        (X, replace(X, mtime_ns=5), replace(X, mode=0o600), file(b"x", mode=0o600, mtime_ns=5)),
        (X, replace(X, mtime_ns=5), replace(X, mtime_ns=7), file(b"x", mtime_ns=7)),  # the later one
        (X, replace(Y, mtime_ns=5), replace(X, mtime_ns=7), file(b"y", mtime_ns=7)),
        (None, replace(Y, mtime_ns=5), replace(Y, mtime_ns=-7), file(b"y", mtime_ns=5)),
        (X, replace(X, owner=(1, 1)), replace(X, attributes=((b"user.a", b""),)),
         file(b"x", owner=(1, 1), attributes=((b"user.a", b""),))),
        (X, symlink(b"a"), X, symlink(b"a")),
        (symlink(b"a"), symlink(b"b"), symlink(b"a"), symlink(b"b")),
        (X, DIRECTORY, X, DIRECTORY),
        (DIRECTORY, X, replace(DIRECTORY, mtime_ns=4), X),  # a directory's own mtime is no change of it
        (DIRECTORY, None, replace(DIRECTORY, mtime_ns=4), None),
        (X, replace(DIRECTORY, mode=0o700), replace(DIRECTORY, mode=0o700, mtime_ns=3),
         replace(DIRECTORY, mode=0o700, mtime_ns=3)),
    ],
)  # fmt: skip
def test_what_can_be_merged_is(base: Node | None, left: Node | None, right: Node | None, result: Node | None) -> None:
    three = [tree({b"a": node} if node else {}) for node in (base, left, right)]
    assert merged(three[0], three[1], three[2]) == tree({b"a": result} if result else {})


@pytest.mark.parametrize(
    ("base", "left", "right", "kinds"),
    [
        (X, Y, Z, "content"),
        (X, replace(Y, mtime_ns=1), replace(Z, mtime_ns=2), "content mtime"),
        (X, replace(Y, mtime_ns=1), replace(Z, mtime_ns=1), "content"),
        (None, Y, Z, "content"),
        (X, replace(X, mode=0o600), replace(X, mode=0o700), "mode"),
        (X, replace(Y, mode=0o600), replace(Z, mode=0o700), "content mode"),
        (X, replace(X, owner=(1, 1)), replace(X, owner=(1, 2)), "owner"),
        (X, replace(X, attributes=((b"user.a", b"1"),)), replace(X, attributes=((b"user.a", b"2"),)), "attributes"),
        (X, None, Y, "deleted_changed"),
        (X, None, replace(X, mtime_ns=1), "deleted_changed"),
        (X, None, symlink(b"x"), "deleted_changed"),
        (X, None, DIRECTORY, "deleted_changed"),
        (DIRECTORY, None, X, "deleted_changed"),
        (DIRECTORY, None, replace(DIRECTORY, mode=0o700), "deleted_changed"),
        (X, symlink(b"a"), DIRECTORY, "type"),
        (None, X, DIRECTORY, "type"),
        (X, Y, DIRECTORY, "type"),
        (X, symlink(b"a"), replace(X, mode=0o600), "type"),
        (symlink(b"a"), symlink(b"b"), symlink(b"c"), "content"),
        (DIRECTORY, replace(DIRECTORY, mode=0o700), replace(DIRECTORY, mode=0o711), "mode"),
        (X, replace(DIRECTORY, mode=0o700), replace(DIRECTORY, mode=0o711), "mode"),
    ],
)
def test_what_both_changed_is_a_conflict(base: Node | None, left: Node | None, right: Node | None, kinds: str) -> None:
    three = [tree({b"a": node} if node else {}) for node in (base, left, right)]
    assert merged(three[0], three[1], three[2]) == {b"a": tuple(kinds.split())}


def test_equal_bytes_never_conflict_whatever_their_holes() -> None:
    data = b"x" * 4_096 + bytes(8_192) + b"y" * 100
    plain, holes = tree(a=file(data)), tree(a=file(data, holes=True))
    changed = tree(a=file(data + b"more"))
    assert merged(tree(), plain, holes) in (plain, holes)
    assert merged(tree(a=X), plain, holes) in (plain, holes)
    assert merged(plain, holes, changed) == changed
    assert merged(holes, plain, changed) == changed
    assert merged(holes, tree(a=file(data[:-1] + b"z")), changed) == {b"a": ("content",)}
    zeros = bytes(9_000)
    assert isinstance(merged(tree(), tree(a=file(zeros)), tree(a=file(zeros + b"x", holes=True))), dict)
    assert merged(tree(), tree(a=file(zeros)), tree(a=file(zeros[:-1] + b"x", holes=True))) == {b"a": ("content",)}


# ---- directories ---------------------------------------------------------------------------------------------------


def test_a_removed_directory_conflicts_with_what_was_done_in_it() -> None:
    base = tree(d__keep=X, d__edit=X, d__e__deep=X, other=X)
    right = put(put(put(base, b"d/new/file", X), b"d/edit", Y), b"d/e/more", X)
    assert merged(base, remove(base, b"d"), right) == {
        b"d/e/more": ("deleted_changed",),
        b"d/edit": ("deleted_changed",),
        b"d/new": ("deleted_changed",),
    }


def test_a_removed_directory_takes_what_the_other_side_removed_in_it_along() -> None:
    base = tree(d__a=X, d__b=X, other=X)
    right = remove(base, b"d/a") | {b"d": replace(DIRECTORY, mtime_ns=9)}
    assert merged(base, remove(base, b"d"), right) == tree(other=X)


def test_a_directory_that_became_a_file_conflicts_with_new_files_in_it() -> None:
    base = tree(d__a=X)
    assert merged(base, put(base, b"d", X), put(base, b"d/b", X)) == {b"d": ("type",)}
    assert merged(base, put(base, b"d", X), base) == tree(d=X)


def test_both_sides_may_add_to_one_new_directory() -> None:
    result = merged(tree(), tree(d__a=X, d__same=X), tree({b"d": replace(DIRECTORY, mtime_ns=2)}, d__b=Y, d__same=X))
    assert result == tree({b"d": replace(DIRECTORY, mtime_ns=2)}, d__a=X, d__b=Y, d__same=X)


def test_conflicts_below_a_directory_in_conflict_are_told_too() -> None:
    base, left, right = (tree({b"d": replace(DIRECTORY, mode=mode)}, d__a=node, e=node)
                         for mode, node in ((0o755, X), (0o700, Y), (0o711, Z)))  # fmt: skip
    assert merged(base, left, right) == {b"d": ("mode",), b"d/a": ("content",), b"e": ("content",)}


# ---- hard links ----------------------------------------------------------------------------------------------------


def linked(*paths: str, node: Node = X, also: Tree | None = None) -> Tree:
    """A state in which these names are one file."""
    return tree({**(also or {}), **{path.encode(): replace(node, inode=1) for path in paths}})


def test_names_that_both_sides_gave_a_file_are_all_kept() -> None:
    assert merged(linked("b", "c"), linked("a", "b", "c"), linked("b", "c", "d")) == of(linked("a", "b", "c", "d"))


def test_a_link_id_follows_the_first_name_that_is_left() -> None:
    base = linked("a/1", "b/2", also=tree(z=X))
    left = remove(base, b"a")
    right = linked("a/1", "b/2", "c/3", also=tree(z=X))
    assert merged(base, left, right) == of(linked("b/2", "c/3", also=tree(z=X)))


def test_a_link_id_changes_deep_in_a_directory_that_no_side_touched() -> None:
    base = linked("b/x/1", "b/x/2", "b/x/3")
    assert merged(base, linked("a/0", "b/x/1", "b/x/2", "b/x/3"), put(base, b"z", Y)) == of(
        linked("a/0", "b/x/1", "b/x/2", "b/x/3", also=tree(z=Y))
    )


def test_a_name_that_is_left_alone_has_no_link() -> None:
    base = linked("a", "b", "c")
    assert merged(base, remove(base, b"a"), remove(base, b"b")) == tree(c=X)


def test_a_new_name_follows_what_the_other_side_wrote() -> None:
    base = tree(q=X)
    assert merged(base, linked("q", "r"), tree(q=Y)) == of(linked("q", "r", node=Y))


def test_a_file_written_on_one_side_is_written_under_all_names() -> None:
    base = linked("a", "b")
    left = linked("a", "b", node=Y)
    right = linked("a", "b", "c", node=replace(X, mode=0o600))
    assert merged(base, left, right) == of(linked("a", "b", "c", node=replace(Y, mode=0o600)))


def test_parting_and_writing_through_the_other_name_is_a_conflict_of_neither() -> None:
    """One side made two files of it, the other wrote both: each name has one answer."""
    base = linked("a", "b")
    assert merged(base, tree(a=X, b=X), linked("a", "b", node=Y)) == tree(a=Y, b=Y)


def test_a_third_name_for_a_file_that_the_other_side_parted_is_a_conflict() -> None:
    base = linked("a", "b")
    found = merged(base, linked("a", "b", "c"), tree(a=X, b=X))
    assert found == {b"a": ("link",), b"b": ("link",), b"c": ("link",)}


def test_two_files_of_the_ancestor_linked_on_one_side_and_written_on_the_other_conflict() -> None:
    base = tree(a=X, b=Y)
    assert merged(base, linked("a", "b"), tree(a=Z, b=Y)) == {b"a": ("link",), b"b": ("link",)}
    assert merged(base, linked("a", "b"), base) == of(linked("a", "b"))


def test_new_names_linked_on_one_side_only_conflict() -> None:
    assert merged(tree(), linked("a", "b"), tree(a=X, b=X)) == {b"a": ("link",), b"b": ("link",)}


def test_chains_of_links_conflict() -> None:
    base = tree(a=X, b=X, c=X)
    found = merged(base, linked("a", "b", also=tree(c=X)), linked("b", "c", also=tree(a=X)))
    assert found == {b"a": ("link",), b"b": ("link",), b"c": ("link",)}


def test_removing_one_name_and_writing_the_file_is_a_conflict_at_that_name() -> None:
    base = linked("a", "b", "c")
    assert merged(base, remove(base, b"b"), linked("a", "b", "c", node=Y)) == {b"b": ("deleted_changed",)}


def test_removing_a_name_does_not_conflict_with_linking_it() -> None:
    base = tree(a=X, b=Y)
    assert merged(base, remove(base, b"a"), linked("a", "c", also=tree(b=Y))) == tree(b=Y, c=X)


def test_a_name_that_became_a_symlink_does_not_pull_others_along() -> None:
    base = tree(q=X)
    assert merged(base, linked("q", "r"), tree(q=symlink(b"s"))) == {b"q": ("link",), b"r": ("link",)}


def test_names_of_linked_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_NAMES", 2)
    base = linked("a", "b")
    assert merged(base, remove(base, b"b"), base) == tree(a=X)
    base = linked("a", "b", "c")
    with pytest.raises(LimitExceededError, match="linked"):
        merged(base, remove(base, b"b"), base)


# ---- any states ----------------------------------------------------------------------------------------------------


def oracle(base: Tree, left: Tree, right: Tree) -> Tree | None:
    """The rules of the documentation, path by path and pair by pair; None for a conflict."""
    out: Tree = {}
    for path in sorted(base.keys() | left.keys() | right.keys()):
        try:
            node = oracle_path(*(bare(side.get(path)) for side in (base, left, right)))
        except ValueError:
            return None
        if node is not None:
            out[path] = node
    if any(path and (states.parent(path) not in out or out[states.parent(path)].type is not Type.DIRECTORY)
           for path in out):  # fmt: skip
        return None
    names = [path for path, node in out.items() if node.type is not Type.DIRECTORY]
    groups: dict[bytes, set[bytes]] = {path: {path} for path in names}
    apart = []
    for one, two in combinations(names, 2):
        together = [oracle_pair(side, one, two) for side in (base, left, right)]
        match together:
            case _, None, None:
                continue
            case (_, True, True | None) | (_, None, True) | (False, True, False) | (False, False, True):
                joined = groups[one] | groups[two]
                for path in joined:
                    groups[path] = joined
            case None, True | False, True | False if together[1] != together[2]:
                return None
            case _:
                apart.append((one, two))
    if any(two in groups[one] for one, two in apart):
        return None
    for number, group in enumerate({id(group): group for group in groups.values()}.values(), 1):
        both = [path for path in group if all(stands(side, path) for side in (left, right))]
        if len({out[path] for path in both or group}) > 1 or len({out[path].type for path in group}) > 1:
            return None
        node = out[(both or sorted(group))[0]]
        for path in group:
            out[path] = replace(node, inode=number)
    return out


def stands(state: Tree, path: bytes) -> bool:
    return path in state and state[path].type is not Type.DIRECTORY


def bare(node: Node | None) -> Node | None:
    return node and replace(node, inode=None)


def oracle_pair(state: Tree, one: bytes, two: bytes) -> bool | None:
    if not stands(state, one) or not stands(state, two):
        return None
    return state[one].inode == state[two].inode is not None


def oracle_path(base: Node | None, left: Node | None, right: Node | None) -> Node | None:
    if left == right or base == right:
        return left
    if base == left:
        return right
    if left is None or right is None or left.type is not right.type:
        for one, two in ((left, right), (right, left)):
            if (
                base
                and one
                and base.type is one.type is Type.DIRECTORY
                and replace(one, mtime_ns=base.mtime_ns) == base
            ):
                return two
        raise ValueError
    if base and base.type is not left.type:
        base = None

    def field(of: Callable[[Node], object]) -> Node:
        if of(left) == of(right) or (base and of(base) == of(right)):
            return left
        if base and of(base) == of(left):
            return right
        raise ValueError

    try:
        time = field(lambda node: node.mtime_ns).mtime_ns
    except ValueError:
        time = max(left.mtime_ns, right.mtime_ns)
    return replace(
        left,
        data=field(lambda node: node.data).data,
        mode=field(lambda node: node.mode).mode,
        attributes=field(lambda node: node.attributes).attributes,
        mtime_ns=time,
    )


@given(states.states(), states.edits(), states.edits())
@settings(deadline=None)
def test_any_merge_is_what_the_rules_say(base: Tree, left: list[Edit], right: list[Edit]) -> None:
    sides = states.apply(base, left), states.apply(base, right)
    expected = oracle(base, *sides)
    found = merged(base, *sides)
    if expected is None:
        assert all(isinstance(kinds, tuple) for kinds in found.values())
    else:
        assert found == of(expected)


_names = st.sampled_from([b"a", b"b", b"c", b"d/e"])
_link_edits = st.lists(
    st.builds(Edit, st.sampled_from(["put", "remove", "link", "link", "link", "write"]), _names, _names,
              st.sampled_from([X, X, Y])),
    max_size=4,
)  # fmt: skip


@given(_link_edits, _link_edits, _link_edits)
@settings(deadline=None)
def test_links_merge_as_the_rules_say(base_: list[Edit], left: list[Edit], right: list[Edit]) -> None:
    base = states.apply(tree(a=X, b=X, c=X), base_)
    sides = states.apply(base, left), states.apply(base, right)
    expected = oracle(base, *sides)
    found = merged(base, *sides)
    if expected is None:
        assert all(isinstance(kinds, tuple) for kinds in found.values())
    else:
        assert found == of(expected)


@given(states.states(), states.states(), states.edits(), states.edits())
@settings(deadline=None)
def test_edits_of_disjoint_paths_all_come_out(one: Tree, two: Tree, left: list[Edit], right: list[Edit]) -> None:
    """What each side did in a directory of its own is there afterwards, with every link."""

    def both(one: Tree, two: Tree) -> Tree:
        shifted = {path: replace(node, inode=node.inode and node.inode + 1_000) for path, node in two.items()}
        return tree(
            {b"l/" + path if path else b"l": node for path, node in one.items()}
            | {b"r/" + path if path else b"r": node for path, node in shifted.items()}
        )

    base = both(one, two)
    after = states.apply(one, left), states.apply(two, right)
    assert merged(base, both(after[0], two), both(one, after[1])) == of(both(*after))


@given(states.states(), states.states())
@settings(deadline=None)
def test_a_side_that_did_nothing_takes_all_of_the_other(base: Tree, side: Tree) -> None:
    objects = MemoryObjects()
    roots = build(objects, base), build(objects, side)
    before = len(objects)
    for left, right, result in ((0, 1, 1), (1, 0, 1), (1, 1, 1), (0, 0, 0)):
        assert merge(objects, objects, roots[0], roots[left], roots[right]) == Merged(roots[result])
    assert len(objects) == before


# ---- what it costs -------------------------------------------------------------------------------------------------


class Counting(MemoryObjects):
    def __init__(self) -> None:
        super().__init__()
        self.reads: set[bytes] = set()

    def read(self, id: bytes, kind: Kind) -> bytes:
        self.reads.add(id)
        return super().read(id, kind)


def test_what_one_side_left_alone_is_not_opened() -> None:
    objects = Counting()
    base = tree(a__b__c=X, d__e=X, same__x=X, same__y=symlink(b"x"))
    roots = [build(objects, state) for state in (base, put(base, b"a/b/n", X), put(base, b"d/n", X))]
    objects.reads.clear()
    done = merge(objects, objects, roots[0], roots[1], roots[2])
    reads = set(objects.reads)
    assert done.root is not None
    assert states.read(objects, done.root) == put(put(base, b"a/b/n", X), b"d/n", X)
    assert dict(walk.walk(objects, roots[0]))[b"same"].content not in reads
    assert len(reads) <= 3 + 2 * 3  # three roots, and what the search for links opened on the way to both changes


def test_large_directories_merge_to_what_a_capture_makes() -> None:
    base = tree({b"%05d" % number: X for number in range(3_000)})
    left = base | {b"%05d" % number: Y for number in range(0, 3_000, 2)}
    right = {path: node for path, node in base.items() if not path.endswith(b"7")} | {b"%05d-" % 100: Z}
    expected = {path: node for path, node in left.items() if not path.endswith(b"7")} | {b"%05d-" % 100: Z}
    assert merged(base, left, right) == tree(expected)


def test_trees_of_the_greatest_depth_merge() -> None:
    objects = MemoryObjects()
    roots = [chain(objects, names) for names in ((), (b"a",), (b"b",), (b"a", b"b"))]
    assert merge(objects, objects, roots[0], roots[1], roots[2]) == Merged(roots[3])


def chain(objects: MemoryObjects, names: tuple[bytes, ...]) -> Entry:
    """A thousand directories inside each other, with empty files in the last."""
    entries = [Entry(name, Type.FILE, 0o644, 0) for name in names]
    for _ in range(1_000):
        content = put_tree(entries, objects.put)
        entries = [Entry(b"d", Type.DIRECTORY, 0o755, 0, content=content)]
    return Entry(b"", Type.DIRECTORY, 0o755, 0, content=put_tree(entries, objects.put))


def test_conflicts_are_listed_up_to_a_bound_and_counted() -> None:
    objects = MemoryObjects()
    roots = [build(objects, tree({b"%05d" % n: node for n in range(MAX_CONFLICTS + 5)})) for node in (X, Y, Z)]
    before = len(objects)
    done = merge(objects, objects, roots[0], roots[1], roots[2])
    assert done.root is None
    assert done.count == MAX_CONFLICTS + 5
    assert len(done.conflicts) == MAX_CONFLICTS
    assert done.conflicts[1] == Conflict(b"00001", (ConflictKind.CONTENT,))
    assert len(objects) == before  # nothing is written for what cannot be merged
