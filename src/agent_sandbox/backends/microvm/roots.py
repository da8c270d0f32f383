"""The root file systems that sandboxes wait for: each is made once, however many wait for it.

Making one takes seconds for each GiB of its image. It has a thread of its own, and who waits for it has none, so that
others can be stopped and destroyed meanwhile. Who stops waiting does not end it: the next one finds it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

from agent_sandbox.backends.linux.waiting import ended
from agent_sandbox.errors import BackendError, SandboxError
from agent_sandbox.images import ImageRoot
from agent_sandbox.images.machine import MachineImages, MachineRoot
from agent_sandbox.types import ImagePull

_log = logging.getLogger(__name__)

_AT_ONCE = 2
"""Roots that are made at the same time: each is bound by the disk."""


class Roots:
    """The roots that are being made. Use it from one event loop."""

    def __init__(self, images: MachineImages) -> None:
        self._images = images
        self._making: dict[str, asyncio.Task[MachineRoot]] = {}
        self._told: dict[str, ImagePull] = {}
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._closing = False

    async def get(self, name: str, image: ImageRoot, digest: str) -> MachineRoot:
        """The root of an image, made where there is none. Errors as of :meth:`MachineImages.rootfs`."""
        found = await asyncio.to_thread(self._images.find_rootfs, image, digest)
        if found is not None:
            return found
        key = digest or name
        making = self._making.get(key)
        if making is None:
            making = asyncio.create_task(self._make(key, name, image, digest), name=f"root of {name}")
            self._making[key] = making
            making.add_done_callback(partial(self._made, key))
        return await asyncio.shield(making)

    def told(self) -> list[ImagePull]:
        """How far each is that is being made."""
        return list(self._told.values())

    async def close(self) -> None:
        """End the making of what is not ready, and wait for that."""
        self._closing = True
        for making in list(self._making.values()):
            await ended(making)

    async def _make(self, key: str, name: str, image: ImageRoot, digest: str) -> MachineRoot:
        def progress(phase: str, done: int, total: int) -> None:
            if self._closing:
                raise BackendError("the server ended while it made the image's root file system")
            self._told[key] = ImagePull(name, done, total)

        async with self._turn:
            progress("wait", 0, 0)
            return await asyncio.to_thread(self._images.rootfs, image, digest, progress)

    def _made(self, key: str, making: asyncio.Task[MachineRoot]) -> None:
        """Forget it; what went wrong is told here, too, as nobody may be waiting any more."""
        del self._making[key]
        self._told.pop(key, None)
        with contextlib.suppress(asyncio.CancelledError):
            if (error := making.exception()) is not None:
                reason = error.message if isinstance(error, SandboxError) else repr(error)
                _log.warning("the root file system of image %s was not made: %s", key, reason)
