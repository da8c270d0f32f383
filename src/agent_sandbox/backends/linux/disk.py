"""The disk of a sandbox: an ext4 image on a loop device, which is what ``disk_mb`` means.

Strategy
--------
* mkfs runs once for each size, into a template; a sandbox gets a sparse copy of it (by reflink where the file system
  has it), so that creating starts no process and writes some 150 KiB. The kernel keeps the limit: beyond it writes fail
  with ENOSPC inside this one sandbox. Images are sparse, so the host's disk may be promised more than once.
* The loop device is set to clear itself when its mount goes, so unmounting is all there is to undo. It reads and
  writes the image directly where the host's file system can, so that nothing is cached twice.
* The host mounts only images made here and written through the mount ever since; never one from elsewhere. The mount
  point is not beside the image: the image outlives a reboot, and the mount point is of a directory that does not.
* The disk's own root is closed to everybody but the sandbox's root (mode 0710): below it stands what the host does for
  this sandbox, and its ids belong to nobody else on the host.
* On the disk stand ``workspace`` (bound into the sandbox; ``lost+found`` stays outside), ``upper`` and ``work`` (a
  writable root's changes), the daemon's log, all within the same limit, and the places ``root`` and ``lower`` where the
  sandbox's root file system is put together. A workspace over layers has its changes in ``changes`` and
  ``changes-work``, and is put together on ``workspace``.
* A disk whose kernel went away under it is mended by e2fsck before it is mounted again; a clean one needs no program.

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
import time
from pathlib import Path

from agent_sandbox.backends.linux import mounts
from agent_sandbox.errors import BackendError, LimitExceededError

_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 4, 16
_FICLONE = 0x40049409
_LOOP_TRIES = 64
"""Races lost in a row before giving up: more creations at once than anybody runs on one host."""
_LOOP_MAJOR = 7
_TEMPLATES_KEPT = 16
"""Sizes remembered. Each costs about 150 KiB; a size that went is made again in some 5 ms."""
_MKFS_SECONDS = 60.0
_FSCK_SECONDS = 600.0
"""A journal is replayed in 20 ms; a whole check of a large disk takes minutes."""
_FSCK_MENDED = (0, 1, 2)
"""Exit codes of e2fsck(8): nothing wrong, mended, mended and wishing for a reboot (of a mounted root only)."""
_FREE_SECONDS = 5.0
_SUPERBLOCK, _SUPERBLOCK_BYTES = 1024, 1024
_EXT4_MAGIC, _EXT4_VALID, _EXT4_ERRORS, _EXT4_NEEDS_RECOVERY = 0xEF53, 1, 2, 4
_ENV = {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin", "LC_ALL": "C"}
_FORMAT = "v3"
"""When changing the options of mkfs: count this up, or old templates stay in use."""
_MKFS = (
    *("-q", "-F", "-b", "4096", "-m", "1", "-i", "8192", "-L", "sandbox", "-e", "remount-ro", "-O", "^resize_inode"),
    *("-E", "lazy_itable_init=0,lazy_journal_init=1"),
)
"""Blocks of 4 KiB, since a directory of smaller ones is full at some 20,000 long names; 1 % of them kept back for
:meth:`Disk.lend_reserve`; an inode for 8 KiB, since agents' trees hold small files; nothing left to write later."""


class Disk:
    """One sandbox's disk: ``disk.img`` in its environment's directory, mounted on ``mount_point``.

    A failure of any method leaves what was made so far, which unmounting and removing the directories undoes.
    """

    def __init__(self, directory: Path, mount_point: Path) -> None:
        self.image = directory / "disk.img"
        self.mount_point = mount_point
        self.root = self.mount_point / "root"
        self.lower = self.mount_point / "lower"
        self.workspace = self.mount_point / "workspace"
        self.upper = self.mount_point / "upper"
        self.work = self.mount_point / "work"
        self.changes = self.mount_point / "changes"
        self.changes_work = self.mount_point / "changes-work"
        self.log = self.mount_point / "sandboxd.log"

    def make(self, template: Path, uid: int, gid: int, base: int) -> None:
        """Copy ``template``, mount it and make what stands on it.

        The workspace is owned by ``uid``:``gid``, 0755; a writable root's changes by the sandbox's root. ``base`` is
        the host id of the sandbox's root: 0 where it has no ids of its own.
        """
        clone(template, self.image)
        self._mount()
        os.chown(self.mount_point, 0, base)
        self.mount_point.chmod(0o710)
        for directory in (self.workspace, self.upper, self.work, self.root, self.lower):
            directory.mkdir()
            directory.chmod(0o755)
        os.chown(self.upper, base, base)
        os.chown(self.workspace, base + uid, base + gid)

    def open(self) -> None:
        """Mount the disk of a sandbox that was stopped, mended where its last mount did not end well.

        :class:`BackendError` when it cannot be mended, or when something still holds it: two mounts of one disk would
        destroy it. :class:`FileNotFoundError` without an image.
        """
        self._wait_until_free()
        if not _is_clean(self.image):
            _mend(self.image)
        self._mount()
        for directory in (self.root, self.lower):  # disks of an older release lack them
            directory.mkdir(exist_ok=True)

    def lend_reserve(self, uid: int) -> None:
        """Let the host user ``uid`` take the blocks that are kept back; the host's root, 0, is their owner otherwise.

        What filled a disk does not always fit on another of its size: written anew, it takes a few blocks more or less.
        """
        flags = mounts.MS_REMOUNT | mounts.MS_NOSUID | mounts.MS_NODEV
        mounts.mount("none", self.mount_point, "ext4", flags, f"resuid={uid}")

    def write_out(self) -> None:
        """Bring what was written to a mounted disk to its image. :class:`LimitExceededError` when the host lacks room.

        Until then nothing says so: the image is sparse, and what is written to it late fails late.
        """
        descriptor = os.open(self.mount_point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mounts.sync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENOSPC, errno.EROFS):
                raise
            raise LimitExceededError(
                "the sandbox's disk could not be written; the server's disk is probably full: delete snapshots"
            ) from error
        finally:
            os.close(descriptor)

    def flush(self) -> None:
        """Bring an unmounted disk's image to the host's storage. Nothing happens without an image."""
        with contextlib.suppress(FileNotFoundError), self.image.open("rb") as file:
            os.fsync(file.fileno())

    def _mount(self) -> None:
        self.mount_point.mkdir(mode=0o700, exist_ok=True)
        device, number = _attach(self.image)
        try:
            flags = mounts.MS_NOSUID | mounts.MS_NODEV
            mounts.mount(f"/dev/loop{number}", self.mount_point, "ext4", flags)
        finally:
            os.close(device)

    def _wait_until_free(self) -> None:
        """Loop devices clear themselves a moment after the last mount has gone."""
        deadline = time.monotonic() + _FREE_SECONDS
        while _is_attached(self.image):
            if time.monotonic() > deadline:
                raise BackendError("the sandbox's disk is still in use; try again in a moment")
            time.sleep(0.01)


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
            copied = _copy_piece(src, dst, offset, end - offset)
            if copied == 0:
                raise OSError(errno.EIO, "the disk template ended early")
            offset += copied


def _copy_piece(src: int, dst: int, offset: int, count: int) -> int:
    try:
        return os.copy_file_range(src, dst, count, offset, offset)
    except OSError as error:
        if error.errno != errno.EXDEV:  # the two are on different file systems
            raise
    os.lseek(dst, offset, os.SEEK_SET)
    return os.sendfile(dst, src, offset, count)


def _mkfs(image: Path) -> None:
    try:
        done = subprocess.run(
            ["mkfs.ext4", *_MKFS, str(image)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_MKFS_SECONDS,
            check=False,
            env=_ENV,
        )
    except FileNotFoundError as error:
        raise BackendError("mkfs.ext4 is not installed; install it with: apt-get install e2fsprogs") from error
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"mkfs.ext4 did not finish within {_MKFS_SECONDS:.0f} seconds") from error
    if done.returncode != 0:
        raise BackendError(f"mkfs.ext4 failed: {done.stderr[-500:].decode(errors='replace').strip()}")


def _superblock(image: Path) -> tuple[int, int, int]:
    """Read magic, state and incompatible features of an ext4 image; zeros where there is no superblock.

    Offsets are those of ``struct ext4_super_block`` (Documentation/filesystems/ext4/super.rst).
    """
    with image.open("rb") as file:
        file.seek(_SUPERBLOCK)
        block = file.read(_SUPERBLOCK_BYTES)
    if len(block) < _SUPERBLOCK_BYTES:
        return 0, 0, 0
    magic, state = struct.unpack_from("<2H", block, 0x38)
    (incompatible,) = struct.unpack_from("<I", block, 0x60)
    return magic, state, incompatible


def _is_clean(image: Path) -> bool:
    """Whether the last mount of an ext4 image ended in order: its superblock says so, and no journal waits."""
    magic, state, incompatible = _superblock(image)
    return magic == _EXT4_MAGIC and state == _EXT4_VALID and not incompatible & _EXT4_NEEDS_RECOVERY


def met_errors(image: Path) -> bool:
    """Whether a kernel that had an ext4 image mounted noted errors in it, which no e2fsck has mended since.

    The image may be a stranger's: of it two bytes are believed, and they decide nothing but words.
    """
    magic, state, _ = _superblock(image)
    return magic == _EXT4_MAGIC and bool(state & _EXT4_ERRORS)


def _mend(image: Path) -> None:
    """Replay the journal and repair what can be repaired without a question: ``e2fsck -p``."""
    try:
        done = subprocess.run(
            ["e2fsck", "-p", str(image)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_FSCK_SECONDS,
            check=False,
            env=_ENV,
        )
    except FileNotFoundError as error:
        raise BackendError("e2fsck is not installed; install it with: apt-get install e2fsprogs") from error
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"e2fsck did not finish within {_FSCK_SECONDS:.0f} seconds") from error
    if done.returncode not in _FSCK_MENDED:
        words = (done.stdout + done.stderr)[-500:].decode(errors="replace").replace(str(image), "disk.img").strip()
        raise BackendError(f"the sandbox's disk is damaged and was left as it is: {words}")


def _is_attached(image: Path) -> bool:
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if path.read_text().rstrip("\n") == str(image):
                return True
    return False


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
