"""The ``host`` image on an engine that shares this host's files: the skeleton as a small image, ``/usr`` mounted.

The skeleton (``agent_sandbox.images.host``) is given to the engine as an image of some 2 MB, tagged by its content. An
engine cannot mount anything ``nosuid``, but what is mounted keeps that from where it comes from: so ``/usr`` is shown
once below ``/run``, read-only, without set-id bits and devices, and containers get that. Everything blocks but asking
the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
from pathlib import Path

from agent_sandbox.backends.docker.container import LABEL, Mount
from agent_sandbox.backends.docker.engine import Engine
from agent_sandbox.backends.docker.images import Image
from agent_sandbox.backends.linux import mounts
from agent_sandbox.errors import BackendError, NotFoundError
from agent_sandbox.images.host import HostImage

NAME = "host"
REPOSITORY = "asb-host"


class HostOnEngine:
    """The host's image for one engine: its skeletons below ``directory``, what it shows below ``shown``."""

    def __init__(self, engine: Engine, directory: Path, shown: Path, uid: int, gid: int) -> None:
        self._engine = engine
        self._image = HostImage(directory, uid, gid)
        self._usr, self._empty = shown / "usr", shown / "empty"

    def prepare(self) -> None:
        """Build the skeleton and show ``/usr``, where that is not done."""
        self._image.prepare(in_use=set())
        for directory in (self._usr, self._empty):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not mounts.mounted_below(self._usr):
            flags = mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV
            mounts.mount("/usr", self._usr, "", mounts.MS_BIND)
            mounts.mount("", self._usr, "", mounts.MS_BIND | mounts.MS_REMOUNT | flags)

    def close(self) -> None:
        """Take what was shown away; sandboxes keep it."""
        for point in mounts.mounted_below(self._usr):
            mounts.detach(point)
        for directory in (self._usr, self._empty, self._usr.parent):
            with contextlib.suppress(OSError):
                directory.rmdir()

    def mounts(self) -> tuple[Mount, ...]:
        """What of the host a container gets, in order.

        ``/usr`` is read-only by what it is bound from; asked for it again, a runtime forgets what else is true of that.
        """
        return tuple(
            Mount("bind", str(self._usr), target) if target == "/usr" else Mount("bind", str(self._empty), target, True)
            for _, target in self._image.binds()
        )

    async def ensure(self, rootfs: Path) -> Image:
        """The skeleton ``rootfs`` (of :meth:`rootfs`) as an image of the engine's, brought there where it has none."""
        name = f"{REPOSITORY}:{rootfs.parent.name}"
        with contextlib.suppress(NotFoundError):
            found = await self._engine.get(f"/images/{name}/json")
            if ((found.get("Config") or {}).get("Labels") or {}).get(f"{LABEL}.managed") == "true":
                return Image(str(found["Id"]))
        archive = await asyncio.to_thread(_packed, rootfs)
        await self._engine.import_image(archive, REPOSITORY, rootfs.parent.name, f"LABEL {LABEL}.managed=true")
        found = await self._engine.get(f"/images/{name}/json")
        return Image(str(found["Id"]))

    def rootfs(self) -> Path:
        """The skeleton's directory. :class:`BackendError` when it cannot be built."""
        try:
            return self._image.rootfs()
        except OSError as error:
            raise BackendError(f"the host image cannot be built: {error.strerror}") from error


def _packed(rootfs: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(rootfs, arcname=".")
    return packed.getvalue()
