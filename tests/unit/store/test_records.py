"""Records: every form comes back, the smallest is taken, and a flipped bit never gives other bytes."""

from __future__ import annotations

import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import records
from agent_sandbox.store.objects import MAX_CANONICAL, Kind, identity
from agent_sandbox.store.records import Form
from tests.unit.store import vectors

NOISE = vectors.stream("records", 20_000)
OLD = vectors.stream("old", 10_000)
OLD_ID = identity(Kind.BLOB, OLD)


def decoded(record: bytes, base: bytes | None = None) -> tuple[records.Header, bytes]:
    header = records.decode_header(record[: records.MAX_HEADER])
    return header, records.decode_payload(header, record[header.size :], base)


def encoded(canonical: bytes, base: tuple[bytes, bytes, int] | None = None) -> tuple[bytes, int]:
    return records.encode(Kind.BLOB, identity(Kind.BLOB, canonical), canonical, base)


@settings(deadline=None)
@given(st.sampled_from(list(Kind)), st.binary(min_size=1, max_size=300), st.integers(1, 100))
def test_what_was_encoded_comes_back(kind: Kind, part: bytes, times: int) -> None:
    canonical = part * times
    record, depth = records.encode(kind, identity(kind, canonical), canonical)
    header, found = decoded(record)
    assert (found, depth, header.depth, header.base) == (canonical, 0, 0, None)
    assert header.form is (Form.ZSTD if header.length < len(canonical) else Form.RAW)
    assert header.size + header.length == len(record)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=100), st.binary(min_size=1, max_size=3_000), st.integers(0, 3), st.data())
def test_a_patch_comes_back(edit: bytes, base: bytes, depth: int, data: st.DataObject) -> None:
    """Whatever the base is: also one of a few bytes, which zstd does not use."""
    at = data.draw(st.integers(0, len(base)))
    canonical = base[:at] + edit + base[at:] + NOISE[: data.draw(st.integers(0, 50))]
    base_id = identity(Kind.BLOB, base)
    record, found_depth = encoded(canonical, (base_id, base, depth))
    header, found = decoded(record, base)
    assert found == canonical
    assert header.depth == found_depth == (depth + 1 if header.form is Form.PATCH else 0)
    assert header.base == (base_id if header.form is Form.PATCH else None)


def test_the_smallest_form_is_taken() -> None:
    assert decoded(encoded(NOISE)[0])[0].form is Form.RAW
    assert decoded(encoded(b"a" * 1_000)[0])[0].form is Form.ZSTD
    changed = OLD[:5_000] + b"0123456789" + OLD[5_000:]
    record, depth = encoded(changed, (OLD_ID, OLD, 0))
    assert decoded(record, OLD)[0].form is Form.PATCH
    assert depth == 1
    assert len(record) < 200
    assert decoded(encoded(NOISE, (OLD_ID, OLD, 0))[0])[0].form is Form.RAW
    assert decoded(encoded(b"a" * 1_000, (OLD_ID, OLD, 0))[0])[0].form is Form.ZSTD


def test_a_patch_is_at_most_four_deep() -> None:
    assert encoded(OLD + b"x", (OLD_ID, OLD, 3))[1] == 4
    assert encoded(OLD + b"x", (OLD_ID, OLD, 4))[1] == 0


def test_nothing_is_a_patch_of_itself() -> None:
    record, depth = encoded(OLD, (OLD_ID, OLD, 0))
    assert depth == 0
    assert decoded(record)[1] == OLD


@pytest.mark.parametrize(
    ("kind", "length"), [(kind, length) for kind in Kind for length in (0, MAX_CANONICAL[kind] + 1)]
)
def test_lengths_that_no_object_has_are_not_written(kind: Kind, length: int) -> None:
    with pytest.raises(ValueError, match=f"a {kind.name.lower()} of {length} bytes"):
        records.encode(kind, bytes(32), bytes(length))


@pytest.mark.parametrize("kind", Kind)
def test_the_largest_object_of_each_kind_comes_back(kind: Kind) -> None:
    for canonical in (bytes(MAX_CANONICAL[kind]), vectors.stream("large", MAX_CANONICAL[kind])):
        record, _ = records.encode(kind, identity(kind, canonical), canonical)
        assert decoded(record)[1] == canonical


RECORDS = {
    "raw": (encoded(NOISE[:100])[0], None, NOISE[:100]),
    "zstd": (encoded(b"some text " * 30)[0], None, b"some text " * 30),
    "patch": (encoded(OLD + b"end", (OLD_ID, OLD, 1))[0], OLD, OLD + b"end"),
}


@pytest.mark.parametrize("form", RECORDS)
def test_no_flipped_bit_gives_other_bytes(form: str) -> None:
    record, base, canonical = RECORDS[form]
    refused = 0
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert decoded(bytes(damaged), base)[1] == canonical
        except StoreDamagedError:
            refused += 1
    assert refused >= 8 * (len(record) - 10)


@pytest.mark.parametrize("form", RECORDS)
def test_no_record_may_be_cut_or_go_on(form: str) -> None:
    record, base, _ = RECORDS[form]
    for data in (*(record[:end] for end in range(len(record))), record + b"\x00"):
        with pytest.raises(StoreDamagedError):
            decoded(data, base)


def test_a_patch_needs_its_base() -> None:
    record = RECORDS["patch"][0]
    for base in (None, b"", OLD[1:], OLD[:-1] + b"\x00"):
        with pytest.raises(StoreDamagedError):
            decoded(record, base)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=120))
def test_any_bytes_are_a_record_or_refused(data: bytes) -> None:
    with pytest.raises(StoreDamagedError):
        decoded(data)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(Form), st.integers(1, 200), st.binary(max_size=100), st.booleans())
def test_any_payload_is_refused_in_time(form: Form, length: int, payload: bytes, framed: bool) -> None:
    """A header whose checksum is right says nothing of the payload; ids are not guessed."""
    if framed:
        payload = zstandard.ZstdCompressor().compress(bytes(length))[:10] + payload
    header = records.Header(Kind.BLOB, form, int(form is Form.PATCH), length, len(payload), bytes(32), None, 48)
    with pytest.raises(StoreDamagedError):
        records.decode_payload(header, payload, OLD)


def test_the_checksum_is_over_the_header_alone() -> None:
    record = RECORDS["zstd"][0]
    assert record[44:48] == zlib.crc32(record[:44]).to_bytes(4, "little")
    patch = RECORDS["patch"][0]
    assert patch[76:80] == zlib.crc32(patch[:76]).to_bytes(4, "little")
    assert patch[44:76] == OLD_ID
