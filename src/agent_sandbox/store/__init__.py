"""The versioned workspace store: states of a directory tree, kept once, with history.

``spec/store.md`` gives every stored byte; :class:`Store` (``store.py``) is the one face.
"""

from agent_sandbox.store.catalog import Layer, Pin, Project, Ref, RefKind
from agent_sandbox.store.check import CheckReport
from agent_sandbox.store.diff import Change, ChangeKind
from agent_sandbox.store.gc import GcReport
from agent_sandbox.store.history import LogEntry
from agent_sandbox.store.objects import Commit, Entry, Type
from agent_sandbox.store.outcomes import (
    Conflict,
    ConflictKind,
    Conflicts,
    Created,
    HeadMoved,
    Left,
    LeftOut,
    Report,
    UpToDate,
)
from agent_sandbox.store.ports import Upper
from agent_sandbox.store.stats import Stats
from agent_sandbox.store.store import Store

__all__ = [
    "Change",
    "ChangeKind",
    "CheckReport",
    "Commit",
    "Conflict",
    "ConflictKind",
    "Conflicts",
    "Created",
    "Entry",
    "GcReport",
    "HeadMoved",
    "Layer",
    "Left",
    "LeftOut",
    "LogEntry",
    "Pin",
    "Project",
    "Ref",
    "RefKind",
    "Report",
    "Stats",
    "Store",
    "Type",
    "UpToDate",
    "Upper",
]
