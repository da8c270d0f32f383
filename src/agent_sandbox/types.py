"""The domain's values: what a sandbox is, what a command yields, what a directory holds.

Frozen dataclasses without behaviour. They are internal: what crosses a process or a disk is in ``models.py``
(public JSON), ``spec/wire.md`` and the manager's records. Paths and names are ``str`` with surrogate escapes
(:func:`os.fsdecode`), so bytes that are not UTF-8 survive the way there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

WORKSPACE = "/workspace"

IsolationClass = Literal["process", "container", "gvisor", "vm"]
NetworkPolicy = Literal["none", "full", "allowlist"]
LimitName = Literal["cpus", "memory", "pids", "disk", "network"]
FileType = Literal["file", "directory", "symlink", "other"]
Stream = Literal["stdout", "stderr"]
ChangeKind = Literal["created", "modified", "removed", "moved"]


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Everything a backend needs to create an environment.

    ``cpus`` is in cores, sizes in MiB. ``image_digest`` names the exact content to use; an empty one means that the
    image cannot be pinned (the ``host`` image). ``env`` is the sandbox's part of each command's environment and must
    never reach a runtime's configuration, argv or labels.
    """

    image: str
    image_digest: str
    cpus: float
    memory_mb: int
    pids_limit: int
    disk_mb: int
    tmp_mb: int
    network: NetworkPolicy = "none"
    read_only_rootfs: bool = True
    uid: int = 1000
    gid: int = 1000
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


Fill = Callable[[int, tuple[int, int], Callable[[], bool]], None]
"""Lays a state out in an open, empty directory, whose own mode and times it sets last; everything in it belongs to the
uid and gid given. Blocks; raises once the function given last says that nobody waits any more."""


@dataclass(frozen=True, slots=True)
class PreparedWorkspace:
    """What ``/workspace`` begins with, in the form that the backend's ``projection`` asks for.

    ``lowers`` are read-only directories on this host, the topmost first, as overlay layers. They belong to the manager,
    stay unchanged, and are kept for as long as the environment is there. Files in them have the sandbox user's ids as
    they are inside. ``fill`` lays the state out in a directory of the backend's. ``state`` names it, 64 hexadecimal
    digits: the same name, the same state.
    """

    lowers: tuple[str, ...] = ()
    fill: Fill | None = None
    state: str = ""


@dataclass(frozen=True, slots=True)
class HeldWorkspace:
    """A workspace while nothing in it changes, as a directory on this host. Its content is the guest's: hostile.

    ``mapped`` says that a process may have changed a file through a shared map: its times say nothing then. ``upper``
    is the upper directory, where ``path`` is an overlay over the layers that the environment was created from.
    """

    path: str
    mapped: bool
    upper: str | None = None


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image name resolved to content: ``digest`` is empty and ``pinned`` false where it can change underneath."""

    name: str
    digest: str
    pinned: bool
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImagePull:
    """An image that is being fetched: bytes that came and, as far as they are known yet, bytes that there are."""

    image: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one backend can do on this machine; also public JSON at ``GET /v1/backends``.

    ``enforces`` holds the limits that are really enforced here. ``notes`` says why, for each capability that is absent
    or weaker than its name promises. See ``docs/design`` for the meaning of each field.
    """

    isolation: IsolationClass
    accelerated: bool = True
    enforces: frozenset[LimitName] = frozenset()
    network: frozenset[NetworkPolicy] = frozenset({"none"})
    userns: bool = False
    guest: bool = False
    layered_workspace: bool = False
    checkpoint: bool = False
    pause: bool = False
    resize: bool = False
    fuse: bool = False
    nested_containers: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecOutput:
    """A chunk of a command's output, as the kernel gave it: never split, joined or decoded by lines."""

    stream: Stream
    data: bytes


@dataclass(frozen=True, slots=True)
class ExecExit:
    """How a command ended: exactly one of ``code`` and ``signal`` is set.

    ``message`` says why it could not be started (codes 126 and 127). ``oom_killed`` says whether the kernel killed it
    for want of memory (it was killed, and the kernel's count of such kills in its sandbox rose while it ran); ``None``
    where nobody counts. Times are in seconds, ``max_rss_kb`` in KiB, those of the command's own process and the
    children it waited for.
    """

    code: int | None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool | None = None
    message: str = ""
    wall_seconds: float = 0.0
    user_seconds: float = 0.0
    system_seconds: float = 0.0
    max_rss_kb: int = 0


ExecEvent = ExecOutput | ExecExit


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """The size of a terminal in characters; each 1 to 65,535."""

    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """A command that is to be kept as an object under ``id``.

    ``env`` is the exec's own part. ``id`` is 1 to 64 characters of ``a-z0-9-`` and unique in the sandbox; ``tag`` is
    the caller's own text, at most 256 bytes. ``tty`` gives it a terminal of that size, whose input is standard input.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    timeout_seconds: float
    id: str
    tag: str = ""
    stdin: bool = False
    tty: TerminalSize | None = None


@dataclass(frozen=True, slots=True)
class ExecStarted:
    """The program runs; ``pid`` is its process id inside the sandbox (0 where it could not be started)."""

    pid: int


@dataclass(frozen=True, slots=True)
class ExecGap:
    """``bytes`` of output that this reader will not get: they had left the ring before it came to them."""

    bytes: int


@dataclass(frozen=True, slots=True)
class ExecStatus:
    """A command as an object. ``started_at`` is in seconds since the epoch.

    Output is numbered from 0 over both streams: ``cursor`` is the number of the next byte, ``first`` that of the
    oldest one which can still be read. ``argv`` may be cut after 4,096 bytes. ``exit`` is there once ``running`` is
    false, unless the command could not be ended as it should and its exit is not known.
    """

    id: str
    tag: str
    argv: tuple[str, ...]
    pid: int
    started_at: float
    running: bool
    tty: bool
    cursor: int
    first: int
    exit: ExecExit | None


AttachEvent = ExecStarted | ExecOutput | ExecGap | ExecExit


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One name in a directory. ``size`` is in bytes, ``mode`` the permission bits, ``mtime_ns`` since the epoch."""

    name: str
    path: str
    type: FileType
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileChange:
    """One change that a watch has seen; ``to`` is the new name of what was moved."""

    kind: ChangeKind
    path: str
    to: str | None
    directory: bool


@dataclass(frozen=True, slots=True)
class ChangesLost:
    """More changed than the watch could tell: look again at everything."""


@dataclass(frozen=True, slots=True)
class GuestStats:
    """What the daemon counts: processes alive inside, commands it knows, its own memory, output held in rings."""

    processes: int
    execs: int
    memory_bytes: int
    ring_bytes: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export holds: the bytes of its regular files without holes, its entries, and what was left out.

    ``skipped`` has at most 100 pairs of path and reason; ``skipped_total`` is the whole count.
    """

    file_bytes: int
    entries: int
    skipped: tuple[tuple[str, str], ...] = ()
    skipped_total: int = 0


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """One environment as ``inspect`` shows it: what was asked and what the backend observes now."""

    id: str
    running: bool
    details: Mapping[str, object] = field(default_factory=dict)
