"""Import of archives: the state is that of a capture; what is hostile is refused, what has no place is reported."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import InvalidRequestError, PayloadTooLargeError
from agent_sandbox.store import tarin, walk
from agent_sandbox.store.objects import Type, encode_root, link_id
from agent_sandbox.store.outcomes import Left, LeftOut
from agent_sandbox.store.ports import Captured, Options
from agent_sandbox.store.reference import ReferenceEngine
from agent_sandbox.store.tarin import read_tar
from agent_sandbox.store.tarinput import Limits
from agent_sandbox.store.tarout import write_tar
from tests.unit.store import states
from tests.unit.store.engines import capture
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.tars import END, attributes, listing, pax, raw, with_python
from tests.unit.store.trees import Data, Edit, Link, Looks, Make, build, scratch, state_of, trees

random = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
REFERENCE = ReferenceEngine()


def load(archive: bytes, store: MemoryObjects | None = None, *, owners: bool = False) -> tuple[MemoryObjects, Captured]:
    store = store or MemoryObjects()
    return store, read_tar(io.BytesIO(archive), store, store, options=Options(owners=owners))


def found(archive: bytes) -> dict[str, str]:
    store, captured = load(archive)
    return listing(store, captured.root)


def gnu_tar(directory: Path, *options: str) -> bytes:
    command = ["tar", "-C", str(directory), *options, "-cf", "-", "."]
    return subprocess.run(command, check=True, capture_output=True).stdout


# ---- the same as a capture -----------------------------------------------------------------------------------------


@random
@given(tree=trees(), order=st.sampled_from(["none", "name", "inode"]))
def test_an_archive_of_gnu_tar_is_a_capture(tree: list[Edit], order: str) -> None:
    with scratch() as place:
        build(place / "tree", tree)
        # GNU tar 1.34 writes the names of a FIFO as several, and no holes of a file of less than one block of a tar.
        states = state_of(place / "tree").values()
        assume(not any(state.type == "p" and state.names for state in states))
        assume(not any(0 < state.size < 512 and state.runs != ((0, state.size),) for state in states))
        captured = capture(REFERENCE, place / "tree", MemoryObjects())
        archive = gnu_tar(place / "tree", "--format=pax", "--xattrs", "--sparse", f"--sort={order}")
        imported = load(archive)[1]
        assert imported.root == captured.root
        assert replace(imported.report, stored=0) == replace(captured.report, stored=0)
        assert load(gzip.compress(archive, 1))[1].root == captured.root


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar"])
def test_older_formats_hold_what_they_can(form: str) -> None:
    looks = Looks(0o4755, 1_600_000_000 * 10**9)
    tree: list[Edit] = [
        Make(0, b"d", None, False, looks),
        Make(1, b"file", Data(5_000, 1), False, looks),
        Make(0, b"l", b"d/file", False, looks),
        Link(1, 0, b"again"),
    ]
    with scratch() as place:
        build(place / "tree", tree)
        for path in (place / "tree", place / "tree/d"):
            os.utime(path, (0, 5))
        root = capture(REFERENCE, place / "tree", MemoryObjects()).root
        assert load(gnu_tar(place / "tree", f"--format={form}"))[1].root == root


def test_owners_where_they_are_recorded() -> None:
    archive = with_python([(_info("a", uid=1_000, gid=4_000_000_000), b"x")])
    store, captured = load(archive, owners=True)
    assert [entry.owner for _, entry in walk.walk(store, captured.root)] == [(1_000, 4_000_000_000)]
    assert captured.root.owner == (0, 0)
    store, captured = load(archive)
    assert [entry.owner for _, entry in walk.walk(store, captured.root)] == [None]


def _info(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_archives_of_python(form: int) -> None:
    long = "x" * 120 + "/" + "y" * 200
    archive = with_python(
        [
            (_info(long, mode=0o600, mtime=7), b"data"),
            (_info("l", tarfile.SYMTYPE, linkname=long), b""),
            (_info("\udcff", tarfile.FIFOTYPE), b""),
        ],
        form,
    )
    assert found(archive) == {long.split("/")[0]: "/", long: "data", "l": f"-> {long}", "\\xff": "|"}


@random
@given(state=states.states(), owned=st.booleans())
def test_what_is_exported_is_imported(state: states.Tree, owned: bool) -> None:
    store = MemoryObjects()
    if owned:
        state = {path: replace(node, owner=(node.mode, 70_000)) for path, node in state.items()}
    root = states.build(store, state)
    out = io.BytesIO()
    write_tar(store, root, out)
    assert load(out.getvalue(), owners=owned)[1].root == root


def test_a_time_of_any_size() -> None:
    for mtime in (-(1 << 63) * 10**9, (1 << 63) * 10**9 - 1, -1):
        store = MemoryObjects()
        root = states.build(store, states.tree(a=states.file(mtime_ns=mtime)))
        out = io.BytesIO()
        write_tar(store, root, out)
        assert load(out.getvalue())[1].root == root


# ---- names ---------------------------------------------------------------------------------------------------------


def test_missing_directories_are_made_and_may_be_described_later() -> None:
    store, captured = load(raw(b"a/b/c") + END)
    entries = dict(walk.walk(store, captured.root))
    assert [(entries[path].mode, entries[path].mtime_ns) for path in (b"a", b"a/b")] == [(0o755, 0)] * 2
    assert (captured.root.mode, captured.root.mtime_ns) == (0o755, 0)
    store, captured = load(
        raw(b"a/b/c") + raw(b"a/", b"5", mode=b"0000700\0") + raw(b"./", b"5", mode=b"0001777\0") + END
    )
    entries = dict(walk.walk(store, captured.root))
    assert (entries[b"a"].mode, entries[b"a"].mtime_ns) == (0o700, 5_000_000_000)
    assert (captured.root.mode, captured.root.mtime_ns) == (0o1777, 5_000_000_000)
    assert set(entries) == {b"a", b"a/b", b"a/b/c"}


@pytest.mark.parametrize("name", [b"a/b", b"./a/b", b"a//b", b"a/./b", b"././a/b"])
def test_one_path_has_many_spellings(name: bytes) -> None:
    assert found(raw(name, data=b"x") + END) == {"a": "/", "a/b": "x"}


def test_later_members_replace_earlier_ones() -> None:
    first = raw(b"a", data=b"one") + raw(b"d/x") + raw(b"d", b"5") + raw(b"l", b"2", link=b"a")
    assert found(first + END) == {"a": "one", "d": "/", "d/x": "", "l": "-> a"}
    assert found(first + raw(b"a", data=b"two") + END)["a"] == "two"
    assert found(first + raw(b"a", b"5") + END)["a"] == "/"
    assert found(first + raw(b"l", data=b"file") + END) == {"a": "one", "d": "/", "d/x": "", "l": "file"}
    assert found(first + raw(b"d/", b"5") + END)["d/x"] == ""
    assert found(first + raw(b"d", data=b"file") + END) == {"a": "one", "d": "file", "l": "-> a"}
    assert found(first + raw(b"l", b"5") + raw(b"l/x") + END)["l/x"] == ""


def test_a_file_that_is_replaced_by_what_is_left_out_is_gone() -> None:
    store, captured = load(raw(b"a") + raw(b"a", b"3") + END)
    assert listing(store, captured.root) == {}
    assert captured.report.left_out == (LeftOut(b"a", Left.DEVICE),)


@pytest.mark.parametrize(
    "archive",
    {
        "absolute": raw(b"/etc/passwd"),
        "above": raw(b"../x"),
        "above in the middle": raw(b"a/../../x"),
        "inside again": raw(b"a/../b"),
        "empty": raw(b""),
        "NUL": pax([(b"path", b"a\0b")]) + raw(b"a"),
        "through a symlink": raw(b"l", b"2", link=b"/tmp") + raw(b"l/x"),
        "through a symlink to a directory of the archive": raw(b"d/", b"5") + raw(b"l", b"2", link=b"d") + raw(b"l/x"),
        "through a symlink, a directory": raw(b"l", b"2", link=b"/tmp") + raw(b"l/x/", b"5"),
        "through a symlink, a device": raw(b"l", b"2", link=b"/tmp") + raw(b"l/x", b"3"),
        "through a symlink, a link": raw(b"f") + raw(b"l", b"2", link=b".") + raw(b"l/x", b"1", link=b"f"),
        "through a symlink, a link's target": raw(b"f") + raw(b"l", b"2", link=b".") + raw(b"x", b"1", link=b"l/f"),
        "through a file": raw(b"f") + raw(b"f/x"),
        "through a FIFO": raw(b"f", b"6") + raw(b"f/x"),
        "link to nothing": raw(b"a", b"1", link=b"b"),
        "link forward": raw(b"a", b"1", link=b"b") + raw(b"b"),
        "link to a directory": raw(b"d/", b"5") + raw(b"a", b"1", link=b"d"),
        "link to the root": raw(b"a", b"1", link=b"./"),
        "link out": raw(b"a", b"1", link=b"/etc/passwd"),
        "link up": raw(b"a", b"1", link=b"../x"),
        "link from the root": raw(b"a") + raw(b"./", b"1", link=b"a"),
        "root as a file": raw(b"."),
        "root as a symlink": raw(b"./", b"2", link=b"/"),
        "root as a FIFO": raw(b".", b"6"),
        "root as a device": raw(b".", b"3"),
        "symlink to nowhere": raw(b"a", b"2"),
        "symlink with NUL": pax([(b"linkpath", b"a\0b")]) + raw(b"a", b"2"),
        "attribute with NUL": pax([(b"SCHILY.xattr.user.a\0b", b"")]) + raw(b"a"),
        "too deep": pax([(b"path", b"d/" * 1_001)]) + raw(b"a", b"5"),
        "too long": pax([(b"path", b"./" * 1_000_000 + b"a")]) + raw(b"a"),
        "too deep, a file": pax([(b"path", b"d/" * 1_001 + b"f")]) + raw(b"a"),
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_hostile_members_are_refused(archive: tuple[str, bytes]) -> None:
    class Witness(MemoryObjects):
        sealed = False

        def seal(self) -> None:
            self.sealed = True

    store = Witness()
    with pytest.raises(InvalidRequestError):
        load(raw(b"before") + archive[1] + raw(b"after") + END, store)
    assert not store.sealed


def test_the_error_names_the_path() -> None:
    with pytest.raises(InvalidRequestError, match="l/x leads through l, which is no directory"):
        load(raw(b"l", b"2", link=b"/tmp") + raw(b"l/x") + END)
    with pytest.raises(InvalidRequestError, match=r"'..' in it: a/\.\./\.\./x"):
        load(raw(b"a/../../x") + END)
    with pytest.raises(InvalidRequestError, match="a is a hard link to b, which did not come before it"):
        load(raw(b"a", b"1", link=b"b") + END)


def test_a_tree_as_deep_as_there_may_be() -> None:
    deep = b"d/" * 1_000
    store, captured = load(pax([(b"path", deep)]) + raw(b"a", b"5") + pax([(b"path", deep + b"f")]) + raw(b"a") + END)
    assert sum(1 for _ in walk.walk(store, captured.root)) == 1_001
    out = io.BytesIO()
    write_tar(store, captured.root, out)
    assert load(out.getvalue())[1].root == captured.root


# ---- what has no place ---------------------------------------------------------------------------------------------


def test_what_has_no_place_in_a_workspace_is_reported() -> None:
    long = b"n" * 256
    store, captured = load(
        raw(b"dev/null", b"3")
        + raw(b"dev/sda", b"4")
        + raw(b"again", b"1", link=b"dev/null")
        + pax([(b"path", long)])
        + raw(b"x")
        + pax([(b"path", long + b"/below")])
        + raw(b"x", data=b"not read")
        + pax([(b"linkpath", b"t" * 4_096)])
        + raw(b"l", b"2")
        + raw(b"kept")
        + END
    )
    assert listing(store, captured.root) == {"kept": ""}
    assert captured.report.left_out_count == 6
    assert captured.report.left_out == (
        LeftOut(b"dev/null", Left.DEVICE),
        LeftOut(b"dev/sda", Left.DEVICE),
        LeftOut(b"again", Left.DEVICE),
        LeftOut(long, Left.NAME),
        LeftOut(long + b"/below", Left.NAME),
        LeftOut(b"l", Left.NAME),
    )


def test_names_and_targets_of_the_greatest_length_are_kept() -> None:
    name, target = b"n" * 255, b"t" * 4_095
    store, captured = load(pax([(b"path", name), (b"linkpath", target)]) + raw(b"x", b"2") + END)
    assert listing(store, captured.root) == {name.decode(): "-> " + target.decode()}
    assert not captured.report.left_out


def test_a_path_that_was_left_out_may_come_again() -> None:
    archive = raw(b"a", b"3") + raw(b"a", data=b"x") + raw(b"b", b"1", link=b"a") + END
    assert found(archive) == {"a": "x", "b": "x"}
    archive = raw(b"a", b"3") + raw(b"b", data=b"x") + raw(b"a", b"1", link=b"b") + raw(b"c", b"1", link=b"a") + END
    assert found(archive) == {"a": "x", "b": "x", "c": "x"}


@pytest.mark.parametrize(
    ("records", "kept"),
    [
        ([(b"user.a", b"v" * 65_536)], True),
        ([(b"user.a", b"v" * 65_537)], False),
        ([(b"user." + b"a" * 250, b"")], True),
        ([(b"user." + b"a" * 251, b"")], False),
        ([(b"user.", b"x")], False),
        ([(b"user.%02d" % index, b"v" * 65_000) for index in range(16)], True),
        ([(b"user.%02d" % index, b"v" * 65_536) for index in range(16)], False),
    ],
)
def test_attributes_that_are_too_large_are_left_out_alone(records: Sequence[tuple[bytes, bytes]], kept: bool) -> None:
    header = pax([(b"SCHILY.xattr." + name, value) for name, value in records])
    store, captured = load(header + raw(b"a", data=b"x") + header + raw(b"d/", b"5") + END)
    entries = dict(walk.walk(store, captured.root))
    assert set(entries) == {b"a", b"d"}
    for entry in entries.values():
        assert attributes(store, entry) == (dict(records) if kept else {})
    left = () if kept else (LeftOut(b"a", Left.ATTRIBUTES), LeftOut(b"d", Left.ATTRIBUTES))
    assert captured.report.left_out == left


def test_other_attributes_are_nobodys() -> None:
    header = pax([(b"SCHILY.xattr.security.x", b"1"), (b"SCHILY.xattr.trusted.overlay.opaque", b"y")])
    store, captured = load(
        header + raw(b"a") + pax([(b"SCHILY.xattr.user.a", b"1")]) + raw(b"l", b"2", link=b"a") + END
    )
    assert [entry.attrs for _, entry in walk.walk(store, captured.root)] == [None, None]
    assert not captured.report.left_out


def test_the_list_of_what_was_left_out_is_bounded() -> None:
    captured = load(b"".join(raw(b"%d" % index, b"3") for index in range(10_050)) + END)[1]
    assert (len(captured.report.left_out), captured.report.left_out_count) == (10_000, 10_050)


# ---- hard links ----------------------------------------------------------------------------------------------------


def linked(archive: bytes) -> dict[bytes, bytes | None]:
    store, captured = load(archive)
    return {path: entry.link for path, entry in walk.walk(store, captured.root) if entry.type is not Type.DIRECTORY}


def test_links_are_named_by_the_first_path_as_bytes() -> None:
    archive = raw(b"z", data=b"x") + raw(b"a/x", b"1", link=b"z") + raw(b"a.b", b"1", link=b"./z") + END
    assert linked(archive) == dict.fromkeys([b"a/x", b"a.b", b"z"], link_id(b"a.b"))


def test_links_to_links_symlinks_and_fifos() -> None:
    archive = raw(b"l", b"2", link=b"x") + raw(b"m", b"1", link=b"l") + raw(b"n", b"1", link=b"m")
    archive += raw(b"p", b"6") + raw(b"q", b"1", link=b"p") + END
    assert found(archive) == {"l": "-> x", "m": "-> x", "n": "-> x", "p": "|", "q": "|"}
    assert linked(archive) == dict.fromkeys([b"l", b"m", b"n"], link_id(b"l")) | dict.fromkeys(
        [b"p", b"q"], link_id(b"p")
    )


def test_a_name_that_is_replaced_is_no_longer_linked() -> None:
    archive = raw(b"a", data=b"x") + raw(b"b", b"1", link=b"a") + raw(b"c", b"1", link=b"a")
    assert linked(archive + raw(b"a", data=b"y") + END) == {b"a": None, b"b": link_id(b"b"), b"c": link_id(b"b")}
    assert linked(archive + raw(b"a") + raw(b"b") + END) == {b"a": None, b"b": None, b"c": None}
    assert found(archive + raw(b"a", data=b"y") + END) == {"a": "y", "b": "x", "c": "x"}


def test_a_link_to_itself_changes_nothing() -> None:
    archive = raw(b"a", data=b"x") + raw(b"./a", b"1", link=b"a") + END
    assert (found(archive), linked(archive)) == ({"a": "x"}, {b"a": None})


def test_a_link_that_replaces_what_holds_its_target() -> None:
    archive = raw(b"d/x", data=b"x") + raw(b"d", b"1", link=b"d/x") + END
    assert (found(archive), linked(archive)) == ({"d": "x"}, {b"d": None})


# ---- content -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 131_071, 131_072, 131_073, 1_000_000, (1 << 20) + 1, 3_000_000])
def test_content_is_cut_as_a_capture_does(size: int) -> None:
    with scratch() as place:
        build(place / "tree", [Make(0, b"a", Data(size, 4), False, Looks(0o644, 0))])
        os.utime(place / "tree", (0, 0))
        captured = capture(REFERENCE, place / "tree", MemoryObjects())
        assert load(gnu_tar(place / "tree"))[1].root == captured.root
        assert captured.report.bytes == size


def test_zeros_stay_data() -> None:
    store, captured = load(raw(b"a", data=bytes(1_000_000)) + END)
    ((_, entry),) = walk.walk(store, captured.root)
    assert all(extent.id is not None for extent in walk.extents(store, entry))


def test_what_replaces_the_base_is_kept_as_patches() -> None:
    noise = os.urandom(300_000)
    small = os.urandom(20_000)

    def archive(change: bytes) -> bytes:
        members = [
            raw(b"d/large", data=noise[:150_000] + change + noise[150_000:]),
            raw(b"d/small", data=small + change),
        ]
        return (
            b"".join(members + [raw(b"d/%03d" % index, data=change[:1] * (index == 5)) for index in range(200)]) + END
        )

    store, first = load(archive(b""))
    before = store.written
    second = read_tar(io.BytesIO(archive(b"change")), store, store, base=first.root)
    assert second.report.stored == store.written - before
    assert second.report.stored < 3_000
    assert load(archive(b"change"))[1].root == second.root
    again = read_tar(io.BytesIO(archive(b"change")), store, store, base=second.root)
    assert (again.root, again.report.stored) == (second.root, 0)


def test_the_search_for_what_is_replaced_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(lookups: int) -> int:
        monkeypatch.setattr(tarin, "MAX_LOOKUPS", lookups)
        noise = os.urandom(20_000)
        store, first = load(raw(b"d/a", data=noise) + END)
        second = read_tar(io.BytesIO(raw(b"d/a", data=noise + b"x") + END), store, store, base=first.root)
        return second.report.stored

    assert stored(1) < 1_000
    assert stored(0) > 20_000


def test_a_damaged_base_means_no_patch() -> None:
    store, first = load(raw(b"a", data=b"x" * 1_000) + END)
    gone = replace(first.root, content=bytes(32))
    second = read_tar(io.BytesIO(raw(b"a", data=b"x" * 1_001) + END), store, store, base=gone)
    assert listing(store, second.root) == {"a": "x" * 1_001}


# ---- limits --------------------------------------------------------------------------------------------------------


def test_the_limit_of_members() -> None:
    archive = raw(b"a") * 10 + END
    store = MemoryObjects()
    read_tar(io.BytesIO(archive), store, store, limits=Limits(entries=10))
    with pytest.raises(PayloadTooLargeError, match="more than 9 members"):
        read_tar(io.BytesIO(archive), store, store, limits=Limits(entries=9))


@pytest.mark.parametrize(
    "archive",
    {
        "names": b"".join(raw(b"%d" % index) for index in range(100)),
        "made directories": pax([(b"path", b"d/" * 100)]) + raw(b"a", b"5"),
        "targets": b"".join(pax([(b"linkpath", b"t" * 4_000)]) + raw(b"%d" % index, b"2") for index in range(8)),
        "links": raw(b"a") + b"".join(raw(b"%d" % index, b"1", link=b"a") for index in range(100)),
        "left out": b"".join(raw(b"%d" % index, b"3") for index in range(100)),
    }.items(),
    ids=lambda item: item[0],
)
def test_the_limit_of_memory(archive: tuple[str, bytes]) -> None:
    store = MemoryObjects()
    read_tar(io.BytesIO(archive[1] + END), store, store, limits=Limits(memory=1 << 20))
    with pytest.raises(PayloadTooLargeError, match="more than 30000 bytes"):
        read_tar(io.BytesIO(archive[1] + END), store, store, limits=Limits(memory=30_000))


class Generated:
    """An archive that is made while it is read."""

    def __init__(self, pieces: Sequence[bytes], times: int) -> None:
        self._pieces = iter(piece for _ in range(times) for piece in pieces)
        self._rest = b""

    def read(self, size: int) -> bytes:
        if not self._rest:
            self._rest = next(self._pieces, b"")
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece


def test_memory_for_names_is_what_is_counted() -> None:
    many = 20_000
    archive = b"".join(raw(b"d/name-%06d" % index, data=b"x") for index in range(many)) + END
    store = MemoryObjects()
    tracemalloc.start()
    with pytest.raises(PayloadTooLargeError):
        read_tar(io.BytesIO(archive), store, store, limits=Limits(memory=many * 300))
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < many * 300 + (2 << 20)


def test_memory_does_not_grow_with_content() -> None:
    piece = raw(b"a", data=b"", size=b"%011o\0" % (32 << 20))[:512]
    store = MemoryObjects()
    tracemalloc.start()
    read_tar(
        Generated([piece, *[b"x" * (1 << 20)] * 32, END], 1),
        store,
        store,
        cut=lambda data, start, end: min(end, start + 32_768),
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_terabyte_of_holes() -> None:
    records = [
        (b"GNU.sparse.major", b"1"),
        (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.name", b"a"),
        (b"GNU.sparse.realsize", b"%d" % ((1 << 63) - 1)),
    ]
    archive = pax(records) + raw(b"x", data=b"1\n4096\n5\n".ljust(512, b"\0") + b"hello") + END
    store, captured = load(archive)
    ((_, entry),) = walk.walk(store, captured.root)
    assert [(extent.length, extent.id is None) for extent in walk.extents(store, entry)] == [
        (4_096, True),
        (5, False),
        ((1 << 63) - 1 - 4_101, True),
    ]
    assert captured.report.bytes == 5


# ---- progress and report -------------------------------------------------------------------------------------------


def test_progress_counts_members_and_bytes_read() -> None:
    archive = gzip.compress(b"".join(raw(b"%d" % index, data=os.urandom(600)) for index in range(300)) + END)
    told: list[tuple[int, int, int, int]] = []
    store = MemoryObjects()
    read_tar(io.BytesIO(archive), store, store, progress=lambda *numbers: told.append(numbers))
    assert told[-1] == (300, 0, len(archive), 0)
    assert told == sorted(told)
    assert len(told) > 3


def test_the_report_counts_names_and_bytes() -> None:
    archive = raw(b"d/a", data=b"12345") + raw(b"d/b", b"1", link=b"d/a") + raw(b"l", b"2", link=b"x") + raw(b"p", b"6")
    store, captured = load(archive + END)
    report = captured.report
    assert (report.files, report.directories, report.symlinks, report.fifos) == (2, 1, 1, 1)
    assert (report.bytes, report.read, report.stored) == (5, 5, store.written)


# ---- anything ------------------------------------------------------------------------------------------------------

SEEDS = [
    raw(b"d/", b"5") + raw(b"d/a", data=b"x" * 700) + raw(b"b", b"1", link=b"d/a") + raw(b"l", b"2", link=b"d") + END,
    pax([(b"path", b"p" * 200), (b"mtime", b"-1.5"), (b"SCHILY.xattr.user.a", b"v"), (b"size", b"3")])
    + raw(b"x", data=b"abc")
    + raw(b"././@LongLink", b"L", b"q" * 150 + b"\0")
    + raw(b"y", b"6")
    + END,
    pax([(b"GNU.sparse.size", b"9000"), (b"GNU.sparse.map", b"0,4,8000,4"), (b"GNU.sparse.numblocks", b"2")])
    + raw(b"s", data=b"12345678")
    + pax([(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"99")])
    + raw(b"x", data=b"2\n0\n3\n99\n0\n".ljust(512, b"\0") + b"abc")
    + END,
    raw(
        b"o",
        b"S",
        b"abcd",
        magic=b"ustar  \0",
        tail=bytes(121) + b"%011o\0%011o\0" % (5, 4) + bytes(73) + b"%011o\0" % 9,
    )
    + END,
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """An archive with some bytes changed, put in, taken out or doubled; often with sums that are right again."""
    archive = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(archive)))
        match draw(st.integers(0, 4)):
            case 0:
                archive[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                archive[at:at] = draw(st.binary(max_size=8))
            case 2:
                del archive[at : at + draw(st.sampled_from([1, 3, 512]))]
            case 3:
                start = at // 512 * 512
                archive[start:start] = archive[start : start + draw(st.sampled_from([512, 1_024]))]
            case _:
                archive[at : at + 4] = draw(
                    st.sampled_from([b"\xff\xff\xff\xff", b"9999", b"\0\0\0\0", b"-1 =", b"../."])
                )
        if draw(st.booleans()):
            for start in range(0, len(archive) - 511, 512):
                block = archive[start : start + 512]
                if block[257:262] == b"ustar":
                    others = sum(block[:148]) + 8 * 32 + sum(block[156:])
                    archive[start + 148 : start + 156] = b"%06o\0 " % others
    return bytes(archive)


@pytest.mark.parametrize("archive", SEEDS)
def test_what_is_mutated_was_sound(archive: bytes) -> None:
    assert found(archive)


@settings(max_examples=500, deadline=None)
@given(archive=mutated(), owners=st.booleans())
def test_a_mutated_archive_is_refused_or_a_sound_state(archive: bytes, owners: bool) -> None:
    with suppress(InvalidRequestError, PayloadTooLargeError):
        store, captured = load(archive, owners=owners)
        encode_root(captured.root)
        out = io.BytesIO()
        write_tar(store, captured.root, out)
        assert load(out.getvalue(), owners=owners)[1].root == captured.root


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2_000))
def test_any_bytes_are_no_archive(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        load(data)
