"""What backends that work with this host's own files need of it."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

from agent_sandbox import installing
from agent_sandbox.errors import BackendError


def require_root(backend: str = "runc") -> None:
    """Raise :class:`BackendError` when this process is not root."""
    if os.geteuid() != 0:
        raise BackendError(f"the {backend} backend needs root; run the server with sudo")


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
