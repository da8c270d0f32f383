"""Made-up commands, kept as objects with rings."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agent_sandbox import wire
from agent_sandbox.backends.fake.programs import PROGRAMS, Exit, Process, run
from agent_sandbox.backends.fake.session import Operation
from agent_sandbox.backends.fake.state import Environment, Failure, File, text

RING, RINGS = 1024 * 1024, 8 * 1024 * 1024
MAX_ENDED, MAX_RUNNING = 1_000, 1_024
WINDOW = 262_144
IGNORED = frozenset({17, 18, 19, 20, 21, 22, 23, 28})
"""SIGCHLD, SIGCONT, what stops, SIGURG and SIGWINCH: a made-up command goes on."""
_ID = re.compile(r"[a-z0-9-]{1,64}")


class Input:
    """Standard input: at most one window waits for the command."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._waiting: deque[bytes] = deque()
        self._closed = False
        self._changed = asyncio.Condition()

    async def write(self, data: bytes) -> None:
        if self._closed or not self._command.running:
            raise Failure("not_found", "the command takes no input")
        async with self._changed:
            if self._command.tty is not None and b"\x03" in data:
                self._command.signal(2)
                return
            self._waiting.append(data)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: sum(map(len, self._waiting)) < WINDOW or not self._command.running)
        if not self._command.running:
            raise Failure("not_found", "the command takes no input")

    async def close(self) -> None:
        if self._closed or not self._command.running:
            raise Failure("not_found", "the command takes no input")
        await self.shut()

    async def shut(self) -> None:
        self._closed = True
        async with self._changed:
            self._changed.notify_all()

    async def read(self) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
            data = self._waiting.popleft() if self._waiting else b""
            self._changed.notify_all()
        return data


@dataclass(eq=False)
class Command:
    """One command; ``lead`` is the stream that holds it back."""

    environment: Environment
    id: str
    tag: str
    argv: list[bytes]
    env: dict[str, str]
    cwd: str
    timeout: float
    tty: dict[str, int] | None
    stdin: bool
    lead: Operation | None = None
    pid: int = 0
    started: float = field(default_factory=time.time)
    end: dict[str, Any] | None = None
    first: int = 0
    cursor: int = 0

    def __post_init__(self) -> None:
        self.environment.pids += 1
        self.pid = self.environment.pids
        self._ring: deque[tuple[int, int, bytes]] = deque()
        self._signal: int | None = None
        self._changed = asyncio.Condition()
        self.input = Input(self)
        self.task = asyncio.create_task(self._run())
        self.environment.execs.add(self.task)
        self.task.add_done_callback(self.environment.execs.discard)

    @property
    def exists(self) -> bool:
        """Whether there is such a program."""
        return posixpath.basename(os.fsdecode(self.argv[0])) in PROGRAMS

    @property
    def running(self) -> bool:
        return self.end is None

    def signal(self, number: int) -> None:
        if self.running and number not in IGNORED:
            self._signal = number
            self.task.cancel()

    async def changed(self) -> None:
        async with self._changed:
            await self._changed.wait()

    async def _run(self) -> None:
        started, kills = time.monotonic(), self.environment.oom_kills
        end: dict[str, Any] = {"timed_out": False, "user_us": 0, "system_us": 0, "max_rss_kb": 0}
        process = Process(
            self.environment,
            [os.fsdecode(arg) for arg in self.argv],
            self.env,
            self.cwd,
            lambda data: self._emit(wire.CHANNEL_OUT, data),
            lambda data: self._emit(wire.CHANNEL_OUT if self.tty else wire.CHANNEL_ERR, data),
            self.input.read if self.stdin or self.tty else None,
            lambda: self.tty,
        )
        try:
            async with asyncio.timeout(self.timeout):
                if self.lead is not None and self.id and self.exists:
                    await self.lead.note(started=True, pid=self.pid)
                code = await run(process)
                end |= {"code": code}
                if code == 127 and not self.exists:
                    end["message"] = f"{process.argv[0]}: not found"
        except Exit as done:
            end |= {"code": done.code} if done.signal is None else {"signal": done.signal}
        except TimeoutError:
            end |= {"signal": 9, "timed_out": True}
        except (Failure, ValueError, IndexError):
            end |= {"code": 2}
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            end |= {"signal": self._signal}
        if self.id and 9 in (end.get("signal"), end.get("code", 0) - 128):
            end["oom_killed"] = self.environment.oom_kills > kills
        end["wall_us"] = int((time.monotonic() - started) * 1e6)
        self.end = end
        await self.input.shut()
        async with self._changed:
            self._changed.notify_all()
        ended = [command for command in self.environment.commands.values() if not command.running]
        for old in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self.environment.commands[old.id]

    async def _emit(self, channel: int, data: bytes) -> None:
        if self.id:
            self._ring.append((self.cursor, channel, data))
            self.cursor += len(data)
            self.drop(self.cursor - self.first - RING)
            others = sorted(self.environment.commands.values(), key=lambda command: (command.running, command.started))
            for command in others:
                held = sum(other.cursor - other.first for other in others)
                command.drop(held - RINGS)
            async with self._changed:
                self._changed.notify_all()
        if self.lead is not None and not await self.lead.send(channel, data):
            self.lead = None
        await asyncio.sleep(0)

    def drop(self, count: int) -> None:
        """Forget that many of the oldest bytes."""
        self.first = min(self.first + max(count, 0), self.cursor)
        while self._ring and self._ring[0][0] + len(self._ring[0][2]) <= self.first:
            self._ring.popleft()

    def read(self, cursor: int) -> tuple[int, bytes] | None:
        """The channel and the bytes of one piece from a cursor on."""
        for start, channel, data in self._ring:
            if start <= cursor < start + len(data):
                return channel, data[cursor - start :]
        return None

    def describe(self) -> dict[str, Any]:
        described = {
            "id": self.id,
            "tag": self.tag,
            "argv": _shown(self.argv),
            "pid": self.pid,
            "started_ms": int(self.started * 1000),
            "running": self.running,
            "tty": self.tty is not None,
            "cursor": self.cursor,
            "first": self.first,
        }
        return described if self.end is None else described | {"exit": self.end}


def _shown(argv: list[bytes]) -> list[bytes]:
    shown, left = [], 4_096
    for arg in argv:
        shown.append(arg[:left])
        left -= len(arg)
        if left <= 0:
            break
    return shown


def _find(environment: Environment, args: dict[str, Any], *, running: bool = False) -> Command:
    command = environment.commands.get(args["id"])
    if command is None:
        raise Failure("not_found", f"there is no command {args['id']!r}")
    if running and not command.running:
        raise Failure("not_found", "the command has ended")
    return command


async def start(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    cwd, id, detach = text(args["cwd"]), args.get("id", ""), args.get("detach", False)
    if environment.files.get(cwd, File(b"", 0)).data is not None:
        raise Failure("workdir", f"{cwd}: {os.strerror(errno.ENOENT)}")
    if (detach or id) and not _ID.fullmatch(id):
        raise Failure("invalid_request", f"{id!r} is no id")
    if id in environment.commands:
        raise Failure("conflict", f"there is a command {id!r}")
    if sum(command.running for command in environment.commands.values()) >= MAX_RUNNING:
        raise Failure("exhausted", f"{MAX_RUNNING} commands are running")
    command = Command(
        environment,
        id,
        args.get("tag", ""),
        args["argv"],
        {os.fsdecode(name): os.fsdecode(value) for name, value in args["env"]},
        cwd,
        args["timeout_ms"] / 1000,
        args.get("tty"),
        args.get("stdin", False),
        None if detach else operation,
    )
    if id:
        environment.commands[id] = command
    if detach and command.exists:
        return {"id": id, "pid": command.pid}
    feeding = asyncio.create_task(_feed(command, operation)) if command.stdin or command.tty else None
    try:
        await asyncio.shield(command.task)
    finally:
        if feeding is not None:
            feeding.cancel()
        if operation.given_up:
            command.signal(9)
    return dict(command.end or {})


async def _feed(command: Command, operation: Operation) -> None:
    try:
        async for piece in operation.pieces():
            await command.input.write(piece)
        await command.input.close()
    except Failure:
        pass


async def attach(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    command, position, follow = _find(environment, args), args.get("cursor", 0), args.get("follow", True)
    if position > command.cursor:
        raise Failure("invalid_request", f"the output ends at {command.cursor}")
    while True:
        if position < command.first:
            await operation.note(gap=command.first - position)
            position = command.first
        elif (piece := command.read(position)) is not None:
            await operation.send(*piece)
            position += len(piece[1])
        elif command.end is not None:
            return {"exit": command.end, "cursor": position}
        elif not follow:
            return {"cursor": position}
        else:
            await command.changed()


async def list_all(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    commands = list(environment.commands.values())
    for start in range(0, len(commands), 10):
        listed = [command.describe() for command in commands[start : start + 10]]
        await operation.send(wire.CHANNEL_OUT, msgspec.msgpack.encode(listed))
    return {"count": len(commands)}


async def status(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    return {"exec": _find(environment, args).describe()}


async def stdin(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    command, taken = _find(environment, args, running=True), 0
    if not command.stdin and command.tty is None:
        raise Failure("not_found", "the command takes no input")
    async for piece in operation.pieces():
        await command.input.write(piece)
        taken += len(piece)
    return {"taken": taken}


async def close(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    command = _find(environment, args, running=True)
    if not command.stdin and command.tty is None:
        raise Failure("not_found", "the command takes no input")
    await command.input.close()
    return {}


async def signal(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    if not 1 <= args["signal"] <= 64:
        raise Failure("invalid_request", "a signal is 1 to 64")
    _find(environment, args, running=True).signal(args["signal"])
    return {"processes": 1}


async def resize(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    command = _find(environment, args, running=True)
    if command.tty is None:
        raise Failure("invalid_request", "the command has no terminal")
    command.tty |= {"rows": args["rows"], "cols": args["cols"]}
    return {}


async def forget(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    command = _find(environment, args)
    command.signal(9)
    await asyncio.wait([command.task])
    environment.commands.pop(command.id, None)
    return {}
