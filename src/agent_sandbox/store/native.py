"""The engine in Rust behind the seam of ``ports.py``: what crosses is bytes, numbers and the seam's own methods.

The engine raises one exception with the code of the error that it means; here that becomes the error. What a method of
:class:`~agent_sandbox.store.ports.Objects` or :class:`~agent_sandbox.store.ports.Writer` raised comes out as it was.
All of them are called from the thread that called, which the engine's own threads ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from agent_sandbox.store.objects import Entry, decode_root, encode_root
from agent_sandbox.store.outcomes import Left, LeftOut, Report
from agent_sandbox.store.ports import Captured, Objects, Options, Progress, Row, Writer

__all__ = ["NativeEngine", "cut"]

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


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _native.EngineError as error:
        code, message = error.args
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
        options: Options | None = None,
        progress: Progress | None = None,
    ) -> Captured:
        """See :class:`~agent_sandbox.store.ports.Engine`."""
        options = options or Options()
        before = writer.written
        with _translated():
            root, counts, left_out, left_out_count = _native.capture(
                directory,
                objects.packs,
                objects.locate,
                writer.has,
                writer.append,
                writer.flush,
                Row,
                base=None if base is None else encode_root(base),
                lower=lower,
                cache=cache,
                owners=options.owners,
                threads=options.threads,
                progress=progress,
            )
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
                threads=options.threads,
            )
