"""The bodies that clients send."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from agent_sandbox.models.markers import (
    MAX_NAME_LENGTH,
    MAX_TAG_LENGTH,
    MAX_TERMINAL_SIDE,
    Bool,
    Command,
    Labels,
    Mode,
    Number,
    Signal,
    Str,
    Text,
)
from agent_sandbox.types import IsolationClass

_REFUSE_UNKNOWN: dict[str, Any] = {"extra": "forbid"}
_WITHOUT_UNDERSCORE: dict[str, Any] = {**_REFUSE_UNKNOWN, "alias_generator": lambda name: name.rstrip("_")}


@dataclass(frozen=True, kw_only=True)
class SandboxCreate:
    """What a new sandbox shall be. What is absent takes the server's default.

    ``cpus`` is in cores, sizes in MiB, ``timeout_seconds`` the time to live. ``backend`` names one of the server's
    backends; ``min_isolation`` asks for at least this class. ``metadata`` are labels of the caller's own.

    ``from`` (``from_`` here) is what the workspace begins as: a snapshot's id, ``NAME`` (the newest layer of a
    project), ``NAME@N`` (its layer ``N``), ``NAME:BRANCH``, or a commit's id; it is empty else. With ``project`` alone
    it begins as that project's newest layer; ``from`` beside it may be ``N`` or the name of a branch.
    """

    __pydantic_config__ = _WITHOUT_UNDERSCORE

    image: Str | None = None
    cpus: Annotated[float, Number(gt=0)] | None = None
    memory_mb: Annotated[int, Number(ge=16)] | None = None
    pids_limit: Annotated[int, Number(ge=16)] | None = None
    disk_mb: Annotated[int, Number(ge=16)] | None = None
    network: Bool = False
    read_only_rootfs: Bool = True
    timeout_seconds: Annotated[int, Number(ge=1)] | None = None
    env: dict[Str, Str] = field(default_factory=dict)
    backend: Str | None = None
    min_isolation: IsolationClass | None = None
    metadata: Annotated[dict[str, str], Labels()] = field(default_factory=dict)
    project: Str | None = None
    from_: Str | None = None


@dataclass(frozen=True, kw_only=True)
class TimeoutUpdate:
    """A new time to live in seconds, counted from now."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    timeout_seconds: Annotated[int, Number(ge=1)]


@dataclass(frozen=True, kw_only=True)
class ExecRequest:
    """A command: a string is run by ``/bin/sh -c``, a list as it is. ``workdir`` is ``/workspace`` when absent."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    command: Annotated[str | list[str], Command()]
    env: dict[Str, Str] = field(default_factory=dict)
    workdir: Str | None = None
    timeout_seconds: Annotated[float, Number(gt=0)] | None = None


Side = Annotated[int, Number(ge=1, le=MAX_TERMINAL_SIDE)]


@dataclass(frozen=True, kw_only=True)
class TerminalSize:
    """The size of a terminal in characters."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    rows: Side
    cols: Side


@dataclass(frozen=True, kw_only=True)
class ExecCreate:
    """A command that is kept as an object; the first four fields are as in :class:`ExecRequest`.

    ``stdin`` leaves standard input open, else it is empty; ``tty`` gives a terminal of that size, whose input is
    standard input. With ``detach`` nobody has to read the output, and the command survives the client and the server.
    ``timeout_seconds`` is the longest allowed one when it is absent and ``tty`` or ``detach`` is given. ``user`` is the
    sandbox's own; ``root`` needs a backend that can keep it apart.
    """

    __pydantic_config__ = _REFUSE_UNKNOWN

    command: Annotated[str | list[str], Command()]
    env: dict[Str, Str] = field(default_factory=dict)
    workdir: Str | None = None
    timeout_seconds: Annotated[float, Number(gt=0)] | None = None
    stdin: Bool = False
    tty: TerminalSize | None = None
    detach: Bool = False
    tag: Annotated[str, Text(MAX_TAG_LENGTH)] = ""
    user: Literal["default", "root"] = "default"


@dataclass(frozen=True, kw_only=True)
class SignalRequest:
    """A signal for every process of a command, by name or number."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    signal: Annotated[str | int, Signal()]


@dataclass(frozen=True, kw_only=True)
class MkdirRequest:
    """A directory to make inside ``/workspace``. With ``parents`` missing ones are made and an existing one is fine."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    path: Str
    mode: Annotated[str, Mode()] = "755"
    parents: Bool = True


@dataclass(frozen=True, kw_only=True)
class MoveRequest:
    """Another name for a file or directory inside ``/workspace``; JSON's ``from`` is ``from_`` here."""

    __pydantic_config__ = _WITHOUT_UNDERSCORE

    from_: Str
    to: Str
    replace: Bool = True


@dataclass(frozen=True, kw_only=True)
class RemoveRequest:
    """A name inside ``/workspace`` to remove: a link itself, a directory with ``recursive`` unless it is empty."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    path: Str
    recursive: Bool = False


@dataclass(frozen=True, kw_only=True)
class ChmodRequest:
    """New permission bits for a file inside ``/workspace``."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    path: Str
    mode: Annotated[str, Mode()]


@dataclass(frozen=True, kw_only=True)
class SnapshotCreate:
    """A label for the new snapshot. With ``memory`` its processes are kept as well, where the backend can do that."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    name: Annotated[str, Text(MAX_NAME_LENGTH)] | None = None
    memory: Bool = False


@dataclass(frozen=True, kw_only=True)
class RollbackRequest:
    """The snapshot to go back to; it may be another sandbox's.

    ``memory`` says whether its processes go on from where they were; absent: where the snapshot has them.
    """

    __pydantic_config__ = _REFUSE_UNKNOWN

    snapshot_id: Str
    memory: Bool | None = None


@dataclass(frozen=True, kw_only=True)
class MergeRequest:
    """The snapshot whose changes are brought into the sandbox; any reference to a state will do, such as ``NAME@N``."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    snapshot_id: Str


@dataclass(frozen=True, kw_only=True)
class LayerCreate:
    """The state that becomes the next layer: a sandbox's or snapshot's id, or a reference as in
    :class:`SandboxCreate`; JSON's ``from`` is ``from_`` here."""

    __pydantic_config__ = _WITHOUT_UNDERSCORE

    from_: Str


@dataclass(frozen=True, kw_only=True)
class ForkRequest:
    """What the new sandbox shall have otherwise than the snapshot's; what is absent is the same.

    ``memory`` says whether the snapshot's processes go on in it; absent: where the snapshot has them. They do so on the
    same ``backend`` and with the same limits only.
    """

    __pydantic_config__ = _REFUSE_UNKNOWN

    timeout_seconds: Annotated[int, Number(ge=1)] | None = None
    network: Bool | None = None
    cpus: Annotated[float, Number(gt=0)] | None = None
    memory_mb: Annotated[int, Number(ge=16)] | None = None
    backend: Str | None = None
    memory: Bool | None = None
    metadata: Annotated[dict[str, str], Labels()] = field(default_factory=dict)
