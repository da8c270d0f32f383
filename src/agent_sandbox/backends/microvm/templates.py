"""Machines that were booted, found idle and saved before they had a key, so that creating one is letting one go on.

::

    MACHINE_DIR/template/<digest of what it is made of>/    a saved machine (checkpoints.py)
    MACHINE_DIR/template/.new-…                             one that is being made, or removed

A template is of one kernel, root, size and monitor, which its name is made of; there is no other way to it, so what
changes on the host leaves it unused. It holds nothing of any sandbox: no key, no host name, no entropy that counts,
since all that is told by the drive that each machine reads when it goes on. So several servers may share them.

Who makes or uses one has its directory open and locked (flock(2), which ends with the process): what is in use is not
removed, and what a killed maker left is. Two servers may make the same one at once; the first to finish is kept.

Bounds: the ``KEPT`` used last are kept, each of some 100 MiB on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from agent_sandbox.backends.microvm import checkpoints
from agent_sandbox.backends.microvm.checkpoints import Made
from agent_sandbox.errors import BackendError, ConflictError

_log = logging.getLogger(__name__)

KEPT = 16
"""Sizes and images in use at once on one host; a machine whose template went boots for some seconds."""
_NEW = ".new-"
_TRIES = 3
"""Times that a template may be removed by another server between its making and its use."""


class Templates:
    """The templates of one directory. Use it from one event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._making: dict[str, asyncio.Lock] = {}

    def clear(self) -> None:
        """Remove what a crash left half-made. Blocks."""
        for path in self._directory.glob(_NEW + "*"):
            _remove(path)

    @contextlib.asynccontextmanager
    async def use(self, made: Made, make: Callable[[Path], Awaitable[None]]) -> AsyncGenerator[Path, None]:
        """Give the directory of the template for ``made``, which stays while the block runs.

        Where there is none, ``make`` saves a machine into the empty directory it is given; who wants the same one
        meanwhile waits for it. What ``make`` raises goes on to who called it; the next one tries again. Where the
        block fails with an error of the backend's, the template may be damaged: it is removed.
        """
        path = self._directory / hashlib.sha256(msgspec.json.encode(made)).hexdigest()[:32]
        for _ in range(_TRIES):
            async with self._making.setdefault(path.name, asyncio.Lock()):
                held = await asyncio.to_thread(_hold, path, made)
                if held is None:
                    await self._make(path, made, make)
                    held = await asyncio.to_thread(_hold, path, made)
            if held is not None:
                try:
                    yield path
                except (BackendError, ConflictError):
                    # What does not go on is not kept for the next one. Others that go on from it now keep it.
                    os.close(held)
                    held = None
                    _log.warning("the template %s did not go on, and goes", path.name)
                    await asyncio.to_thread(_remove, path)
                    raise
                finally:
                    if held is not None:
                        os.close(held)
                return
        raise BackendError("the template of the machine is removed as soon as it is made")

    async def _make(self, path: Path, made: Made, make: Callable[[Path], Awaitable[None]]) -> None:
        with contextlib.ExitStack() as stack:
            # It takes a moment. On a thread, a cancellation would leave it.
            aside, held = _begin(self._directory)
            stack.callback(os.close, held)
            try:
                await make(aside)
                await asyncio.to_thread(checkpoints.seal, aside, made)
                await asyncio.to_thread(_put, aside, path)
            finally:
                await asyncio.to_thread(shutil.rmtree, aside, True)
        await asyncio.to_thread(self._evict)

    def _evict(self) -> None:
        there = [path for path in self._directory.iterdir() if not path.name.startswith(_NEW)]
        for path in sorted(there, key=_age, reverse=True)[KEPT:]:
            _log.info("the template %s was not used for longest, and goes", path.name)
            _remove(path)


def _hold(path: Path, made: Made) -> int | None:
    """Keep a whole template from being removed, and note that it is used; None where there is no such one."""
    try:
        held = _lock(path, fcntl.LOCK_SH)
    except OSError:
        return None
    try:
        checkpoints.require(checkpoints.read(path), made)
        if path.stat().st_ino == os.fstat(held).st_ino:
            os.utime(held)
            return held
    except (ConflictError, OSError):
        pass
    os.close(held)
    return None


def _put(aside: Path, path: Path) -> None:
    """Give a finished one its name, unless there is one already that another server has finished."""
    with contextlib.suppress(ConflictError):
        checkpoints.read(path)
        return
    _remove(path)
    try:
        aside.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another's, since the look at it
            raise


def _begin(directory: Path) -> tuple[Path, int]:
    """Make a place to make one in, and lock it."""
    for _ in range(_TRIES):
        aside = directory / f"{_NEW}{secrets.token_hex(8)}"
        aside.mkdir(mode=0o700, parents=True)
        # Without a lock, another server may take it for one that a crash left.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            return aside, _lock(aside, fcntl.LOCK_EX)
    raise BackendError("what is made of the machine's template is removed again and again by another server")


def _remove(path: Path) -> None:
    """Remove one that nobody uses or makes."""
    with contextlib.suppress(OSError), _locked(path):
        aside = path.with_name(f"{_NEW}{secrets.token_hex(8)}")
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = _lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(path: Path, how: int) -> int:
    """Open a directory and lock it. :class:`BlockingIOError` when somebody has it who must not be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


__all__ = ["KEPT", "Templates"]
