"""Files of a sandbox. Paths are bytes, taken from the raw query, or strings with surrogate escapes in a body.

A file up to :data:`SMALL_BYTES` goes in one piece, which is one question to the sandbox. A larger one streams either
way; its size is asked first, so that the reply says its length and a client notices one that is cut off.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from agent_sandbox import models
from agent_sandbox.errors import BackendError, InvalidRequestError, PayloadTooLargeError
from agent_sandbox.manager import Manager
from agent_sandbox.server import routing, views
from agent_sandbox.server.codec import JsonReply, boolean, parameter, query, required
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.errors import common, documented
from agent_sandbox.server.ranges import parse_range
from agent_sandbox.server.streams import BINARY, PieceStream, uploaded, whole
from agent_sandbox.types import WORKSPACE, FileEntry

DEFAULT_MODE = "644"

SMALL_BYTES = 256 * 1024
"""A file of this size costs less as one piece than the second question costs, and no memory that counts."""

LONG_LISTING_ENTRIES = 1_000
"""A longer listing is shown and encoded on a thread: 100,000 entries take half a second, which others need not wait."""

_MODE = re.compile(r"[0-7]{1,4}\Z")

# A file holds what a guest wrote: a browser must neither show it nor guess what it is.
_HEADERS = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment", "Accept-Ranges": "bytes"}

router = routing.router("files")

_RANGE = {
    "name": "Range",
    "in": "header",
    "required": False,
    "description": "One range of bytes, such as `bytes=0-1023`, `bytes=1024-` or `bytes=-1024`.",
    "schema": {"type": "string"},
}
_FOLLOW = parameter("follow", "Look at what a link leads to.", type="boolean", default=True)


@router.get(
    "/sandboxes/{sandbox_id}/files",
    response_class=Response,
    responses={
        **common(404, 409),
        200: {"description": "The file's bytes.", "content": BINARY},
        206: {"description": "The part that `Range` asks for.", "content": BINARY},
        **documented(416),
    },
    openapi_extra={
        "parameters": [parameter("path", "Absolute, or relative to /workspace; percent-encoded bytes."), _RANGE]
    },
)
async def read_file(sandbox_id: str, request: Request) -> Response:
    """Read a regular file, or a part of it; links are followed inside the sandbox."""
    path = required(query(request, "path"), "path")
    manager = manager_of(request)
    if (header := request.headers.get("range")) is not None and (wanted := parse_range(header)) is not None:
        entry = await _regular(manager, sandbox_id, path)
        start, length = wanted.of(entry.size)
        said = f"bytes {start}-{start + length - 1}/{entry.size}"
        return _pieces(manager, sandbox_id, path, start, length, status=206, extra={"Content-Range": said})
    try:
        data = await manager.read_file(sandbox_id, path, SMALL_BYTES)
    except PayloadTooLargeError:
        entry = await _regular(manager, sandbox_id, path)
        return _pieces(manager, sandbox_id, path, 0, entry.size)
    return Response(data, media_type="application/octet-stream", headers=_HEADERS)


async def _regular(manager: Manager, sandbox_id: str, path: str) -> FileEntry:
    entry = await manager.stat_file(sandbox_id, path)
    if entry.type != "file":
        raise InvalidRequestError(f"{path!r} is no regular file")
    return entry


def _pieces(
    manager: Manager,
    sandbox_id: str,
    path: str,
    start: int,
    length: int,
    *,
    status: int = 200,
    extra: dict[str, str] | None = None,
) -> Response:
    pieces = manager.open_file(sandbox_id, path, offset=start, length=length)
    headers = {**_HEADERS, **(extra or {}), "Content-Length": str(length)}
    return SizedStream(pieces, length, status=status, headers=headers)


class SizedStream(PieceStream):
    """A stream whose length was said: one that ends early is cut off, and never ended."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], length: int, **options: Any) -> None:
        super().__init__(pieces, **options)
        self._left = length

    async def piece(self, data: bytes | memoryview) -> None:
        self._left -= len(data)
        await super().piece(data)

    async def produce(self) -> None:
        await super().produce()
        if self._left:
            raise BackendError("the file became shorter while it was read")


@router.put(
    "/sandboxes/{sandbox_id}/files",
    response_model=models.FileInfo,
    responses=common(404, 409, 429),
    openapi_extra={
        "parameters": [
            parameter("path", "Inside /workspace, or relative to it; parents are created."),
            parameter("mode", "Permission bits in octal.", default=DEFAULT_MODE, pattern="^[0-7]{1,4}$"),
        ],
        "requestBody": {"required": True, "content": BINARY},
    },
)
async def write_file(sandbox_id: str, request: Request) -> Response:
    """Create or replace a file in the workspace; a reader sees the old one or the new one."""
    values = query(request, "path", "mode")
    path = required(values, "path")
    mode = values.get("mode", DEFAULT_MODE)
    if not _MODE.match(mode):
        raise InvalidRequestError(f"mode {mode[:20]!r} is not one to four octal digits, such as 644")
    manager, body = manager_of(request), uploaded(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) <= SMALL_BYTES:
        first, ended = await whole(request), True
    else:
        first, ended = await _beginning(body)
    if ended:
        entry = await manager.write_file(sandbox_id, path, first, int(mode, 8))
    else:
        entry = await manager.store_file(sandbox_id, path, _joined(first, body), int(mode, 8))
    return JsonReply(views.file(entry))


async def _beginning(body: AsyncIterator[bytes]) -> tuple[bytes, bool]:
    """Read a body up to :data:`SMALL_BYTES` and tell whether that was all."""
    first = bytearray()
    async for data in body:
        first += data
        if len(first) > SMALL_BYTES:
            return bytes(first), False
    return bytes(first), True


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for data in rest:
        yield data


@router.get(
    "/sandboxes/{sandbox_id}/files/list",
    response_model=models.FileList,
    responses=common(404, 409),
    openapi_extra={"parameters": [parameter("path", "The directory.", default=WORKSPACE)]},
)
async def list_files(sandbox_id: str, request: Request) -> Response:
    """List the direct children of a directory, dotfiles included."""
    path = query(request, "path").get("path", WORKSPACE)
    shown, entries = await manager_of(request).list_files(sandbox_id, path)
    if len(entries) > LONG_LISTING_ENTRIES:
        return await asyncio.to_thread(_listed, shown, entries)
    return _listed(shown, entries)


def _listed(path: str, entries: Sequence[FileEntry]) -> Response:
    return JsonReply(models.FileList(path=path, entries=[views.file(entry) for entry in entries]))


@router.get(
    "/sandboxes/{sandbox_id}/files/stat",
    response_model=models.FileStat,
    responses=common(404, 409, 501),
    openapi_extra={"parameters": [parameter("path", "The file."), _FOLLOW]},
)
async def stat_file(sandbox_id: str, request: Request) -> Response:
    """Look at one file."""
    values = query(request, "path", "follow")
    path, follow = required(values, "path"), boolean(values, "follow", True)
    return JsonReply(views.stat(await manager_of(request).stat_file(sandbox_id, path, follow=follow)))


@router.post(
    "/sandboxes/{sandbox_id}/files/mkdir", response_model=models.FileStat, responses=common(404, 409, 429, 501)
)
async def make_directory(sandbox_id: str, body: models.MkdirRequest, request: Request) -> Response:
    """Make a directory in the workspace."""
    made = await manager_of(request).make_directory(sandbox_id, body.path, int(body.mode, 8), parents=body.parents)
    return JsonReply(views.stat(made))


@router.post("/sandboxes/{sandbox_id}/files/move", response_model=models.FileStat, responses=common(404, 409, 429, 501))
async def move_file(sandbox_id: str, body: models.MoveRequest, request: Request) -> Response:
    """Give a file or directory of the workspace another name."""
    moved = await manager_of(request).move_file(sandbox_id, body.from_, body.to, replace=body.replace)
    return JsonReply(views.stat(moved))


@router.post("/sandboxes/{sandbox_id}/files/remove", response_model=models.Removed, responses=common(404, 409, 501))
async def remove_file(sandbox_id: str, body: models.RemoveRequest, request: Request) -> Response:
    """Remove a file or directory of the workspace; a link itself, not what it leads to."""
    removed = await manager_of(request).remove_file(sandbox_id, body.path, recursive=body.recursive)
    return JsonReply(models.Removed(removed=removed))


@router.post("/sandboxes/{sandbox_id}/files/chmod", response_model=models.FileStat, responses=common(404, 409, 501))
async def change_mode(sandbox_id: str, body: models.ChmodRequest, request: Request) -> Response:
    """Change the permission bits of a file of the workspace."""
    changed = await manager_of(request).change_mode(sandbox_id, body.path, int(body.mode, 8))
    return JsonReply(views.stat(changed))
