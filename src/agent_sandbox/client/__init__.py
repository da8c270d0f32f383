"""The SDK, which needs nothing but httpx: :class:`SandboxClient`, :class:`Sandbox`, and what they return and raise."""

from agent_sandbox.client.errors import ReplyLostError, SandboxAPIError, ServerUnreachableError, TransportError
from agent_sandbox.client.sandbox import Sandbox, SandboxClient
from agent_sandbox.models import Backend, ExecEvent, ExecResult, FileInfo
from agent_sandbox.models import Snapshot as SnapshotInfo

__all__ = [
    "Backend",
    "ExecEvent",
    "ExecResult",
    "FileInfo",
    "ReplyLostError",
    "Sandbox",
    "SandboxAPIError",
    "SandboxClient",
    "ServerUnreachableError",
    "SnapshotInfo",
    "TransportError",
]
