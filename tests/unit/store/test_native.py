"""The engine in Rust where it meets Python: errors, callbacks, signals, and what only it has."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest
from agent_sandbox_engine import _native

from agent_sandbox import errors
from agent_sandbox.errors import InvalidRequestError, StoreError
from agent_sandbox.store import chunks
from agent_sandbox.store.native import NativeEngine, cut
from agent_sandbox.store.ports import Captured, Location, Options, Row
from agent_sandbox.store.reference import ReferenceEngine
from tests.unit.store import vectors
from tests.unit.store.engines import capture, checkout, memory, opened
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.trees import scratch

ENGINE = NativeEngine()
MIB = 1 << 20


class OurError(Exception):
    """Something that no engine knows."""


def fail(*arguments: object) -> NoReturn:
    raise OurError


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", _native.CODES)
def test_every_code_of_the_engine_is_the_error_that_has_it(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise _native.EngineError(code, "a message")

    monkeypatch.setattr(_native, "capture", refuse)
    with scratch() as place, pytest.raises(errors.SandboxError, match="a message") as caught:
        capture(ENGINE, place, memory(place))
    assert caught.value.code == code
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_message_of_the_engine_is_short_whatever_path_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise _native.EngineError("invalid_request", "begins " + "\\x01" * 255_000 + " ends")

    monkeypatch.setattr(_native, "capture", refuse)
    with scratch() as place, pytest.raises(InvalidRequestError, match=r"^begins .* ends$") as caught:
        capture(ENGINE, place, memory(place))
    assert len(str(caught.value)) < 2_100


def test_what_is_no_directory_is_refused() -> None:
    with scratch() as place:
        store = memory(place)
        (place / "file").write_bytes(b"")
        fd = os.open(place / "file", os.O_RDONLY)
        try:
            with pytest.raises(InvalidRequestError):
                ENGINE.capture(fd, store, store)
        finally:
            os.close(fd)
        with pytest.raises(StoreError, match="Bad file descriptor"):
            ENGINE.capture(fd, store, store)


@pytest.mark.parametrize("name", ["has", "append", "locate"])
def test_what_a_callback_raises_comes_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch() as place:
        store = memory(place)
        (place / "tree").mkdir()
        (place / "tree" / "file").write_bytes(b"one")
        old = capture(ENGINE, place / "tree", store)
        (place / "tree" / "file").write_bytes(b"two")
        monkeypatch.setattr(store, name, fail)
        with pytest.raises(OurError):
            capture(ENGINE, place / "tree", store, base=old.root)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("has", lambda ids: [True] * (len(ids) + 1)),
        ("has", lambda ids: []),
        ("has", lambda ids: [None] * len(ids)),
        ("locate", lambda ids: []),
        ("locate", lambda ids: [Location(-1, 0, 0)] * len(ids)),
        ("locate", lambda ids: [3] * len(ids)),
    ],
)
def test_a_wrong_answer_is_an_error(
    name: str, answer: Callable[[Sequence[bytes]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with scratch() as place:
        store = memory(place)
        (place / "tree").mkdir()
        (place / "tree" / "file").write_bytes(b"one")
        old = capture(ENGINE, place / "tree", store)
        (place / "tree" / "file").write_bytes(b"two")
        monkeypatch.setattr(store, name, answer)
        with pytest.raises((TypeError, OverflowError, AttributeError, InvalidRequestError)):
            capture(ENGINE, place / "tree", store, base=old.root)


# ---- callbacks and signals -----------------------------------------------------------------------------------------


class Watched(MemoryObjects):
    """Notes which thread calls."""

    def __init__(self, packs: Path) -> None:
        super().__init__(packs)
        self.threads: set[int] = set()
        self.appended: list[int] = []

    def has(self, ids: Sequence[bytes]) -> list[bool]:
        self.threads.add(threading.get_ident())
        assert all(len(id) == 32 for id in ids)
        return super().has(ids)

    def append(self, records: bytes, rows: Sequence[Row]) -> None:
        self.threads.add(threading.get_ident())
        self.appended.append(len(records))
        assert sum(row.length for row in rows) == len(records)
        super().append(records, rows)


def test_callbacks_come_from_the_calling_thread_in_large_pieces() -> None:
    with scratch() as place:
        (place / "packs").mkdir()
        (place / "tree").mkdir()
        for number in range(3):
            (place / "tree" / f"{number}").write_bytes(os.urandom(8 * MIB))
        store = Watched(place / "packs")
        capture(ENGINE, place / "tree", store, options=Options(threads=4))
        assert store.threads == {threading.get_ident()}
        assert max(store.appended) < 5 * MIB
        assert len(store.appended) <= 10


@contextmanager
def alarm(seconds: float, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_ends_a_capture() -> None:
    with scratch() as place:
        store = memory(place)
        (place / "tree").mkdir()
        with (place / "tree" / "file").open("wb") as file:
            for _ in range(512):  # several tenths of a second of work, which asks the caller little
                file.write(bytes(MIB))
        with pytest.raises(OurError), opened(place / "tree") as fd, alarm(0.001, fail):
            ENGINE.capture(fd, store, store, options=Options(threads=1))


def test_an_error_of_the_progress_ends_a_capture() -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        with pytest.raises(OurError):
            capture(ENGINE, place / "tree", memory(place), progress=fail)


def test_other_threads_run_meanwhile() -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        (place / "tree" / "file").write_bytes(os.urandom(20 * MIB))
        store = memory(place)
        done = threading.Event()
        counted = 0

        def count() -> None:
            nonlocal counted
            while not done.is_set():
                counted += 1

        with opened(place / "tree") as fd:
            other = threading.Thread(target=count)
            other.start()
            before = counted
            ENGINE.capture(fd, store, store)
            done.set()
            other.join()
        assert counted > before


# ---- what only this engine has -------------------------------------------------------------------------------------


def take(place: Path, store: MemoryObjects, *, base: Captured | None = None, lower: str | None = None) -> Captured:
    if lower is None:
        return capture(ENGINE, place / "tree", store, base=base.root if base else None)
    with opened(place / "tree") as fd, opened(place / lower) as beside:
        captured = ENGINE.capture(fd, store, store, base=base.root if base else None, lower=beside)
    store.seal()
    return captured


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data,
        lambda data: data[:1_000_000] + b"0123456789" + data[1_000_010:],
        lambda data: b"0123456789" + data,
        lambda data: data[:700_001] + data[700_011:],
        lambda data: data[:-1],
        lambda data: data + b"0123456789",
    ],
)
def test_comparison_with_a_lower_changes_no_identity(edit: Callable[[bytes], bytes]) -> None:
    with scratch() as place:
        store = memory(place)
        (place / "tree" / "sub").mkdir(parents=True)
        file = place / "tree" / "sub" / "file"
        data = os.urandom(2 * MIB)
        file.write_bytes(data)
        base = take(place, store)
        checkout(ReferenceEngine(), base.root, place / "lower", store)
        file.write_bytes(edit(data))
        new = take(place, store, base=base, lower="lower")
        assert new.report.stored < 4_000
        assert new.root == capture(ENGINE, place / "tree", store).root
        checkout(ReferenceEngine(), new.root, place / "copy", store)
        assert (place / "copy" / "sub" / "file").read_bytes() == edit(data)


def test_the_number_of_threads_changes_no_identity() -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        for number in range(300):
            (place / "tree" / f"{number}").write_bytes(os.urandom(number * 1_000))
        roots = set()
        for threads in (1, 2, 5, 100):
            (place / f"{threads}").mkdir()
            store = memory(place / f"{threads}")
            roots.add(capture(ENGINE, place / "tree", store, options=Options(threads=threads)).root)
        assert len(roots) == 1


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_cuts_are_those_of_the_reference(kind: Callable[[bytes], bytes | bytearray | memoryview]) -> None:
    data = vectors.stream("native", 200_000) + bytes(50_000)
    whole = kind(data)
    at = 0
    while at < len(data):
        end = cut(whole, at, len(data))
        assert end == chunks.cut(data, at, len(data))
        at = end
    assert cut(whole, 5, 5) == 5
    for start, end in [(len(data), len(data) + 1), (len(data) + 1, len(data) + 1)]:
        with pytest.raises(ValueError, match="outside"):
            cut(whole, start, end)


def test_a_cut_needs_bytes_side_by_side() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        cut(memoryview(bytes(100))[::2], 0, 10)
