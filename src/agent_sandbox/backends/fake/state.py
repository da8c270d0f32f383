"""A made-up environment: its files, and how they are found and put."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent_sandbox.types import WORKSPACE, ChangeKind, SandboxSpec

if TYPE_CHECKING:
    from agent_sandbox.backends.fake.execs import Command

Watcher = Callable[[ChangeKind, str, str | None, bool], None]
"""Takes what happened, the path, the new one of a move, and whether it is a directory."""


@dataclass
class File:
    """One file (``data``) or directory (``None``) of a made-up workspace."""

    data: bytes | None
    mode: int
    mtime_ns: int = field(default_factory=time.time_ns)


class Tree(dict[str, File]):
    """All files by path. What changes is told to the watchers."""

    def __init__(self, files: dict[str, File]) -> None:
        super().__init__(files)
        self.watchers: set[Watcher] = set()

    def tell(self, kind: ChangeKind, path: str, to: str | None, file: File) -> None:
        for watcher in self.watchers:
            watcher(kind, path, to, file.data is None)

    def __setitem__(self, path: str, file: File) -> None:
        kind: ChangeKind = "modified" if path in self else "created"
        super().__setitem__(path, file)
        self.tell(kind, path, None, file)

    def __delitem__(self, path: str) -> None:
        file = self[path]
        super().__delitem__(path)
        self.tell("removed", path, None, file)

    def move(self, source: str, target: str) -> None:
        """Rename a file, or a directory with all that is beneath it."""
        file = self[source]
        for path in [path for path in self if path == source or path.startswith(source + "/")]:
            super().__setitem__(target + path[len(source) :], self[path])
            super().__delitem__(path)
        self.tell("moved", source, target, file)


@dataclass
class Environment:
    spec: SandboxSpec
    key: bytes
    files: Tree
    running: bool = True
    connections: set[asyncio.Task[None]] = field(default_factory=set)
    execs: set[asyncio.Task[Any]] = field(default_factory=set)
    commands: dict[str, Command] = field(default_factory=dict)
    listeners: set[int | str] = field(default_factory=set)
    pids: int = 1
    oom_kills: int = 0


class Failure(Exception):
    """An operation's error as the wire says it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def text(path: bytes) -> str:
    if not path.startswith(b"/") or b"\0" in path or len(path) > 4095:
        raise Failure("invalid_request", "a path is absolute, without NUL, and at most 4,095 bytes")
    return posixpath.normpath(os.fsdecode(path))


def find(environment: Environment, path: str) -> File:
    found = environment.files.get(path)
    if found is None:
        raise Failure("not_found", f"{path}: {os.strerror(errno.ENOENT)}")
    return found


def entry(path: str, file: File) -> dict[str, Any]:
    return {
        "name": os.fsencode(posixpath.basename(path)),
        "path": os.fsencode(path),
        "type": "directory" if file.data is None else "file",
        "size": len(file.data or b""),
        "mode": file.mode,
        "mtime_ns": file.mtime_ns,
    }


def beneath(path: str) -> str:
    """A path that may be changed: one beneath the workspace, not the workspace itself."""
    if not path.startswith(WORKSPACE + "/"):
        raise Failure("invalid_request", f"{path}: only what is beneath {WORKSPACE} is changed")
    return path


def put(environment: Environment, path: str, data: bytes, mode: int) -> File:
    make_directories(environment, posixpath.dirname(beneath(path)))
    old = environment.files.get(path)
    if old is not None and old.data is None:
        raise Failure("invalid_request", f"{path}: {os.strerror(errno.EISDIR)}")
    file = environment.files[path] = File(data, mode)
    return file


def make_directories(environment: Environment, path: str) -> None:
    for parent in reversed([path, *_parents(path)]):
        if parent not in environment.files:
            environment.files[parent] = File(None, 0o755)
        elif environment.files[parent].data is not None:
            raise Failure("invalid_request", f"{parent}: {os.strerror(errno.ENOTDIR)}")


def children(environment: Environment, path: str) -> list[str]:
    """Every path beneath a directory, in order."""
    return sorted(known for known in environment.files if known.startswith(path.rstrip("/") + "/"))


def _parents(path: str) -> list[str]:
    parents = []
    while (path := posixpath.dirname(path)) not in ("/", WORKSPACE):
        parents.append(path)
    return parents
