"""The reference engine: the byte work over directory trees in plain Python, to be read and to be compared with.

``capture.py`` reads a tree, ``layout.py`` makes one, ``difference.py`` makes an overlay layer, ``stats.py`` counts what
is in one. It keeps the same objects as the engine in Rust, at about 10 MB/s, since it looks for the cuts byte by byte.
"""

from __future__ import annotations

from pathlib import Path

from agent_sandbox.store.capture import capture
from agent_sandbox.store.difference import difference
from agent_sandbox.store.layout import lay_out
from agent_sandbox.store.objects import Entry
from agent_sandbox.store.ports import Captured, Objects, Options, OverlayRefusedError, Progress, Writer
from agent_sandbox.store.stats import data_bytes, data_bytes_after


class ReferenceEngine:
    """:class:`~agent_sandbox.store.ports.Engine` in Python: one thread, whatever the options say."""

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
        """See :class:`~agent_sandbox.store.ports.Engine`. ``lower`` only saves time, and is not used; upper
        directories of overlays are always refused."""
        if overlay:
            raise OverlayRefusedError("this engine reads merged views alone")
        return capture(
            directory, objects, writer, base=base, cache=cache, options=options or Options(), progress=progress
        )

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
        lay_out(root, directory, objects, options=options or Options(), progress=progress)

    def difference(
        self, old: Entry, new: Entry, directory: int, objects: Objects, *, options: Options | None = None
    ) -> None:
        """See :class:`~agent_sandbox.store.ports.Engine`."""
        difference(old, new, directory, objects, options=options or Options())

    def data_bytes(self, root: Entry, objects: Objects, *, known: tuple[Entry, int] | None = None) -> int:
        """See :class:`~agent_sandbox.store.ports.Engine`."""
        return data_bytes(objects, root) if known is None else data_bytes_after(objects, *known, root)
