"""Directories as tar streams, and what changes beneath them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from agent_sandbox.errors import BackendError
from agent_sandbox.manager import Manager
from agent_sandbox.server import routing
from agent_sandbox.server.codec import boolean, parameter, query
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.errors import common
from agent_sandbox.server.streams import NDJSON, LineStream, Streamed, line, uploaded
from agent_sandbox.types import WORKSPACE, ChangesLost, FileChange

router = routing.router("files")

TAR: dict[str, Any] = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
HEADERS = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
_DIRECTORY = parameter("path", "A directory: /workspace, or inside it.", default=WORKSPACE)
_CHANGES = (
    'One JSON object a line: `{"type": "ready"}` once changes are seen, then `created`, `modified`, `removed` or '
    "`moved` with `path`, `directory` and `to`, and `lost` when more changed than it could tell."
)


@router.get(
    "/sandboxes/{sandbox_id}/archive",
    response_class=Response,
    responses={**common(404, 409, 501), 200: {"description": "A POSIX tar stream.", "content": TAR}},
    openapi_extra={"parameters": [_DIRECTORY]},
)
async def export_directory(sandbox_id: str, request: Request) -> Response:
    """Read a directory as a tar stream, names relative to it; sockets and devices are left out."""
    return ArchiveStream(manager_of(request), sandbox_id, query(request, "path").get("path", WORKSPACE))


@router.put(
    "/sandboxes/{sandbox_id}/archive",
    status_code=204,
    responses=common(404, 409, 429, 501),
    openapi_extra={"parameters": [_DIRECTORY], "requestBody": {"required": True, "content": TAR}},
)
async def import_directory(sandbox_id: str, request: Request) -> Response:
    """Extract a tar stream into a directory, over what is there; what was extracted before an error stays."""
    path = query(request, "path").get("path", WORKSPACE)
    await manager_of(request).import_directory(sandbox_id, path, uploaded(request))
    return Response(status_code=204)


@router.get(
    "/sandboxes/{sandbox_id}/watch",
    response_class=Response,
    responses={**common(404, 409, 429, 501), 200: {"description": _CHANGES, "content": NDJSON}},
    openapi_extra={
        "parameters": [
            parameter("path", "The directory to watch.", default=WORKSPACE),
            parameter("recursive", "With everything beneath it.", type="boolean", default=True),
        ]
    },
)
async def watch(sandbox_id: str, request: Request) -> Response:
    """Tell what changes beneath a directory until the client closes the connection."""
    values = query(request, "path", "recursive")
    ready = asyncio.Event()
    changes = manager_of(request).watch(
        sandbox_id, values.get("path", WORKSPACE), recursive=boolean(values, "recursive", True), ready=ready
    )
    return WatchStream(changes, ready)


class ArchiveStream(Streamed):
    """A directory, sent as the sandbox packs it."""

    def __init__(self, manager: Manager, sandbox_id: str, path: str) -> None:
        super().__init__(media_type="application/x-tar", headers=HEADERS)
        self._manager = manager
        self._sandbox_id = sandbox_id
        self._path = path

    async def produce(self) -> None:
        await self._manager.export_directory(self._sandbox_id, self._path, self.piece)


class WatchStream(LineStream):
    """Changes as they come, behind the word that they will be seen."""

    def __init__(self, changes: AsyncGenerator[FileChange | ChangesLost, None], ready: asyncio.Event) -> None:
        super().__init__()
        self._changes = changes
        self._ready = ready

    async def produce(self) -> None:
        async with aclosing(self._changes) as changes:
            first = asyncio.ensure_future(anext(changes, None))
            seen = asyncio.ensure_future(self._ready.wait())
            try:
                await asyncio.wait({first, seen}, return_when=asyncio.FIRST_COMPLETED)
                if self._ready.is_set():
                    await self.piece(line({"type": "ready"}))
                change = await first
            finally:
                seen.cancel()
                if not first.done():
                    first.cancel()
                await asyncio.wait({first, seen})
            while change is not None:
                await self.piece(line(_shown(change)))
                change = await anext(changes, None)
            raise BackendError("the watch ended; changes after this are not told")


def _shown(change: FileChange | ChangesLost) -> dict[str, Any]:
    if isinstance(change, ChangesLost):
        return {"type": "lost"}
    moved = {} if change.to is None else {"to": change.to}
    return {"type": change.kind, "path": change.path, **moved, "directory": change.directory}
