"""What the store answers: outcomes are values, and refusals that the caller must handle are outcomes too."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Left(StrEnum):
    """Why something was left out of a commit."""

    SOCKET = "socket"
    DEVICE = "device"
    OTHER_FILESYSTEM = "other_filesystem"
    ATTRIBUTES = "attributes_too_large"
    UNREADABLE = "unreadable"
    NAME = "name"
    """A name that cannot be in a workspace: from an archive, or of more than 255 bytes."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One path that a commit does not hold, and why; ``path`` is relative to the workspace."""

    path: bytes
    why: Left


@dataclass(frozen=True, slots=True)
class Report:
    """What a capture saw and did. Bytes and counts; ``stored`` is what the store grew by in its packs."""

    files: int = 0
    directories: int = 0
    symlinks: int = 0
    fifos: int = 0
    bytes: int = 0
    """Bytes of data in files, holes not counted."""
    read: int = 0
    """Bytes that were read (what the stat cache knew was not)."""
    stored: int = 0
    left_out: tuple[LeftOut, ...] = ()
    left_out_count: int = 0
    """How many paths were left out; ``left_out`` names the first 10,000."""
    whole: bool = True
    """Whether all of the state was looked at; else the counts are those of what lay in the upper directory."""


@dataclass(frozen=True, slots=True)
class Created:
    """A commit was made and is on disk."""

    commit: bytes
    report: Report = field(default_factory=Report)


@dataclass(frozen=True, slots=True)
class UpToDate:
    """Nothing had changed; ``commit`` is the state that already was."""

    commit: bytes
    report: Report = field(default_factory=Report)


@dataclass(frozen=True, slots=True)
class HeadMoved:
    """The branch or line is not where the caller expected it; nothing was changed. ``head`` is where it is."""

    head: bytes


class ConflictKind(StrEnum):
    """How two sides disagree over one path."""

    CONTENT = "content"
    TYPE = "type"
    MODE = "mode"
    MTIME = "mtime"
    ATTRIBUTES = "attributes"
    OWNER = "owner"
    DELETED_CHANGED = "deleted_changed"
    """One side removed what the other changed."""
    LINK = "link"
    """The sides disagree over which names are one file."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """One path on which both sides changed the same thing in different ways."""

    path: bytes
    kinds: tuple[ConflictKind, ...]


@dataclass(frozen=True, slots=True)
class Conflicts:
    """The sides cannot be merged by entry; nothing was committed. ``base`` is the common ancestor."""

    base: bytes
    conflicts: tuple[Conflict, ...]
    count: int
    """How many conflicts there are; ``conflicts`` names the first 10,000."""
