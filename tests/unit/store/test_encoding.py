"""Numbers and byte strings of the stored format."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store.encoding import Reader, block, svarint, uvarint


@settings(deadline=None)
@given(st.integers(0, (1 << 64) - 1))
def test_an_unsigned_number_comes_back(value: int) -> None:
    data = uvarint(value)
    reader = Reader(data, "number")
    assert reader.uvarint() == value
    assert reader.left == 0
    assert len(data) == max(1, -(-value.bit_length() // 7))


@settings(deadline=None)
@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_a_signed_number_comes_back(value: int) -> None:
    reader = Reader(svarint(value), "number")
    assert reader.svarint() == value
    assert reader.left == 0


@settings(deadline=None)
@given(st.binary(max_size=12))
def test_bytes_are_a_number_in_its_only_form_or_refused(data: bytes) -> None:
    for name, encode in (("uvarint", uvarint), ("svarint", svarint)):
        reader = Reader(data, "number")
        try:
            value = getattr(reader, name)()
        except StoreDamagedError:
            continue
        assert encode(value) == data[: reader.at]


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_what_does_not_fit_64_bits_is_no_unsigned_number(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        uvarint(value)


@pytest.mark.parametrize("value", [-(1 << 63) - 1, 1 << 63])
def test_what_does_not_fit_64_bits_is_no_signed_number(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        svarint(value)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300)))
def test_byte_strings_come_back_in_order(parts: list[bytes]) -> None:
    reader = Reader(b"".join(map(block, parts)), "list")
    assert [reader.block(0, 300) for _ in parts] == parts
    reader.finish()


def test_a_byte_string_has_its_bounds() -> None:
    assert Reader(block(b"abc"), "name").block(3, 3) == b"abc"
    for least, most in ((4, 10), (0, 2)):
        with pytest.raises(StoreDamagedError):
            Reader(block(b"abc"), "name").block(least, most)


def test_a_length_is_never_trusted() -> None:
    with pytest.raises(StoreDamagedError, match="a damaged name: it ends too early"):
        Reader(uvarint(1 << 40) + b"abc", "name").block(0, 1 << 50)
    with pytest.raises(StoreDamagedError):
        Reader(b"abc", "name").take(4)
    with pytest.raises(StoreDamagedError):
        Reader(b"", "name").u8()


def test_a_number_may_have_a_bound_of_its_own() -> None:
    assert Reader(uvarint(300), "number").uvarint(300) == 300
    with pytest.raises(StoreDamagedError):
        Reader(uvarint(301), "number").uvarint(300)


def test_bytes_left_over_are_refused() -> None:
    reader = Reader(b"ab", "name")
    reader.u8()
    assert reader.left == 1
    with pytest.raises(StoreDamagedError, match="left over"):
        reader.finish()
    reader.u8()
    reader.finish()
