"""The disk of a sandbox: an ext4 image on a loop device, which is what ``disk_mb`` means.

Strategy
--------
* mkfs runs once for each size, into a template; a sandbox gets a sparse copy of it (by reflink where the file system
  has it), so that creating starts no process and writes some 150 KiB. The kernel keeps the limit: beyond it writes fail
  with ENOSPC inside this one sandbox. Images are sparse, so the host's disk may be promised more than once.
* The loop device is set to clear itself when its mount goes, so unmounting is all there is to undo. It reads and
  writes the image directly where the host's file system can, so that nothing is cached twice.
* The host mounts only images made here and written through the mount ever since; never one from elsewhere.
* On the disk stand ``workspace`` (bound into the sandbox; ``lost+found`` stays outside), ``upper`` and ``work`` (a
  writable root's changes) and the daemon's log, all within the same limit.

Known ugliness: LOOP_CTL_GET_FREE names a device without reserving it, so two users race for it; the loser tries again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import subprocess
from pathlib import Path

from agent_sandbox.backends.oci import mounts
from agent_sandbox.errors import BackendError

_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 4, 16
_FICLONE = 0x40049409
_LOOP_TRIES = 64
"""Races lost in a row before giving up: more creations at once than anybody runs on one host."""
_LOOP_MAJOR = 7
_TEMPLATES_KEPT = 16
"""Sizes remembered. Each costs about 150 KiB; a size that went is made again in some 5 ms."""
_MKFS_SECONDS = 60.0
_FORMAT = "v2"
"""When changing the options of mkfs: count this up, or old templates stay in use."""
_MKFS = (
    *("-q", "-F", "-b", "4096", "-m", "0", "-i", "8192", "-L", "sandbox", "-e", "remount-ro", "-O", "^resize_inode"),
    *("-E", "lazy_itable_init=0,lazy_journal_init=1"),
)
"""Blocks of 4 KiB, since a directory of smaller ones is full at some 20,000 long names; all of them for the user; an
inode for 8 KiB, since agents' trees hold small files; nothing left to write later."""


class Disk:
    """One sandbox's disk below its environment's directory: ``disk.img`` mounted on ``mnt``."""

    def __init__(self, directory: Path) -> None:
        self.image = directory / "disk.img"
        self.mount_point = directory / "mnt"
        self.workspace = self.mount_point / "workspace"
        self.upper = self.mount_point / "upper"
        self.work = self.mount_point / "work"
        self.log = self.mount_point / "sandboxd.log"

    def make(self, template: Path, uid: int, gid: int) -> None:
        """Copy ``template``, mount it and make the workspace, owned by ``uid``:``gid``, 0755.

        A failure leaves what was made so far, which :meth:`unmount` and removing the directory undo.
        """
        clone(template, self.image)
        self.mount_point.mkdir(mode=0o700, exist_ok=True)
        device, number = _attach(self.image)
        try:
            flags = mounts.MS_NOSUID | mounts.MS_NODEV
            mounts.mount(f"/dev/loop{number}", self.mount_point, "ext4", flags)
        finally:
            os.close(device)
        for directory in (self.workspace, self.upper, self.work):
            directory.mkdir()
            directory.chmod(0o755)
        os.chown(self.workspace, uid, gid)

    def unmount(self) -> None:
        """Unmount the disk, whose loop device then clears itself. Nothing happens when it is not mounted."""
        while mounts.unmount(self.mount_point):
            pass


class Templates:
    """Blank file systems by size, kept in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def clear(self) -> None:
        """Remove what a crash left half-made."""
        for path in self._directory.glob(".new-*"):
            path.unlink(missing_ok=True)

    def get(self, size_mb: int) -> Path:
        """The template of ``size_mb`` MiB, made when it is not there. :class:`BackendError` when mkfs fails."""
        path = self._directory / f"ext4-{_FORMAT}-{size_mb}.img"
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return path
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = self._directory / f".new-{secrets.token_hex(8)}"
        try:
            with aside.open("xb") as file:
                file.truncate(size_mb * 1024 * 1024)
            _mkfs(aside)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        self._evict()
        return path

    def _evict(self) -> None:
        def age(path: Path) -> float:
            try:
                return path.stat().st_mtime
            except FileNotFoundError:
                return 0.0

        newest_first = sorted(self._directory.glob("ext4-*.img"), key=age, reverse=True)
        for path in newest_first[_TEMPLATES_KEPT:]:
            path.unlink(missing_ok=True)


def clone(source: Path, target: Path) -> None:
    """Copy a sparse file with its holes, sharing blocks where the file system can. ``target`` must not exist (0600)."""
    with source.open("rb", buffering=0) as src:
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as dst:
            try:
                fcntl.ioctl(dst, _FICLONE, src.fileno())
            except OSError:
                _copy_data(src.fileno(), dst.fileno())


def _copy_data(src: int, dst: int) -> None:
    size = os.fstat(src).st_size
    os.ftruncate(dst, size)
    offset = 0
    while offset < size:
        try:
            offset = os.lseek(src, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(src, offset, os.SEEK_HOLE)
        while offset < end:
            copied = os.copy_file_range(src, dst, end - offset, offset, offset)
            if copied == 0:
                raise OSError(errno.EIO, "the disk template ended early")
            offset += copied


def _mkfs(image: Path) -> None:
    try:
        done = subprocess.run(
            ["mkfs.ext4", *_MKFS, str(image)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_MKFS_SECONDS,
            check=False,
            env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin", "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise BackendError("mkfs.ext4 is not installed; install it with: apt-get install e2fsprogs") from error
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"mkfs.ext4 did not finish within {_MKFS_SECONDS:.0f} seconds") from error
    if done.returncode != 0:
        raise BackendError(f"mkfs.ext4 failed: {done.stderr[-500:].decode(errors='replace').strip()}")


def _attach(image: Path) -> tuple[int, int]:
    """Bind ``image`` to a free loop device; return the device's open descriptor and number."""
    with image.open("r+b", buffering=0) as backing, Path("/dev/loop-control").open("r+b", buffering=0) as control:
        direct = _LO_FLAGS_DIRECT_IO
        for _ in range(_LOOP_TRIES):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = os.open(_device_node(number), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, _loop_config(backing.fileno(), direct, image))
            except OSError as error:
                os.close(device)
                if error.errno == errno.EINVAL and direct:
                    direct = 0
                elif error.errno not in (errno.EBUSY, errno.ENXIO):
                    raise
                continue
            return device, number
    raise OSError(errno.EBUSY, "no free loop device")


def _loop_config(backing: int, direct: int, image: Path) -> bytes:
    """A ``struct loop_config`` (linux/loop.h): descriptor, block size, loop_info64, reserved."""
    name = os.fsencode(image.parent.name)[:63]
    info = struct.pack("=5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, _LO_FLAGS_AUTOCLEAR | direct, name, b"", b"", 0, 0)
    return struct.pack("=2I", backing, 0) + info + bytes(64)


def _device_node(number: int) -> Path:
    """The node of a loop device, made where no devtmpfs does it (the server itself in a container)."""
    path = Path(f"/dev/loop{number}")
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(_LOOP_MAJOR, number))
    return path
