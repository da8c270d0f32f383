"""The public JSON shapes, version 1, shared by the server, the SDK, the command line and MCP.

Standard frozen dataclasses, so that the SDK needs no validation library. Strategy:

* The server hands a request shape to FastAPI. ``__pydantic_config__`` refuses unknown fields, and the markers of
  ``markers.py`` carry each field's bounds; pydantic calls their two hooks, which need nothing but dictionaries. Types
  are strict: no ``true`` or ``"1"`` where a number belongs. A field whose public name is a word of Python's has an
  underscore behind it here (``from_``).
* Clients build replies with ``from_json``, which ignores fields it does not know: an old client survives a new server.
  Fields that a server of the first contract does not send have defaults.
* A string holds surrogate escapes where bytes inside a sandbox are not UTF-8 (JSON ``\\udcXX``). None may hold NUL.

Names, types and defaults of the first contract are fixed. ``exec``, ``exec/stream``, ``files`` and ``files/list`` carry
exactly the fields here; :class:`Sandbox` and :class:`Snapshot` may grow.

When adding a field: give it a default, run ``make openapi``, add it to ``server/views.py``.
"""

from __future__ import annotations

from agent_sandbox.models.markers import (
    MAX_INTEGER,
    MAX_METADATA_KEY,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE,
    MAX_NAME_LENGTH,
    MAX_TAG_LENGTH,
    MAX_TERMINAL_SIDE,
    rfc3339,
)
from agent_sandbox.models.replies import (
    Backend,
    BackendCapabilities,
    BackendList,
    Change,
    ChangeList,
    ErrorBody,
    ErrorReply,
    Exec,
    ExecEvent,
    ExecList,
    ExecOutputEvent,
    ExecResult,
    ExecUsage,
    FileInfo,
    FileList,
    FileStat,
    Health,
    ImagePull,
    Layer,
    LayerAdded,
    MergeConflict,
    MergeResult,
    PastState,
    Project,
    ProjectList,
    Removed,
    Sandbox,
    SandboxList,
    SandboxStats,
    Signalled,
    Snapshot,
    SnapshotList,
    SnapshotLog,
    StdinTaken,
    WatchEvent,
)
from agent_sandbox.models.requests import (
    ChmodRequest,
    ExecCreate,
    ExecRequest,
    ForkRequest,
    LayerCreate,
    MergeRequest,
    MkdirRequest,
    MoveRequest,
    RemoveRequest,
    RollbackRequest,
    SandboxCreate,
    SignalRequest,
    SnapshotCreate,
    TerminalSize,
    TimeoutUpdate,
)

__all__ = [
    "MAX_INTEGER",
    "MAX_METADATA_KEY",
    "MAX_METADATA_PAIRS",
    "MAX_METADATA_VALUE",
    "MAX_NAME_LENGTH",
    "MAX_TAG_LENGTH",
    "MAX_TERMINAL_SIDE",
    "Backend",
    "BackendCapabilities",
    "BackendList",
    "Change",
    "ChangeList",
    "ChmodRequest",
    "ErrorBody",
    "ErrorReply",
    "Exec",
    "ExecCreate",
    "ExecEvent",
    "ExecList",
    "ExecOutputEvent",
    "ExecRequest",
    "ExecResult",
    "ExecUsage",
    "FileInfo",
    "FileList",
    "FileStat",
    "ForkRequest",
    "Health",
    "ImagePull",
    "Layer",
    "LayerAdded",
    "LayerCreate",
    "MergeConflict",
    "MergeRequest",
    "MergeResult",
    "MkdirRequest",
    "MoveRequest",
    "PastState",
    "Project",
    "ProjectList",
    "RemoveRequest",
    "Removed",
    "RollbackRequest",
    "Sandbox",
    "SandboxCreate",
    "SandboxList",
    "SandboxStats",
    "SignalRequest",
    "Signalled",
    "Snapshot",
    "SnapshotCreate",
    "SnapshotList",
    "SnapshotLog",
    "StdinTaken",
    "TerminalSize",
    "TimeoutUpdate",
    "WatchEvent",
    "rfc3339",
]
