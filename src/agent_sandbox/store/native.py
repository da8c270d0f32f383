"""The engine in Rust behind the seam of ``ports.py``: what crosses is bytes, numbers and the seam's own methods.

The engine raises one exception with the code of the error that it means; here that becomes the error. What a method of
:class:`~agent_sandbox.store.ports.Objects` or :class:`~agent_sandbox.store.ports.Writer` raised comes out as it was.
All of them are called from the thread that called, which the engine's own threads ask.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent_sandbox_engine import _native
from agent_sandbox_engine._native import cut

from agent_sandbox.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    LimitExceededError,
    SandboxError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
)
from agent_sandbox.store.objects import Entry, Kind, decode_root, encode_root
from agent_sandbox.store.outcomes import Left, LeftOut, Report
from agent_sandbox.store.ports import Captured, Location, Objects, Options, OverlayRefusedError, Progress, Row, Writer

__all__ = ["NativeEngine", "Seen", "cut", "verify"]

_ERRORS: dict[str, type[SandboxError]] = {
    kind.code: kind
    for kind in (
        ConflictError,
        ForbiddenError,
        InvalidRequestError,
        LimitExceededError,
        StoreDamagedError,
        StoreError,
        StoreFullError,
    )
}


_ROW = struct.Struct("<QQQ")
_MESSAGE = 2_000
"""Characters of an error: it may name a path, which a sandbox makes as long as a megabyte."""


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _native.EngineError as error:
        code, message = error.args
        if len(message) > _MESSAGE:
            message = f"{message[: _MESSAGE // 2]}…{message[-_MESSAGE // 2 :]}"
        raise _ERRORS[code](message) from None


class NativeEngine:
    """:class:`~agent_sandbox.store.ports.Engine` in Rust, on several threads and without the interpreter's lock."""

    def capture(
        self,
        directory: int,
        objects: Objects,
        writer: Writer,
        *,
        base: Entry | None = None,
        lower: int | None = None,
        cache: Path | None = None,
        overlay: bool = False,
        options: Options | None = None,
        progress: Progress | None = None,
    ) -> Captured:
        """See :class:`~agent_sandbox.store.ports.Engine`."""
        options = options or Options()
        before = writer.written
        with _translated():
            answer = _native.capture(
                directory,
                objects.packs,
                objects.locate,
                writer.has,
                writer.append,
                Row,
                base=None if base is None else encode_root(base),
                lower=lower,
                cache=cache,
                overlay=overlay,
                owners=options.owners,
                threads=options.threads,
                progress=progress,
            )
        if isinstance(answer, str):
            raise OverlayRefusedError(answer)
        root, counts, left_out, left_out_count = answer
        files, directories, symlinks, fifos, size, read = counts
        report = Report(
            files=files,
            directories=directories,
            symlinks=symlinks,
            fifos=fifos,
            bytes=size,
            read=read,
            stored=writer.written - before,
            left_out=tuple(LeftOut(path, Left(why)) for path, why in left_out),
            left_out_count=left_out_count,
        )
        return Captured(decode_root(root), report)

    def checkout(
        self,
        root: Entry,
        directory: int,
        objects: Objects,
        *,
        options: Options | None = None,
        progress: Progress | None = None,
    ) -> None:
        """See :class:`~agent_sandbox.store.ports.Engine`."""
        options = options or Options()
        with _translated():
            _native.checkout(
                encode_root(root),
                directory,
                objects.packs,
                objects.locate,
                owners=options.owners,
                owner=options.owner,
                threads=options.threads,
                progress=progress,
            )

    def difference(
        self, old: Entry, new: Entry, directory: int, objects: Objects, *, options: Options | None = None
    ) -> None:
        """See :class:`~agent_sandbox.store.ports.Engine`."""
        options = options or Options()
        with _translated():
            _native.difference(
                encode_root(old),
                encode_root(new),
                directory,
                objects.packs,
                objects.locate,
                owners=options.owners,
                owner=options.owner,
                threads=options.threads,
            )

    def data_bytes(self, root: Entry, objects: Objects, *, known: tuple[Entry, int] | None = None) -> int:
        """See :class:`~agent_sandbox.store.ports.Engine`."""
        with _translated():
            return _native.data_bytes(
                encode_root(root),
                objects.packs,
                objects.locate,
                known=None if known is None else (encode_root(known[0]), known[1]),
            )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a record turned out to be; ``base`` and ``depth`` are of its patch."""

    kind: Kind
    length: int
    """Canonical bytes."""
    base: bytes | None
    depth: int


def verify(
    objects: Objects,
    rows: Sequence[tuple[bytes, Location]],
    *,
    threads: int = 0,
    progress: Progress | None = None,
) -> list[Seen | str]:
    """Read and decode many records, with what they are patches of; for each what it is, or why it is damaged.

    Give it thousands at a time, in the order of the packs: it works on several threads and without the interpreter's
    lock. Bases that are not among the rows are located by ``objects``. Progress counts records and their bytes.
    """
    packed = b"".join(id + _ROW.pack(place.pack, place.offset, place.length) for id, place in rows)
    with _translated():
        found = _native.verify(packed, objects.packs, objects.locate, threads=threads, progress=progress)
    return [
        why or "it cannot be read" if record is None else Seen(Kind(record[0]), *record[1:]) for record, why in found
    ]
