"""Machines that were booted, found idle and saved before they had a key, so that creating one is letting one go on.

::

    DATA_DIR/<backend>/machines/<digest of what it is made of>/    a saved machine (checkpoints.py)
    DATA_DIR/<backend>/machines/.new-…                             one that is being made

A template is of one kernel, root, size and monitor, which its name is made of; there is no other way to it, so what
changes on the host leaves it unused. It holds nothing of any sandbox: no key, no host name, no entropy that counts,
since all that is told by the drive that each machine reads when it goes on.

Bounds: the ``KEPT`` used last are kept, each of some 100 MiB on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import msgspec

from agent_sandbox.backends.microvm import checkpoints
from agent_sandbox.backends.microvm.checkpoints import Made
from agent_sandbox.errors import ConflictError

_log = logging.getLogger(__name__)

KEPT = 8
_NEW = ".new-"


class Templates:
    """The templates of one directory. Use it from one event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._making: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    def clear(self) -> None:
        """Remove what a crash left half-made. Blocks."""
        for path in self._directory.glob(_NEW + "*"):
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def use(self, made: Made, make: Callable[[Path], Awaitable[None]]) -> AsyncGenerator[Path, None]:
        """Give the directory of the template for ``made``, which stays while the block runs.

        Where there is none, ``make`` saves a machine into the empty directory it is given; who wants the same one
        meanwhile waits for it. What ``make`` raises goes on to who called it; the next one tries again.
        """
        name = hashlib.sha256(msgspec.json.encode(made)).hexdigest()[:32]
        self._users[name] += 1
        try:
            lock = self._making.setdefault(name, asyncio.Lock())
            async with lock:
                if not await asyncio.to_thread(self._find, name, made):
                    await self._make(name, made, make)
            yield self._directory / name
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._making.pop(name, None)

    async def _make(self, name: str, made: Made, make: Callable[[Path], Awaitable[None]]) -> None:
        aside = self._directory / f"{_NEW}{secrets.token_hex(8)}"
        try:
            await asyncio.to_thread(aside.mkdir, 0o700, True)
            await make(aside)
            await asyncio.to_thread(checkpoints.seal, aside, made)
            await asyncio.to_thread(self._put, aside, name)
        finally:
            await asyncio.to_thread(shutil.rmtree, aside, True)
        await asyncio.to_thread(self._evict)

    def _find(self, name: str, made: Made) -> bool:
        path = self._directory / name
        try:
            checkpoints.require(checkpoints.read(path), made)
            os.utime(path)
        except (ConflictError, OSError):
            return False
        return True

    def _put(self, aside: Path, name: str) -> None:
        target = self._directory / name
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)

    def _evict(self) -> None:
        def age(path: Path) -> float:
            try:
                return path.stat().st_mtime
            except FileNotFoundError:
                return 0.0

        there = [path for path in self._directory.iterdir() if not path.name.startswith(_NEW)]
        for path in sorted(there, key=age, reverse=True)[KEPT:]:
            if not self._users[path.name]:
                _log.info("removing the template %s: it was not used for longest", path.name)
                shutil.rmtree(path, ignore_errors=True)


__all__ = ["KEPT", "Templates"]
