"""Compressed archives: known by their bytes, bounded in what they become, refused when damaged or cut off."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import InvalidRequestError, PayloadTooLargeError
from agent_sandbox.store.tarinput import Input, Limits
from tests.unit.store.tars import END, raw

FORMATS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
PLAIN = raw(b"a", data=os.urandom(100_000) + b"x" * 1_000_000) + END


class Dribble:
    """A file that gives a few bytes at a time, as a socket does."""

    def __init__(self, data: bytes, most: int = 1_000) -> None:
        self._file = io.BytesIO(data)
        self._most = most

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, self._most))


def everything(data: bytes, limits: Limits | None = None, most: int = 1 << 20) -> bytes:
    stream = Input(Dribble(data, most), limits or Limits())
    return b"".join(iter(lambda: stream.read(1 << 16), b""))


def test_plain_bytes_pass() -> None:
    assert everything(PLAIN) == PLAIN
    assert everything(b"") == b""
    assert everything(b"short") == b"short"


@pytest.mark.parametrize("name", FORMATS)
def test_compressed_bytes_are_unpacked(name: str) -> None:
    packed = FORMATS[name](PLAIN)
    assert everything(packed) == PLAIN
    assert everything(packed, most=7) == PLAIN


@pytest.mark.parametrize("name", FORMATS)
def test_streams_one_after_the_other(name: str) -> None:
    pack = FORMATS[name]
    assert everything(pack(PLAIN[:700]) + pack(b"") + pack(PLAIN[700:])) == PLAIN
    assert everything(pack(PLAIN) + bytes(1_000)) == PLAIN


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("keep", [-1, -5, 200_000, 40_000, 513])
def test_what_was_cut_off_is_refused(name: str, keep: int) -> None:
    packed = FORMATS[name](PLAIN)
    assert len(packed) < 200_000 or keep != 200_000
    with pytest.raises(InvalidRequestError, match=f"{name} data ends too early"):
        everything(packed[: keep if keep < 0 else min(keep, len(packed) - 2)])


@pytest.mark.parametrize("name", FORMATS)
def test_what_follows_a_stream_and_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} data"):
        everything(FORMATS[name](PLAIN) + b"garbage" * 100)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(at=st.integers(6, 99_000), flip=st.integers(1, 255))
def test_damage_is_refused(name: str, at: int, flip: int) -> None:
    packed = bytearray(FORMATS[name](PLAIN))
    packed[at] ^= flip
    with suppress(InvalidRequestError, PayloadTooLargeError):
        assert everything(bytes(packed)) == PLAIN  # a bit that says nothing, such as gzip's time


def test_an_archive_whose_first_name_looks_like_a_format_is_plain() -> None:
    for magic in (b"BZh9", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ"):
        archive = raw(magic) + END
        assert everything(archive) == archive


@pytest.mark.parametrize("name", ["plain", *FORMATS])
def test_the_limit_of_bytes(name: str) -> None:
    packed = FORMATS.get(name, bytes)(PLAIN)
    assert everything(packed, Limits(bytes=len(PLAIN))) == PLAIN
    with pytest.raises(PayloadTooLargeError, match="more than"):
        everything(packed, Limits(bytes=len(PLAIN) - 1))


def bomb(name: str, mebibytes: int) -> bytes:
    """So many MiB of zeros; small however many they are."""
    if name == "zstd":
        out = zstandard.ZstdCompressor().compressobj()
        return b"".join([*(out.compress(bytes(1 << 20)) for _ in range(mebibytes)), out.flush()])
    piece = FORMATS[name](bytes(64 << 20))
    return piece * (mebibytes // 64)


@pytest.mark.parametrize("name", FORMATS)
def test_the_limit_of_growth(name: str) -> None:
    with pytest.raises(PayloadTooLargeError, match="times larger"):
        everything(bomb(name, 320), Limits(ratio=100))


@pytest.mark.parametrize("name", FORMATS)
def test_small_archives_may_grow_as_they_like(name: str) -> None:
    assert len(everything(bomb(name, 64), Limits(ratio=2))) == 64 << 20


@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_takes_bounded_memory(name: str) -> None:
    packed = bomb(name, 192)
    tracemalloc.start()
    stream = Input(io.BytesIO(packed), Limits(ratio=1 << 30))
    while stream.read(1 << 16):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 70 << 20


def test_windows_above_the_bound_are_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=30, enable_ldm=True)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(InvalidRequestError, match="zstd"):
        everything(wide.compress(PLAIN) + wide.flush())
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    with pytest.raises(InvalidRequestError, match="xz"):
        everything(lzma.compress(b"small", filters=filters))


def test_it_counts_what_it_took() -> None:
    packed = gzip.compress(PLAIN)
    stream = Input(io.BytesIO(packed), Limits())
    while stream.read(1 << 16):
        pass
    assert stream.taken == len(packed)
