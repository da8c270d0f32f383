"""Every call that is about kept commands, built as a value, and the pure half of reading their output."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from agent_sandbox import models
from agent_sandbox.client.call import (
    BYTES,
    Call,
    as_list,
    as_nothing,
    as_number,
    as_shape,
    flag,
    new_key,
    post,
    sandbox_path,
    with_query,
)
from agent_sandbox.client.errors import ReplyLostError, ServerUnreachableError, TransportError, api_error
from agent_sandbox.client.requests import command_body, longest_wait
from agent_sandbox.errors import BackendError, SandboxError

RECONNECT_PAUSES = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 8.0)
"""Seconds before each new attempt to read on: a server that is started again is back by then."""

MAX_OUTPUT_BYTES = 10 * 1024 * 1024
"""What ``exec`` with input keeps of both streams together: as much as the plain ``exec`` of a server by default."""

Size = tuple[int, int]
"""Rows and columns of a terminal."""


def start(
    sandbox_id: str,
    command: str | Sequence[str],
    *,
    env: Mapping[str, str] | None,
    workdir: str | None,
    timeout_seconds: float | None,
    stdin: bool,
    tty: Size | None,
    tag: str,
    idempotency_key: str | None = None,
) -> Call[models.Exec]:
    """Start a command that nobody has to read."""
    body = _start_body(command, env, workdir, timeout_seconds, stdin, tty, tag)
    path, key = sandbox_path(sandbox_id, "/execs"), idempotency_key or new_key()
    return post(path, {**body, "detach": True}, as_shape(models.Exec), idempotency_key=key)


def start_attached(
    sandbox_id: str,
    command: str | Sequence[str],
    *,
    env: Mapping[str, str] | None,
    workdir: str | None,
    timeout_seconds: float | None,
    stdin: bool,
    tty: Size | None,
    tag: str,
) -> Call[models.ExecOutputEvent]:
    """Start a command whose stream loses nothing; ``decode`` reads one line."""
    body = _start_body(command, env, workdir, timeout_seconds, stdin, tty, tag)
    wait = longest_wait(timeout_seconds)
    return post(sandbox_path(sandbox_id, "/execs"), body, as_shape(models.ExecOutputEvent), wait=wait)


def _start_body(
    command: str | Sequence[str],
    env: Mapping[str, str] | None,
    workdir: str | None,
    timeout_seconds: float | None,
    stdin: bool,
    tty: Size | None,
    tag: str,
) -> dict[str, Any]:
    body = command_body(command, env, workdir, timeout_seconds)
    if stdin:
        body["stdin"] = True
    if tty is not None:
        body["tty"] = {"rows": tty[0], "cols": tty[1]}
    if tag:
        body["tag"] = tag
    return body


def list_execs(sandbox_id: str) -> Call[list[models.Exec]]:
    """List the commands that are kept."""
    return Call("GET", sandbox_path(sandbox_id, "/execs"), as_list("execs", models.Exec.from_json))


def get(sandbox_id: str, exec_id: str) -> Call[models.Exec]:
    """Look at a command."""
    return Call("GET", _exec(sandbox_id, exec_id), as_shape(models.Exec))


def output(sandbox_id: str, exec_id: str, cursor: int, *, follow: bool) -> Call[models.ExecOutputEvent]:
    """Read output from a byte on; ``decode`` reads one line."""
    path = _exec(sandbox_id, exec_id, "/output", cursor=str(cursor), follow=flag(follow))
    return Call("GET", path, as_shape(models.ExecOutputEvent), wait=longest_wait(None))


def signal(sandbox_id: str, exec_id: str, signal: str | int) -> Call[int]:
    """Send a signal to every process of a command."""
    return post(_exec(sandbox_id, exec_id, "/signal"), {"signal": signal}, as_number("processes"))


def stdin(sandbox_id: str, exec_id: str, content: bytes | None, *, close: bool) -> Call[int]:
    """Send bytes to standard input; without ``content`` the client sends a body of its own. Waits for the command."""
    path = _exec(sandbox_id, exec_id, "/stdin", close=flag(close))
    return Call("POST", path, as_number("taken"), content, BYTES, wait=longest_wait(None))


def resize(sandbox_id: str, exec_id: str, rows: int, cols: int) -> Call[None]:
    """Change the size of a terminal."""
    return post(_exec(sandbox_id, exec_id, "/resize"), {"rows": rows, "cols": cols}, as_nothing)


def delete(sandbox_id: str, exec_id: str) -> Call[None]:
    """End a command and forget it."""
    return Call("DELETE", _exec(sandbox_id, exec_id), as_nothing)


def terminal_path(sandbox_id: str, size: Size, /, **parameters: str) -> str:
    """The path of a terminal's WebSocket."""
    return sandbox_path(sandbox_id, "/terminal", rows=str(size[0]), cols=str(size[1]), **parameters)


def _exec(sandbox_id: str, exec_id: str, suffix: str = "", /, **parameters: str) -> str:
    return with_query(sandbox_path(sandbox_id, f"/execs/{quote(exec_id, safe='')}{suffix}"), **parameters)


class Reading:
    """Where a reader of a command's output is, and whether it reads on after a failure. Pure.

    Every event that comes moves the cursor and makes all attempts available again.
    """

    def __init__(self, sandbox_id: str, exec_id: str, cursor: int, *, follow: bool) -> None:
        self._ids = sandbox_id, exec_id
        self._follow = follow
        self._pauses = iter(RECONNECT_PAUSES)
        self._connected = False
        self.cursor = cursor
        self.over = False

    def call(self) -> Call[models.ExecOutputEvent]:
        """The call that reads on from here."""
        return output(*self._ids, self.cursor, follow=self._follow)

    def take(self, event: models.ExecOutputEvent) -> models.ExecOutputEvent:
        """Note what has come; raises the server's reason for a stream that it cut off."""
        if event.type == "error":
            raise broken(event)
        self._connected = True
        self._pauses = iter(RECONNECT_PAUSES)
        if event.type in ("stdout", "stderr", "gap"):
            self.cursor = event.cursor
        self.over = event.type == "exit"
        return event

    def end(self) -> None:
        """Note that the stream ended; :class:`ReplyLostError` when it should have gone on."""
        if self._follow and not self.over:
            raise ReplyLostError("the command's output ended without an exit status; how it ended is unknown")
        self.over = True

    def pause(self, error: SandboxError) -> float:
        """Seconds until reading on is tried again; raises the error when it is not."""
        first_failed = isinstance(error, ServerUnreachableError) and not self._connected
        if first_failed or not isinstance(error, (TransportError, BackendError)):
            raise error
        self._connected = True
        pause = next(self._pauses, None)
        if pause is None:
            raise error
        return pause


def broken(event: models.ExecOutputEvent | models.WatchEvent) -> SandboxError:
    """The error of a stream's ``error`` line, whose status had been sent: 200."""
    return api_error(200, event.code or "http_error", event.message)


class Collected:
    """Put a command's events together into the result that a plain ``exec`` gives. Pure."""

    def __init__(self) -> None:
        self._kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._room = MAX_OUTPUT_BYTES
        self._truncated = False

    def take(self, event: models.ExecOutputEvent) -> models.ExecResult | None:
        """Keep an event; return the result with the last one."""
        if event.type in ("stdout", "stderr"):
            piece = event.raw
            self._truncated = self._truncated or len(piece) > self._room
            self._kept[event.type].append(piece[: self._room])
            self._room -= len(self._kept[event.type][-1])
        elif event.type == "gap":
            self._truncated = True
        elif event.type == "exit":
            return self._result(event)
        return None

    def _result(self, event: models.ExecOutputEvent) -> models.ExecResult:
        return models.ExecResult(
            stdout=self._text("stdout"),
            stderr=self._text("stderr") + (f"{event.message}\n" if event.message else ""),
            exit_code=exit_status(event),
            timed_out=event.timed_out,
            truncated=self._truncated,
            duration_ms=event.duration_ms or 0,
        )

    def _text(self, stream: Literal["stdout", "stderr"]) -> str:
        return codecs.decode(b"".join(self._kept[stream]), "utf-8", "replace")


def exit_status(event: models.ExecOutputEvent | models.Exec) -> int:
    """The exit code as a shell shows it: 128 + the signal that ended a command, 137 on timeout.

    :class:`BackendError` when neither is known.
    """
    if event.timed_out:
        return 137
    if event.exit_code is not None:
        return event.exit_code
    if event.signal is not None:
        return 128 + event.signal
    raise BackendError("how the command ended is not known")


def first_seen(event: models.ExecOutputEvent) -> models.Exec:
    """What is known of a command by the first line of its starter's stream."""
    ended = event.type == "exit"
    return models.Exec(
        id=event.id,
        tag="",
        command=[],
        pid=event.pid,
        status="exited" if ended else "running",
        started_at="",
        exit_code=event.exit_code,
        signal=event.signal,
        timed_out=event.timed_out,
        tty=False,
        cursor=0,
        first_cursor=0,
        message=event.message,
    )
