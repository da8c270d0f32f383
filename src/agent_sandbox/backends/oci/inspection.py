"""What the kernel shows of a running environment, for ``inspect``. Reads ``/proc`` only; blocks for a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_sandbox.backends.oci.mounts import unescape
from agent_sandbox.backends.oci.runc import Process

_BYTES = 256 * 1024
"""Of each file: some thousand mounts, far more than a sandbox has."""
_STATUS = {
    "CapEff": "capabilities_effective",
    "CapBnd": "capabilities_bounding",
    "NoNewPrivs": "no_new_privs",
    "Seccomp": "seccomp_mode",
}


def observe(process: Process | None, limits: dict[str, float | int | None]) -> dict[str, Any]:
    """The details of an environment: its limits, and of its first process the pid, privileges, mounts and devices."""
    details: dict[str, Any] = {"limits": limits}
    if process is None:
        return details
    directory = Path(f"/proc/{process.pid}")
    details |= {"pid": process.pid, "mounts": parse_mounts(_read(directory / "mountinfo"))}
    details |= parse_status(_read(directory / "status"))
    return details


def parse_mounts(table: str) -> list[dict[str, str]]:
    """The mounts of a mountinfo file (proc_pid_mountinfo(5)): target, type, source and options of each."""
    found = []
    for line in table.splitlines():
        before, separator, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if separator and len(fields) >= 6 and len(tail) >= 2:
            mount = {"target": unescape(fields[4]), "type": tail[0], "source": unescape(tail[1]), "options": fields[5]}
            found.append(mount)
    return found


def parse_status(text: str) -> dict[str, str]:
    """The privileges in a status file (proc_pid_status(5)), as the kernel writes them."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {_STATUS[name]: value.strip() for name, _, value in pairs if name in _STATUS}


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_BYTES).decode(errors="surrogateescape")
    except OSError:
        return ""
