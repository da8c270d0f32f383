"""The extension module. `agent_sandbox.store.native` is its only caller, and `agent_sandbox.store.ports` says more."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

CODES: list[str]
"""The codes of :class:`EngineError`."""

class EngineError(Exception):
    """A failure; ``args`` are the code of its class in ``agent_sandbox.errors``, and a message."""

def cut(data: bytes | bytearray | memoryview, start: int, end: int) -> int:
    """Return where the chunk that begins at ``start`` ends; see ``agent_sandbox.store.chunks.cut``."""

def capture(
    directory: int,
    packs: PathLike[str],
    locate: Callable[[Sequence[bytes]], Sequence[Any]],
    has: Callable[[Sequence[bytes]], Sequence[bool]],
    append: Callable[[bytes, Sequence[Any]], None],
    row: Callable[[bytes, int, int, bytes | None, int], Any],
    *,
    base: bytes | None,
    lower: int | None,
    cache: PathLike[str] | None,
    overlay: bool,
    owners: bool,
    threads: int,
    progress: Callable[[int, int, int, int], None] | None,
) -> tuple[bytes, tuple[int, int, int, int, int, int], list[tuple[bytes, str]], int] | str:
    """Return the root entry; files, directories, symlinks, FIFOs, bytes, bytes read; what was left out and why; how
    much that is. A text is why the upper directory of an overlay does not tell the state."""

def checkout(
    root: bytes,
    directory: int,
    packs: PathLike[str],
    locate: Callable[[Sequence[bytes]], Sequence[Any]],
    *,
    owners: bool,
    owner: tuple[int, int] | None,
    threads: int,
    progress: Callable[[int, int, int, int], None] | None,
) -> None: ...
def difference(
    old: bytes,
    new: bytes,
    directory: int,
    packs: PathLike[str],
    locate: Callable[[Sequence[bytes]], Sequence[Any]],
    *,
    owners: bool,
    owner: tuple[int, int] | None,
    threads: int,
) -> None: ...
def verify(
    rows: bytes,
    packs: PathLike[str],
    locate: Callable[[Sequence[bytes]], Sequence[Any]],
    *,
    threads: int,
    progress: Callable[[int, int, int, int], None] | None,
) -> list[tuple[tuple[int, int, bytes | None, int] | None, str | None]]:
    """Return for each row kind, canonical length, base and depth of its record, or why it is damaged."""

def data_bytes(
    root: bytes,
    packs: PathLike[str],
    locate: Callable[[Sequence[bytes]], Sequence[Any]],
    *,
    known: tuple[bytes, int] | None,
) -> int: ...
