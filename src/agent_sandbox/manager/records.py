"""What the manager knows of sandboxes and snapshots, and how it is written down.

The dataclasses are internal and change freely. The stored form is JSON with its version first, one per row of
``state.db``; every version ever written has a fixture in ``tests/unit/test_manager_records.py`` that must decode for
ever. A record that cannot be read raises :class:`UnreadableRecordError`: whoever reads it leaves what it describes
alone.

When changing a stored field: raise its version, keep the branch that reads the old one, add a fixture.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from agent_sandbox.errors import BackendError
from agent_sandbox.manager.lifecycle import STORED_STATES, SandboxState
from agent_sandbox.types import (
    Capabilities,
    EnvironmentInfo,
    ExecExit,
    GuestStats,
    ImagePull,
    NetworkPolicy,
    SandboxSpec,
)

SANDBOX_VERSION = 3
"""2: with ``latest_at`` and ``metadata``; 3: with ``project``, ``source``, ``commit``, ``commit_bytes``, ``parked``."""

SNAPSHOT_VERSION = 3
"""2: with ``commit``; 3: with ``auto`` and ``memory_bytes``."""

_T = TypeVar("_T")
_ID_ALPHABET = string.ascii_lowercase + string.digits
_ID_LENGTH = 16  # 82 bits: not to be guessed, and never met twice


class UnreadableRecordError(BackendError):
    """A stored record is damaged, or was written by a newer server."""


@dataclass(frozen=True)
class SandboxRecord:
    """One sandbox. ``env_id`` is the environment that it is now; times are seconds since the epoch.

    ``running`` is what the backend said last; it is not stored. ``expires_at`` counts from the moment of being ready;
    running commands may move it, at most to ``latest_at``. ``metadata`` are labels of the caller's. ``source`` is what
    the workspace was created from, as a reference, and ``project`` the project that this is of.

    ``commit`` is the state of the store that the workspace of ``env_id`` began with and ``commit_bytes`` its bytes of
    data; None where it began empty, or an earlier version began it. ``parked`` is an environment that a rollback
    replaced and that is kept until its workspace is the automatic snapshot.
    """

    id: str
    env_id: str
    backend: str
    spec: SandboxSpec
    state: SandboxState
    running: bool
    created_at: float
    expires_at: float
    source_snapshot_id: str | None
    latest_at: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    project: str | None = None
    source: str | None = None
    commit: str | None = None
    commit_bytes: int | None = None
    parked: str | None = None


@dataclass(frozen=True)
class SnapshotRecord:
    """One snapshot: the sandbox it was taken of and the spec that this had.

    ``commit`` is its state in the store, 64 hexadecimal digits; None for a file in ``snapshots/``, whose BLAKE2b-256 is
    ``digest`` (hexadecimal). ``size_bytes`` counts regular files without holes, ``stored_bytes`` what was added to the
    disk for it. ``skipped`` has at most 100 pairs of path and reason, ``skipped_total`` is their whole
    count. ``auto``: a rollback made it of what it replaced; it goes with its sandbox, or with the next one.
    ``memory_bytes`` is what its checkpoint takes (``checkpoints.py``); None where no memory was kept.
    """

    id: str
    sandbox_id: str
    name: str | None
    backend: str
    spec: SandboxSpec
    size_bytes: int
    stored_bytes: int
    created_at: float
    skipped: tuple[tuple[str, str], ...]
    skipped_total: int
    digest: str = ""
    commit: str | None = None
    auto: bool = False
    memory_bytes: int | None = None


@dataclass(frozen=True)
class CommandResult:
    """What a command left: the first MAX_EXEC_OUTPUT_BYTES of both streams together, and how it ended.

    ``duration_ms`` is wall time on the host's monotonic clock, from the call to the command's end.
    """

    stdout: bytes
    stderr: bytes
    exit: ExecExit
    truncated: bool
    duration_ms: int


@dataclass(frozen=True)
class SandboxStats:
    """What a sandbox uses now; ``None`` where the backend does not count it."""

    memory_bytes: int | None
    cpu_seconds: float | None
    guest: GuestStats

    @classmethod
    def of(cls, guest: GuestStats, seen: EnvironmentInfo) -> SandboxStats:
        """Take what ``inspect`` shows under ``usage``, where it does."""
        usage = seen.details.get("usage")
        table: Mapping[str, Any] = usage if isinstance(usage, Mapping) else {}
        memory, cpu = table.get("memory_bytes"), table.get("cpu_seconds")
        return cls(
            memory if isinstance(memory, int) else None, float(cpu) if isinstance(cpu, int | float) else None, guest
        )


@dataclass(frozen=True)
class BackendStatus:
    """One configured backend, as ``GET /v1/backends`` shows it; ``message`` says what to do when it is not healthy.

    ``versions`` are those of what it runs on, ``pulls`` the images that are being fetched.
    """

    name: str
    default: bool
    capabilities: Capabilities
    healthy: bool
    message: str
    versions: Mapping[str, str] = field(default_factory=dict)
    pulls: Sequence[ImagePull] = ()


def new_id(prefix: str) -> str:
    """Make an id that nobody else has or can guess."""
    return prefix + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))


def encode_sandbox(record: SandboxRecord) -> str:
    """Give the stored form of a sandbox's record."""
    return _encode(
        {
            "version": SANDBOX_VERSION,
            "id": record.id,
            "env_id": record.env_id,
            "backend": record.backend,
            "state": record.state,
            "created_at": record.created_at,
            "expires_at": record.expires_at,
            "latest_at": record.latest_at,
            "metadata": dict(record.metadata),
            "project": record.project,
            "source": record.source,
            "source_snapshot_id": record.source_snapshot_id,
            "commit": record.commit,
            "commit_bytes": record.commit_bytes,
            "parked": record.parked,
            "spec": dataclasses.asdict(record.spec),
        }
    )


def decode_sandbox(text: object) -> SandboxRecord:
    """Read a sandbox's stored record; ``running`` is ``False`` until the backend is asked."""

    def build(table: Mapping[str, Any]) -> SandboxRecord:
        state = _typed(table, "state", str)
        if state not in STORED_STATES:
            raise ValueError(f"unknown state {state!r}")
        is_first, is_third = table["version"] == 1, table["version"] >= 3
        expires_at = _typed(table, "expires_at", float)
        return SandboxRecord(
            id=_typed(table, "id", str),
            env_id=_typed(table, "env_id", str),
            backend=_typed(table, "backend", str),
            spec=_decode_spec(table["spec"]),
            state=state,
            running=False,
            created_at=_typed(table, "created_at", float),
            expires_at=expires_at,
            source_snapshot_id=_optional(table, "source_snapshot_id"),
            latest_at=expires_at if is_first else _typed(table, "latest_at", float),
            metadata={} if is_first else _texts(table, "metadata"),
            project=_optional(table, "project") if is_third else None,
            source=_optional(table, "source") if is_third else None,
            commit=_commit(table) if is_third else None,
            commit_bytes=_count(table, "commit_bytes") if is_third else None,
            parked=_optional(table, "parked") if is_third else None,
        )

    return _decode(text, build, SANDBOX_VERSION)


def encode_snapshot(record: SnapshotRecord) -> str:
    """Give the stored form of a snapshot's record."""
    return _encode({"version": SNAPSHOT_VERSION, **dataclasses.asdict(record)})


def decode_snapshot(text: object) -> SnapshotRecord:
    """Read a snapshot's stored record."""

    def build(table: Mapping[str, Any]) -> SnapshotRecord:
        return SnapshotRecord(
            id=_typed(table, "id", str),
            sandbox_id=_typed(table, "sandbox_id", str),
            name=_optional(table, "name"),
            backend=_typed(table, "backend", str),
            spec=_decode_spec(table["spec"]),
            size_bytes=_typed(table, "size_bytes", int),
            stored_bytes=_typed(table, "stored_bytes", int),
            created_at=_typed(table, "created_at", float),
            skipped=tuple((str(path), str(reason)) for path, reason in table["skipped"]),
            skipped_total=_typed(table, "skipped_total", int),
            digest=_typed(table, "digest", str),
            commit=None if table["version"] == 1 else _commit(table),
            auto=table["version"] >= 3 and _typed(table, "auto", bool),
            memory_bytes=None if table["version"] < 3 else _memory_bytes(table),
        )

    return _decode(text, build, SNAPSHOT_VERSION)


def _commit(table: Mapping[str, Any]) -> str | None:
    commit = _optional(table, "commit")
    if commit is not None and not re.fullmatch(r"[0-9a-f]{64}", commit):
        raise ValueError("the commit is no commit's id")
    return commit


def _memory_bytes(table: Mapping[str, Any]) -> int | None:
    return None if table["memory_bytes"] is None else _typed(table, "memory_bytes", int)


def _encode(table: Mapping[str, Any]) -> str:
    # ASCII, so that surrogate escapes in names pass through SQLite's UTF-8.
    return json.dumps(table, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _decode(text: object, build: Callable[[Mapping[str, Any]], _T], newest: int) -> _T:
    try:
        table = json.loads(text) if isinstance(text, str) else None
        if not isinstance(table, dict) or type(table.get("version")) is not int:
            raise ValueError("it has no version")
        if not 1 <= table["version"] <= newest:
            raise ValueError(f"its version {table['version']} is not known here")
        return build(table)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnreadableRecordError(f"a stored record cannot be read: {error}") from error


def _decode_spec(table: Any) -> SandboxSpec:
    if not isinstance(table, dict):
        raise TypeError("the spec is not a map")
    network = _typed(table, "network", str)
    if network not in {"none", "full", "allowlist"}:
        raise ValueError(f"unknown network policy {network!r}")
    return SandboxSpec(
        image=_typed(table, "image", str),
        image_digest=_typed(table, "image_digest", str),
        cpus=_typed(table, "cpus", float),
        memory_mb=_typed(table, "memory_mb", int),
        pids_limit=_typed(table, "pids_limit", int),
        disk_mb=_typed(table, "disk_mb", int),
        tmp_mb=_typed(table, "tmp_mb", int),
        network=cast(NetworkPolicy, network),
        read_only_rootfs=_typed(table, "read_only_rootfs", bool),
        uid=_typed(table, "uid", int),
        gid=_typed(table, "gid", int),
        env=_texts(table, "env"),
    )


def _texts(table: Mapping[str, Any], name: str) -> dict[str, str]:
    texts = table[name]
    if not isinstance(texts, dict) or not all(isinstance(value, str) for value in texts.values()):
        raise TypeError(f"{name} is not a map of texts")
    return texts


def _typed(table: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    value = table[name]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f"{name} is not of type {kind.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is not a finite number")
    return value


def _count(table: Mapping[str, Any], name: str) -> int | None:
    return None if table[name] is None else _typed(table, name, int)


def _optional(table: Mapping[str, Any], name: str) -> str | None:
    return None if table[name] is None else _typed(table, name, str)
