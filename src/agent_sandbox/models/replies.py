"""What the server answers."""

from __future__ import annotations

import base64
import binascii
import builtins
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from agent_sandbox.errors import ValidationError
from agent_sandbox.models.markers import Timestamp
from agent_sandbox.types import FileType, IsolationClass, LimitName, NetworkPolicy


class _Reply:
    """What a shape that clients build from a reply can do."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build the shape from decoded JSON, ignoring unknown fields.

        Raises :class:`ValidationError` when a field that has no default is missing.
        """
        known = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}  # type: ignore[arg-type]
        try:
            return cls(**known)
        except TypeError as error:
            raise ValidationError(f"the server's reply is no {cls.__name__}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Health(_Reply):
    """The server and ``backend`` answer: the default one, or the first of the others that does."""

    status: Literal["ok"]
    backend: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Sandbox(_Reply):
    """One sandbox. ``cpus`` is in cores, sizes in MiB.

    ``status`` says whether commands can run; ``state`` is the exact state: ``running``, ``stopped``, or what is under
    way (``creating``, ``rolling_back``, ``destroying``). ``source`` says what the workspace was created from, as a
    reference, and ``project`` the project that this is of. ``backend`` and what follows it go beyond the first contract
    and are absent on servers that know only that.
    """

    id: str
    status: Literal["running", "stopped"]
    image: str
    cpus: float
    memory_mb: int
    pids_limit: int
    network: bool
    read_only_rootfs: bool
    created_at: Timestamp
    expires_at: Timestamp
    source_snapshot_id: str | None = None
    backend: str = ""
    disk_mb: int = 0
    state: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    project: str | None = None
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class SandboxList:
    """Every sandbox that the caller can see."""

    sandboxes: list[Sandbox]


@dataclass(frozen=True, kw_only=True)
class ExecResult(_Reply):
    """How a command ended, and its output as UTF-8 with replacement.

    ``exit_code`` is 128 + the signal when one ended it, 137 on timeout. ``truncated`` says that output above the
    server's limit was dropped. ``duration_ms`` is in milliseconds.
    """

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    truncated: bool
    duration_ms: int

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with code 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True)
class ExecEvent(_Reply):
    """One line of a streamed command: ``stdout`` or ``stderr`` with ``data``, at last ``exit`` with the other fields.

    A stream that breaks for a reason the server knows ends with ``error``, whose ``data`` is ``CODE: MESSAGE``, and the
    connection is cut off. A stream without an ``exit`` line never succeeded.
    """

    type: Literal["stdout", "stderr", "exit", "error"]
    data: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    duration_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExecUsage(_Reply):
    """What a command used: its own process and the children it waited for. ``max_rss_kb`` is in KiB."""

    user_seconds: float
    system_seconds: float
    max_rss_kb: int
    wall_seconds: float


class _WithUsage(_Reply):
    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        usage = data.get("usage")
        if isinstance(usage, Mapping):
            data = {**data, "usage": ExecUsage.from_json(usage)}
        return super().from_json(data)


@dataclass(frozen=True, kw_only=True)
class Exec(_WithUsage):
    """A command as an object. ``command`` is its argument vector, cut after 4,096 bytes.

    Output is numbered from 0 over both streams: ``cursor`` is the number of the next byte, ``first_cursor`` that of the
    oldest byte that can still be read. Of an ``exited`` one, exactly one of ``exit_code`` and ``signal`` is set, or
    neither where it could not be learned. ``oom_killed`` says whether it was killed because the sandbox's memory was
    used up; it is ``null`` while it runs, and where the kernel does not count such kills. ``message`` says why a
    command could not be started (codes 126 and 127).
    """

    id: str
    tag: str
    command: list[str]
    pid: int
    status: Literal["running", "exited"]
    started_at: Timestamp
    exit_code: int | None
    signal: int | None
    timed_out: bool
    tty: bool
    cursor: int
    first_cursor: int
    usage: ExecUsage | None = None
    oom_killed: bool | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class ExecList:
    """The commands that are kept, oldest first: those that run, and the last 1,000 that ended."""

    execs: list[Exec]


@dataclass(frozen=True, kw_only=True)
class ExecOutputEvent(_WithUsage):
    """One line of a kept command's output.

    ============= ======================================================================================
    ``started``   ``id`` and ``pid``; the first line for who starts a command, unless it cannot be started
    ``stdout``    ``data``, or ``data_b64`` where the bytes are not UTF-8; ``cursor`` is the number of the
    ``stderr``    byte behind them: give it to ``output`` to read on
    ``gap``       ``bytes`` that are no longer kept, and the ``cursor`` behind them
    ``exit``      the last line: ``exit_code`` or ``signal``, ``usage`` and the others
    ``error``     ``code`` and ``message`` of what broke the stream, which is then cut off
    ============= ======================================================================================
    """

    type: Literal["started", "stdout", "stderr", "gap", "exit", "error"]
    id: str = ""
    pid: int = 0
    cursor: int = 0
    data: str = ""
    data_b64: str = ""
    bytes: int = 0
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool | None = None
    message: str = ""
    usage: ExecUsage | None = None
    duration_ms: int | None = None
    code: str = ""

    @property
    def raw(self) -> builtins.bytes:
        """The exact bytes of a piece of output. Raises :class:`ValidationError` where the server sent nonsense."""
        try:
            return base64.b64decode(self.data_b64, validate=True) if self.data_b64 else self.data.encode()
        except (binascii.Error, ValueError) as error:
            raise ValidationError(f"the server's output line is broken: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Signalled(_Reply):
    """How many processes the signal was sent to."""

    processes: int


@dataclass(frozen=True, kw_only=True)
class StdinTaken(_Reply):
    """How many bytes of the body went to the command's standard input."""

    taken: int


@dataclass(frozen=True, kw_only=True)
class FileStat(_Reply):
    """One file. ``size`` is in bytes, ``mode`` the permission bits in octal, such as ``644``."""

    name: str
    path: str
    type: FileType
    size: int
    modified_at: Timestamp
    mode: str


@dataclass(frozen=True, kw_only=True)
class Removed(_Reply):
    """How many names went."""

    removed: int


@dataclass(frozen=True, kw_only=True)
class WatchEvent(_Reply):
    """One line of a watch.

    ``ready`` comes first: every later change will be told. ``lost`` means that more changed than could be told: look
    again at everything. The others are a change of ``path``; ``moved`` has its new name in ``to``.
    """

    type: Literal["ready", "created", "modified", "removed", "moved", "lost", "error"]
    path: str = ""
    to: str | None = None
    directory: bool = False
    code: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class SandboxStats(_Reply):
    """What a sandbox uses now. What the backend does not count is ``null``.

    ``memory_bytes`` is what counts against ``memory_mb``, ``cpu_seconds`` all processor time since its start;
    ``processes`` are those alive inside, ``execs`` the commands that are kept, ``output_bytes`` what is kept of their
    output, ``daemon_memory_bytes`` the daemon's own resident memory.
    """

    memory_bytes: int | None
    cpu_seconds: float | None
    processes: int
    execs: int
    output_bytes: int
    daemon_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class FileInfo(_Reply):
    """One name in a directory. ``size`` is in bytes."""

    name: str
    path: str
    type: FileType
    size: int
    modified_at: Timestamp


@dataclass(frozen=True, kw_only=True)
class FileList:
    """The direct children of the directory ``path``, by name."""

    path: str
    entries: list[FileInfo]


@dataclass(frozen=True, kw_only=True)
class Snapshot(_Reply):
    """One snapshot. ``size_bytes`` counts the bytes of its regular files, holes left out.

    ``backend``, ``stored_bytes`` (on the server's disk), ``skipped_total`` (how many paths, such as sockets, could not
    be captured), ``memory`` (whether its processes are kept), ``memory_bytes`` (what they take on the server's disk),
    and ``auto`` (whether a rollback made it, of what it replaced) go beyond the first contract.
    """

    id: str
    sandbox_id: str
    name: str | None
    image: str
    size_bytes: int
    created_at: Timestamp
    backend: str = ""
    stored_bytes: int = 0
    skipped_total: int = 0
    memory: bool = False
    memory_bytes: int = 0
    auto: bool = False


@dataclass(frozen=True, kw_only=True)
class SnapshotList:
    """Every snapshot that the caller can see."""

    snapshots: list[Snapshot]


@dataclass(frozen=True, kw_only=True)
class Change(_Reply):
    """One path that differs between two states. Sizes are those of regular files, in bytes.

    ============= ======================================================================================
    ``added``     it is in the new state only; ``removed``: in the old one only
    ``modified``  its content, or the target of a symbolic link
    ``type``      it became something else, such as a directory in place of a file
    ``metadata``  mode, time, attributes, or which names are one file; the content is the same
    ============= ======================================================================================

    ``text`` is a unified difference, empty where there is nothing to show; ``null`` where it was not asked for, or left
    out for its size.
    """

    path: str
    kind: Literal["added", "removed", "modified", "type", "metadata"]
    old_type: FileType | None
    new_type: FileType | None
    old_size: int | None
    new_size: int | None
    text: str | None = None


class _WithItems(_Reply):
    """A reply with one list of shapes."""

    _items: ClassVar[tuple[str, type[_Reply]]]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        name, kind = cls._items
        items = data.get(name)
        if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
            raise ValidationError(f"the server's reply has no list {name!r}")
        return super().from_json({**data, name: [kind.from_json(item) for item in items]})


@dataclass(frozen=True, kw_only=True)
class ChangeList(_WithItems):
    """What differs between two states, by path, a directory before what is in it.

    ``truncated`` says that there is more than is listed, ``text_truncated`` that a text was left out. A directory of
    which nothing but the time differs is not listed.
    """

    _items = ("changes", Change)

    changes: list[Change]
    truncated: bool
    text_truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class PastState(_Reply):
    """A state of a workspace. ``snapshot_ids`` are the snapshots that keep it, ``parents`` the states before it.

    ``kept`` says whether its files are still there; of one that is not, only this is known.
    """

    commit: str
    parents: list[str]
    created_at: Timestamp
    kept: bool
    snapshot_ids: list[str]


@dataclass(frozen=True, kw_only=True)
class SnapshotLog(_WithItems):
    """A state and those that led to it, newest first; the oldest is the empty workspace that sandboxes begin with."""

    _items = ("states", PastState)

    states: list[PastState]


@dataclass(frozen=True, kw_only=True)
class MergeConflict(_Reply):
    """A path on which both sides changed the same thing in different ways; ``kinds`` says what they disagree over.

    ``content``, ``type``, ``mode``, ``mtime``, ``attributes``, ``owner``, ``link`` (which names are one file), or
    ``deleted_changed`` (one side removed what the other changed).
    """

    path: str
    kinds: list[str]


@dataclass(frozen=True, kw_only=True)
class MergeResult(_WithItems):
    """How a merge ended.

    ============== =====================================================================================
    ``merged``     the workspace holds both; ``snapshot_id`` keeps it, ``before_snapshot_id`` what it was
    ``up_to_date`` the workspace has the snapshot in its history already; nothing was changed
    ``conflicts``  both sides changed the same; nothing was changed. The first 1,000 are listed, all counted
    ============== =====================================================================================
    """

    _items = ("conflicts", MergeConflict)

    outcome: Literal["merged", "up_to_date", "conflicts"]
    sandbox: Sandbox
    snapshot_id: str | None
    before_snapshot_id: str | None
    conflicts: list[MergeConflict]
    conflict_count: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        sandbox = data.get("sandbox")
        if not isinstance(sandbox, Mapping):
            raise ValidationError("the server's reply has no 'sandbox'")
        return super().from_json({**data, "sandbox": Sandbox.from_json(sandbox)})


@dataclass(frozen=True, kw_only=True)
class Layer(_Reply):
    """A published state of a project; ``created_at`` is when the state was made."""

    number: int
    commit: str
    created_at: Timestamp


@dataclass(frozen=True, kw_only=True)
class Project(_WithItems):
    """A project: a name over a line of layers. ``layers`` are the newest of its ``layer_count``, newest first."""

    _items = ("layers", Layer)

    name: str
    created_at: Timestamp
    layer_count: int
    layers: list[Layer]


@dataclass(frozen=True, kw_only=True)
class ProjectList:
    """Every project by name, each with its newest layer."""

    projects: list[Project]


@dataclass(frozen=True, kw_only=True)
class LayerAdded(_Reply):
    """``created`` a layer, or ``up_to_date``: the state was that layer already, and nothing was changed."""

    outcome: Literal["created", "up_to_date"]
    layer: Layer

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        layer = data.get("layer")
        if not isinstance(layer, Mapping):
            raise ValidationError("the server's reply has no 'layer'")
        return super().from_json({**data, "layer": Layer.from_json(layer)})


@dataclass(frozen=True, kw_only=True)
class BackendCapabilities(_Reply):
    """What a backend can do on this machine. ``enforces`` names the limits that really hold; ``notes`` says why not."""

    isolation: IsolationClass
    accelerated: bool
    enforces: list[LimitName]
    network: list[NetworkPolicy]
    userns: bool
    guest: bool
    layered_workspace: bool
    checkpoint: bool
    pause: bool
    resize: bool
    fuse: bool
    nested_containers: bool
    notes: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ImagePull(_Reply):
    """An image that is being fetched. ``total_bytes`` grows while the sizes of its layers become known."""

    image: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Backend(_Reply):
    """One backend of the server; ``message`` says what is wrong when it is not healthy.

    ``versions`` are those of what it runs on, such as its runtime; ``pulls`` are images that it fetches at this moment
    because a sandbox that is being created needs them.
    """

    name: str
    default: bool
    healthy: bool
    message: str
    capabilities: BackendCapabilities
    versions: dict[str, str] = field(default_factory=dict)
    pulls: list[ImagePull] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BackendList:
    """Every backend that the server offers, the default one first."""

    backends: list[Backend]


@dataclass(frozen=True, kw_only=True)
class ErrorBody:
    """What went wrong. ``code`` is stable; ``message`` is one sentence for people; ``details`` depends on the code."""

    code: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ErrorReply:
    """The one shape of every error."""

    error: ErrorBody
