"""What this backend needs of a host, and what it can promise on the one it is on."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

from agent_sandbox import installing
from agent_sandbox.errors import BackendError
from agent_sandbox.types import Capabilities, LimitName


def require_root() -> None:
    """Raise :class:`BackendError` when this process is not root."""
    if os.geteuid() != 0:
        raise BackendError("the runc backend needs root; run the server with sudo")


def require_disks() -> None:
    """Raise :class:`BackendError` when a sandbox's disk cannot be made here."""
    if shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:" + os.environ.get("PATH", "")) is None:
        raise BackendError("mkfs.ext4 is not installed; install it with: apt-get install e2fsprogs")
    if not Path("/dev/loop-control").exists():
        raise BackendError("the kernel has no loop devices; load them with: modprobe loop")


def find_sandboxd(configured: str) -> Path:
    """The daemon's executable: the configured one, or the engine package's. :class:`BackendError` without one."""
    if configured:
        path = Path(configured).absolute()
    else:
        try:
            path = Path(importlib.import_module("agent_sandbox_engine").sandboxd_path())
        except (ImportError, FileNotFoundError) as error:
            raise BackendError(
                f"the sandboxd binary is missing; install it with: {installing.remedy('server')}, "
                "or name one in AGENT_SANDBOX_SANDBOXD"
            ) from error
    if not path.is_file() or not os.access(path, os.X_OK):
        raise BackendError(f"{path} is not an executable file; AGENT_SANDBOX_SANDBOXD names the sandboxd binary")
    if path.stat().st_mode & 0o005 != 0o005:
        raise BackendError(f"{path} must be readable and executable by everybody; run: chmod 755 {path}")
    return path


def capabilities(
    limits: frozenset[LimitName], *, has_swap_limit: bool, has_socket_limit: bool, no_userns: str, no_layers: str = ""
) -> Capabilities:
    """What this backend offers where the kernel keeps ``limits`` by control groups.

    ``no_userns`` says why sandboxes get no host ids of their own; it is empty where they do. ``no_layers`` says why
    workspaces are no overlays of layers.
    """
    notes = {"disk": "size only; its bandwidth is not limited"}
    if no_userns:
        notes["userns"] = (
            f"{no_userns}; commands run as a user id of the host (AGENT_SANDBOX_SANDBOX_USER): sandboxes share the "
            "kernel's limits for each user, and a user of the host with that id can read and signal commands; choose "
            "one that nobody has"
        )
    notes |= {
        limit: "this kernel lacks the control group" for limit in ("cpus", "memory", "pids") if limit not in limits
    }
    if "memory" in limits and not has_swap_limit:
        notes["memory"] = "this kernel does not limit swap with memory; turn swap off on this host"
    elif "memory" in limits and not has_socket_limit:
        notes["memory"] = "this kernel does not limit the buffers of internet sockets"
    if no_layers:
        notes["layered_workspace"] = f"{no_layers}; snapshots copy the whole workspace"
    return Capabilities(
        isolation="container",
        enforces=limits | {"disk", "network"},
        network=frozenset({"none"}),
        userns=not no_userns,
        guest=True,
        layered_workspace=not no_layers,
        notes=notes,
    )
