"""Files of this side that are sent and received: read and written in pieces, never held whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from agent_sandbox.client.file_requests import PIECE_BYTES
from agent_sandbox.errors import InvalidRequestError

Source = str | os.PathLike[str] | BinaryIO | Iterable[bytes]
"""What can be uploaded: the path of a file, an open binary file, or pieces of bytes."""

Sink = str | os.PathLike[str] | BinaryIO
"""Where a download can go: the path of a file, or an open binary file."""

Input = bytes | str | BinaryIO | Iterable[bytes]
"""What standard input can be: bytes, text (as UTF-8), an open binary file, or pieces of bytes."""


@contextmanager
def reading(source: Source, *, gather: bool = False) -> Iterator[Iterator[bytes]]:
    """Yield the pieces of a source; ``gather`` joins small ones, for what nobody waits for piece by piece."""
    if isinstance(source, (str, os.PathLike)):
        with Path(source).open("rb") as file:
            yield _pieces(file.read1)
    else:
        yield gathered(of_input(source)) if gather else of_input(source)


def gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of 256 KiB or more: an archive is made of many that have some bytes."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if size:
        yield b"".join(held)


def of_input(source: bytes | str | BinaryIO | Iterable[bytes]) -> Iterator[bytes]:
    """Return the pieces of standard input."""
    if isinstance(source, str):
        source = source.encode()
    if isinstance(source, (bytes, bytearray, memoryview)):
        return iter((bytes(source),) if source else ())
    read = getattr(source, "read1", None) or getattr(source, "read", None)
    return _pieces(read) if read is not None else iter(source)


def _pieces(read: Callable[[int], Any]) -> Iterator[bytes]:
    while piece := read(PIECE_BYTES):
        if isinstance(piece, str):
            raise InvalidRequestError("open the file in binary mode")
        yield piece


@contextmanager
def writing(sink: Sink) -> Iterator[Callable[[bytes], object]]:
    """Yield what writes a piece. A path gets its file at the end only, whole, in place of one that is there."""
    if not isinstance(sink, (str, os.PathLike)):
        yield sink.write
        return
    path = Path(sink)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:100]}.", delete=False) as file:
        try:
            yield file.write
            file.close()
            umask = os.umask(0)
            os.umask(umask)
            Path(file.name).chmod(0o666 & ~umask)
            Path(file.name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(file.name).unlink()
            raise


@asynccontextmanager
async def reading_off_the_loop(source: Source, *, gather: bool = False) -> AsyncIterator[AsyncIterator[bytes]]:
    """As :func:`reading`, with everything that may block on a thread."""
    held = reading(source, gather=gather)
    pieces = await asyncio.to_thread(held.__enter__)
    try:
        yield off_the_loop(pieces)
    finally:
        await asyncio.to_thread(held.__exit__, None, None, None)


@asynccontextmanager
async def writing_off_the_loop(sink: Sink) -> AsyncIterator[Callable[[bytes], Awaitable[object]]]:
    """As :func:`writing`, with everything that may block on a thread."""
    with ExitStack() as stack:
        write = await asyncio.to_thread(stack.enter_context, writing(sink))
        yield lambda piece: asyncio.to_thread(write, piece)


async def off_the_loop(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield pieces whose reading may block, each read on a thread."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
