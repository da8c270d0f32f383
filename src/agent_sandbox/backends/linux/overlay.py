"""Overlays of workspaces: their options, whether this host's kernel mounts them, how their changes begin."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

from agent_sandbox.backends.linux import mounts
from agent_sandbox.errors import BackendError

MAX_LAYERS = 64
"""Layers below a workspace; their names are mount options, which end at 4 KiB (mount(2)), at 25 bytes for each."""
OVERLAY_OPTIONS = "redirect_dir=on,index=on,metacopy=off,xino=on"
"""Of a workspace: renames of directories and writes to hard links work as anywhere, files have numbers that stay."""

_PROBE = "overlay-probe-"


def clear_probes(directory: Path) -> None:
    """Remove what :func:`why_no_overlay` left in ``directory`` where its process was killed; nobody may be trying."""
    for place in directory.glob(f"{_PROBE}*"):
        for point in mounts.mounted_below(place):
            mounts.detach(point)
        shutil.rmtree(place, ignore_errors=True)


def why_no_overlay(directory: Path) -> str:
    """Why workspaces cannot be overlays of layers on this host; empty when they can, tried in ``directory``."""
    place = directory / f"{_PROBE}{secrets.token_hex(4)}"
    try:
        for name in ("lower", "upper", "work", "merged"):
            (place / name).mkdir(parents=True)
        options = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work,{OVERLAY_OPTIONS}"
        mounts.mount("overlay", place / "merged", "overlay", mounts.MS_NOSUID | mounts.MS_NODEV, options)
        mounts.detach(place / "merged")
    except OSError as error:
        return f"this host's kernel mounts no overlay with {OVERLAY_OPTIONS} ({error.strerror})"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return ""


def forget_layers(changes: Path, work: Path) -> None:
    """Let changes be mounted over layers that show the same as those which they were made over, but are other files.

    By handles of files the kernel notes what a change was copied from (``index=on``): without the one of the root it
    takes other layers. It needs those of linked files to know their other names, so :class:`BackendError` where one of
    these was changed: its names would part.
    """
    with os.scandir(work / "index") as entries:
        if any(not entry.name.startswith("#") for entry in entries):
            raise BackendError(
                "the layers of the workspace were removed and cannot be replaced, since it has changed linked files of"
                " them; roll the sandbox back to a snapshot"
            )
    os.removexattr(changes, "trusted.overlay.origin")


def take_after(source: Path, target: Path, base: int) -> None:
    """Give a directory the mode, times, attributes and, counted from ``base``, the owner of another one."""
    state = source.stat()
    os.chown(target, base + state.st_uid, base + state.st_gid)
    for name in os.listxattr(source):
        if name.startswith("user."):
            os.setxattr(target, name, os.getxattr(source, name))
    target.chmod(stat.S_IMODE(state.st_mode))
    os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))
