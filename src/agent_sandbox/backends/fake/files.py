"""Files, watches and archives of a made-up environment."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import posixpath
import tarfile
from typing import Any

import msgspec

from agent_sandbox import wire
from agent_sandbox.backends.fake.session import Operation
from agent_sandbox.backends.fake.state import (
    Environment,
    Failure,
    beneath,
    children,
    entry,
    find,
    make_directories,
    put,
    text,
)
from agent_sandbox.types import WORKSPACE, ChangeKind

MAX_WATCHES = 16
MAX_CHANGES = 4_096
"""Changes that wait for a slow reader; more are told as lost."""


async def stat(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = text(args["path"])
    return {"entry": entry(path, find(environment, path))}


async def list_directory(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = text(args["path"])
    if find(environment, path).data is not None:
        raise Failure("invalid_request", f"{path}: {os.strerror(errno.ENOTDIR)}")
    listed = [entry(p, f) for p, f in environment.files.items() if posixpath.dirname(p) == path]
    for start in range(0, len(listed), 100):
        await operation.send(wire.CHANNEL_OUT, msgspec.msgpack.encode(listed[start : start + 100]))
    return {"count": len(listed)}


async def read(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = text(args["path"])
    data = find(environment, path).data
    if data is None:
        raise Failure("invalid_request", f"{path}: {os.strerror(errno.EISDIR)}")
    start = args.get("offset", 0)
    data = data[start:] if args.get("length") is None else data[start : start + args["length"]]
    if "max_bytes" in args and len(data) > args["max_bytes"]:
        raise Failure("too_large", f"{path} has {len(data)} bytes")
    await operation.send(wire.CHANNEL_OUT, data)
    return {"size": len(data)}


async def write(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = text(args["path"])
    data = await operation.receive()
    return {"entry": entry(path, put(environment, path, data, args["mode"]))}


async def mkdir(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    path, parents = beneath(text(args["path"])), args.get("parents", True)
    old = environment.files.get(path)
    if old is not None and (not parents or old.data is not None):
        raise Failure("conflict", f"{path}: {os.strerror(errno.EEXIST)}")
    if not parents:
        find(environment, posixpath.dirname(path))
    make_directories(environment, path)
    if old is None:
        environment.files[path].mode = args["mode"]
    return {"entry": entry(path, environment.files[path])}


async def move(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    source, target = beneath(text(args["from"])), beneath(text(args["to"]))
    moved, old = find(environment, source), environment.files.get(target)
    if find(environment, posixpath.dirname(target)).data is not None or target.startswith(source + "/"):
        raise Failure("invalid_request", f"{target}: {os.strerror(errno.EINVAL)}")
    if old is not None and (not args.get("replace", True) or children(environment, target)):
        raise Failure("conflict", f"{target}: {os.strerror(errno.EEXIST)}")
    if old is not None and (old.data is None) != (moved.data is None):
        raise Failure(
            "invalid_request", f"{target}: {os.strerror(errno.EISDIR if moved.data is not None else errno.ENOTDIR)}"
        )
    environment.files.move(source, target)
    return {"entry": entry(target, moved)}


async def remove(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = beneath(text(args["path"]))
    find(environment, path)
    inside = children(environment, path)
    if inside and not args.get("recursive", False):
        raise Failure("conflict", f"{path}: {os.strerror(errno.ENOTEMPTY)}")
    for known in [*reversed(inside), path]:
        del environment.files[known]
    return {"removed": len(inside) + 1}


async def chmod(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = beneath(text(args["path"]))
    file = find(environment, path)
    file.mode = args["mode"]
    environment.files.tell("modified", path, None, file)
    return {"entry": entry(path, file)}


async def watch(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    root, recursive = text(args["path"]), args.get("recursive", True)
    if find(environment, root).data is not None:
        raise Failure("invalid_request", f"{root}: {os.strerror(errno.ENOTDIR)}")
    if len(environment.files.watchers) >= MAX_WATCHES:
        raise Failure("exhausted", f"there are {MAX_WATCHES} watches")
    seen: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MAX_CHANGES)

    def watched(path: str) -> bool:
        return path.startswith(root.rstrip("/") + "/") and (recursive or posixpath.dirname(path) == root)

    def on_change(kind: ChangeKind, path: str, to: str | None, directory: bool) -> None:
        if to is not None and watched(path) != watched(to):
            kind, path, to = ("removed", path, None) if watched(path) else ("created", to, None)
        if not watched(path):
            return
        change: dict[str, Any] = {"kind": kind, "path": os.fsencode(path), "directory": directory}
        if to is not None:
            change["to"] = os.fsencode(to)
        if seen.qsize() >= MAX_CHANGES - 1:
            change = {"overflow": True}
        if not seen.full():
            seen.put_nowait(change)

    environment.files.watchers.add(on_change)
    try:
        await operation.note(ready=True)
        while True:
            await operation.send(wire.CHANNEL_OUT, msgspec.msgpack.encode([await seen.get()]))
    finally:
        environment.files.watchers.discard(on_change)


async def export_tar(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    root = text(args.get("path", WORKSPACE.encode()))
    if find(environment, root).data is not None:
        raise Failure("invalid_request", f"{root}: {os.strerror(errno.ENOTDIR)}")
    buffer, size, entries = io.BytesIO(), 0, 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        for path in [root, *children(environment, root)]:
            file = environment.files[path]
            info = tarfile.TarInfo("./" if path == root else posixpath.relpath(path, root))
            info.type = tarfile.DIRTYPE if file.data is None else tarfile.REGTYPE
            info.mode, info.mtime, info.size = file.mode, file.mtime_ns // 10**9, len(file.data or b"")
            info.pax_headers = {"mtime": f"{file.mtime_ns // 10**9}.{file.mtime_ns % 10**9:09d}"}
            archive.addfile(info, io.BytesIO(file.data or b""))
            size, entries = size + info.size, entries + 1
    if size > args["max_bytes"]:
        raise Failure("too_large", f"the workspace holds {size} bytes")
    await operation.send(wire.CHANNEL_OUT, buffer.getvalue())
    return {"entries": entries, "file_bytes": size, "skipped": [], "skipped_total": 0}


async def import_tar(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    root = text(args.get("path", WORKSPACE.encode()))
    data = await operation.receive()
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as archive:
            return _extract(environment, root, archive, args["max_bytes"])
    except tarfile.TarError as error:
        raise Failure("invalid_request", f"this is no tar: {error}") from error


def _extract(environment: Environment, root: str, archive: tarfile.TarFile, most: int) -> dict[str, Any]:
    size = entries = 0
    if root != WORKSPACE:
        make_directories(environment, beneath(root))
    for info in archive:
        path = posixpath.normpath(posixpath.join(root, info.name))
        if path != root and not path.startswith(root + "/"):
            raise Failure("invalid_request", f"{info.name!r} leads out of the workspace")
        content = archive.extractfile(info) if info.isreg() else None
        if content is not None:
            file = put(environment, path, content.read(), info.mode)
            size += len(file.data or b"")
        else:
            make_directories(environment, path)
            file = environment.files[path]
            file.mode = info.mode
        seconds, _, fraction = str(info.pax_headers.get("mtime", info.mtime)).partition(".")
        file.mtime_ns = int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0"))
        entries += 1
        if size > most:
            raise Failure("too_large", f"the archive holds more than {most} bytes")
    return {"entries": entries, "file_bytes": size}
