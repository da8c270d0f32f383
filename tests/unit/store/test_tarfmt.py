"""Numbers, times, records and header blocks of tar archives, against POSIX, the GNU manual and Python's own reader."""

from __future__ import annotations

import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.store import tarfmt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"0000644\0", 0o644),
        (b"   644 \0", 0o644),
        (b"00000000", 0),
        (b"\0\0\0\0", 0),
        (b"77777777777\0", 0o77777777777),
        (b"\x80\0\0\0\0\0\0\x02\0\0\0\0", 1 << 33),
        (b"\xff" * 12, -1),
        (b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", None),
        (b"12x\0", None),
        (b"-1\0", None),
        (b"8\0", None),
    ],
)
def test_numbers_in_every_dress(field: bytes, value: int | None) -> None:
    assert tarfmt.number(field) == value


@pytest.mark.parametrize(
    ("mtime_ns", "text"),
    [
        (0, b"0"),
        (1_500_000_000, b"1.5"),
        (1, b"0.000000001"),
        (-1, b"-0.000000001"),
        (-1_500_000_000, b"-1.5"),
        (-2_000_000_000, b"-2"),
        (1_700_000_000_123_456_789, b"1700000000.123456789"),
    ],
)
def test_times_are_exact_decimals(mtime_ns: int, text: bytes) -> None:
    assert tarfmt.format_time(mtime_ns) == text
    assert tarfmt.parse_time(text) == mtime_ns


@given(st.integers(-(1 << 63) * 10**9, (1 << 63) * 10**9 - 1))
def test_every_time_that_the_store_can_hold_survives(mtime_ns: int) -> None:
    assert tarfmt.parse_time(tarfmt.format_time(mtime_ns)) == mtime_ns


def test_digits_beyond_nanoseconds_are_cut_off() -> None:
    assert tarfmt.parse_time(b"1.0000000019") == 1_000_000_001


@pytest.mark.parametrize(
    "text", [b"", b"-", b".5", b"1.x", b"1e3", b"+1", b"--1", b"9223372036854775808", b"1" * 5_000]
)
def test_what_is_no_time_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        tarfmt.parse_time(text)


@pytest.mark.parametrize("length", [0, 1, 85, 86, 87, 88, 89, 90, 985, 990, 995, 9_990])
def test_a_record_counts_its_own_digits(length: int) -> None:
    record = tarfmt.record(b"path", b"x" * length)
    assert int(record.split(b" ")[0]) == len(record)
    assert list(tarfmt.parse_records(record * 2)) == [(b"path", b"x" * length)] * 2


@pytest.mark.parametrize(
    "body",
    [
        b"5 a=b\n",
        b"6 a=b",
        b"99 a=b\n",
        b"6 a=bc",
        b"6 abc\n",
        b"x a=b\n",
        b"0 ",
        b"-6 a=b\n",
        b"6 a=b\n\0",
        b" a=b\n",
        b"\n",
    ],
)
def test_what_is_no_record_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        list(tarfmt.parse_records(body))


def test_attribute_names_keep_their_signs() -> None:
    assert tarfmt.xattr_key(b"user.a=b%c%3D") == b"SCHILY.xattr.user.a%3Db%25c%253D"
    assert tarfmt.xattr_name(b"SCHILY.xattr.user.a%3Db%25c%253D") == b"user.a=b%c%3D"
    assert tarfmt.xattr_name(b"path") is None


@given(st.binary(max_size=20))
def test_every_attribute_name_survives(name: bytes) -> None:
    assert tarfmt.xattr_name(tarfmt.xattr_key(name)) == name


def test_python_reads_the_same_in_a_header() -> None:
    block = tarfmt.block(b"2", b"a/b", b"to", 0o4755, (1000, 0o7777777), 0o77777777777, 5_000_000_000)
    info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    assert len(block) == 512
    assert block[257:265] == b"ustar\x0000"
    assert (info.name, info.linkname, info.mode, info.type) == ("a/b", "to", 0o4755, b"2")
    assert (info.uid, info.gid, info.size, info.mtime) == (1000, 0o7777777, 0o77777777777, 5)
