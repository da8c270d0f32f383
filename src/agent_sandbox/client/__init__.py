"""The SDK, which needs nothing but httpx.

:class:`SandboxClient` and :class:`Sandbox` are for code that blocks, :class:`AsyncSandboxClient` and
:class:`AsyncSandbox` for code on an event loop: the same names and arguments, with ``await``, ``async for`` and
``async with``. Both send what the builders in ``requests.py``, ``exec_requests.py``, ``file_requests.py``,
``history_requests.py`` and ``project_requests.py`` make. Only terminals need more: the extra ``terminal``.
"""

from agent_sandbox.client.aio.execution import AsyncExecution
from agent_sandbox.client.aio.sandbox import AsyncSandbox, AsyncSandboxClient
from agent_sandbox.client.aio.terminal import AsyncTerminal
from agent_sandbox.client.errors import ReplyLostError, SandboxAPIError, ServerUnreachableError, TransportError
from agent_sandbox.client.execution import Execution
from agent_sandbox.client.sandbox import Sandbox, SandboxClient
from agent_sandbox.client.terminal import Terminal
from agent_sandbox.models import (
    Backend,
    ChangeList,
    ExecEvent,
    ExecOutputEvent,
    ExecResult,
    FileInfo,
    FileStat,
    Layer,
    LayerAdded,
    MergeResult,
    PastState,
    Project,
    SandboxStats,
    WatchEvent,
)
from agent_sandbox.models import Change as ChangeInfo
from agent_sandbox.models import Exec as ExecInfo
from agent_sandbox.models import Snapshot as SnapshotInfo

__all__ = [
    "AsyncExecution",
    "AsyncSandbox",
    "AsyncSandboxClient",
    "AsyncTerminal",
    "Backend",
    "ChangeInfo",
    "ChangeList",
    "ExecEvent",
    "ExecInfo",
    "ExecOutputEvent",
    "ExecResult",
    "Execution",
    "FileInfo",
    "FileStat",
    "Layer",
    "LayerAdded",
    "MergeResult",
    "PastState",
    "Project",
    "ReplyLostError",
    "Sandbox",
    "SandboxAPIError",
    "SandboxClient",
    "SandboxStats",
    "ServerUnreachableError",
    "SnapshotInfo",
    "Terminal",
    "TransportError",
    "WatchEvent",
]
