"""The engines under test, and the few lines that every test of them needs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sandbox.store.chunks import put_tree
from agent_sandbox.store.native import NativeEngine
from agent_sandbox.store.objects import Entry, Type
from agent_sandbox.store.ports import Captured, Engine, Options, Progress
from agent_sandbox.store.reference import ReferenceEngine
from tests.unit.store.memory import MemoryObjects

ENGINES: list[Engine] = [ReferenceEngine(), NativeEngine()]
"""Each engine must pass every test that takes one; a test that takes two lets one read what the other wrote."""

_NOBODY = 65_534

each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
each_pair = pytest.mark.parametrize(
    ("writer", "reader"),
    [(one, two) for one in ENGINES for two in ENGINES],
    ids=lambda engine: type(engine).__name__,
)


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    """Open a directory."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def capture(
    engine: Engine,
    directory: Path,
    store: MemoryObjects,
    *,
    base: Entry | None = None,
    cache: Path | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Captured:
    """Capture a directory into ``store``, whose records are then on disk."""
    with opened(directory) as fd:
        captured = engine.capture(
            fd, store, store, base=base, cache=cache, options=options or Options(), progress=progress
        )
    store.seal()
    return captured


def checkout(
    engine: Engine,
    root: Entry,
    directory: Path,
    store: MemoryObjects,
    *,
    options: Options | None = None,
    progress: Progress | None = None,
) -> None:
    """Lay a state out under a new directory."""
    directory.mkdir()
    with opened(directory) as fd:
        engine.checkout(root, fd, store, options=options or Options(), progress=progress)


def difference(
    engine: Engine, old: Entry, new: Entry, directory: Path, store: MemoryObjects, *, options: Options | None = None
) -> None:
    """Lay the overlay layer between two states out under a new directory."""
    directory.mkdir()
    with opened(directory) as fd:
        engine.difference(old, new, fd, store, options=options or Options())


def state(store: MemoryObjects, entries: Iterable[Entry]) -> Entry:
    """Keep a directory of these entries, sorted here, and return it as the root of a state."""
    tree = put_tree(sorted(entries, key=lambda entry: entry.name), store.put)
    store.flush()
    return Entry(b"", Type.DIRECTORY, 0o755, 0, content=tree)


@contextmanager
def unprivileged(*owned: Path) -> Iterator[None]:
    """Run as a user that is not root and owns these directories; does nothing when we are not root anyway."""
    if os.geteuid() != 0:
        yield
        return
    for directory in owned:
        os.chown(directory, _NOBODY, _NOBODY)
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextmanager
def let_in(fifo: Path) -> Iterator[threading.Event]:
    """Let a thread wait in opening a FIFO for writing; the event is set when somebody opened it for reading."""
    opened_by_somebody = threading.Event()

    def write() -> None:
        os.close(os.open(fifo, os.O_WRONLY))
        opened_by_somebody.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    time.sleep(0.05)
    try:
        yield opened_by_somebody
    finally:
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        writer.join(10)
        os.close(reader)


def memory(place: Path) -> MemoryObjects:
    """Return an empty object database with its pack under ``place``."""
    (place / "packs").mkdir()
    return MemoryObjects(place / "packs")
