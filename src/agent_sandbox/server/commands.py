"""Plain commands: run to the end, or streamed as newline-delimited JSON.

A client that goes away before its command has ended takes the command with it: the manager's coroutine is cancelled, or
its generator closed, and that kills the whole tree. A stream that breaks gets a last line
``{"type":"error","data":"CODE: MESSAGE"}``, made of fields that every client of the first contract knows.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from agent_sandbox import models
from agent_sandbox.errors import BackendError, SandboxError
from agent_sandbox.manager import CommandResult
from agent_sandbox.manager.policy import exit_status
from agent_sandbox.server import routing
from agent_sandbox.server.codec import JsonReply
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.errors import common
from agent_sandbox.server.streams import NDJSON, Abandonment, Streamed, line
from agent_sandbox.types import ExecEvent, ExecExit, ExecOutput

LARGE_OUTPUT_BYTES = 256 * 1024
"""Output above this is decoded and encoded on a thread: below, the hand-over costs more than it saves."""

router = routing.router("exec")

_STREAM_DOC: dict[int | str, dict[str, Any]] = {
    200: {
        "description": 'One JSON object a line: `{"type": "stdout"|"stderr", "data": str}` as output arrives, then one '
        '`{"type": "exit", "exit_code": int, "timed_out": bool, "duration_ms": int}`. A stream that breaks ends '
        'with `{"type": "error", "data": "CODE: MESSAGE"}` where the reason is known, and is cut off.',
        "content": NDJSON,
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


class Lines:
    """Encode a command's events as lines of JSON; each stream is decoded as UTF-8 of its own. Pure."""

    def __init__(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}

    def output(self, event: ExecOutput) -> bytes:
        """Encode a chunk; empty while it holds only the first bytes of a character."""
        text = self._decoders[event.stream].decode(event.data)
        return line({"type": event.stream, "data": text}) if text else b""

    def exit(self, event: ExecExit, duration_ms: int) -> bytes:
        """Encode what the decoders still hold, and the end."""
        tails = ((name, decoder.decode(b"", final=True)) for name, decoder in self._decoders.items())
        lines = [line({"type": name, "data": text}) for name, text in tails if text]
        if why := _why(event):
            lines.append(line({"type": "stderr", "data": why}))
        end = {"type": "exit", "exit_code": exit_status(event), "timed_out": event.timed_out}
        return b"".join([*lines, line({**end, "duration_ms": duration_ms})])


class EventStream(Streamed):
    """Send a plain command's events as they come."""

    def __init__(self, events: AsyncGenerator[ExecEvent, None]) -> None:
        super().__init__()
        self._events = events

    async def produce(self) -> None:
        async with aclosing(self._events) as events:
            began = time.monotonic()
            lines = Lines()
            event = await self.first(events)
            while isinstance(event, ExecOutput):
                if data := lines.output(event):
                    await self.piece(data)
                event = await anext(events, None)
            if event is None:
                raise BackendError("the command's output ended without an exit status; how it ended is unknown")
            await self.last(lines.exit(event, round((time.monotonic() - began) * 1000)))

    async def broken(self, error: SandboxError) -> None:
        await self.piece(line({"type": "error", "data": f"{error.code}: {error.message}"}))


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
