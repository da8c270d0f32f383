"""Commands: run to their end, or kept as objects that are attached to, signalled and forgotten.

A command's own deadline bounds every wait on it, and ``grace_seconds`` after it the caller is told by
:class:`GuestStalled` and ends the guest. An attachment may idle as long as its command; the connection's sign of life
keeps it from waiting for a dead daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from agent_sandbox import wire
from agent_sandbox.errors import BackendError, InvalidRequestError, NotFoundError
from agent_sandbox.guest import limits, replies
from agent_sandbox.guest.connection import Connection
from agent_sandbox.types import (
    AttachEvent,
    ExecEvent,
    ExecGap,
    ExecOutput,
    ExecStarted,
    ExecStatus,
    TerminalSize,
)


@dataclass(frozen=True, slots=True)
class Program:
    """What ``exec.start`` needs; ``env`` is the whole environment. An empty ``id`` lives with its stream."""

    argv: Sequence[bytes]
    env: Sequence[tuple[bytes, bytes]]
    cwd: bytes
    timeout_seconds: float
    id: str = ""
    tag: str = ""
    stdin: bool = False
    tty: TerminalSize | None = None


class Commands(Connection):
    """The ``exec`` group of the wire."""

    def exec(
        self, argv: Sequence[bytes], env: Sequence[tuple[bytes, bytes]], cwd: bytes, timeout_seconds: float
    ) -> AsyncGenerator[ExecEvent, None]:
        """Run a command with exactly this environment; yield its output, then one :class:`ExecExit`.

        Leaving the generator early kills the command's tree. Raises :class:`GuestStalled` when the daemon does not keep
        the deadline, and the typed errors of the wire.
        """
        return cast("AsyncGenerator[ExecEvent, None]", self.open_exec(Program(argv, env, cwd, timeout_seconds)))

    async def open_exec(self, program: Program) -> AsyncGenerator[AttachEvent, None]:
        """Run a command; one with an id is kept, and yields :class:`ExecStarted` first unless it cannot be started."""
        loop = asyncio.get_running_loop()
        stream = self.open("exec.start", _start_args(program))
        deadline, late = loop.time() + program.timeout_seconds, 0
        awaited = bool(program.id)
        try:
            await stream.send_args()
            while True:
                limit = max(deadline - loop.time(), 0.0) + self.grace_seconds
                try:
                    event = await stream.next(limit)
                except TimeoutError:
                    raise replies.GuestStalled("the sandbox's daemon did not end a command in time") from None
                match event:
                    case wire.Data():
                        late += len(event.data) if loop.time() > deadline else 0
                        if late > limits.AFTER_DEADLINE_BYTES:
                            raise replies.GuestStalled("the sandbox's daemon goes on after a command's deadline")
                        if awaited != (event.channel == wire.CHANNEL_NOTE):
                            raise BackendError("the sandbox's daemon says that a command started once, and first")
                        if awaited:
                            awaited = False
                            yield ExecStarted(replies.note(event.data, replies.Started).pid)
                        else:
                            yield _output(event)
                    case wire.Ended():
                        yield replies.exit_of(replies.result(event.result, replies.Exit))
                        return
                    case _:
                        pass
        finally:
            stream.close()

    async def start_exec(self, program: Program) -> int:
        """Start a command that goes on without a reader; return its pid, 0 when it could not be started."""
        fields = await self.call("exec.start", _start_args(program) | {"detach": True}, dict[str, Any])
        if "id" not in fields:
            if replies.exit_of(replies.shaped(fields, replies.Exit)).code not in (126, 127):
                raise BackendError("the sandbox's daemon did not say whether a command was started")
            return 0
        told = replies.shaped(fields, replies.Detached)
        if told.id != program.id:
            raise BackendError("the sandbox's daemon started a command under another id")
        return told.pid

    async def attach_exec(self, id: str, cursor: int, follow: bool) -> AsyncGenerator[AttachEvent, None]:
        """Read a command's ring from the byte ``cursor`` on, then what comes unless ``follow`` is false."""
        stream = self.open("exec.attach", {"id": _checked_id(id), "cursor": cursor, "follow": follow})
        position, replayed = cursor, 0
        try:
            while True:
                event = await (stream.next(None) if follow else stream.progress())
                if isinstance(event, wire.Data) and event.channel == wire.CHANNEL_NOTE:
                    gap = replies.note(event.data, replies.Gap).gap
                    position += gap
                    if position >= 2**63:
                        raise BackendError("the sandbox's daemon lost more bytes than there can be")
                    yield ExecGap(gap)
                elif isinstance(event, wire.Data):
                    size = len(event.data)
                    position, replayed = position + size, replayed + size
                    if not follow and replayed > limits.MAX_REPLAY_BYTES:
                        raise BackendError("the sandbox's daemon sent more than a ring holds")
                    yield _output(event)
                elif isinstance(event, wire.Ended):
                    told = replies.result(event.result, replies.Attached)
                    if told.cursor != position or (follow and told.exit is None):
                        raise BackendError("the sandbox's daemon ended an attachment where it cannot end")
                    if told.exit is not None:
                        yield replies.exit_of(told.exit)
                    return
        finally:
            stream.close()

    async def list_execs(self) -> list[ExecStatus]:
        """The commands that are kept, oldest first."""
        found: dict[str, ExecStatus] = {}
        counts: list[int] = []
        pieces = self.download("exec.list", {}, replies.Counted, lambda told: counts.append(told.count))
        async with aclosing(pieces):
            async for piece in pieces:
                listed = replies.statuses_of(piece)
                before = len(found)
                found |= {status.id: status for status in listed}
                if not listed or len(found) != before + len(listed) or len(found) > limits.MAX_EXECS:
                    raise BackendError("the sandbox's daemon listed a command twice, none, or too many")
        if counts != [len(found)]:
            raise BackendError("the sandbox's daemon counted its commands wrong")
        return sorted(found.values(), key=lambda status: status.started_at)

    async def exec_status(self, id: str) -> ExecStatus:
        """One command that is kept."""
        told = await self.call("exec.status", {"id": _checked_id(id)}, dict[str, Any])
        return replies.status_of(told, id)

    async def write_stdin(self, id: str, src: AsyncIterator[bytes]) -> int:
        """Send bytes to a command's standard input, as it takes them; return how many it took."""
        sent = 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal sent
            async for piece in src:
                sent += len(piece)
                yield piece

        told = await self.upload("exec.stdin", {"id": _checked_id(id)}, counted(), replies.Taken, patient=True)
        if told.taken > sent:
            raise BackendError("the sandbox's daemon took more input than there was")
        return told.taken

    async def close_stdin(self, id: str) -> None:
        """End a command's standard input behind what was sent."""
        await self.call("exec.close", {"id": _checked_id(id)}, dict[str, Any])

    async def signal_exec(self, id: str, signal: int) -> int:
        """Signal a command's tree; return how many processes that were."""
        args = {"id": _checked_id(id), "signal": signal}
        return (await self.call("exec.signal", args, replies.Signalled)).processes

    async def resize_exec(self, id: str, size: TerminalSize) -> None:
        """Change the size of a command's terminal."""
        args = {"id": _checked_id(id), "rows": size.rows, "cols": size.cols}
        await self.call("exec.resize", args, dict[str, Any])

    async def forget_exec(self, id: str) -> None:
        """End a command if it runs, and forget it. :class:`GuestStalled` when its tree cannot be ended."""
        await self.call("exec.forget", {"id": _checked_id(id)}, dict[str, Any])


def _start_args(program: Program) -> dict[str, Any]:
    args: dict[str, Any] = {
        "argv": program.argv,
        "env": program.env,
        "cwd": program.cwd,
        "timeout_ms": max(1, round(program.timeout_seconds * 1000)),
    }
    if program.id:
        args["id"] = _checked_id(program.id, InvalidRequestError)
    if len(program.tag.encode()) > limits.MAX_TAG:
        raise InvalidRequestError(f"the tag of a command has at most {limits.MAX_TAG} bytes")
    optional: Mapping[str, Any] = {"tag": program.tag, "stdin": program.stdin}
    args |= {name: value for name, value in optional.items() if value}
    if program.tty is not None:
        args["tty"] = {"rows": program.tty.rows, "cols": program.tty.cols}
    return args


def _checked_id(id: str, kind: type[InvalidRequestError | NotFoundError] = NotFoundError) -> str:
    if not replies.EXEC_ID.fullmatch(id):
        raise kind(f"{id[:100]!r} is no id of a command: 1 to 64 characters of a-z, 0-9 and -")
    return id


def _output(event: wire.Data) -> ExecOutput:
    return ExecOutput("stdout" if event.channel == wire.CHANNEL_OUT else "stderr", event.data)
