"""One process that works on a store until it is killed: it says what it tries, and what was acknowledged.

It edits a directory at random and commits it, and in between forks, tags, publishes, pins, forgets, deletes and
collects. Its project is its own, so what must be there is exactly known; the store it shares with others, and some of
its content too.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from agent_sandbox.errors import StoreBusyError
from agent_sandbox.store.native import NativeEngine
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.outcomes import Created, UpToDate
from agent_sandbox.store.packs import OsFiles, PackFile
from agent_sandbox.store.ports import Engine
from agent_sandbox.store.reference import ReferenceEngine
from agent_sandbox.store.store import Store
from tests.unit.store.trees import (
    Data,
    Edit,
    Fill,
    Insert,
    Link,
    Look,
    Looks,
    Make,
    Remove,
    Rename,
    Resize,
    Write,
    apply,
    state_of,
)

ENGINES: dict[str, type[Engine]] = {"reference": ReferenceEngine, "native": NativeEngine}
OPS = {
    "commit": 60,
    "gc": 12,
    "fork": 4,
    "tag": 4,
    "add": 3,
    "pin": 3,
    "unpin": 2,
    "forget": 6,
    "delete": 6,
    "reopen": 4,
}
"""What it does, and how often of 100."""
MOST_ENTRIES = 60
WAIT_SECONDS = 30.0


def digest_of(directory: Path) -> str:
    """Hash all that a commit of the directory must keep."""
    return hashlib.sha256(repr(sorted(state_of(directory).items(), key=lambda item: item[0])).encode()).hexdigest()


class Killing(OsFiles):
    """The packs' directory, through which the process kills itself at the ``left``-th step: before, after, or half."""

    def __init__(self, directory: int, left: int) -> None:
        super().__init__(directory)
        self._left = left

    def step(self) -> bool:
        """Count one, and return whether it is the last."""
        self._left -= 1
        return self._left == 0

    def create(self, name: str) -> PackFile:
        if self.step():
            _die()
        return _KillingFile(super().create(name), self)

    def remove(self, name: str) -> None:
        if self.step():
            _die()
        super().remove(name)

    def sync(self) -> None:
        if self.step():
            _die()
        super().sync()
        if self.step():
            _die()


class _KillingFile:
    def __init__(self, file: PackFile, files: Killing) -> None:
        self._file = file
        self._files = files

    def write(self, data: bytes | memoryview, offset: int) -> int:
        if self._files.step():
            self._file.write(memoryview(data)[: len(data) // 2], offset)
            _die()
        return self._file.write(data, offset)

    def sync(self) -> None:
        if self._files.step():
            _die()
        self._file.sync()
        if self._files.step():
            _die()

    def truncate(self, size: int) -> None:
        if self._files.step():
            _die()
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@dataclass
class Worker:
    """What one process is to do. ``names`` is what is there of its project: a reference or pin, and its commit."""

    store: Path
    directory: Path
    project: str
    seed: int
    engine: str
    steps: int
    """How many steps of writing packs it lives for; 0 is until it is killed."""
    names: dict[str, str]
    parents: dict[str, str]
    """Commits of its project and the one before, as far as they are known."""
    say: Callable[[dict[str, Any]], None]
    forgotten: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Work for ever."""
        rng = random.Random(self.seed)
        try:
            store = self._open()
            store.checkout(f"{self.project}:main", self.directory)
            while True:
                op = rng.choices(list(OPS), list(OPS.values()))[0]
                if op == "reopen":
                    store.close()
                    store = self._open()
                else:
                    getattr(self, f"_{op}")(store, rng)
        except BaseException:  # noqa: BLE001 (told to who started it)
            self.say({"failed": traceback.format_exc()})

    def _open(self) -> Store:
        files = None
        if self.steps:
            files = Killing(os.open(self.store / "packs", os.O_RDONLY | os.O_CLOEXEC), self.steps)
        database = ObjectDatabase.open(self.store, wait_seconds=WAIT_SECONDS, files=files)
        return Store(database, ENGINES[self.engine]())

    def _do(self, act: Callable[[], Any], **what: Any) -> Any:
        self.say({"try": what})
        result = act()
        self.say({"done": what, "commit": result.commit.hex()} if isinstance(result, Created) else {"done": what})
        return result

    def _commit(self, store: Store, rng: random.Random) -> None:
        apply(self.directory, [draw(rng) for _ in range(rng.randrange(1, 4))])
        while sum(len(names) + len(files) for _, names, files in os.walk(self.directory)) > MOST_ENTRIES:
            apply(self.directory, [Remove(rng.randrange(1000))])
        ref = f"{self.project}:main"
        old = self.names[ref]
        outcome = self._do(
            lambda: store.commit(ref, self.directory, author="worker", message=str(rng.random())),
            op="commit",
            ref=ref,
            old=old,
            digest=digest_of(self.directory),
        )
        assert isinstance(outcome, Created | UpToDate), outcome
        if isinstance(outcome, Created):
            self.names[ref] = outcome.commit.hex()
            self.parents[outcome.commit.hex()] = old

    def _gc(self, store: Store, rng: random.Random) -> None:
        def act() -> None:
            with suppress(StoreBusyError):
                store.gc(wait_seconds=rng.choice((0.0, 1.0)))

        self._do(act, op="gc")

    def _some(self, rng: random.Random) -> str:
        """Any commit with its state: one that a name is at, or one before."""
        commit = rng.choice(sorted(self.names.values()))
        while rng.random() < 0.5 and (older := self.parents.get(commit)) and older not in self.forgotten:
            commit = older
        return commit

    def _fork(self, store: Store, rng: random.Random) -> None:
        commit, ref = self._some(rng), f"{self.project}:b{rng.randrange(10**6)}"
        self._do(lambda: store.fork(commit, ref), op="name", name=ref, commit=commit)
        self.names[ref] = commit

    def _tag(self, store: Store, rng: random.Random) -> None:
        commit, ref = self._some(rng), f"{self.project}:t{rng.randrange(10**6)}"
        self._do(lambda: store.tag(commit, ref), op="name", name=ref, commit=commit)
        self.names[ref] = commit

    def _add(self, store: Store, rng: random.Random) -> None:
        numbers = [int(name.partition("@")[2]) for name in self.names if "@" in name]
        name, commit = f"{self.project}@{max(numbers) + 1}", self.names[f"{self.project}:main"]
        if commit != self.names[f"{self.project}@{max(numbers)}"]:
            outcome = self._do(lambda: store.add(f"{self.project}:main"), op="name", name=name, commit=commit)
            assert isinstance(outcome, Created), outcome
            self.names[name] = commit

    def _pin(self, store: Store, rng: random.Random) -> None:
        commit, name = self._some(rng), f"{self.project}.{rng.randrange(10**6)}"
        self._do(lambda: store.pin(name, commit), op="name", name=f"pin {name}", commit=commit)
        self.names[f"pin {name}"] = commit

    def _unpin(self, store: Store, rng: random.Random) -> None:
        pins = sorted(name for name in self.names if name.startswith("pin "))
        if pins:
            name = rng.choice(pins)
            self._do(lambda: store.unpin(name.removeprefix("pin ")), op="unname", name=name)
            del self.names[name]

    def _delete(self, store: Store, rng: random.Random) -> None:
        names = sorted(name for name in self.names if ":" in name and not name.endswith(":main"))
        if names:
            name = rng.choice(names)
            self._do(lambda: store.delete(name), op="unname", name=name)
            del self.names[name]

    def _forget(self, store: Store, rng: random.Random) -> None:
        commit = self.parents.get(self._some(rng))
        if commit and commit not in self.forgotten:
            self._do(lambda: store.forget(commit), op="forget", commit=commit)
            self.forgotten.add(commit)


def collect(store: Path, seed: int, steps: int) -> None:
    """Open the store and collect, again and again, until killed: what a crash left is mended, and the mending dies."""
    rng = random.Random(seed)
    while True:
        files = Killing(os.open(store / "packs", os.O_RDONLY | os.O_CLOEXEC), steps) if steps else None
        with ObjectDatabase.open(store, wait_seconds=WAIT_SECONDS, files=files) as database:
            opened = Store(database, ReferenceEngine())
            opened.gc(wait_seconds=WAIT_SECONDS)
            if rng.random() < 0.5:
                opened.check()


def message(pipe: int, what: dict[str, Any]) -> None:
    """Tell the parent; one line is one write, so it is whole or not there."""
    line = json.dumps(what).encode() + b"\n"
    while line:
        line = line[os.write(pipe, line) :]


_NAMES = (b"a", b"b", b"c", b"a.b", b"\xff", b"\xc3\xa4", b"long" * 50)


def draw(rng: random.Random) -> Edit:
    """Draw one edit of a small tree. Contents come from few seeds, so that processes store the same at once."""

    def number() -> int:
        return rng.randrange(1000)

    def name() -> bytes:
        return rng.choice(_NAMES) if rng.random() < 0.7 else b"%d" % number()

    def looks() -> Looks:
        attributes = ((b"user.a", b"%d" % rng.randrange(5)),) if rng.random() < 0.2 else ()
        return Looks(rng.choice((0o644, 0o755, 0o4711)), rng.randrange(1 << 33) * 10**9 + number(), attributes)

    def content() -> Data:
        size = rng.choice((0, 10, 5_000, 20_000)) if rng.random() < 0.9 else rng.choice((131_071, 131_072, 200_000))
        return Data(size, rng.randrange(40), ((1, 2),) if rng.random() < 0.1 else ())

    kind = rng.randrange(20)
    if kind < 8:
        what = rng.choice((content(), content(), content(), None, b"../target"))
        return Make(number(), name(), what, what is None and rng.random() < 0.2, looks())
    if kind < 9:
        return Fill(number(), 33, rng.randrange(2)) if rng.random() < 0.2 else Link(number(), number(), name())
    if kind < 10:
        return Link(number(), number(), name())
    if kind < 12:
        return Rename(number(), number(), name())
    if kind < 14:
        return Remove(number())
    if kind < 16:
        return Write(number(), rng.randrange(200_000), Data(rng.randrange(1, 3_000), number()), False)
    if kind < 18:
        return Insert(number(), rng.randbytes(10))
    if kind < 19:
        return Resize(number(), rng.choice((0, 100, 140_000)))
    return Look(number(), looks())
