"""The daemon's side of the wire over a made-up environment."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import posixpath
import socket
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agent_sandbox import wire
from agent_sandbox.backends.fake.programs import Exit, Process, run
from agent_sandbox.backends.fake.state import Environment, Failure, File, entry, find, make_directories, put, text
from agent_sandbox.types import WORKSPACE


@dataclass
class _Operation:
    """One stream: what the other side sends arrives in ``inbox``; ``send`` waits for credit."""

    session: _Session
    number: int
    inbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    credit: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, channel: int, data: bytes) -> None:
        while data:
            self.credit.clear()
            data = data[self.session.wire.send(self.number, channel, data) :]
            await self.session.flush()
            if data and not self.session.wire.is_open(self.number):
                raise asyncio.CancelledError
            if data:
                await self.credit.wait()

    async def receive(self) -> bytes:
        pieces = []
        while (piece := await self.inbox.get()) is not None:
            pieces.append(piece)
            self.session.wire.consumed(self.number, len(piece) + 1)
            await self.session.flush()
        return b"".join(pieces)


class _Session:
    def __init__(self, environment: Environment, sock: socket.socket) -> None:
        self.environment = environment
        self.sock = sock
        self.wire = wire.Connection("daemon", environment.key)
        self.operations: dict[int, tuple[_Operation, asyncio.Task[None]]] = {}
        self._sending = asyncio.Lock()

    async def flush(self) -> None:
        async with self._sending:
            for piece in self.wire.data_to_send():
                await asyncio.get_running_loop().sock_sendall(self.sock, piece)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.wire.closed:
            data = await loop.sock_recv(self.sock, 262_144)
            if not data:
                break
            for event in self.wire.receive(data):
                self._event(event)
            await self.flush()

    def _event(self, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            operation = _Operation(self, event.stream)
            task = asyncio.create_task(self._operate(operation, event.op, event.args))
            self.operations[event.stream] = (operation, task)
            task.add_done_callback(lambda _: self.operations.pop(event.stream, None))
            if event.op == "exec.start":
                self.environment.execs.add(task)
                task.add_done_callback(self.environment.execs.discard)
        elif isinstance(event, wire.Data | wire.Eof | wire.Credit | wire.Reset) and event.stream in self.operations:
            operation, task = self.operations[event.stream]
            if isinstance(event, wire.Data):
                operation.inbox.put_nowait(event.data)
            elif isinstance(event, wire.Eof):
                operation.inbox.put_nowait(None)
            elif isinstance(event, wire.Credit):
                operation.credit.set()
            else:
                task.cancel()

    async def _operate(self, operation: _Operation, op: str, args: dict[str, Any]) -> None:
        try:
            handler = OPERATIONS.get(op)
            if handler is None:
                raise Failure("unsupported", f"there is no operation {op!r}")
            result = await handler(self.environment, operation, args)
        except Failure as failure:
            result = {"error": {"code": failure.code, "message": str(failure)}}
        except (KeyError, TypeError, ValueError) as error:
            result = {"error": {"code": "invalid_request", "message": f"{op}: {error}"}}
        self.wire.end(operation.number, result)
        try:
            await self.flush()
        except OSError:
            pass


async def serve(environment: Environment, sock: socket.socket) -> None:
    session = _Session(environment, sock)
    try:
        await session.run()
    except OSError:
        pass
    finally:
        for operation, task in list(session.operations.values()):
            if task not in environment.execs:
                task.cancel()
            operation.credit.set()


async def _stat(environment: Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = text(args["path"])
    return {"entry": entry(path, find(environment, path))}


async def _list(environment: Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = text(args["path"])
    if find(environment, path).data is not None:
        raise Failure("invalid_request", f"{path}: {os.strerror(errno.ENOTDIR)}")
    children = [entry(p, f) for p, f in environment.files.items() if posixpath.dirname(p) == path]
    for start in range(0, len(children), 100):
        await operation.send(wire.CHANNEL_OUT, msgspec.msgpack.encode(children[start : start + 100]))
    return {"count": len(children)}


async def _read(environment: Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = text(args["path"])
    data = find(environment, path).data
    if data is None:
        raise Failure("invalid_request", f"{path}: {os.strerror(errno.EISDIR)}")
    if len(data) > args.get("max_bytes", len(data)):
        raise Failure("too_large", f"{path}: {len(data)} bytes")
    start = args.get("offset", 0)
    data = data[start : start + args.get("length", len(data))]
    await operation.send(wire.CHANNEL_OUT, data)
    return {"size": len(data)}


async def _write(environment: Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = text(args["path"])
    data = await operation.receive()
    return {"entry": entry(path, put(environment, path, data, args["mode"]))}


async def _export(environment: Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    buffer, size, entries = io.BytesIO(), 0, 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        for path, file in sorted(environment.files.items()):
            if path != WORKSPACE and not path.startswith(WORKSPACE + "/"):
                continue
            info = tarfile.TarInfo("./" if path == WORKSPACE else posixpath.relpath(path, WORKSPACE))
            info.type = tarfile.DIRTYPE if file.data is None else tarfile.REGTYPE
            info.mode, info.mtime, info.size = file.mode, file.mtime_ns // 10**9, len(file.data or b"")
            info.pax_headers = {"mtime": f"{file.mtime_ns // 10**9}.{file.mtime_ns % 10**9:09d}"}
            archive.addfile(info, io.BytesIO(file.data or b""))
            size, entries = size + info.size, entries + 1
    if size > args["max_bytes"]:
        raise Failure("too_large", f"the workspace holds {size} bytes")
    await operation.send(wire.CHANNEL_OUT, buffer.getvalue())
    return {"entries": entries, "file_bytes": size, "skipped": [], "skipped_total": 0}


async def _import(environment: Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    data, size, entries = await operation.receive(), 0, 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as archive:
            for info in archive:
                path = posixpath.normpath(posixpath.join(WORKSPACE, info.name))
                if path != WORKSPACE and not path.startswith(WORKSPACE + "/"):
                    raise Failure("invalid_request", f"{info.name!r} leads out of the workspace")
                content = archive.extractfile(info) if info.isreg() else None
                if content is not None:
                    file = put(environment, path, content.read(), info.mode)
                    size += len(file.data or b"")
                else:
                    make_directories(environment, path)
                    file = environment.files[path]
                    file.mode = info.mode
                seconds, _, fraction = str(info.pax_headers.get("mtime", info.mtime)).partition(".")
                file.mtime_ns = int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0"))
                entries += 1
                if size > args["max_bytes"]:
                    raise Failure("too_large", f"the archive holds more than {args['max_bytes']} bytes")
    except tarfile.TarError as error:
        raise Failure("invalid_request", f"this is no tar: {error}") from error
    return {"entries": entries, "file_bytes": size}


async def _info(environment: Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    return {"version": "fake", "pid": 1, "uid": 1000, "gid": 1000, "execs": len(environment.execs), "uptime_ms": 0}


async def _exec(environment: Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    cwd = text(args["cwd"])
    if environment.files.get(cwd, File(b"", 0)).data is not None:
        raise Failure("workdir", f"{cwd}: {os.strerror(errno.ENOENT)}")
    end: dict[str, Any] = {"timed_out": False, "user_us": 0, "system_us": 0, "max_rss_kb": 0}
    process = Process(
        environment,
        [os.fsdecode(arg) for arg in args["argv"]],
        {os.fsdecode(name): os.fsdecode(value) for name, value in args["env"]},
        cwd,
        lambda data: operation.send(wire.CHANNEL_OUT, data),
        lambda data: operation.send(wire.CHANNEL_ERR, data),
    )
    try:
        async with asyncio.timeout(args["timeout_ms"] / 1000):
            code = await run(process)
            end |= {"code": code}
            if code == 127:
                end["message"] = f"{process.argv[0]}: not found"
    except Exit as done:
        end |= {"code": done.code} if done.signal is None else {"signal": done.signal}
    except TimeoutError:
        end |= {"signal": 9, "timed_out": True}
    end["wall_us"] = int((time.monotonic() - started) * 1e6)
    return end


Operation = Callable[[Environment, _Operation, dict[str, Any]], Awaitable[dict[str, Any]]]
OPERATIONS: Mapping[str, Operation] = {
    "exec.start": _exec,
    "fs.list": _list,
    "fs.read": _read,
    "fs.stat": _stat,
    "fs.write": _write,
    "sys.info": _info,
    "tar.export": _export,
    "tar.import": _import,
}
