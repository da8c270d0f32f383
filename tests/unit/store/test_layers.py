"""OCI layers: what one state needs to become another, and what comes of applying it, ours and umoci's."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import InvalidRequestError, PayloadTooLargeError
from agent_sandbox.store import walk
from agent_sandbox.store.assembly import Assembly
from agent_sandbox.store.layers import read_layer, write_layer
from agent_sandbox.store.objects import Entry, Kind, Type
from agent_sandbox.store.outcomes import Left, LeftOut
from agent_sandbox.store.ports import Options
from agent_sandbox.store.reference import ReferenceEngine
from agent_sandbox.store.shape import Shapes
from agent_sandbox.store.tarinput import Limits
from agent_sandbox.store.tarout import write_tar
from agent_sandbox.store.tarread import TarReader
from tests.unit.store import states
from tests.unit.store.engines import capture
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.oci import unpack
from tests.unit.store.states import DIRECTORY, Tree, file, symlink, tree
from tests.unit.store.tars import END, listing, pax, raw
from tests.unit.store.trees import Edit, State, apply, build, edits, scratch, state_of, trees

REFERENCE = ReferenceEngine()
random = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


class Watched(MemoryObjects):
    """Remembers which objects were read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[bytes] = set()

    def read(self, id: bytes, kind: Kind) -> bytes:
        self.seen.add(id)
        return super().read(id, kind)


def layer(store: MemoryObjects, old: Entry | None, new: Entry) -> bytes:
    out = io.BytesIO()
    write_layer(store, old, new, out)
    return out.getvalue()


def names(archive: bytes) -> list[str]:
    """The names in a layer as they come, links with what they lead to."""
    reader = TarReader(io.BytesIO(archive), empty=True)
    found = []
    while (member := reader.next()) is not None:
        link = f" = {member.link.decode()}" if member.kind.value == "hard link" else ""
        found.append(member.path.decode(errors="backslashreplace") + link)
    return found


def between(old: Tree | None, new: Tree) -> list[str]:
    store = MemoryObjects()
    return names(layer(store, states.build(store, old) if old is not None else None, states.build(store, new)))


def applied(base: Tree | None, members: Iterable[bytes]) -> dict[str, str]:
    store = MemoryObjects()
    under = states.build(store, base) if base is not None else None
    captured = read_layer(io.BytesIO(b"".join(members) + END), store, store, under)
    return listing(store, captured.root)


def hidden(paths: Iterable[bytes]) -> bool:
    return any(name.startswith(b".wh.") for path in paths for name in path.split(b"/"))


# ---- there and back ------------------------------------------------------------------------------------------------


@random
@given(old=states.states(), changes=states.edits(8))
def test_a_layer_makes_one_state_of_the_other(old: Tree, changes: list[states.Edit]) -> None:
    store = MemoryObjects()
    before, after = states.build(store, old), states.build(store, states.apply(old, changes))
    archive = layer(store, before, after)
    captured = read_layer(io.BytesIO(archive), store, store, before)
    assert captured.root == after
    assert archive == layer(store, before, after)


@random
@given(old=states.states(), new=states.states(), owned=st.booleans())
def test_states_that_have_nothing_in_common(old: Tree, new: Tree, owned: bool) -> None:
    store = MemoryObjects()
    if owned:
        new = {path: replace(node, owner=(node.mode, 7)) for path, node in new.items()}
    before, after = states.build(store, old), states.build(store, new)
    archive = layer(store, before, after)
    assert read_layer(io.BytesIO(archive), store, store, before, options=Options(owners=owned)).root == after


@random
@given(state=states.states())
def test_the_first_layer_is_the_archive(state: Tree) -> None:
    store = MemoryObjects()
    root = states.build(store, state)
    out = io.BytesIO()
    write_tar(store, root, out)
    assert layer(store, None, root) == out.getvalue()
    assert read_layer(io.BytesIO(out.getvalue()), store, store, None).root == root


def as_umoci_can(directory: Path) -> dict[bytes, State]:
    """A tree without what umoci 0.4 cannot restore, from whatever archive.

    Holes, times before 1970 and far ahead, attributes without a value or with signs in their names.
    """
    found = {}
    for path, state in state_of(directory).items():
        whole = os.fsencode(directory) + b"/" + path
        found[path] = replace(
            state,
            runs=(),
            digest=hashlib.sha256(Path(os.fsdecode(whole)).read_bytes()).hexdigest() if state.type == "-" else "",
            mtime_ns=state.mtime_ns if 0 <= state.mtime_ns < 10**9 << 33 else 0,
            attributes=tuple((name, value) for name, value in state.attributes if value and not {"%", "="} & set(name)),
        )
    return found


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(first=trees(), changes=edits())
def test_umoci_makes_the_same_of_it(first: list[Edit], changes: list[Edit]) -> None:
    with scratch() as place:
        store = MemoryObjects()
        build(place / "tree", first)
        old = capture(REFERENCE, place / "tree", store).root
        apply(place / "tree", changes)
        new = capture(REFERENCE, place / "tree", store).root
        assume(not hidden(path for root in (old, new) for path, _ in walk.walk(store, root)))
        unpacked = unpack(place, [layer(store, None, old), layer(store, old, new)])
        assert as_umoci_can(unpacked) == as_umoci_can(place / "tree")


# ---- written -------------------------------------------------------------------------------------------------------


def test_nothing_changed() -> None:
    state = tree(a__b=file(b"x"))
    assert between(state, state) == []
    assert between(state, state | {b"": replace(DIRECTORY, mode=0o700)}) == ["./"]


def test_only_what_changed_and_the_way_to_it() -> None:
    old = tree(a__b__c=file(b"1"), a__d=file(b"2"), e__f=file(b"3"), g=file(b"4"))
    assert between(old, old | {b"a/b/c": file(b"new")}) == ["./", "a/", "a/b/", "a/b/c"]
    assert between(old, old | {b"a/b": replace(DIRECTORY, mode=0o700)}) == ["./", "a/", "a/b/"]
    assert between(old, old | {b"a/b/c": file(b"1", mtime_ns=1)}) == ["./", "a/", "a/b/", "a/b/c"]


def test_whiteouts_come_before_siblings() -> None:
    old = tree(a__b=file(), a__c__d=file(), z=file())
    assert between(old, tree(a__a=file(), a__x=file())) == ["./", ".wh.z", "a/", "a/.wh.b", "a/.wh.c", "a/a", "a/x"]


def test_a_change_of_type_needs_no_whiteout() -> None:
    old, new = tree(a=file(b"x"), b__c=file()), tree(a__x=file(), b=symlink(b"a"))
    assert between(old, new) == ["./", "a/", "a/x", "b"]


def test_the_form_of_a_whiteout() -> None:
    store = MemoryObjects()
    archive = layer(store, states.build(store, tree(a=file(b"x"))), states.build(store, tree()))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        whiteout = tar.getmember(".wh.a")
    assert (whiteout.type, whiteout.size) == (tarfile.REGTYPE, 0)


@pytest.mark.parametrize("old", [None, tree(), tree(d__x=file(b"old")), tree(d=file())])
@pytest.mark.parametrize("name", [b".wh.x", b".wh.", b".wh..wh..opq"])
def test_a_name_that_a_layer_cannot_have_is_refused_before_the_first_byte(old: Tree | None, name: bytes) -> None:
    store = MemoryObjects()
    before = states.build(store, old) if old is not None else None
    after = states.build(store, tree({b"d/" + name: file(b"new"), b"a": file()}))
    out = io.BytesIO()
    with pytest.raises(InvalidRequestError, match=re.escape(f"'.wh.': d/{name.decode()}")):
        write_layer(store, before, after, out)
    assert not out.getvalue()


def test_such_a_name_may_not_go_either_but_may_stay() -> None:
    old = tree({b"d/.wh.x": file(b"x"), b"d/e": file()})
    with pytest.raises(InvalidRequestError, match=r"d/\.wh\.x"):
        between(old, states.remove(old, b"d/.wh.x"))
    with pytest.raises(InvalidRequestError, match=r"d/\.wh\.x"):
        between(old, old | {b"d/.wh.x": file(b"y")})
    assert between(old, old | {b"d/e": file(b"y")}) == ["./", "d/", "d/e"]
    assert between(old, tree()) == ["./", ".wh.d"]


def test_equal_directories_are_not_read() -> None:
    old = tree({b"same/%d/%d" % (index, name): file(b"x") for index in range(9) for name in range(9)} | {b"a": file()})
    store = Watched()
    before = states.build(store, old)
    after = states.build(store, old | {b"a": file(b"new"), b"same": replace(DIRECTORY, mode=0o700)})
    same = walk.lookup(store, before, b"same")
    assert same is not None
    assert same.content is not None
    store.seen.clear()
    archive = layer(store, before, after)
    assert names(archive) == ["./", "a", "same/"]
    assert same.content not in store.seen
    store.seen.clear()
    assert read_layer(io.BytesIO(archive), store, store, before).root == after
    assert same.content not in store.seen


# ---- hard links ----------------------------------------------------------------------------------------------------


def test_all_names_of_an_inode_are_in_the_layer() -> None:
    old = tree({b"k/a": file(b"x", inode=1), b"m/b": file(b"x", inode=1), b"z": file(b"z")})
    changed = states.write(old, b"m/b", file(b"new"))
    assert between(old, changed) == ["./", "k/", "k/a", "m/", "m/b = k/a"]
    # A new name that comes first renames the inode; one that does not is found all the same.
    assert between(old, states.link(old, b"k/a", b"b")) == ["./", "b", "k/", "k/a = b", "m/", "m/b = b"]
    assert between(old, states.link(old, b"k/a", b"q")) == ["./", "k/", "k/a", "m/", "m/b = k/a", "q = k/a"]
    assert between(old, states.remove(old, b"m/b")) == ["./", "k/", "k/a", "m/", "m/.wh.b"]
    three = states.link(old, b"k/a", b"q")
    assert between(three, states.remove(three, b"q")) == ["./", ".wh.q"]


def test_the_search_for_other_names_meets_a_name_that_cannot_be() -> None:
    old = tree({b"a": file(b"x", inode=1), b"d/.wh.b": file(b"x", inode=1)})
    with pytest.raises(InvalidRequestError, match=r"d/\.wh\.b"):
        between(old, states.link(old, b"a", b"z"))


def linked(base: Tree, members: Iterable[bytes]) -> list[set[str]]:
    """Names that are one file after a layer was applied."""
    store = MemoryObjects()
    captured = read_layer(io.BytesIO(b"".join(members) + END), store, store, states.build(store, base))
    assert not list(Shapes(store).faults(captured.root))
    groups: dict[int, set[str]] = {}
    for path, node in states.read(store, captured.root).items():
        if node.inode is not None:
            groups.setdefault(node.inode, set()).add(path.decode())
    return sorted(groups.values(), key=min)


def test_names_of_the_base_come_and_go() -> None:
    base = tree({name: file(b"x", inode=1) for name in (b"a/1", b"b/2", b"c/d/3")} | {b"e": file(b"e")})
    assert linked(base, [raw(b"e", data=b"y")]) == [{"a/1", "b/2", "c/d/3"}]
    assert linked(base, [raw(b"a/.wh.1")]) == [{"b/2", "c/d/3"}]
    assert linked(base, [raw(b".wh.a"), raw(b".wh.b")]) == []
    assert linked(base, [raw(b"c/.wh..wh..opq")]) == [{"a/1", "b/2"}]
    assert linked(base, [raw(b"c", data=b"file")]) == [{"a/1", "b/2"}]
    assert linked(base, [raw(b"0", b"1", link=b"b/2")]) == [{"0", "a/1", "b/2", "c/d/3"}]
    assert linked(base, [raw(b"f", b"1", link=b"e")]) == [{"a/1", "b/2", "c/d/3"}, {"e", "f"}]
    assert linked(base, [raw(b"b/2", data=b"own"), raw(b"f", b"1", link=b"b/2")]) == [{"a/1", "c/d/3"}, {"b/2", "f"}]


# ---- read: the examples of the specification -----------------------------------------------------------------------

BASE = tree(a__b__c__bar=file(b"bar"))
NEW = [raw(b"a/", b"5"), raw(b"a/b/", b"5"), raw(b"a/b/c/", b"5"), raw(b"a/b/c/foo", data=b"foo")]


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("whiteout", [b"a/.wh..wh..opq", b"a/.wh.b"])
def test_a_whiteout_hides_the_layer_below_wherever_it_is(at: int, whiteout: bytes) -> None:
    members = [*NEW[:at], raw(whiteout), *NEW[at:]]
    assert applied(BASE, members) == {"a": "/", "a/b": "/", "a/b/c": "/", "a/b/c/foo": "foo"}


def test_without_whiteouts_a_layer_adds() -> None:
    assert applied(BASE, NEW)["a/b/c/bar"] == "bar"


def test_explicit_and_opaque_whiteouts_of_a_directory() -> None:
    base = tree(
        {
            b"etc/my-app-config": file(),
            b"bin/my-app-binary": file(),
            b"bin/my-app-tools": file(),
            b"bin/tools/one": file(),
        }
    )
    left = {"bin": "/", "etc": "/", "etc/my-app-config": ""}
    assert applied(base, [raw(b"bin/", b"5"), raw(b"bin/.wh..wh..opq")]) == left
    assert applied(base, [raw(b"bin/.wh." + name) for name in (b"my-app-binary", b"my-app-tools", b"tools")]) == left
    assert applied(base, [raw(b"./.wh..wh..opq")]) == {}


def test_a_directory_over_a_directory_keeps_what_is_in_it_and_takes_what_it_is() -> None:
    store = MemoryObjects()
    base = states.build(store, tree(a__b=file(b"x")))
    header = pax([(b"SCHILY.xattr.user.a", b"1")])
    captured = read_layer(io.BytesIO(header + raw(b"a/", b"5", mode=b"0000700\0") + END), store, store, base)
    found = states.read(store, captured.root)
    assert found[b"a/b"] == file(b"x")
    assert found[b"a"] == states.Node(Type.DIRECTORY, b"", 0o700, 5_000_000_000, attributes=((b"user.a", b"1"),))


def test_anything_else_replaces_what_was_there() -> None:
    base = tree(a__b=file(b"x"), c=file(b"y"), d=symlink(b"a"))
    assert applied(base, [raw(b"a", data=b"file")]) == {"a": "file", "c": "y", "d": "-> a"}
    assert applied(base, [raw(b"d/", b"5"), raw(b"c/", b"5"), raw(b"c/x")]) == {
        "a": "/",
        "a/b": "x",
        "c": "/",
        "c/x": "",
        "d": "/",
    }
    assert applied(base, [raw(b"c", b"3")]) == {"a": "/", "a/b": "x", "d": "-> a"}


def test_a_hidden_directory_that_the_layer_only_passes_through_is_a_new_one() -> None:
    store = MemoryObjects()
    attributes = ((b"user.a", b"1"),)
    base = states.build(store, tree({b"a": replace(DIRECTORY, mode=0o700, attributes=attributes), b"a/b": file()}))
    for members in ([raw(b"a/c"), raw(b".wh.a")], [raw(b".wh.a"), raw(b"a/c")]):
        captured = read_layer(io.BytesIO(b"".join(members) + END), store, store, base)
        found = states.read(store, captured.root)
        assert set(found) == {b"", b"a", b"a/c"}
        assert found[b"a"] == DIRECTORY


def test_whiteouts_of_nothing_do_nothing() -> None:
    members = [raw(b".wh.no"), raw(b"no/.wh.x"), raw(b"no/.wh..wh..opq"), raw(b"f/x/.wh.y"), raw(b".wh." + b"n" * 90)]
    assert applied(tree(f__y=file(b"x")), members) == {"f": "/", "f/y": "x"}
    assert applied(None, [*members, raw(b"a", data=b"a"), raw(b".wh.a"), raw(b".wh..wh..opq")]) == {"a": "a"}
    assert applied(tree(a=file(b"a")), []) == {"a": "a"}


@pytest.mark.parametrize(
    "member",
    [
        raw(b".wh."),
        raw(b"a/.wh.."),
        raw(b".wh..."),
        raw(b".wh..wh.x"),
        raw(b".wh..wh..opq.x"),
        raw(b".wh.x", b"5"),
        raw(b".wh.x", b"2", link=b"a"),
        raw(b".wh..wh..opq/", b"5"),
        raw(b".wh.x/y"),
        raw(b"l/.wh.x"),
        raw(b"l/x"),
        raw(b"../.wh.x"),
        raw(b"/.wh.x"),
        raw(b"x", b"1", link=b".wh.a"),
    ],
    ids=range(14),
)
def test_hostile_layers_are_refused(member: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        applied(tree(a=file(b"a"), l=symlink(b"/tmp")), [member])


def test_an_opaque_whiteout_does_not_follow_a_symlink() -> None:
    base = tree(d__x=file(b"x"), l=symlink(b"d"))
    assert applied(base, [raw(b"l/.wh..wh..opq")]) == {"d": "/", "d/x": "x", "l": "-> d"}


@pytest.mark.parametrize("whiteout", [b"d/.wh..wh..opq", b".wh..wh..opq"])
def test_repeated_whiteouts_look_once(whiteout: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []
    hide = Assembly._hide

    def counted(self: Assembly, parent: Any, name: bytes) -> None:
        looked.extend(parent.names[name].names if name == b"d" and not parent.names[name].pure else [name])
        hide(self, parent, name)

    monkeypatch.setattr(Assembly, "_hide", counted)
    base = tree({b"d/%d" % index: file() for index in range(50)})
    own = [raw(b"d/own-%d" % index) for index in range(50)]
    assert len(applied(base, [*own, *[raw(whiteout)] * 100])) == 51
    assert len(looked) <= 100 + 100


def test_limits_and_reports_are_those_of_archives() -> None:
    store = MemoryObjects()
    base = states.build(store, tree({b"d/%03d" % index: file() for index in range(200)}))
    archive = raw(b"d/x", data=b"x") + raw(b"null", b"3") + END
    report = read_layer(io.BytesIO(archive), store, store, base).report
    assert (report.files, report.directories, report.bytes) == (201, 1, 1)
    assert report.left_out == (LeftOut(b"null", Left.DEVICE),)
    with pytest.raises(PayloadTooLargeError):
        read_layer(io.BytesIO(archive), store, store, base, limits=Limits(memory=50_000))
    with pytest.raises(PayloadTooLargeError):
        read_layer(io.BytesIO(archive), store, store, base, limits=Limits(entries=1))
