"""The tar reader: what old and new archivers write, and what nobody should."""

from __future__ import annotations

import io
import os
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.store.tarread import MAX_PIECES, Member, MemberKind, TarReader
from tests.unit.store.tars import END, pax, raw
from tests.unit.store.trees import scratch


def members(archive: bytes) -> list[tuple[Member, bytes]]:
    """All members with their data, read in pieces of 7 bytes."""
    reader = TarReader(io.BytesIO(archive))
    found = []
    while (member := reader.next()) is not None:
        found.append((member, b"".join(iter(lambda: reader.read(7), b""))))
    return found


def one(archive: bytes) -> tuple[Member, bytes]:
    """The only member."""
    (found,) = members(archive + END)
    return found


# ---- what there is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "name", "kind"),
    [
        (b"0", b"a", MemberKind.FILE),
        (b"\0", b"a", MemberKind.FILE),
        (b"\0", b"a/", MemberKind.DIRECTORY),
        (b"7", b"a", MemberKind.FILE),
        (b"1", b"a", MemberKind.HARD_LINK),
        (b"2", b"a", MemberKind.SYMLINK),
        (b"3", b"a", MemberKind.DEVICE),
        (b"4", b"a", MemberKind.DEVICE),
        (b"5", b"a", MemberKind.DIRECTORY),
        (b"6", b"a", MemberKind.FIFO),
    ],
)
def test_kinds(flag: bytes, name: bytes, kind: MemberKind) -> None:
    member, _ = one(raw(name, flag, link=b"to"))
    assert (member.kind, member.path, member.link) == (kind, name, b"to")


def test_the_prefix_of_ustar_and_of_nobody_else() -> None:
    prefix = bytes(80) + b"above"  # owner names and device numbers come before it
    assert one(raw(b"a", tail=prefix))[0].path == b"above/a"
    assert one(raw(b"a", magic=b"ustar  \0", tail=prefix))[0].path == b"a"
    assert one(raw(b"a", magic=bytes(8), tail=prefix))[0].path == b"a"
    star = prefix.ljust(80 + 131, b"\0") + b"1" * 24 + bytes(8) + b"tar\0"
    assert one(raw(b"a", tail=star))[0].path == b"above/a"


def test_pax_records_replace_what_the_header_says() -> None:
    records = [
        (b"path", b"x" * 300),
        (b"linkpath", b"y" * 300),
        (b"mtime", b"-1.5"),
        (b"uid", b"4000000000"),
        (b"gid", b"7"),
        (b"comment", b"unknown"),
        (b"SCHILY.xattr.user.a%3Db", b"1\n2\0"),
        (b"SCHILY.xattr.user.empty", b""),
        (b"SCHILY.xattr.security.capability", b"no"),
    ]
    member, _ = one(pax(records) + raw(b"a", b"2"))
    assert (member.path, member.link, member.mtime_ns) == (b"x" * 300, b"y" * 300, -1_500_000_000)
    assert member.owner == (4_000_000_000, 7)
    assert member.attributes == {b"user.a=b": b"1\n2\0", b"user.empty": b""}


def test_a_size_in_pax_counts() -> None:
    archive = pax([(b"size", b"3")]) + raw(b"a", data=b"xyz", size=b"00000000000\0")
    assert one(archive)[1] == b"xyz"


def test_pax_headers_hold_for_one_member_and_global_times_for_all() -> None:
    first, second = members(
        pax([(b"mtime", b"7"), (b"comment", b"by git")], b"g") + pax([(b"mtime", b"9")]) + raw(b"a") + raw(b"b") + END
    )
    assert (first[0].mtime_ns, second[0].mtime_ns) == (9_000_000_000, 7_000_000_000)


def test_long_names_of_gnu() -> None:
    archive = raw(b"././@LongLink", b"L", b"x" * 300 + b"\0") + raw(b"././@LongLink", b"K", b"y" * 300 + b"\0")
    member, _ = one(archive + raw(b"short", b"2", link=b"short"))
    assert (member.path, member.link) == (b"x" * 300, b"y" * 300)


def test_numbers_in_base_256() -> None:
    member, data = one(raw(b"a", data=b"xy", size=b"\x80" + bytes(10) + b"\2", mtime=b"\xff" * 12))
    assert (data, member.mtime_ns) == (b"xy", -1_000_000_000)


def test_links_have_no_data_whatever_their_size_says() -> None:
    found = members(raw(b"a", b"1", link=b"b", size=b"00000001000\0") + raw(b"b", b"5", size=b"777\0".ljust(12)) + END)
    assert [member.path for member, _ in found] == [b"a", b"b"]


def test_data_that_was_not_taken_is_passed_over() -> None:
    reader = TarReader(io.BytesIO(raw(b"a", data=b"x" * 1_000) + raw(b"b") + END))
    assert reader.next() is not None
    assert reader.read(10) == b"x" * 10
    member = reader.next()
    assert member is not None
    assert member.path == b"b"
    assert reader.next() is None


def test_the_label_of_a_volume_is_no_member() -> None:
    assert one(raw(b"label", b"V") + raw(b"a"))[0].path == b"a"


def test_what_follows_the_end_is_read_and_ignored() -> None:
    stream = io.BytesIO(raw(b"a") + END + b"more" * 1_000_000)
    reader = TarReader(stream)
    assert reader.next() is not None
    assert reader.next() is None
    assert not stream.read()


# ---- files with holes ----------------------------------------------------------------------------------------------

BLOCK = 4_096
HOLES = {
    "none at the end": ([(BLOCK, BLOCK), (10 * BLOCK, 100)], 10 * BLOCK + 100),
    "at both ends": ([(BLOCK, BLOCK), (4 * BLOCK, 2 * BLOCK)], 20 * BLOCK),
    "many": ([(index * 2 * BLOCK, BLOCK) for index in range(100)], 200 * BLOCK),
    "all": ([], 1 << 40),
}


@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize(
    "options",
    [["--format=gnu"], *(["--format=pax", f"--sparse-version={version}"] for version in ("0.0", "0.1", "1.0"))],
    ids=["old", "0.0", "0.1", "1.0"],
)
def test_every_form_that_gnu_tar_writes(options: list[str], holes: str) -> None:
    runs, size = HOLES[holes]
    name = "n" * 150
    with scratch() as place:
        with (place / name).open("wb") as file:
            for offset, length in runs:
                os.pwrite(file.fileno(), bytes([65 + offset % 26]) * length, offset)
            file.truncate(size)
        archive = subprocess.run(
            ["tar", "-C", place, "-S", *options, "-cf", "-", name], check=True, capture_output=True
        ).stdout
    ((member, data),) = members(archive)
    assert (member.path, member.kind, member.size) == (name.encode(), MemberKind.FILE, size)
    assert list(member.pieces) == [number for run in runs for number in run]
    assert data == b"".join(bytes([65 + offset % 26]) * length for offset, length in runs)


def test_pieces_side_by_side_are_one_run_and_empty_ones_none() -> None:
    records = [(b"GNU.sparse.size", b"20"), (b"GNU.sparse.map", b"0,0,2,3,5,4,12,0,20,0")]
    member, data = one(pax(records) + raw(b"a", data=b"x" * 7))
    assert (list(member.pieces), member.size, data) == ([2, 7], 20, b"x" * 7)


def sparse_1_0(text: bytes, data: bytes = b"", size: bytes = b"9") -> bytes:
    records = [
        (b"GNU.sparse.major", b"1"),
        (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.name", b"a"),
        (b"GNU.sparse.realsize", size),
    ]
    return pax(records) + raw(b"packed", data=text + bytes(-len(text) % 512) + data)


def sparse_0_1(text: bytes, size: bytes = b"9", count: bytes | None = None) -> bytes:
    records = [(b"GNU.sparse.size", size), (b"GNU.sparse.map", text)]
    return pax(records + ([(b"GNU.sparse.numblocks", count)] if count else [])) + raw(b"a", data=b"xxxx")


def old_sparse(
    pieces: bytes, more: bytes = b"\0", size: bytes = b"00000000011\0", magic: bytes = b"ustar  \0"
) -> bytes:
    tail = (bytes(386 - 265) + pieces).ljust(482 - 265, b"\0") + more + size
    return raw(b"a", b"S", b"xxxx", magic=magic, tail=tail)


OCTAL = b"%011o\0"


@pytest.mark.parametrize(
    "archive",
    {
        "overlap": sparse_1_0(b"2\n0\n3\n2\n1\n", b"xxxx"),
        "descending": sparse_1_0(b"2\n5\n1\n0\n3\n", b"xxxx"),
        "beyond the end": sparse_1_0(b"1\n6\n4\n", b"xxxx"),
        "more than there is": sparse_1_0(b"1\n0\n5\n", b"xxxx"),
        "less than there is": sparse_1_0(b"1\n0\n3\n", b"xxxx"),
        "no number": sparse_1_0(b"1\n0\nx\n", b"xxxx"),
        "negative": sparse_1_0(b"1\n-1\n4\n", b"xxxx"),
        "no end": sparse_1_0(b"1" * 512),
        "cut off": sparse_1_0(b"9\n0\n1\n"),
        "too many": sparse_1_0(b"%d\n" % (MAX_PIECES + 1)),
        "size above all sizes": sparse_1_0(b"1\n0\n4\n", b"xxxx", b"9223372036854775808"),
        "no size": pax([(b"GNU.sparse.map", b"0,4")]) + raw(b"a", data=b"xxxx"),
        "no pair": sparse_0_1(b"0,3,4"),
        "another count": sparse_0_1(b"0,4", count=b"2"),
        "no list": sparse_0_1(b"0;4"),
        "unknown version": pax([(b"GNU.sparse.major", b"2"), (b"GNU.sparse.size", b"4")]) + raw(b"a", data=b"xxxx"),
        "map without offset": pax([(b"GNU.sparse.numbytes", b"4")]) + raw(b"a", data=b"xxxx"),
        "two offsets": pax([(b"GNU.sparse.offset", b"0"), (b"GNU.sparse.offset", b"4")]) + raw(b"a", data=b"xxxx"),
        "two maps": pax(
            [
                (b"GNU.sparse.size", b"9"),
                (b"GNU.sparse.offset", b"0"),
                (b"GNU.sparse.numbytes", b"4"),
                (b"GNU.sparse.map", b"0,4"),
            ]
        )
        + raw(b"a", data=b"xxxx"),
        "for all": pax([(b"GNU.sparse.size", b"9")], b"g") + raw(b"a"),
        "old, not of GNU": old_sparse(OCTAL % 0 + OCTAL % 4, magic=b"ustar\x0000"),
        "old, overlap": old_sparse(OCTAL % 0 + OCTAL % 3 + OCTAL % 2 + OCTAL % 1),
        "old, no number": old_sparse(OCTAL % 0 + b"zzz".ljust(12)),
        "old, no size": old_sparse(OCTAL % 0 + OCTAL % 4, size=b"zzz".ljust(12)),
        "old, negative size": old_sparse(OCTAL % 0 + OCTAL % 4, size=b"\xff" * 12),
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_maps_that_cannot_be(archive: tuple[str, bytes]) -> None:
    with pytest.raises(InvalidRequestError):
        members(archive[1] + END)


def test_an_old_map_that_never_ends_is_bounded() -> None:
    piece = (OCTAL % 0 + OCTAL % 1) * 21
    blocks = piece.ljust(504, b"\0") + b"\1" + bytes(7)

    class Endless:
        def __init__(self) -> None:
            self.head = old_sparse(OCTAL % 0 + OCTAL % 1, b"\1")[:512]

        def read(self, size: int) -> bytes:
            head, self.head = self.head, b""
            return head or blocks * (size // 512)

    with pytest.raises(InvalidRequestError, match="pieces"):
        TarReader(Endless()).next()


# ---- what nobody should write --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "archive",
    {
        "nothing": b"",
        "zeros": END,
        "text": b"hello" * 1_000,
        "no end": raw(b"a"),
        "cut in a header": raw(b"a")[:300],
        "cut in data": raw(b"a", data=b"x" * 600)[:-600],
        "cut in the padding": raw(b"a", data=b"x")[:-1],
        "cut in a pax header": pax([(b"path", b"x" * 600)])[:800],
        "wrong sum": raw(b"a") + raw(b"b").replace(b"b", b"c", 1) + END,
        "extended header without a member": raw(b"a") + pax([(b"path", b"b")]) + END,
        "long name without a member": raw(b"a", b"L", b"b\0") + END,
        "malformed record": raw(b"a", b"x", b"99 path=b\n") + raw(b"a") + END,
        "size that is no number": raw(b"a", size=b"zzz".ljust(12)) + END,
        "negative size": raw(b"a", size=b"\xff" * 12) + END,
        "size of all": raw(b"a", size=b"\x80" + b"\xff" * 11) + END,
        "pax size that is no number": pax([(b"size", b"-1")]) + raw(b"a") + END,
        "mode that is no number": raw(b"a", mode=b"zzz".ljust(8)) + END,
        "negative mode": raw(b"a", mode=b"\xff" * 8) + END,
        "time that is no number": raw(b"a", mtime=b"zzz".ljust(12)) + END,
        "pax time that is no number": pax([(b"mtime", b"now")]) + raw(b"a") + END,
        "unknown type": raw(b"a", b"M") + END,
        "dump": raw(b"a", b"D") + END,
        "one path for all": pax([(b"path", b"x")], b"g") + raw(b"a") + END,
        "one size for all": pax([(b"size", b"1")], b"g") + raw(b"a") + END,
        "one owner for all": pax([(b"uid", b"0")], b"g") + raw(b"a") + END,
    }.items(),
    ids=lambda item: item[0],
)
def test_what_is_no_sound_archive(archive: tuple[str, bytes]) -> None:
    with pytest.raises(InvalidRequestError):
        members(archive[1])


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_a_huge_header_is_refused_before_it_is_read(kind: bytes) -> None:
    class Endless:
        def __init__(self) -> None:
            self.head = raw(b"a", kind, size=b"77777777777\0")
            self.given = 0

        def read(self, size: int) -> bytes:
            head, self.head = self.head, b""
            piece = head or bytes(size)
            self.given += len(piece)
            return piece

    stream = Endless()
    with pytest.raises(InvalidRequestError, match="extended header"):
        TarReader(stream).next()
    assert stream.given <= 1 << 20


def test_a_member_of_any_size_takes_no_memory() -> None:
    class Endless:
        def __init__(self) -> None:
            self.head = raw(b"a", size=b"77777777777\0")

        def read(self, size: int) -> bytes:
            head, self.head = self.head, b""
            return head or bytes(size)

    reader = TarReader(Endless())
    assert reader.next() is not None
    tracemalloc.start()
    for _ in range(256):
        assert reader.read(1 << 18)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_gnu_tar_reads_what_the_tests_write(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(
        pax([(b"mtime", b"7.5")]) + raw(b"a", data=b"hello") + raw(b"b", b"2", link=b"a") + END
    )
    subprocess.run(["tar", "-xf", "x.tar"], cwd=tmp_path, check=True)
    assert (tmp_path / "b").read_bytes() == b"hello"
    assert (tmp_path / "a").stat().st_mtime_ns == 7_500_000_000
