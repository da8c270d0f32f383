"""Snapshots as the first version kept them: files, one compressed tar each, ``DATA_DIR/snapshots/<id>.tar.zst``.

None is made any more. Those that are found are taken over into the store (``fleet.py``, :meth:`Workspaces.adopt`): the
state is there and the row names it before the file goes, so a crash leaves the file with its row, or a file without
use, which :meth:`SnapshotFiles.start` removes. Deleting such a snapshot goes the other way: row first, then the file.
One whose bytes are not what its row says stays, for whoever may mend it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)

_SUFFIX = ".tar.zst"


class SnapshotFiles:
    """The files of one DATA_DIR."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def start(self, known: Collection[str]) -> None:
        """Remove what a crash left: unfinished files, and those whose id is not in ``known``."""
        await asyncio.to_thread(self._sweep, known)

    def path(self, id: str) -> Path:
        """Where the file of a snapshot is."""
        return self._directory / (id + _SUFFIX)

    async def delete(self, id: str) -> None:
        """Remove the file of a snapshot whose row does not need it. Where that fails, the next start does it."""

        def remove() -> None:
            try:
                self.path(id).unlink(missing_ok=True)
            except OSError as error:
                log.warning("the file of snapshot %s stays until the next start: %s", id, error.strerror)

        await asyncio.to_thread(remove)

    def _sweep(self, known: Collection[str]) -> None:
        if not self._directory.exists():
            return
        for path in self._directory.iterdir():
            if path.name.endswith(_SUFFIX + ".tmp") or (
                path.name.endswith(_SUFFIX) and path.name.removesuffix(_SUFFIX) not in known
            ):
                log.warning("removing %s: no snapshot needs it", path.name)
                try:
                    path.unlink()
                except OSError as error:
                    log.warning("%s cannot be removed: %s", path.name, error.strerror)
