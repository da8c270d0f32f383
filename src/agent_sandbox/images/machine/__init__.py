"""What microVMs boot and run on: a kernel with its first root file system, and images as EROFS files.

Prepared once and found by content: nothing here starts a process for what is there already. Every method blocks, and
several processes may share the directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agent_sandbox.images.machine.kernels import Kernel, Kernels, Prepared
from agent_sandbox.images.machine.roots import MachineRoot, Roots
from agent_sandbox.images.sources import Progress

if TYPE_CHECKING:
    from agent_sandbox.images.store import ImageRoot

__all__ = ["Kernel", "MachineImages", "MachineRoot", "Prepared"]


def _silent(phase: str, done: int, total: int) -> None:
    pass


class MachineImages:
    """Kernels and root file systems below ``directory`` (``Settings.machine_directory()``)."""

    def __init__(self, directory: Path) -> None:
        self._kernels = Kernels(directory / "kernel")
        self._roots = Roots(directory / "root")

    def prepare(self) -> None:
        """Clear what killed builders left."""
        self._roots.sweep()
        self._kernels.sweep()

    def kernel(self, sandboxd: Path) -> Kernel:
        """The kernel that new machines boot, with the daemon ``sandboxd`` as its init.

        :class:`BackendError` when none is prepared or it is damaged; the message says what to run.
        """
        return self._kernels.find(sandboxd)

    def describe_kernel(self) -> str:
        """The kernel that new machines boot, in words; looks and writes nothing. Errors as of :meth:`kernel`."""
        return self._kernels.describe()

    def prepare_kernel(
        self, kernel: Path | None = None, modules: Path | None = None, progress: Progress = _silent
    ) -> Prepared:
        """Make a kernel the one that new machines boot: Debian's newest, or a file with the modules built for it.

        ``kernel`` is a bzImage for amd64, or a kernel package of Debian's, which brings its modules; ``modules`` is the
        ``/lib/modules/VERSION`` of an image. :class:`InvalidRequestError` for what cannot be right or lacks something,
        :class:`LimitExceededError` when the disk has no room, :class:`BackendError` when it cannot be fetched or
        written. The current kernel stays what it was, and nothing is left behind.
        """
        return self._kernels.prepare(kernel, modules, progress)

    def rootfs(self, image: ImageRoot, digest: str, progress: Progress = _silent) -> MachineRoot:
        """The root file system of an image, made when there is none yet, which takes seconds for each GiB.

        ``image`` is what :meth:`ImageStore.open` gave for ``digest``, which is empty for the host's. Whoever runs on it
        keeps it by a hard link. :class:`BackendError` without mkfs.erofs, :class:`LimitExceededError` when the disk is
        full, :class:`NotFoundError` when the image is removed meanwhile, :class:`ConflictError` when the host changes
        meanwhile. Nothing is left behind by a failure.
        """
        return self._roots.open(image, digest, progress)

    def find_rootfs(self, image: ImageRoot, digest: str) -> MachineRoot | None:
        """As :meth:`rootfs`, but None where it would have to be made."""
        return self._roots.find(image, digest)

    def forget(self, digest: str) -> None:
        """Remove the root file system of an image that was removed. Who runs on it keeps it."""
        self._roots.remove(digest)
