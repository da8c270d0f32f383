"""Commands as objects: start, list, look at, read, signal, feed, resize, forget."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from agent_sandbox import models
from agent_sandbox.errors import BackendError, NotFoundError, ValidationError
from agent_sandbox.manager import CommandOptions
from agent_sandbox.manager.manager import Manager
from agent_sandbox.server import routing, views
from agent_sandbox.server.codec import JsonReply, boolean, number, parameter, query
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.errors import common
from agent_sandbox.server.idempotency import KEY_HEADER, once
from agent_sandbox.server.streams import BINARY, NDJSON, LineStream, line
from agent_sandbox.types import AttachEvent, ExecExit, ExecGap, ExecOutput, ExecStarted, TerminalSize

router = routing.router("execs")

_LINES = (
    "One JSON object a line: `started` with `id` and `pid` (for who starts it), `stdout` and `stderr` with `data` or "
    "`data_b64` and the `cursor` behind it, `gap` with `bytes`, one `exit`. A stream that breaks ends with `error` "
    "where the reason is known, and is cut off."
)
_OUTPUT_DOC: dict[int | str, dict[str, Any]] = {200: {"description": _LINES, "content": NDJSON}}
_EXEC_SCHEMA = {"application/json": {"schema": {"$ref": "#/components/schemas/Exec"}}}


@router.post(
    "/sandboxes/{sandbox_id}/execs",
    status_code=201,
    response_model=models.Exec,
    responses={**common(404, 409, 429, 501), **_OUTPUT_DOC, 201: {"description": "With `detach`: the command."}},
    openapi_extra={"parameters": [KEY_HEADER]},
)
async def create_exec(sandbox_id: str, body: models.ExecCreate, request: Request) -> Response:
    """Start a command that is kept as an object.

    With `detach` it outlives the client and the server; else the reply is its output, which holds the command back
    when it is read slowly, and closing the connection ends the command.
    """
    manager = manager_of(request)
    options = CommandOptions(
        command=body.command,
        env=body.env,
        workdir=body.workdir,
        timeout_seconds=body.timeout_seconds,
        stdin=body.stdin,
        tty=None if body.tty is None else TerminalSize(body.tty.rows, body.tty.cols),
        detach=body.detach,
        tag=body.tag,
        root=body.user == "root",
    )
    if not body.detach:
        if "idempotency-key" in request.headers:
            raise ValidationError("Idempotency-Key: a command that is not detached cannot be started once for two")
        return ExecStream(*manager.open_exec(sandbox_id, options))

    async def start() -> Response:
        return JsonReply(views.command(await manager.start_exec(sandbox_id, options)), status=201)

    return await once(request, start)


@router.get("/sandboxes/{sandbox_id}/execs", response_model=models.ExecList, responses=common(404, 409, 501))
async def list_execs(sandbox_id: str, request: Request) -> Response:
    """List the commands that are kept: those that run and the last that ended."""
    listed = await manager_of(request).list_execs(sandbox_id)
    return JsonReply(models.ExecList(execs=[views.command(status) for status in listed]))


@router.get("/sandboxes/{sandbox_id}/execs/{exec_id}", response_model=models.Exec, responses=common(404, 409, 501))
async def get_exec(sandbox_id: str, exec_id: str, request: Request) -> Response:
    """Look at one command."""
    return JsonReply(views.command(await manager_of(request).exec_status(sandbox_id, exec_id)))


@router.get(
    "/sandboxes/{sandbox_id}/execs/{exec_id}/output",
    response_class=Response,
    responses={**common(404, 409, 501), **_OUTPUT_DOC},
    openapi_extra={
        "parameters": [
            parameter("cursor", "The first byte to read.", type="integer", minimum=0, default=0),
            parameter("follow", "Go on until the command ends.", type="boolean", default=True),
        ]
    },
)
async def exec_output(sandbox_id: str, exec_id: str, request: Request) -> Response:
    """Read a command's output from a byte on, then what comes. Closing the connection changes nothing."""
    values = query(request, "cursor", "follow")
    cursor = number(values, "cursor", 0, 0, models.MAX_INTEGER)
    follow = boolean(values, "follow", True)
    events = manager_of(request).attach_exec(sandbox_id, exec_id, cursor=cursor, follow=follow)
    return ExecStream(exec_id, events, cursor=cursor, ends=follow)


@router.post(
    "/sandboxes/{sandbox_id}/execs/{exec_id}/signal", response_model=models.Signalled, responses=common(404, 409, 501)
)
async def signal_exec(sandbox_id: str, exec_id: str, body: models.SignalRequest, request: Request) -> Response:
    """Send a signal to every process of a command."""
    sent = await manager_of(request).signal_exec(sandbox_id, exec_id, body.signal)
    return JsonReply(models.Signalled(processes=sent))


@router.post(
    "/sandboxes/{sandbox_id}/execs/{exec_id}/stdin",
    response_model=models.StdinTaken,
    responses=common(404, 409, 501),
    openapi_extra={
        "parameters": [parameter("close", "End standard input behind the body.", type="boolean", default=False)],
        "requestBody": {"required": False, "content": BINARY},
    },
)
async def write_stdin(sandbox_id: str, exec_id: str, request: Request) -> Response:
    """Send the body to a command's standard input as it comes; waits while the command does not read."""
    close = boolean(query(request, "close"), "close", False)
    manager: Manager = manager_of(request)
    taken = await manager.write_stdin(sandbox_id, exec_id, _not_empty(request))
    if close:
        try:
            await manager.close_stdin(sandbox_id, exec_id)
        except NotFoundError:
            # One that ended with its last byte has nothing left to close, and what it took is what was asked.
            if not taken:
                raise
    return JsonReply(models.StdinTaken(taken=taken))


@router.post("/sandboxes/{sandbox_id}/execs/{exec_id}/resize", status_code=204, responses=common(404, 409, 501))
async def resize_exec(sandbox_id: str, exec_id: str, body: models.TerminalSize, request: Request) -> Response:
    """Change the size of a command's terminal."""
    await manager_of(request).resize_exec(sandbox_id, exec_id, TerminalSize(body.rows, body.cols))
    return Response(status_code=204)


@router.delete("/sandboxes/{sandbox_id}/execs/{exec_id}", status_code=204, responses=common(404, 409, 501))
async def forget_exec(sandbox_id: str, exec_id: str, request: Request) -> Response:
    """End a command with every process that it started, and forget it."""
    await manager_of(request).forget_exec(sandbox_id, exec_id)
    return Response(status_code=204)


async def _not_empty(request: Request) -> AsyncGenerator[bytes, None]:
    # No bound on silence, as for files: who types at a command may think. The command's deadline ends it.
    async for data in request.stream():
        if data:
            yield data


class ExecLines:
    """Encode the events of a kept command; counts the bytes for the cursor. Pure."""

    def __init__(self, id: str, cursor: int = 0) -> None:
        self._id = id
        self._cursor = cursor

    def event(self, event: AttachEvent) -> dict[str, Any]:
        """Give one line's object."""
        match event:
            case ExecOutput():
                self._cursor += len(event.data)
                shown: dict[str, Any] = {"type": event.stream, "cursor": self._cursor}
                try:
                    return {**shown, "data": event.data.decode()}
                except UnicodeDecodeError:
                    return {**shown, "data_b64": base64.b64encode(event.data).decode()}
            case ExecStarted():
                return {"type": "started", "id": self._id, "pid": event.pid}
            case ExecGap():
                self._cursor += event.bytes
                return {"type": "gap", "bytes": event.bytes, "cursor": self._cursor}
            case ExecExit():
                return {"type": "exit", **views.exit_fields(event)}


class ExecStream(LineStream):
    """Send the events of a kept command; with ``ends`` the last must be its exit."""

    def __init__(
        self, id: str, events: AsyncGenerator[AttachEvent, None], *, cursor: int = 0, ends: bool = True
    ) -> None:
        super().__init__()
        self._events = events
        self._lines = ExecLines(id, cursor)
        self._ends = ends

    async def produce(self) -> None:
        async with aclosing(self._events) as events:
            event = await self.first(events)
            while event is not None:
                data = line(self._lines.event(event))
                if isinstance(event, ExecExit):
                    await self.last(data)
                    return
                await self.piece(data)
                event = await anext(events, None)
            if self._ends:
                raise BackendError("the command's output ended without an exit; how it ended is unknown")
