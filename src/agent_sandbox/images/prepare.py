"""What an imported root file system gets so that a sandbox can run on it.

Mount points, an entry for the sandbox user in passwd and group where the ids have none, and the small files that name
the host and its network: ``hosts``, ``hostname``, an empty ``resolv.conf``; and an empty ``machine-id`` where there is
none, over which a machine of its own gets its id. All of it through a
:class:`~agent_sandbox.images.confined.Tree`, since any of these names may be a link in the image. A link in the place
of a mount point or of one of these files is replaced; the directory ``/etc`` itself must be one.
"""

from __future__ import annotations

import os
import stat

from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.images.confined import Tree

USER = "sandbox"
HOME = "/workspace"
HOSTS = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback sandbox\n"
MOUNT_POINTS = {"proc": 0o555, "sys": 0o555, "dev": 0o755, "tmp": 0o1777, "run": 0o755, "workspace": 0o755}
_TABLE_BYTES = 4 << 20
"""Of passwd or group; larger ones belong to directory services, not to images."""


def prepare_rootfs(tree: Tree, uid: int, gid: int) -> None:
    """Add what a sandbox needs. :class:`InvalidRequestError` when the image cannot take it."""
    for name, mode in MOUNT_POINTS.items():
        _directory(tree, name.encode(), mode)
    etc = tree.mode(b"etc")
    if etc is None:
        _directory(tree, b"etc", 0o755)
    elif not stat.S_ISDIR(etc):
        raise InvalidRequestError("the image's /etc is not a directory")
    passwd, group = _read(tree, b"etc/passwd"), _read(tree, b"etc/group")
    _write(tree, b"etc/passwd", add_user(passwd, uid, gid))
    _write(tree, b"etc/group", add_group(group, gid))
    _write(tree, b"etc/hosts", HOSTS.encode())
    _write(tree, b"etc/hostname", b"sandbox\n")
    _write(tree, b"etc/resolv.conf", b"")
    if tree.mode(b"etc/machine-id") is None:
        _write(tree, b"etc/machine-id", b"", 0o444)


def add_user(passwd: bytes, uid: int, gid: int) -> bytes:
    """The passwd file with an entry for ``uid``; unchanged when it has one."""
    return _add(passwd, 2, uid, f"{{}}:x:{uid}:{gid}:{USER}:{HOME}:/bin/sh\n")


def add_group(group: bytes, gid: int) -> bytes:
    """The group file with an entry for ``gid``; unchanged when it has one."""
    return _add(group, 2, gid, f"{{}}:x:{gid}:\n")


def _add(table: bytes, column: int, number: int, line: str) -> bytes:
    rows = [row.split(b":") for row in table.splitlines()]
    if any(len(row) > column and row[column] == str(number).encode() for row in rows):
        return table
    taken = {row[0] for row in rows}
    name = USER if USER.encode() not in taken else f"{USER}{number}"
    gap = b"" if not table or table.endswith(b"\n") else b"\n"
    return table + gap + line.format(name).encode()


def _directory(tree: Tree, path: bytes, mode: int) -> None:
    there = tree.make_way(path, for_directory=True)
    parent, name = tree.parent(path)
    if not there:
        os.mkdir(name, mode, dir_fd=parent)
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _read(tree: Tree, path: bytes) -> bytes:
    try:
        descriptor = tree.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        content = file.read(_TABLE_BYTES + 1)
    if len(content) > _TABLE_BYTES:
        raise InvalidRequestError(f"the image's /{os.fsdecode(path)} is larger than {_TABLE_BYTES >> 20} MiB")
    return content


def _write(tree: Tree, path: bytes, content: bytes, mode: int = 0o644) -> None:
    tree.make_way(path, for_directory=False)
    parent, name = tree.parent(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, mode, dir_fd=parent), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
