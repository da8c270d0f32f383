"""What a daemon says, checked against ``spec/wire.md``: pure functions from its maps to the domain's values.

Whatever cannot be (a missing field, a wrong type, a negative count, a name with a slash) is :class:`BackendError`.
Names and paths that the caller gave are taken from the caller, not from the reply.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from agent_sandbox import wire
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    PayloadTooLargeError,
    SandboxError,
)
from agent_sandbox.guest import limits
from agent_sandbox.types import (
    ChangeKind,
    ChangesLost,
    ExecExit,
    ExecStatus,
    ExportReport,
    FileChange,
    FileEntry,
    FileType,
)

EXEC_ID = re.compile(r"[a-z0-9-]{1,64}")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Time = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Pid = Annotated[int, msgspec.Meta(ge=0, le=4_194_304)]  # PID_MAX_LIMIT, proc(5)
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]  # the end of the year 9999
_Code = Annotated[int, msgspec.Meta(ge=0, le=255)]
_Signal = Annotated[int, msgspec.Meta(ge=1, le=64)]


class GuestStalled(BackendError):
    """The daemon did not end a command in time: only the host can now."""


ERRORS: Mapping[str, type[SandboxError]] = {
    "invalid_request": InvalidRequestError,
    "not_found": NotFoundError,
    "workdir": InvalidRequestError,
    "permission": ForbiddenError,
    "conflict": ConflictError,
    "too_large": PayloadTooLargeError,
    "no_space": LimitExceededError,
    "exhausted": LimitExceededError,
    "stuck": GuestStalled,
    "unsupported": BackendError,
    "internal": BackendError,
}
"""The error codes of ``spec/wire.md`` as the caller's situation."""


class Entry(msgspec.Struct):
    name: bytes
    path: bytes
    type: FileType
    size: Count
    mode: Count
    mtime_ns: Time


class EntryResult(msgspec.Struct):
    entry: Entry


class Exit(msgspec.Struct):
    timed_out: bool
    oom_killed: bool | None = None
    code: _Code | None = None
    signal: _Signal | None = None
    message: str = ""
    user_us: Count = 0
    system_us: Count = 0
    max_rss_kb: Count = 0
    wall_us: Count = 0


class Started(msgspec.Struct):
    """The note of a start."""

    started: Literal[True]
    pid: Pid


class Detached(msgspec.Struct):
    id: str
    pid: Pid


class Gap(msgspec.Struct):
    """The note of lost bytes."""

    gap: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Attached(msgspec.Struct):
    cursor: Count
    exit: Exit | None = None


class Counted(msgspec.Struct):
    count: Count


class Taken(msgspec.Struct):
    taken: Count


class Signalled(msgspec.Struct):
    processes: Pid


class Sent(msgspec.Struct):
    size: Count


class Removed(msgspec.Struct):
    removed: Count


class Exported(msgspec.Struct):
    entries: Count
    file_bytes: Count
    skipped: list[tuple[bytes, str]] = []
    skipped_total: Count = 0


class Stats(msgspec.Struct):
    processes: Pid
    execs: Count
    memory_bytes: Count
    ring_bytes: Count


class GuestInfo(msgspec.Struct, frozen=True):
    """What the daemon says of itself."""

    version: str
    pid: int
    uid: int
    gid: int
    execs: int
    uptime_ms: int


class _Status(msgspec.Struct):
    id: str
    argv: list[bytes]
    pid: Pid
    started_ms: _Milliseconds
    running: bool
    tty: bool
    cursor: Count
    first: Count
    tag: str = ""
    exit: Exit | None = None
    error: dict[str, Any] | None = None


class _StatusResult(msgspec.Struct):
    exec: _Status


class _Change(msgspec.Struct):
    path: bytes | None = None
    kind: ChangeKind | None = None
    to: bytes | None = None
    directory: bool = False
    overflow: bool = False


T = TypeVar("T")

_entries = msgspec.msgpack.Decoder(list[Entry])
_statuses = msgspec.msgpack.Decoder(list[_Status])
_changes = msgspec.msgpack.Decoder(list[_Change])


def result(fields: Mapping[str, Any], kind: type[T]) -> T:
    """An END map in the shape it must have; raises the error that it carries."""
    error = fields.get("error")
    if isinstance(error, dict):
        code, message = error.get("code"), error.get("message")
        text = message[:1_000] if isinstance(message, str) else "no reason was given"
        raise ERRORS.get(code if isinstance(code, str) else "", BackendError)(text)
    return shaped(fields, kind)


def note(data: bytes, kind: type[T]) -> T:
    """A note in the shape it must have."""
    try:
        return shaped(wire.unpack_note(data), kind)
    except wire.ProtocolError as problem:
        raise BackendError(f"the sandbox's daemon sent a broken note: {problem}") from problem


def shaped(fields: Mapping[str, Any], kind: type[T]) -> T:
    """A map in the shape it must have."""
    try:
        return msgspec.convert(fields, kind, builtin_types=(bytes,))  # text is no base64 of bytes here
    except msgspec.ValidationError as problem:
        raise BackendError(f"the sandbox's daemon sent a reply of the wrong shape: {problem}") from problem


def exit_of(told: Exit) -> ExecExit:
    """How a command ended; ``oom_killed`` as far as the daemon knows."""
    if (told.code is None) == (told.signal is None):
        raise BackendError("the sandbox's daemon gave neither exit code nor signal, or both")
    return ExecExit(
        code=told.code,
        signal=told.signal,
        timed_out=told.timed_out,
        oom_killed=told.oom_killed,
        message=told.message[:1_000],
        wall_seconds=told.wall_us / 1e6,
        user_seconds=told.user_us / 1e6,
        system_seconds=told.system_us / 1e6,
        max_rss_kb=told.max_rss_kb,
    )


def entry_of(told: Entry, path: bytes) -> FileEntry:
    """The entry of a path that the caller gave."""
    name = path.rstrip(b"/").rpartition(b"/")[2] or b"/"
    return _entry(told, os.fsdecode(name), os.fsdecode(path))


def _entry(told: Entry, name: str, path: str) -> FileEntry:
    return FileEntry(name, path, told.type, told.size, told.mode & 0o7777, told.mtime_ns)


def listing_of(piece: bytes, directory: bytes) -> list[FileEntry]:
    """The entries of one frame of a listing."""
    base = os.fsdecode(directory.rstrip(b"/") + b"/")
    entries: list[FileEntry] = []
    for told in _array(piece, _entries, "listing"):
        name = told.name
        if not name or len(name) > 255 or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise BackendError("the sandbox's daemon listed a name that cannot be")
        text = os.fsdecode(name)
        entries.append(_entry(told, text, base + text))
    return entries


def statuses_of(piece: bytes) -> list[ExecStatus]:
    """The commands of one frame of their list."""
    return [_status(told) for told in _array(piece, _statuses, "list of commands")]


def status_of(fields: Mapping[str, Any], id: str) -> ExecStatus:
    """The command that was asked for."""
    status = _status(result(fields, _StatusResult).exec)
    if status.id != id:
        raise BackendError("the sandbox's daemon described another command")
    return status


def _status(told: _Status) -> ExecStatus:
    if not EXEC_ID.fullmatch(told.id) or not told.argv or len(told.tag.encode()) > limits.MAX_TAG:
        raise BackendError("the sandbox's daemon listed a command that cannot be")
    if told.first > told.cursor or told.running != (told.exit is None and told.error is None):
        raise BackendError("the sandbox's daemon contradicts itself about a command")
    return ExecStatus(
        id=told.id,
        tag=told.tag,
        argv=tuple(map(os.fsdecode, told.argv)),
        pid=told.pid,
        started_at=told.started_ms / 1e3,
        running=told.running,
        tty=told.tty,
        cursor=told.cursor,
        first=told.first,
        exit=None if told.exit is None else exit_of(told.exit),
    )


def changes_of(piece: bytes, root: bytes) -> list[FileChange | ChangesLost]:
    """The changes of one frame of a watch on ``root``."""
    told = _array(piece, _changes, "list of changes")
    if not told:
        raise BackendError("the sandbox's daemon sent an empty list of changes")
    return [_change(change, root) for change in told]


def _change(told: _Change, root: bytes) -> FileChange | ChangesLost:
    if told.path is None and told.overflow:
        return ChangesLost()
    if told.path is None or told.kind is None or (told.kind == "moved") != (told.to is not None):
        raise BackendError("the sandbox's daemon told of a change that cannot be")
    for path in (told.path, told.to):
        if path is not None and not _beneath(path, root):
            raise BackendError("the sandbox's daemon told of a change outside of what is watched")
    return FileChange(
        told.kind, os.fsdecode(told.path), None if told.to is None else os.fsdecode(told.to), told.directory
    )


def _beneath(path: bytes, root: bytes) -> bool:
    if len(path) > limits.MAX_PATH or b"\0" in path:
        return False
    root = root.rstrip(b"/")
    if path == (root or b"/"):
        return True
    return path.startswith(root + b"/") and not {b"", b".", b".."} & set(path[len(root) + 1 :].split(b"/"))


def export_of(told: Exported, size: int) -> ExportReport:
    """The report of an archive of ``size`` bytes."""
    skipped = tuple((os.fsdecode(path), reason[:200]) for path, reason in told.skipped[:100])
    return ExportReport(min(told.file_bytes, size), told.entries, skipped, max(told.skipped_total, len(skipped)))


def _array(piece: bytes, decoder: msgspec.msgpack.Decoder[list[T]], what: str) -> list[T]:
    try:
        return decoder.decode(piece)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BackendError(f"the sandbox's daemon sent a broken {what}") from error
