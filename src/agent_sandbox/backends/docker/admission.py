"""What cannot be made on an engine, told before anything is. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from agent_sandbox.backends.docker.container import misplaced_volume
from agent_sandbox.backends.docker.hostimage import NAME as HOST
from agent_sandbox.errors import UnsupportedError
from agent_sandbox.types import WORKSPACE, Capabilities, LimitName, SandboxSpec


def require_possible(spec: SandboxSpec, capabilities: Capabilities, backend: str, *, allow_unenforced: bool) -> None:
    """Raise :class:`UnsupportedError` for a network, a limit or a root file system that ``backend`` cannot give."""
    if spec.network not in capabilities.network:
        reason = capabilities.notes.get("network", f"only {sorted(capabilities.network)} here")
        raise UnsupportedError("network", backend, reason)
    limits: tuple[LimitName, ...] = ("cpus", "memory", "pids", "disk")
    missing = [limit for limit in limits if limit not in capabilities.enforces]
    if missing and not allow_unenforced:
        reason = capabilities.notes.get(missing[0], "not enforced here")
        raise UnsupportedError(
            f"limit {missing[0]}", backend, f"{reason}; AGENT_SANDBOX_ALLOW_UNENFORCED=true accepts that"
        )
    if spec.image == HOST and not spec.read_only_rootfs:
        raise UnsupportedError("writable_rootfs", backend, "the host image is the host's own /usr; name another")
    if not spec.read_only_rootfs and not allow_unenforced:
        raise UnsupportedError(
            "writable_rootfs",
            backend,
            "the engine does not limit what it takes of its disk; AGENT_SANDBOX_ALLOW_UNENFORCED=true accepts that",
        )


def require_no_volume_within(image: str, volumes: Sequence[str], backend: str) -> None:
    """Raise :class:`UnsupportedError` where one of an image's ``volumes`` is within a mount of the sandbox's own."""
    found = misplaced_volume(volumes)
    if found is not None:
        reason = f"image {image!r} has one at {found[0]}, within {found[1]}: it would have no limit"
        if found[1] == WORKSPACE:
            reason += " and be in no snapshot"
        raise UnsupportedError("image_volume", backend, f"{reason}; build the image without it")
