"""The ``host`` image: the host's own ``/usr``, read-only, around a small generated skeleton.

What a sandbox sees of the host is ``/usr`` without ``/usr/local`` and ``/usr/src`` (where people keep their own), the
links into it (``/bin``, ``/lib``, …), and those files of ``/etc`` that programs need to start and that are the same on
every machine: the loader's cache, alternatives, public certificates, time zone, interpreters' site files. No home, no
``/var``, no ``/opt``, no socket, no user list, no file that not everybody may read.

The skeleton is built into a directory named by its content and never changed, since sandboxes run on it while the host
is upgraded. The programs below ``/usr`` are the host's and do change: that is why the image has no digest and no
writable root (an overlay must not have a lower directory that changes).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from agent_sandbox.errors import UnsupportedError
from agent_sandbox.images.prepare import HOSTS, MOUNT_POINTS, add_group, add_user

USR_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
COVERED = ("local", "src")
EMPTY_DIRECTORIES = ("home", "media", "mnt", "opt", "root", "srv", "usr", "var", "var/cache", "var/lib", "var/log")
VAR_LINKS = {"var/tmp": "/tmp", "var/run": "/run", "var/lock": "/run/lock"}
COPIED = (
    "alternatives",
    "ca-certificates.conf",
    "debian_version",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.conf",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "perl",
    "protocols",
    "rpc",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
COPIED_PATTERNS = ("python3*", "java-*-openjdk")
_FILE_BYTES = 8 << 20
"""Of one copied file: a loader cache or certificate bundle is under 1 MiB."""
_TOTAL_ENTRIES = 20_000
"""Of copied entries: a desktop has about 1,500."""
NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n"
PROFILE = 'export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}"\nexport PS1="sandbox:\\w\\$ "\n'
PASSWD = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
GROUP = b"root:x:0:\ntty:x:5:\nnogroup:x:65534:\n"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the skeleton: a directory, a link to ``target``, or a file with ``content``."""

    mode: int
    content: bytes = b""
    target: str = ""

    @property
    def kind(self) -> str:
        """``d``, ``l`` or ``f``."""
        return "d" if stat.S_ISDIR(self.mode) else "l" if stat.S_ISLNK(self.mode) else "f"


class HostImage:
    """The skeletons below ``directory``; ``host`` is the root of the host's file system."""

    def __init__(self, directory: Path, uid: int, gid: int, host: Path = Path("/")) -> None:
        self._directory = directory
        self._uid, self._gid = uid, gid
        self._host = host
        self._current: Path | None = None

    def prepare(self, in_use: set[Path]) -> None:
        """Build the skeleton of the host as it is now, and remove those that nothing runs on."""
        self._current = self._build()
        with os.scandir(self._directory) as entries:
            for entry in entries:
                root = Path(entry.path) / "rootfs"
                if root != self._current and root not in in_use:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def rootfs(self) -> Path:
        """The skeleton's directory, built when there is none. :class:`UnsupportedError` where /usr is not merged."""
        if self._current is None or not self._current.is_dir():
            self._current = self._build()
        return self._current

    def binds(self) -> list[tuple[Path, str]]:
        """What of the host is shown where, in order: ``/usr``, then empty directories over what is private in it."""
        usr, empty = self._host / "usr", self.rootfs() / "mnt"
        covered = [name for name in COVERED if (usr / name).is_dir() and not (usr / name).is_symlink()]
        return [(usr, "/usr"), *((empty, f"/usr/{name}") for name in covered)]

    def _build(self) -> Path:
        entries = skeleton(self._host, self._uid, self._gid)
        target = self._directory / fingerprint(entries)
        root = target / "rootfs"
        if root.is_dir():
            return root
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = self._directory / f".new-{secrets.token_hex(8)}"
        try:
            _write(aside / "rootfs", entries)
            with contextlib.suppress(FileExistsError, OSError):
                aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return root


def skeleton(host: Path, uid: int, gid: int) -> dict[str, Entry]:
    """The skeleton's entries by path, parents first. Reads the host, writes nothing.

    :class:`UnsupportedError` where ``/bin`` and the like are directories of their own.
    """
    entries = {"": _directory(0o755)}
    for name, mode in MOUNT_POINTS.items():
        entries[name] = _directory(mode)
    for name in EMPTY_DIRECTORIES:
        entries[name] = _directory(0o755)
    for name in USR_LINKS:
        path = host / name
        if path.is_symlink():
            entries[name] = _link(f"usr/{name}")
        elif path.exists():
            raise UnsupportedError("the host image", "runc", f"/{name} is not a link into /usr here; import an image")
    entries |= {path: _link(target) for path, target in VAR_LINKS.items()}
    entries["etc"] = _directory(0o755)
    etc = host / "etc"
    patterns = [path.name for pattern in COPIED_PATTERNS for path in sorted(etc.glob(pattern))]
    for name in (*COPIED, *patterns):
        for parent in reversed(Path("etc", name).parents):
            entries.setdefault("" if str(parent) == "." else str(parent), _directory(0o755))
        _copy(etc / name, f"etc/{name}", entries)
    generated = {
        "passwd": add_user(PASSWD, uid, gid),
        "group": add_group(GROUP, gid),
        "hosts": HOSTS.encode(),
        "hostname": b"sandbox\n",
        "resolv.conf": b"",
        "machine-id": b"",
        "nsswitch.conf": NSSWITCH.encode(),
        "profile": PROFILE.encode(),
        "shells": b"/bin/sh\n/bin/bash\n",
    }
    return entries | {f"etc/{name}": Entry(stat.S_IFREG | 0o644, content) for name, content in generated.items()}


def fingerprint(entries: dict[str, Entry]) -> str:
    """A name for exactly these entries."""
    whole = hashlib.sha256()
    for path, entry in entries.items():
        body = entry.content or os.fsencode(entry.target)
        head = f"{len(os.fsencode(path))} {entry.mode:o} {len(body)}\n"
        whole.update(head.encode() + os.fsencode(path) + body)
    return whole.hexdigest()[:32]


def _copy(source: Path, path: str, entries: dict[str, Entry]) -> None:
    """Take over what everybody may read; links as they are, anything else not at all."""
    try:
        state = source.lstat()
    except OSError:
        return
    if len(entries) >= _TOTAL_ENTRIES:
        return
    readable = state.st_mode & stat.S_IROTH
    if stat.S_ISLNK(state.st_mode):
        entries[path] = _link(str(source.readlink()))
    elif stat.S_ISDIR(state.st_mode) and readable:
        entries[path] = _directory(0o755)
        for child in sorted(source.iterdir()):
            _copy(child, f"{path}/{child.name}", entries)
    elif stat.S_ISREG(state.st_mode) and readable and state.st_size <= _FILE_BYTES:
        entries[path] = Entry(stat.S_IFREG | 0o644, source.read_bytes())


def _directory(mode: int) -> Entry:
    return Entry(stat.S_IFDIR | mode)


def _link(target: str) -> Entry:
    return Entry(stat.S_IFLNK | 0o777, target=target)


def _write(root: Path, entries: dict[str, Entry]) -> None:
    for path, entry in entries.items():
        target = root / path
        if entry.kind == "l":
            target.symlink_to(entry.target)
        elif entry.kind == "d":
            target.mkdir(parents=path == "")
            target.chmod(stat.S_IMODE(entry.mode))
        else:
            target.write_bytes(entry.content)
            target.chmod(0o644)
