"""Mounting without starting a process: mount(2), umount2(2), and the mount table.

Every function blocks and belongs on a thread. :class:`OSError` is what they raise; the backend's error table
translates it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import time
from pathlib import Path

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_BUSY_SECONDS = 2.0
"""How long an unmount waits for the last descriptors of killed processes; observed: under 20 ms."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


def system_call(number: int, *arguments: int | bytes) -> int:
    """Make a system call that the C library may not know; see syscall(2)."""
    values = [value if isinstance(value, bytes) else ctypes.c_long(value) for value in arguments]
    result = _libc.syscall(ctypes.c_long(number), *values)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(result)


def sync(descriptor: int) -> None:
    """Write out the file system that an open file is on; see syncfs(2)."""
    if _libc.syncfs(descriptor) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    """Mount ``source`` on the directory ``target``; see mount(2)."""
    result = _libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), flags, os.fsencode(data) or None)
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def detach(target: Path) -> None:
    """Take ``target`` and all that is mounted below it out of sight; who is in there keeps it."""
    if _libc.umount2(os.fsencode(target), _UMOUNT_NOFOLLOW | _MNT_DETACH) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def unmount(target: Path) -> bool:
    """Unmount ``target``, waiting while it is busy; detach it in the end. False when nothing was mounted there."""
    deadline = time.monotonic() + _BUSY_SECONDS
    flags = _UMOUNT_NOFOLLOW
    while True:
        if _libc.umount2(os.fsencode(target), flags) == 0:
            return True
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOENT):
            return False
        if number != errno.EBUSY:
            raise OSError(number, os.strerror(number), str(target))
        if time.monotonic() > deadline:
            flags |= _MNT_DETACH
        time.sleep(0.005)


def mounted_below(directory: Path, table: str | None = None) -> list[Path]:
    """The mount points on and below ``directory``, innermost and latest first: the order in which to unmount them.

    ``table`` is the text of a mountinfo file (proc_pid_mountinfo(5)); by default this process's own.
    """
    if table is None:
        table = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    itself, prefix = str(directory), str(directory) + "/"
    found = [unescape(line.split(" ", 5)[4]) for line in table.splitlines()]
    return [Path(path) for path in reversed(found) if path == itself or path.startswith(prefix)]


def unescape(field: str) -> str:
    """Decode the octal escapes of a field of the mount table."""
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), os.fsencode(field))
    return os.fsdecode(raw)
