"""A made-up environment: its files, and how they are found and put."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import time
from dataclasses import dataclass, field
from typing import Any

from agent_sandbox.types import WORKSPACE, SandboxSpec


@dataclass
class File:
    """One file (``data``) or directory (``None``) of a made-up workspace."""

    data: bytes | None
    mode: int
    mtime_ns: int = field(default_factory=time.time_ns)


@dataclass
class Environment:
    spec: SandboxSpec
    key: bytes
    files: dict[str, File]
    running: bool = True
    connections: set[asyncio.Task[None]] = field(default_factory=set)
    execs: set[asyncio.Task[Any]] = field(default_factory=set)


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


def put(environment: Environment, path: str, data: bytes, mode: int) -> File:
    if not path.startswith(WORKSPACE + "/"):
        raise Failure("invalid_request", f"{path}: files are written beneath {WORKSPACE} only")
    make_directories(environment, posixpath.dirname(path))
    old = environment.files.get(path)
    if old is not None and old.data is None:
        raise Failure("invalid_request", f"{path}: {os.strerror(errno.EISDIR)}")
    file = environment.files[path] = File(data, mode)
    return file


def make_directories(environment: Environment, path: str) -> None:
    for parent in [path, *_parents(path)]:
        if environment.files.setdefault(parent, File(None, 0o755)).data is not None:
            raise Failure("invalid_request", f"{parent}: {os.strerror(errno.ENOTDIR)}")


def _parents(path: str) -> list[str]:
    parents = []
    while (path := posixpath.dirname(path)) not in ("/", WORKSPACE):
        parents.append(path)
    return parents
