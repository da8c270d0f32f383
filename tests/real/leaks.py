"""What a data directory's sandboxes hold on this host, so that tests can ask that it is nothing.

Read straight from the kernel and the file system, not through the code under test.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path

KINDS = ("runc", "gvisor", "qemu", "firecracker")
"""Backends that have environments on a disk of this host."""


def resources(data_dir: Path) -> dict[str, list[str]]:
    """Everything on the host that belongs to the sandboxes of ``data_dir``, by kind; kinds without any are left out."""
    real = os.path.realpath(data_dir)
    instance = hashlib.sha256(os.fsencode(real)).hexdigest()[:12]
    heres = (instance, f"{instance}-gvisor", f"{instance}-qemu", f"{instance}-firecracker")
    tops = [f"agent-sandbox-{here}" for here in heres]
    groups = [group for top in tops for group in _groups(top)]
    runs = [Path("/run/agent-sandbox") / here for here in heres]
    places = (f" {real}/", *(f" {run}/" for run in runs))
    found = {
        "processes": sorted({pid for group in groups for pid in _lines(group / "cgroup.procs") if pid != "0"}),
        "control groups": [str(group) for group in groups if group.name not in tops],
        "mounts": [line.split()[4] for line in _lines(Path("/proc/self/mountinfo")) if any(p in line for p in places)],
        "loop devices": [str(path) for path in _loops() if "".join(_lines(path)[:1]).startswith(real + "/")],
        "runtime state": [*_names(runs[0] / "runc"), *_names(runs[1] / "runsc")],
        "environments": [name for kind in KINDS for name in _names(Path(real) / kind / "env")],
        "sockets": [line for line in _lines(Path("/proc/net/unix")) if f" {real}/" in line],
        "mount points": [name for run in runs for name in _names(run / "box")],
        "monitors": [name for run in runs[2:] for name in _names(run / "vm")],
        "id ranges": [path.name for path in _claims() if f"{_target(path)}/".startswith(real + "/")],
        "runtime's processes": _runtime_processes(instance),
    }
    return {kind: values for kind, values in found.items() if values}


async def wait_until_clean(data_dir: Path, seconds: float = 10.0) -> None:
    """Wait until nothing is left; what is then still there is the assertion's message."""
    deadline = time.monotonic() + seconds
    while (left := resources(data_dir)) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert left == {}


def descriptors() -> list[str]:
    """What this process's descriptors lead to, without anonymous ones that a test's own loop has."""
    found = []
    for path in list(Path("/proc/self/fd").iterdir()):
        try:
            target = str(path.readlink())
        except FileNotFoundError:
            continue
        found.append(target.partition(":")[0] if target.startswith(("socket:", "pipe:")) else target)
    return sorted(found)


def _groups(name: str) -> list[Path]:
    tops = [Path(line.split()[4]) / name for line in _lines(Path("/proc/self/mountinfo")) if " - cgroup" in line]
    found = []
    for top in dict.fromkeys(tops):
        found += [Path(parent) for parent, _, _ in os.walk(top)]
    return found


def _loops() -> list[Path]:
    return list(Path("/sys/block").glob("loop*/loop/backing_file"))


def _claims() -> list[Path]:
    try:
        return [path for path in Path("/var/lib/agent-sandbox-ids").iterdir() if path.is_symlink()]
    except FileNotFoundError:
        return []


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:  # another server's, given back in this moment
        return ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _names(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except FileNotFoundError:
        return []


def _runtime_processes(instance: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = _lines(path)
        if words and f"/run/agent-sandbox/{instance}" in words[0]:
            found.append(words[0].replace("\0", " "))
    return found
