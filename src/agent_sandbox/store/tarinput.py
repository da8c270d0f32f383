"""The bytes of an archive, plain or compressed, with a bound on what they become.

gzip, bzip2, xz and zstd are known by their first bytes. Every decoder is fed and drained in steps, so that no input
makes memory grow: zlib, bz2 and lzma stop at the output asked for; zstd cannot, but its densest block turns 4 bytes
into 128 KiB, so 1 KiB of input gives at most 32 MiB. Windows are at most 128 MiB (xz: the decoder as a whole). A stream
that is damaged, cut off, or followed by something else is an :class:`InvalidRequestError`; what grows above the
caller's :class:`Limits` a :class:`PayloadTooLargeError`.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from dataclasses import dataclass
from typing import Protocol

import zstandard

from agent_sandbox.errors import PayloadTooLargeError
from agent_sandbox.store.tarfmt import BLOCK, is_header, malformed
from agent_sandbox.store.tarread import Stream

_STEP = 1 << 18
_ZSTD_STEP = 1 << 10
_WINDOW = 128 << 20
_FREE = 256 << 20
"""Up to this many bytes an archive may become whatever the ratio: zeros compress well."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one archive may cost; more is a :class:`PayloadTooLargeError`."""

    entries: int = 5_000_000
    """Members of the archive, repeated ones too: bounds the time for an archive of tiny members."""
    memory: int = 1 << 30
    """Bytes of memory for names, targets and metadata, which are held until the last member may have replaced the
    first: about 2,500,000 names."""
    bytes: int = 1 << 40
    """Bytes of the archive when unpacked. Holes cost nothing."""
    ratio: int = 250
    """How many times larger a compressed archive may become; counts once it has become 256 MiB."""


class _Decoder(Protocol):
    @property
    def eof(self) -> bool:
        """Whether its stream has ended."""

    @property
    def unused_data(self) -> bytes:
        """What was fed after that end."""

    @property
    def hungry(self) -> bool:
        """Whether it gives no more before it is fed."""

    def feed(self, data: bytes) -> bytes:
        """Take ``data`` and return some output."""


class _Gzip:
    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self.hungry = True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def feed(self, data: bytes) -> bytes:
        out = self._zlib.decompress(self._zlib.unconsumed_tail + data, _STEP)
        self.hungry = not self._zlib.unconsumed_tail and len(out) < _STEP
        return out


class _Standard:
    """bz2 and lzma, which have one interface."""

    def __init__(self, decoder: bz2.BZ2Decompressor | lzma.LZMADecompressor) -> None:
        self._decoder = decoder

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    @property
    def hungry(self) -> bool:
        return self._decoder.needs_input

    def feed(self, data: bytes) -> bytes:
        return self._decoder.decompress(data, _STEP)


class _Zstd:
    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
        self._rest = b""

    @property
    def eof(self) -> bool:
        return self._zstd.eof

    @property
    def unused_data(self) -> bytes:
        return self._zstd.unused_data + self._rest

    @property
    def hungry(self) -> bool:
        return not self._rest

    def feed(self, data: bytes) -> bytes:
        data = self._rest + data
        self._rest = data[_ZSTD_STEP:]
        return self._zstd.decompress(data[:_ZSTD_STEP])


_FORMATS = (
    ("gzip", b"\x1f\x8b", _Gzip),
    ("bzip2", b"BZh", lambda: _Standard(bz2.BZ2Decompressor())),
    ("xz", b"\xfd7zXZ\0", lambda: _Standard(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_WINDOW))),
    ("zstd", b"\x28\xb5\x2f\xfd", _Zstd),
)
_DAMAGE = (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError, ValueError)
"""What decoders raise; bz2 has only OSError and ValueError."""


class Input:
    """The plain bytes of an archive: a :class:`Stream` over the caller's ``file``."""

    def __init__(self, file: Stream, limits: Limits) -> None:
        self._file = file
        self._limits = limits
        self.taken = 0
        """Bytes read from ``file``."""
        self._made = 0
        self._head = b""
        while len(self._head) < BLOCK and (piece := self._take(BLOCK - len(self._head))):
            self._head += piece
        self._format, self._make = "", None
        if len(self._head) < BLOCK or not is_header(self._head):
            for name, magic, make in _FORMATS:
                if self._head.startswith(magic):
                    self._format, self._make = name, make
        self._decoder: _Decoder | None = None

    def _take(self, size: int) -> bytes:
        piece = self._file.read(size)
        self.taken += len(piece)
        return piece

    def _raw(self) -> bytes:
        piece, self._head = self._head, b""
        return piece or self._take(_STEP)

    def read(self, size: int) -> bytes:
        """Return the next bytes, about ``size`` of them, or none at the end."""
        piece = self._unpack() if self._make else self._head or self._take(size)
        if not self._make:
            self._head = b""
        self._made += len(piece)
        if self._made > self._limits.bytes:
            raise PayloadTooLargeError(f"the archive becomes more than {self._limits.bytes} bytes")
        if self._make and self._made > max(_FREE, self._limits.ratio * self.taken):
            raise PayloadTooLargeError(f"the archive becomes more than {self._limits.ratio} times larger when unpacked")
        return piece

    def _unpack(self) -> bytes:
        assert self._make is not None
        while True:
            data = b""
            if self._decoder is None or self._decoder.hungry:
                data = self._raw()
                if self._decoder is None:
                    if not data:
                        return b""
                    data = data.lstrip(b"\0")  # streams may be filled up with zeros
                    if not data:
                        continue
                    self._decoder = self._make()
                elif not data:
                    raise malformed(f"its {self._format} data ends too early")
            try:
                piece = self._decoder.feed(data)
            except _DAMAGE as error:
                raise malformed(f"its {self._format} data is damaged ({error})") from None
            if self._decoder.eof:
                self._head, self._decoder = self._decoder.unused_data, None
            if piece:
                return piece
