"""The engine's layout at its seam to Python: who is called, and what ends it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.errors import StoreDamagedError, StoreError
from agent_sandbox.store.native import NativeEngine
from agent_sandbox.store.objects import Entry
from agent_sandbox.store.ports import Location, Options
from tests.unit.store.engines import capture, checkout, difference
from tests.unit.store.memory import MemoryObjects

FILES = 600


class Watched(MemoryObjects):
    """Notes who asks, and for how much; does something on the way."""

    def __init__(self, packs: Path) -> None:
        super().__init__(packs)
        self.calls: list[tuple[int, int]] = []
        self.error: BaseException | None = None
        self.signal = False

    def locate(self, ids: Sequence[bytes]) -> list[Location | None]:
        self.calls.append((threading.get_ident(), len(ids)))
        if self.signal:
            os.kill(os.getpid(), signal.SIGINT)
        if self.error is not None:
            raise self.error
        return super().locate(ids)


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    (tmp_path / "packs").mkdir()
    return Watched(tmp_path / "packs")


@pytest.fixture
def root(tmp_path: Path, store: Watched) -> Entry:
    """Many small directories."""
    for number in range(FILES):
        directory = tmp_path / "tree" / f"{number // 10:03}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / str(number)).write_text(str(number))
    found = capture(NativeEngine(), tmp_path / "tree", store).root
    store.calls.clear()
    return found


def test_the_calling_thread_is_asked_for_much_at_a_time(tmp_path: Path, store: Watched, root: Entry) -> None:
    checkout(NativeEngine(), root, tmp_path / "copy", store, options=Options(threads=1))
    assert {thread for thread, _ in store.calls} == {threading.get_ident()}
    assert sum(count for _, count in store.calls) >= FILES
    directories = len(list((tmp_path / "copy").iterdir()))
    assert len(store.calls) < directories, "fewer questions than directories"


def test_what_locate_raises_comes_out(tmp_path: Path, store: Watched, root: Entry) -> None:
    store.error = StoreError("the index is away")
    with pytest.raises(StoreError, match="the index is away"):
        checkout(NativeEngine(), root, tmp_path / "copy", store)
    with pytest.raises(StoreError, match="the index is away"):
        difference(NativeEngine(), root, replace(root, content=bytes(32)), tmp_path / "layer", store)


def test_a_signal_ends_a_checkout(tmp_path: Path, store: Watched, root: Entry) -> None:
    store.signal = True
    with pytest.raises(KeyboardInterrupt):
        checkout(NativeEngine(), root, tmp_path / "copy", store)
    store.signal = False
    checkout(NativeEngine(), root, tmp_path / "again", store)


def test_an_error_of_the_progress_ends_a_checkout(tmp_path: Path, store: Watched, root: Entry) -> None:
    def tell(*counts: int) -> None:
        raise StoreError("enough")

    with pytest.raises(StoreError, match="enough"):
        checkout(NativeEngine(), root, tmp_path / "copy", store, progress=tell)


def test_an_object_that_is_gone_is_damage(tmp_path: Path, store: Watched, root: Entry) -> None:
    gone = replace(root, content=bytes(32))
    with pytest.raises(StoreDamagedError, match="missing"):
        checkout(NativeEngine(), gone, tmp_path / "copy", store)
