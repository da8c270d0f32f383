"""Files of a sandbox: read, write, list. Paths are bytes, taken from the raw query."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from agent_sandbox import models
from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.server import views
from agent_sandbox.server.codec import JsonReply, query, required
from agent_sandbox.server.errors import common
from agent_sandbox.server.sandboxes import manager_of
from agent_sandbox.types import WORKSPACE, FileEntry

DEFAULT_MODE = "644"

LONG_LISTING_ENTRIES = 1_000
"""A longer listing is shown and encoded on a thread: 100,000 entries take half a second, which others need not wait."""

_MODE = re.compile(r"[0-7]{1,4}\Z")
_BINARY: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

# A file holds what a guest wrote: a browser must neither show it nor guess what it is.
_HEADERS = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}

router = APIRouter(tags=["files"])


def _parameter(name: str, description: str, **schema: Any) -> dict[str, Any]:
    optional = "default" in schema
    return {
        "name": name,
        "in": "query",
        "required": not optional,
        "description": description,
        "schema": {"type": "string", **schema},
    }


@router.get(
    "/sandboxes/{sandbox_id}/files",
    response_class=Response,
    responses={**common(404), 200: {"description": "The file's bytes.", "content": _BINARY}},
    openapi_extra={"parameters": [_parameter("path", "Absolute, or relative to /workspace; percent-encoded bytes.")]},
)
async def read_file(sandbox_id: str, request: Request) -> Response:
    """Read a regular file; links are followed inside the sandbox."""
    path = required(query(request, "path"), "path")
    data = await manager_of(request).read_file(sandbox_id, path)
    return Response(data, media_type="application/octet-stream", headers=_HEADERS)


@router.put(
    "/sandboxes/{sandbox_id}/files",
    response_model=models.FileInfo,
    responses=common(404, 429),
    openapi_extra={
        "parameters": [
            _parameter("path", "Inside /workspace, or relative to it; parents are created."),
            _parameter("mode", "Permission bits in octal.", default=DEFAULT_MODE, pattern="^[0-7]{1,4}$"),
        ],
        "requestBody": {"required": True, "content": _BINARY},
    },
)
async def write_file(sandbox_id: str, request: Request) -> Response:
    """Create or replace a file in the workspace; a reader sees the old one or the new one."""
    values = query(request, "path", "mode")
    path = required(values, "path")
    mode = values.get("mode", DEFAULT_MODE)
    if not _MODE.match(mode):
        raise InvalidRequestError(f"mode {mode[:20]!r} is not one to four octal digits, such as 644")
    data = b"".join([chunk async for chunk in request.stream()])
    entry = await manager_of(request).write_file(sandbox_id, path, data, int(mode, 8))
    return JsonReply(views.file(entry))


@router.get(
    "/sandboxes/{sandbox_id}/files/list",
    response_model=models.FileList,
    responses=common(404),
    openapi_extra={"parameters": [_parameter("path", "The directory.", default=WORKSPACE)]},
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
