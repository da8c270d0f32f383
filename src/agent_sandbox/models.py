"""The public JSON shapes, version 1, shared by the server, the SDK, the command line and MCP.

Standard frozen dataclasses, so that the SDK needs no validation library. Strategy:

* The server hands a request shape to FastAPI. ``__pydantic_config__`` refuses unknown fields, and the markers below
  (:class:`Number`, :class:`Text`, :class:`Command`, :class:`Flag`) carry each field's bounds; pydantic calls their two
  hooks, which need nothing but dictionaries. Types are strict: no ``true`` or ``"1"`` where a number belongs.
* Clients build replies with ``from_json``, which ignores fields it does not know: an old client survives a new server.
  Fields that a server of the first contract does not send have defaults.
* A string holds surrogate escapes where bytes inside a sandbox are not UTF-8 (JSON ``\\udcXX``). None may hold NUL.

Names, types and defaults of the first contract are fixed. ``exec``, ``exec/stream``, ``files`` and ``files/list`` carry
exactly the fields here; :class:`Sandbox` and :class:`Snapshot` may grow.

When adding a field: give it a default, run ``make openapi``, add it to ``server/views.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self

from agent_sandbox.errors import InvalidRequestError, ValidationError
from agent_sandbox.types import FileType, IsolationClass, LimitName, NetworkPolicy

MAX_NAME_LENGTH = 128
"""Characters of a snapshot's name: a label for people, shown in tables."""

MAX_INTEGER = 2**53 - 1
"""Largest integer that every JSON implementation reads exactly (RFC 8259, section 6)."""

_Schema = dict[str, Any]
_Handler = Callable[[Any], _Schema]

_EPOCH = datetime(1970, 1, 1)
_FIRST, _LAST = ((moment - _EPOCH) // timedelta(microseconds=1) for moment in (datetime.min, datetime.max))


def rfc3339(microseconds: int) -> str:
    """Write microseconds since the epoch as RFC 3339 in UTC; outside the years 1 to 9999 the nearest time within."""
    moment = _EPOCH + timedelta(microseconds=min(max(microseconds, _FIRST), _LAST))
    return moment.isoformat(timespec="microseconds") + "Z"


# -- markers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """Bound an ``int`` or ``float`` field: finite, strictly of its type (an ``int`` passes as ``float``)."""

    ge: float | None = None
    gt: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        bounds = {name: value for name, value in (("ge", self.ge), ("gt", self.gt)) if value is not None}
        sane = {"allow_inf_nan": False} if source is float else {"le": MAX_INTEGER}
        return {**handler(source), **bounds, **sane, "strict": True}


@dataclass(frozen=True)
class Flag:
    """Take ``true`` and ``false`` only."""

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        return {**handler(source), "strict": True}


@dataclass(frozen=True)
class Text:
    """Take a string of at most ``max_length`` characters, surrogate escapes included, without NUL."""

    max_length: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        return _checked_by(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: _Handler) -> _Schema:
        return {"type": "string"} if self.max_length is None else {"type": "string", "maxLength": self.max_length}

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("must be a string")  # noqa: TRY004 - the validator takes ValueError only
        if self.max_length is not None and len(value) > self.max_length:
            raise ValueError(f"must have at most {self.max_length} characters")
        return _without_nul(value)


@dataclass(frozen=True)
class Command:
    """Take a shell line (a string) or an argument vector (a list of strings)."""

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        return _checked_by(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: _Handler) -> _Schema:
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}

    def check(self, value: Any) -> str | list[str]:
        if isinstance(value, str):
            return _without_nul(value)
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise ValueError("must be a string, or a list of strings")
        return [_without_nul(part) for part in value]


@dataclass(frozen=True)
class Time:
    """Say in the schema that a string is an RFC 3339 time."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: _Handler) -> _Schema:
        return {**handler(schema), "format": "date-time"}


def _checked_by(check: Callable[[Any], Any]) -> _Schema:
    return {"type": "function-plain", "function": {"type": "no-info", "function": check}}


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise InvalidRequestError("a NUL character cannot be part of any string here; remove it")
    return value


Str = Annotated[str, Text()]
Bool = Annotated[bool, Flag()]
Timestamp = Annotated[str, Time()]

_REFUSE_UNKNOWN = {"extra": "forbid"}


# -- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SandboxCreate:
    """What a new sandbox shall be. What is absent takes the server's default.

    ``cpus`` is in cores, sizes in MiB, ``timeout_seconds`` the time to live. ``backend`` names one of the server's
    backends; ``min_isolation`` asks for at least this class.
    """

    __pydantic_config__ = _REFUSE_UNKNOWN

    image: Str | None = None
    cpus: Annotated[float, Number(gt=0)] | None = None
    memory_mb: Annotated[int, Number(ge=16)] | None = None
    pids_limit: Annotated[int, Number(ge=8)] | None = None
    disk_mb: Annotated[int, Number(ge=16)] | None = None
    network: Bool = False
    read_only_rootfs: Bool = True
    timeout_seconds: Annotated[int, Number(ge=1)] | None = None
    env: dict[Str, Str] = field(default_factory=dict)
    backend: Str | None = None
    min_isolation: IsolationClass | None = None


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


@dataclass(frozen=True, kw_only=True)
class SnapshotCreate:
    """A label for the new snapshot."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    name: Annotated[str, Text(MAX_NAME_LENGTH)] | None = None


@dataclass(frozen=True, kw_only=True)
class RollbackRequest:
    """The snapshot to go back to; it may be another sandbox's."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    snapshot_id: Str


@dataclass(frozen=True, kw_only=True)
class ForkRequest:
    """What the new sandbox shall have otherwise than the snapshot's; what is absent is the same."""

    __pydantic_config__ = _REFUSE_UNKNOWN

    timeout_seconds: Annotated[int, Number(ge=1)] | None = None
    network: Bool | None = None
    cpus: Annotated[float, Number(gt=0)] | None = None
    memory_mb: Annotated[int, Number(ge=16)] | None = None


# -- replies ---------------------------------------------------------------------------------------------------------


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
    """The server and its default backend answer."""

    status: Literal["ok"]
    backend: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Sandbox(_Reply):
    """One sandbox. ``cpus`` is in cores, sizes in MiB.

    ``status`` says whether commands can run; ``state`` is the exact state. ``backend``, ``disk_mb`` and ``state`` go
    beyond the first contract and are absent on servers that know only that.
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

    ``backend``, ``stored_bytes`` (on the server's disk) and ``skipped_total`` (how many paths, such as sockets, could
    not be captured) go beyond the first contract.
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


@dataclass(frozen=True, kw_only=True)
class SnapshotList:
    """Every snapshot that the caller can see."""

    snapshots: list[Snapshot]


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
class Backend(_Reply):
    """One backend of the server; ``message`` says what is wrong when it is not healthy."""

    name: str
    default: bool
    healthy: bool
    message: str
    capabilities: BackendCapabilities


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
