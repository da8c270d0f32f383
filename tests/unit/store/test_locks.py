"""The lock: threads of one process, and processes (each open file is one to ``flock``)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_sandbox.errors import StoreBusyError, StoreError
from agent_sandbox.store.locks import StoreLock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "lock"
    path.touch()
    return path


@pytest.fixture
def lock(path: Path) -> Iterator[StoreLock]:
    lock = StoreLock(path)
    yield lock
    lock.close()


@pytest.fixture
def other(path: Path) -> Iterator[StoreLock]:
    other = StoreLock(path)
    yield other
    other.close()


def in_thread(work: object) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()  # type: ignore[operator]
        except StoreError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return raised[0] if raised else None


def take(lock: StoreLock, *, inner: bool = False) -> None:
    with lock.shared(0.05, inner=inner):
        pass


def take_all(lock: StoreLock) -> None:
    with lock.exclusive(0.05):
        pass


def test_readers_share_between_processes_and_threads(lock: StoreLock, other: StoreLock) -> None:
    with lock.shared(0.05), other.shared(0.05):
        assert in_thread(lambda: take(lock)) is None


def test_first_holder_of_the_process_is_told(lock: StoreLock) -> None:
    with lock.shared(0.05) as first, lock.shared(0.05) as second:
        assert (first, second) == (True, False)
    with lock.shared(0.05) as again:
        assert again


def test_gc_waits_for_a_reader_of_another_process(lock: StoreLock, other: StoreLock) -> None:
    with lock.shared(0.05), pytest.raises(StoreBusyError):
        take_all(other)
    take_all(other)


def test_reader_waits_for_gc_of_another_process(lock: StoreLock, other: StoreLock) -> None:
    with lock.exclusive(0.05), pytest.raises(StoreBusyError):
        take(other)
    take(other)


def test_gc_waits_for_a_reader_of_its_own_process(lock: StoreLock) -> None:
    with lock.shared(0.05):
        assert isinstance(in_thread(lambda: take_all(lock)), StoreBusyError)
    take_all(lock)


def test_reader_waits_for_gc_of_its_own_process_but_not_for_itself(lock: StoreLock) -> None:
    with lock.exclusive(0.05):
        assert isinstance(in_thread(lambda: take(lock)), StoreBusyError)
        take(lock)


def test_gc_excludes_gc(lock: StoreLock, other: StoreLock) -> None:
    with lock.exclusive(0.05):
        assert isinstance(in_thread(lambda: take_all(lock)), StoreBusyError)
        assert isinstance(in_thread(lambda: take_all(other)), StoreBusyError)


def test_lock_is_held_until_the_last_reader_leaves(lock: StoreLock, other: StoreLock) -> None:
    with ExitStack() as first:
        first.enter_context(lock.shared(0.05))
        with lock.shared(0.05):
            pass
        with pytest.raises(StoreBusyError):
            take_all(other)
    take_all(other)


def test_gc_that_waits_lets_workers_of_a_running_operation_through_but_no_new_operation(lock: StoreLock) -> None:
    waiting = threading.Event()
    with ExitStack() as operation:
        operation.enter_context(lock.shared(0.05))
        collected = threading.Thread(target=lambda: _collect(lock, waiting))
        collected.start()
        waiting.wait(10)
        while not lock._waiting:
            pass
        assert in_thread(lambda: take(lock, inner=True)) is None
        assert isinstance(in_thread(lambda: take(lock)), StoreBusyError)
        take(lock)
    collected.join(10)
    assert not collected.is_alive()
    take(lock)


def _collect(lock: StoreLock, waiting: threading.Event) -> None:
    waiting.set()
    with lock.exclusive(30):
        pass


def test_error_inside_lets_go(lock: StoreLock, other: StoreLock) -> None:
    with pytest.raises(RuntimeError), lock.exclusive(0.05):
        raise RuntimeError
    with pytest.raises(RuntimeError), lock.shared(0.05):
        raise RuntimeError
    take_all(other)


def test_lock_that_is_missing_or_a_link_is_refused(tmp_path: Path, path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    for name in ("nowhere", "link"):
        with pytest.raises(StoreError):
            StoreLock(tmp_path / name)
