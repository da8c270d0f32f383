"""What the kernel shows of a running environment, for ``inspect``. Reads ``/proc`` only; blocks for a moment."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent_sandbox.backends.linux.mounts import unescape
from agent_sandbox.backends.linux.process import Process

_BYTES = 256 * 1024
"""Of each file: some thousand mounts, far more than a sandbox has."""
_NO_FILES = (b"/dev/", b"/memfd:", b"/SYSV", b"anon_inode:")
"""Maps of memory and devices (proc_pid_maps(5)): no file of a workspace has such a name."""
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


def has_shared_map(processes: Iterable[int]) -> bool:
    """Whether one of the processes has a file mapped shared and may write there; when in doubt, True.

    A second store through such a map changes bytes but no time of the file (mmap(2) promises no more). That holds also
    when the map cannot be written just now: mprotect(2) gives a page that is dirty its right to be written back without
    telling the file system.
    """
    return any(_has_shared_map(pid) for pid in processes)


def _has_shared_map(pid: int) -> bool:
    """The threads of a process share its maps, but one that has ended shows none: its first one may be such."""
    try:
        threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda thread: int(thread.name) != pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    for thread in threads:
        try:
            with (thread / "maps").open("rb") as file:
                first = file.readline()
                shared = [line for line in (first, *file) if _is_shared_file(line)]
            if any(line.split(None, 2)[1][1:2] == b"w" for line in shared):
                return True
            if shared:
                return _may_become_writable(thread)
            if first:
                return False
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return True
    return False


def _is_shared_file(line: bytes) -> bool:
    fields = line.split(None, 5)
    return len(fields) == 6 and fields[1][3:4] == b"s" and not fields[5].startswith(_NO_FILES)


def _may_become_writable(thread: Path) -> bool:
    """Whether a shared map of a file was made through a descriptor for writing: only then the flag ``sh`` is there."""
    shared = False
    with (thread / "smaps").open("rb") as file:
        for line in file:
            if b"-" in line.split(None, 1)[0]:
                shared = _is_shared_file(line)
            elif shared and line.startswith(b"VmFlags:") and b"sh" in line.split():
                return True
    return False


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_BYTES).decode(errors="surrogateescape")
    except OSError:
        return ""
