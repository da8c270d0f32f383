"""Commands: run to the end, or streamed as newline-delimited JSON.

A client that goes away before its command has ended takes the command with it: the manager's coroutine is cancelled, or
its generator closed, and that kills the whole tree.

A stream's reply begins with the first event, so that a command that cannot start is an ordinary error with its status;
when nothing has come within a second, the headers go out alone. Once they have, an error can no longer be a status:
the stream gets a last line ``{"type":"error","data":"CODE: MESSAGE"}``, made of fields that every client knows, and the
connection is cut off without the end mark of its encoding. So no client takes a broken stream for a finished command.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agent_sandbox import models
from agent_sandbox.errors import BackendError, SandboxError
from agent_sandbox.manager import CommandResult
from agent_sandbox.manager.policy import exit_status
from agent_sandbox.server.codec import JsonReply, encode
from agent_sandbox.server.errors import common
from agent_sandbox.server.sandboxes import manager_of
from agent_sandbox.types import ExecEvent, ExecExit, ExecOutput

log = logging.getLogger("agent_sandbox.server")

HEADERS_WITHIN_SECONDS = 1.0
"""How long a silent command may hold back the headers: start errors show well within it."""

LARGE_OUTPUT_BYTES = 256 * 1024
"""Output above this is decoded and encoded on a thread: below, the hand-over costs more than it saves."""

router = APIRouter(tags=["exec"])

_STREAM_DOC: dict[int | str, dict[str, Any]] = {
    200: {
        "description": 'One JSON object a line: `{"type": "stdout"|"stderr", "data": str}` as output arrives, then one '
        '`{"type": "exit", "exit_code": int, "timed_out": bool, "duration_ms": int}`. A stream that breaks ends '
        'with `{"type": "error", "data": "CODE: MESSAGE"}` where the reason is known, and is cut off.',
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    }
}


@router.post("/sandboxes/{sandbox_id}/exec", response_model=models.ExecResult, responses=common(404, 409, 429, 501))
async def exec_command(sandbox_id: str, body: models.ExecRequest, request: Request) -> Response:
    """Run a command to its end and return its output, up to the server's limit."""
    with Abandonment(request.receive):
        result = await manager_of(request).exec(
            sandbox_id, body.command, env=body.env, workdir=body.workdir, timeout_seconds=body.timeout_seconds
        )
    if len(result.stdout) + len(result.stderr) > LARGE_OUTPUT_BYTES:
        return await asyncio.to_thread(_finished, result)
    return _finished(result)


@router.post(
    "/sandboxes/{sandbox_id}/exec/stream",
    response_class=StreamingResponse,
    responses={**common(404, 409, 429, 501), **_STREAM_DOC},
)
async def exec_stream(sandbox_id: str, body: models.ExecRequest, request: Request) -> Response:
    """Run a command and stream its output as it arrives. Closing the connection kills the command."""
    events = manager_of(request).exec_stream(
        sandbox_id, body.command, env=body.env, workdir=body.workdir, timeout_seconds=body.timeout_seconds
    )
    return EventStream(events)


class Abandonment:
    """Cancel the body of a ``with`` when the client goes away; it then ends in :class:`ClientDisconnect`.

    The request must have been read to its end before.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = self._left = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.ensure_future(self._disconnect())
        self._watch.add_done_callback(self._notice)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._watch.cancel()
        if self._left and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            raise ClientDisconnect from None

    async def _disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _notice(self, watch: asyncio.Future[None]) -> None:
        if not self._over and not watch.cancelled():
            self._left = True
            self._task.cancel()


class Lines:
    """Encode a command's events as lines of JSON; each stream is decoded as UTF-8 of its own. Pure."""

    def __init__(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}

    def output(self, event: ExecOutput) -> bytes:
        """Encode a chunk; empty while it holds only the first bytes of a character."""
        text = self._decoders[event.stream].decode(event.data)
        return _line({"type": event.stream, "data": text}) if text else b""

    def exit(self, event: ExecExit, duration_ms: int) -> bytes:
        """Encode what the decoders still hold, and the end."""
        tails = ((name, decoder.decode(b"", final=True)) for name, decoder in self._decoders.items())
        lines = [_line({"type": name, "data": text}) for name, text in tails if text]
        if why := _why(event):
            lines.append(_line({"type": "stderr", "data": why}))
        end = {"type": "exit", "exit_code": exit_status(event), "timed_out": event.timed_out}
        return b"".join([*lines, _line({**end, "duration_ms": duration_ms})])


class EventStream(StreamingResponse):
    """Send a command's events as they come, at the speed of the client; see the module for how it ends."""

    def __init__(self, events: AsyncGenerator[ExecEvent, None]) -> None:
        super().__init__((), media_type="application/x-ndjson")
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            with Abandonment(receive):
                await self._send_all(send)

    async def _send_all(self, send: Send) -> None:
        began = time.monotonic()
        lines = Lines()
        try:
            event = await self._first(send)
            await self._start(send)
            while isinstance(event, ExecOutput):
                if line := lines.output(event):
                    await send({"type": "http.response.body", "body": line, "more_body": True})
                event = await anext(self._events, None)
            if event is None:
                raise BackendError("the command's output ended without an exit status; how it ended is unknown")
        except SandboxError as error:
            if not self._started:
                raise
            log.warning("a stream broke: %s: %s", error.code, error.message)
            last = _line({"type": "error", "data": f"{error.code}: {error.message}"})
            await send({"type": "http.response.body", "body": last, "more_body": True})
            return
        end = lines.exit(event, round((time.monotonic() - began) * 1000))
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _first(self, send: Send) -> ExecEvent | None:
        first = asyncio.ensure_future(anext(self._events, None))
        try:
            await asyncio.wait({first}, timeout=HEADERS_WITHIN_SECONDS)
            if not first.done():
                await self._start(send)
            return await first
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait({first})

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})


def _line(value: dict[str, Any]) -> bytes:
    # ASCII, since clients may split at what Unicode calls a line (U+0085, U+2028), which JSON allows within a string.
    line = encode(value)
    return (line if line.isascii() else json.dumps(value, separators=(",", ":")).encode("ascii")) + b"\n"


def _why(exit: ExecExit) -> str:
    """Say why a command could not start where a shell would: the fixed shapes have no field for it."""
    return f"{exit.message}\n" if exit.message else ""


def _finished(result: CommandResult) -> Response:
    return JsonReply(
        models.ExecResult(
            stdout=result.stdout.decode("utf-8", "replace"),
            stderr=result.stderr.decode("utf-8", "replace") + _why(result.exit),
            exit_code=exit_status(result.exit),
            timed_out=result.exit.timed_out,
            truncated=result.truncated,
            duration_ms=result.duration_ms,
        )
    )
