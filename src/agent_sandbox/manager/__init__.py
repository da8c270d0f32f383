"""Ids, quotas, times to live, locks, policy, snapshots, reconcile: everything above a backend. See ``manager.py``."""

from __future__ import annotations

from agent_sandbox.manager.history import Differences, PastState, PathChange
from agent_sandbox.manager.idempotency import Reply
from agent_sandbox.manager.manager import Manager
from agent_sandbox.manager.merging import Merge
from agent_sandbox.manager.policy import CommandOptions, CreateOptions, ForkOptions
from agent_sandbox.manager.records import BackendStatus, CommandResult, SandboxRecord, SandboxStats, SnapshotRecord
from agent_sandbox.manager.requests import exit_status

__all__ = [
    "BackendStatus",
    "CommandOptions",
    "CommandResult",
    "CreateOptions",
    "Differences",
    "ForkOptions",
    "Manager",
    "Merge",
    "PastState",
    "PathChange",
    "Reply",
    "SandboxRecord",
    "SandboxStats",
    "SnapshotRecord",
    "exit_status",
]
