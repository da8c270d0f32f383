"""Export: what GNU tar and Python's reader restore is the state, and the same state gives the same bytes."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.chunks import put_pages, put_tree
from agent_sandbox.store.objects import Entry, Extent, Kind, Type
from agent_sandbox.store.reference import ReferenceEngine
from agent_sandbox.store.tarout import write_tar
from tests.unit.store import states
from tests.unit.store.engines import capture
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.trees import Edit, build, scratch, state_of, trees

REFERENCE = ReferenceEngine()


def export(store: MemoryObjects, root: Entry, **options: tuple[int, int]) -> bytes:
    out = io.BytesIO()
    write_tar(store, root, out, **options)  # type: ignore[arg-type]
    return out.getvalue()


def exported(state: states.Tree) -> bytes:
    store = MemoryObjects()
    return export(store, states.build(store, state))


def members(archive: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive), encoding="utf-8", errors="surrogateescape") as tar:
        return {member.name: member for member in tar}


def extract(archive: bytes, directory: Path) -> None:
    directory.mkdir()
    command = ["tar", "-C", str(directory), "--xattrs", "--xattrs-include=*", "-xpf", "-"]
    done = subprocess.run(command, input=archive, capture_output=True, check=True)
    assert (
        b"unknown extended header" not in done.stderr.replace(b"keyword 'hdrcharset'", b"") or b"hdrcharset" in archive
    )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=trees())
def test_gnu_tar_restores_what_was_captured(tree: list[Edit]) -> None:
    with scratch() as place:
        build(place / "tree", tree)
        store = MemoryObjects()
        archive = export(store, capture(REFERENCE, place / "tree", store).root)
        extract(archive, place / "copy")
        assert state_of(place / "copy") == state_of(place / "tree")


def test_python_reads_it() -> None:
    fine = {"mtime_ns": 1_700_000_000_123_456_789, "attributes": ((b"user.a=%", b"\0\n"),)}
    archive = exported(
        states.tree(
            {
                b"d": states.Node(Type.DIRECTORY, mode=0o2755, mtime_ns=-1_500_000_000),
                b"d/file": states.file(b"hello", mode=0o4711, **fine),
                b"fifo": states.Node(Type.FIFO, mode=0o600),
                b"link": states.symlink(b"t" * 4_095),
                b"one": states.file(b"twice", inode=1),
                b"two": states.file(b"twice", inode=1),
                b"\xc3\xa4": states.file(),
                b"\xff" * 255: states.file(),
            }
        )
    )
    found = members(archive)
    assert list(found) == [".", "d", "d/file", "fifo", "link", "one", "two", "ä", "\udcff" * 255]
    assert [member.type for member in found.values()] == [b"5", b"5", b"0", b"6", b"2", b"0", b"1", b"0", b"0"]
    assert (found["d"].mode, found["d"].pax_headers) == (0o2755, {"mtime": "-1.5"})
    file = found["d/file"]
    assert (file.mode, file.size) == (0o4711, 5)
    assert file.pax_headers == {"mtime": "1700000000.123456789", "SCHILY.xattr.user.a%3D%25": "\0\n"}
    assert found["link"].linkname == "t" * 4_095
    assert found["two"].linkname == "one"
    assert found["ä"].pax_headers == {"path": "ä"}
    assert found["\udcff" * 255].pax_headers["hdrcharset"] == "BINARY"
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        content = tar.extractfile("two")
        assert content is not None
        assert content.read() == b"twice"


def test_names_are_relative_and_the_root_comes_first() -> None:
    archive = exported(states.tree(a__b=states.file(b"x"), c=states.file()))
    assert [archive[at : at + 4].rstrip(b"\0") for at in (0, 512, 1024, 2048)] == [b"./", b"a/", b"a/b", b"c"]
    assert archive[-1024:] == bytes(1024)
    assert len(archive) == 5 * 512 + 1024


def test_equal_states_give_equal_bytes() -> None:
    state = states.tree(a__b=states.file(b"x", attributes=((b"user.a", b"1"),)), l=states.symlink(b"a"))
    assert exported(state) == exported(dict(reversed(state.items())))
    # The form is part of what others may rely on: whoever changes it says so in the change log.
    digest = "c647cadb80e2a5dfc67b1a25f6d070d5fd7a1c376e5b6720db76aea21eb73134"
    assert hashlib.sha256(exported(state)).hexdigest() == digest


@pytest.mark.parametrize(
    ("recorded", "given", "expected"),
    [
        (None, None, (0, 0)),
        (None, (1000, 1001), (1000, 1001)),
        ((5, 6), (1000, 1001), (5, 6)),
        ((0o7777777, 0o10000000), None, (0o7777777, 0o10000000)),
        ((4_294_967_294, 0), None, (4_294_967_294, 0)),
    ],
)
def test_owners(recorded: tuple[int, int] | None, given: tuple[int, int] | None, expected: tuple[int, int]) -> None:
    store = MemoryObjects()
    root = states.build(store, states.tree(a=states.file(b"x", owner=recorded)))
    found = members(export(store, root, **({"owner": given} if given else {})))["a"]
    assert (found.uid, found.gid, found.uname, found.gname) == (*expected, "", "")


# ---- files with holes ----------------------------------------------------------------------------------------------


def with_runs(store: MemoryObjects, runs: list[tuple[int, bytes]], size: int, name: bytes = b"a") -> Entry:
    """A state with one file that has data only where ``runs`` say."""
    extents: list[Extent] = []
    at = 0
    for offset, data in runs:
        extents += [Extent(offset - at, None)] * (offset > at) + [Extent(len(data), store.put(Kind.BLOB, data))]
        at = offset + len(data)
    extents += [Extent(size - at, None)] * (size > at)
    file = Entry(name, Type.FILE, 0o644, 0, size=size, content=put_pages(extents, store.put), paged=True)
    return Entry(b"", Type.DIRECTORY, 0o755, 0, content=put_tree([file], store.put))


TERABYTE = 1 << 40
SPARSE = {
    "nothing": [],
    "in front": [(0, b"x" * 4_096)],
    "in the middle": [(1 << 39, b"x" * 4_096)],
    "at the end": [(TERABYTE - 4_096, b"x" * 4_096)],
    "in pieces": [(index << 30, bytes([index % 250 + 1]) * 4_096) for index in range(1, 300)],
}


@pytest.mark.parametrize("runs", SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize("name", [b"a", b"n" * 255, b"\xff"], ids=["short", "long", "bytes"])
def test_a_terabyte_of_holes_is_a_few_blocks(runs: list[tuple[int, bytes]], name: bytes) -> None:
    store = MemoryObjects()
    archive = export(store, with_runs(store, runs, TERABYTE, name))
    assert len(archive) < sum(len(data) for _, data in runs) + 16 * 512 + 32 * len(runs)
    found = members(archive)[os.fsdecode(name)]
    assert found.sparse is not None
    assert (found.size, found.isreg()) == (TERABYTE, True)
    with scratch() as place:
        extract(archive, place / "copy")
        path = os.fsencode(place / "copy") + b"/" + name
        file = os.open(path, os.O_RDONLY)
        try:
            about = os.fstat(file)
            assert about.st_size == TERABYTE
            assert about.st_blocks * 512 < sum(len(data) for _, data in runs) + (1 << 20)
            assert [os.pread(file, 4_096, offset) for offset, _ in runs] == [data for _, data in runs]
            at, starts = 0, []
            for _ in runs:
                at = os.lseek(file, at, os.SEEK_DATA)
                starts.append(at)
                at = os.lseek(file, at, os.SEEK_HOLE)
            assert starts == [offset for offset, _ in runs]
        finally:
            os.close(file)


def test_a_list_of_chunks_without_holes_is_an_ordinary_file() -> None:
    store = MemoryObjects()
    root = with_runs(store, [(0, b"x" * 30_000), (30_000, b"y" * 30_000)], 60_000)
    found = members(export(store, root))["a"]
    assert (found.size, found.pax_headers) == (60_000, {})


def test_a_size_above_eight_gibibytes_is_in_a_record() -> None:
    store = MemoryObjects()
    chunk = store.put(Kind.BLOB, b"x" * 32_768)
    count = (8 << 30) // 32_768 + 1
    content = put_pages((Extent(32_768, chunk) for _ in range(count)), store.put)
    file = Entry(b"a", Type.FILE, 0o644, 0, size=count * 32_768, content=content, paged=True)
    root = Entry(b"", Type.DIRECTORY, 0o755, 0, content=put_tree([file], store.put))

    class Front(Exception):
        pass

    class Sink:
        def write(self, data: bytes) -> None:
            with tarfile.open(fileobj=io.BytesIO(data[512:])) as tar:
                info = tar.next()
            assert info is not None
            assert (info.name, info.size) == ("a", count * 32_768)
            raise Front

    with pytest.raises(Front):
        write_tar(store, root, Sink())


# ---- how -----------------------------------------------------------------------------------------------------------


def test_it_is_streamed() -> None:
    store = MemoryObjects()
    chunk = store.put(Kind.BLOB, b"x" * 32_768)
    content = put_pages([Extent(32_768, chunk)] * 1_000, store.put)
    file = Entry(b"a", Type.FILE, 0o644, 0, size=32_768_000, content=content, paged=True)
    root = Entry(b"", Type.DIRECTORY, 0o755, 0, content=put_tree([file], store.put))
    pieces: list[int] = []

    class Sink:
        def write(self, data: bytes) -> None:
            pieces.append(len(data))

    tracemalloc.start()
    write_tar(store, root, Sink())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(pieces) == 4 * 512 + 32_768_000
    assert max(pieces) < 128 << 10
    assert peak < 2 << 20


def test_progress_counts_entries_and_bytes_written() -> None:
    told: list[tuple[int, int, int, int]] = []
    store = MemoryObjects()
    root = states.build(store, states.tree(a=states.file(b"x" * 100_000), b=states.file()))
    out = io.BytesIO()
    write_tar(store, root, out, progress=lambda *numbers: told.append(numbers))
    assert told[-1] == (3, 0, len(out.getvalue()), 0)
    assert told == sorted(told)
    assert len(told) > 1


def test_a_damaged_state_is_told() -> None:
    store = MemoryObjects()
    root = states.build(store, states.tree(a=states.file(b"x")))
    file = Entry(b"a", Type.FILE, 0o644, 0, size=2, content=store.put(Kind.BLOB, b"x"))
    with pytest.raises(StoreDamagedError):
        export(store, replace(root, content=put_tree([file], store.put)))
    with pytest.raises(StoreDamagedError):
        export(store, replace(root, content=bytes(32)))
