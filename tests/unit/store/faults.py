"""Directories of packs that fail as disks do, for tests: errors, short and torn writes, and power that goes.

Only what the store itself writes through :class:`~agent_sandbox.store.packs.PackFiles` can fail here; what SQLite meets
is tested with limits on files and on a small file system.
"""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

from agent_sandbox.store.packs import OsFiles, PackFile


class Failing(OsFiles):
    """Fails at the ``at``-th step, counted from 1 over creating, writing, cutting, syncing and removing.

    A write that fails has taken ``torn`` bytes before; a write that does not takes at most ``short`` at a time. The
    fault goes on ``times`` steps.
    """

    def __init__(
        self, path: Path, *, at: int = 0, error: int = 0, torn: int = 0, short: int = 0, times: int = 1
    ) -> None:
        super().__init__(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self.steps = 0
        self.fired = False
        self.torn = torn
        self.short = short
        self._at = range(at, at + times)
        self._error = error

    def fails(self) -> OSError | None:
        """Count a step, and return the error if it is its turn."""
        self.steps += 1
        if self.steps not in self._at:
            return None
        self.fired = True
        return OSError(self._error, os.strerror(self._error))

    def step(self) -> None:
        """Count a step that has no half."""
        error = self.fails()
        if error is not None:
            raise error

    def create(self, name: str) -> PackFile:
        self.step()
        return _FailingFile(super().create(name), self)

    def remove(self, name: str) -> None:
        self.step()
        super().remove(name)

    def sync(self) -> None:
        self.step()
        super().sync()


class _FailingFile:
    def __init__(self, file: PackFile, files: Failing) -> None:
        self._file = file
        self._files = files

    def write(self, data: bytes | memoryview, offset: int) -> int:
        error = self._files.fails()
        if error is None:
            return self._file.write(memoryview(data)[: self._files.short or len(data)], offset)
        if self._files.torn:
            self._file.write(memoryview(data)[: self._files.torn], offset)
        raise error

    def sync(self) -> None:
        self._files.step()
        self._file.sync()

    def truncate(self, size: int) -> None:
        self._files.step()
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


class PowerCut(BaseException):
    """Stands for the end of everything that runs."""


class Powered(OsFiles):
    """Knows what a disk has for sure: the power goes at step ``at``, and ``after`` becomes what is found then.

    Bytes of a file are sure up to its last sync; a name, made or removed, from the sync of the directory on. Of the
    rest, what is found is drawn: there, not there, half of it, or other bytes.
    """

    def __init__(self, store: Path, at: int, after: Path, rng: random.Random) -> None:
        super().__init__(os.open(store / "packs", os.O_RDONLY | os.O_CLOEXEC))
        self.steps = 0
        self._store = store
        self._at = at
        self._after = after
        self._rng = rng
        self._sure: dict[str, bytes] = {}
        self._new: set[str] = set()
        self._removed: dict[str, bytes] = {}
        self._was = {file.name: file.read_bytes() for file in (store / "packs").iterdir()}

    def step(self) -> None:
        """Count a step; the power goes before it is done."""
        self.steps += 1
        if self.steps == self._at:
            self.cut()
            raise PowerCut

    def create(self, name: str) -> PackFile:
        self.step()
        self._sure[name] = b""
        self._new.add(name)
        return _PoweredFile(super().create(name), self, name)

    def remove(self, name: str) -> None:
        self.step()
        with suppress(FileNotFoundError):
            self._removed[name] = (self._store / "packs" / name).read_bytes()
        super().remove(name)

    def sync(self) -> None:
        self.step()
        super().sync()
        self._new.clear()
        self._removed.clear()

    def synced(self, name: str) -> None:
        """A file was synced."""
        self._sure[name] = (self._store / "packs" / name).read_bytes()

    def cut(self) -> None:
        """Make ``after`` what is found when the power is back."""
        shutil.copytree(self._store, self._after, ignore=shutil.ignore_patterns("*-shm"))
        packs = self._after / "packs"
        for file in list(packs.iterdir()):
            if file.name in self._new and self._rng.random() < 0.5:
                file.unlink()
            elif file.name in self._sure:
                file.write_bytes(self._found(self._sure[file.name], file.read_bytes()))
        for name, content in self._removed.items():
            if self._rng.random() < 0.5:
                (packs / name).write_bytes(content)

    def _found(self, sure: bytes, written: bytes) -> bytes:
        """What is found of a file: all that is sure and was not cut since, and of the rest anything."""
        if len(written) < len(sure):
            return self._rng.choice((sure, written))
        same = next((at for at, (one, two) in enumerate(zip(sure, written, strict=False)) if one != two), len(sure))
        kept = sure[:same]
        rest = written[len(kept) :]
        match self._rng.randrange(4):
            case 0:
                return kept + rest
            case 1:
                return kept + rest[: self._rng.randrange(len(rest) + 1)]
            case 2:
                return kept + bytes(len(rest))
            case _:
                half = len(rest) // 2
                return kept + self._rng.randbytes(half) + rest[half:]


class _PoweredFile:
    def __init__(self, file: PackFile, files: Powered, name: str) -> None:
        self._file = file
        self._files = files
        self._name = name

    def write(self, data: bytes | memoryview, offset: int) -> int:
        self._files.step()
        return self._file.write(data, offset)

    def sync(self) -> None:
        self._files.step()
        self._file.sync()
        self._files.synced(self._name)

    def truncate(self, size: int) -> None:
        self._files.step()
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()
