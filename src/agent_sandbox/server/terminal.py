"""A terminal over a WebSocket: a new command, or one with a terminal that runs already.

Binary frames are the terminal's bytes, both ways; text frames are JSON. One task reads the socket and hands input to a
second, which feeds the command; a third sends output at the client's speed. The socket is accepted once the command
runs, so what fails before is an HTTP reply with its status.

Who closes the socket ends a command that was started on it, as an abandoned stream does; an attachment ends alone.
Input that the command does not take waits in a queue of :data:`WAITING_FRAMES`. Beyond it the socket is not read,
so that the client feels it; but then nobody would notice that the client leaves, so after :data:`STALL_SECONDS` the
socket is closed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect

from agent_sandbox import models
from agent_sandbox.errors import BackendError, ConflictError, InvalidRequestError, NotFoundError, SandboxError
from agent_sandbox.manager import CommandOptions, Manager
from agent_sandbox.server import errors, routing
from agent_sandbox.server.codec import bad_field, encode, number, query
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.execs import ExecLines
from agent_sandbox.types import AttachEvent, ExecExit, ExecOutput, TerminalSize

SUBPROTOCOL = "agent-sandbox"

WAITING_FRAMES = 8
STALL_SECONDS = 30.0
MAX_TEXT = 1024
"""Characters of a text frame: a size needs fifty."""

_NEW = ("command", "workdir", "term", "timeout_seconds", "tag")
# A login shell of the image's: bash where it is there, since people expect its line editing.
_SHELL = ["/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -l; exec /bin/sh -l"]

router = routing.router("execs")


@router.websocket("/sandboxes/{sandbox_id}/terminal")
async def terminal(socket: WebSocket, sandbox_id: str) -> None:
    """Work in a terminal; see ``docs/reference/rest.md``."""
    try:
        session = await _session(socket, sandbox_id)
        await session.run(socket)
    except SandboxError as error:
        await socket.send_denial_response(errors.for_error(error))
    except WebSocketDisconnect:
        pass


async def _session(socket: WebSocket, sandbox_id: str) -> Session:
    values = query(socket, "rows", "cols", "exec", "cursor", *_NEW)
    manager = manager_of(socket)
    size = TerminalSize(
        number(values, "rows", 24, 1, models.MAX_TERMINAL_SIDE), number(values, "cols", 80, 1, models.MAX_TERMINAL_SIDE)
    )
    exec_id = values.get("exec")
    if exec_id is None:
        if "cursor" in values:
            raise bad_field("cursor", "belongs to exec")
        options = CommandOptions(
            command=values.get("command") or _SHELL,
            env={"TERM": values["term"]} if values.get("term") else {},
            workdir=values.get("workdir"),
            timeout_seconds=_seconds(values.get("timeout_seconds")),
            tty=size,
            tag=values.get("tag", ""),
        )
        exec_id, events = manager.open_exec(sandbox_id, options)
        return Session(manager, sandbox_id, exec_id, events)
    if taken := [name for name in _NEW if name in values]:
        raise bad_field(taken[0], "belongs to a new command, not to exec")
    status = await manager.exec_status(sandbox_id, exec_id)
    if not status.tty:
        raise InvalidRequestError(f"command {exec_id} has no terminal; read its output instead")
    if status.running and ("rows" in values or "cols" in values):
        await manager.resize_exec(sandbox_id, exec_id, size)
    cursor = number(values, "cursor", 0, 0, models.MAX_INTEGER)
    events = manager.attach_exec(sandbox_id, exec_id, cursor=cursor, follow=True)
    return Session(manager, sandbox_id, exec_id, events, attached=True)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise bad_field("timeout_seconds", "must be a number of seconds") from None


class Session:
    """One socket and one command."""

    def __init__(
        self,
        manager: Manager,
        sandbox_id: str,
        exec_id: str,
        events: AsyncGenerator[AttachEvent, None],
        *,
        attached: bool = False,
    ) -> None:
        self._manager = manager
        self._sandbox_id = sandbox_id
        self._exec_id = exec_id
        self._events = events
        self._attached = attached
        self._lines = ExecLines(exec_id)
        self._input: asyncio.Queue[bytes] = asyncio.Queue(WAITING_FRAMES)
        self._takes_input = True

    async def run(self, socket: WebSocket) -> None:
        """Serve until the command ends or the client leaves. What fails before the command runs is raised."""
        async with aclosing(self._events) as events:
            # A command that is attached to may be silent for long, and is known to be there.
            first = [] if self._attached else [await anext(events)]
            await socket.accept(SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None)
            sending = asyncio.create_task(self._send(socket, first, events))
            receiving = asyncio.create_task(self._receive(socket))
            feeding = asyncio.create_task(self._feed())
            try:
                # The feeding may end alone: a command can close its input and go on.
                await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if not sending.done() and isinstance(error := receiving.exception(), SandboxError):
                    sending.cancel()
                    await asyncio.wait({sending})
                    await _tell(socket, error)
            finally:
                for task in (sending, receiving, feeding):
                    task.cancel()
                await asyncio.gather(sending, receiving, feeding, return_exceptions=True)

    async def _send(
        self, socket: WebSocket, first: list[AttachEvent], events: AsyncGenerator[AttachEvent, None]
    ) -> None:
        try:
            for event in first:
                if await self._sent_last(socket, event):
                    return
            async for event in events:
                if await self._sent_last(socket, event):
                    return
            raise BackendError("the terminal ended without an exit; how its command ended is unknown")
        except SandboxError as error:
            await _tell(socket, error)

    async def _sent_last(self, socket: WebSocket, event: AttachEvent) -> bool:
        if isinstance(event, ExecOutput):
            await socket.send_bytes(event.data)
            return False
        shown = self._lines.event(event)
        shown.pop("cursor", None)
        await socket.send_text(encode(shown).decode())
        if isinstance(event, ExecExit):
            await socket.close(1000)
            return True
        return False

    async def _receive(self, socket: WebSocket) -> None:
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if (data := message.get("bytes")) is not None:
                await self._take(data)
            else:
                await self._resize(message.get("text") or "")

    async def _take(self, data: bytes) -> None:
        if not data or not self._takes_input:
            return
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._input.put(data)
        except TimeoutError:
            raise ConflictError(f"the command has taken no input for {STALL_SECONDS:g} s") from None

    async def _resize(self, text: str) -> None:
        size = parse_resize(text)
        try:
            await self._manager.resize_exec(self._sandbox_id, self._exec_id, size)
        except NotFoundError:
            pass  # it has just ended, and its exit is on the way

    async def _feed(self) -> None:
        try:
            await self._manager.write_stdin(self._sandbox_id, self._exec_id, self._typed())
        except SandboxError:
            # The command has ended, or closed its input, or the output tells what happened.
            self._takes_input = False
            while not self._input.empty():
                self._input.get_nowait()

    async def _typed(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._input.get()


def parse_resize(text: str) -> TerminalSize:
    """Read a text frame. :class:`InvalidRequestError` unless it is a size."""
    try:
        told: Any = json.loads(text) if len(text) <= MAX_TEXT else None
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or told.get("type") != "resize" or set(told) != {"type", "rows", "cols"}:
        raise InvalidRequestError('a text frame is {"type": "resize", "rows": 24, "cols": 80}')
    sides = told["rows"], told["cols"]
    if not all(type(side) is int and 1 <= side <= models.MAX_TERMINAL_SIDE for side in sides):
        raise InvalidRequestError(f"rows and cols are 1 to {models.MAX_TERMINAL_SIDE}")
    return TerminalSize(*sides)


async def _tell(socket: WebSocket, error: SandboxError) -> None:
    await socket.send_text(encode({"type": "error", "code": error.code, "message": error.message}).decode())
    await socket.close(1008 if isinstance(error, InvalidRequestError) else 1011, error.code)
