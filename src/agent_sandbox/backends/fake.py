"""A backend in memory: no process, no root, no isolation. Most tests use it.

Only the daemon is made up: the server's side of it is the real :class:`GuestBackend` and the real wire over a socket
pair. Its workspace is a dictionary, its programs the few in :data:`PROGRAMS`, its shell knows ``;``, ``&&``, quotes,
``>``, ``>>``, ``>&2`` and ``$NAME``. What it cannot do ends in exit code 127; tests that need more use a real backend.

The environments live in the object, not in the connections: a second manager over the same backend finds them again,
as after a restart of the server. ``failures`` makes the next call of a method fail.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import posixpath
import re
import shlex
import socket
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agent_sandbox import wire
from agent_sandbox.backends.guest_backend import Endpoint, GuestBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import NotFoundError, SandboxError, UnsupportedError
from agent_sandbox.types import WORKSPACE, Capabilities, EnvironmentInfo, ResolvedImage, SandboxSpec

MAX_OUTPUT = 64 * 1024 * 1024
"""Most output of one made-up command; ``yes`` stops there."""


@dataclass
class _File:
    """One file (``data``) or directory (``None``) of a made-up workspace."""

    data: bytes | None
    mode: int
    mtime_ns: int = field(default_factory=time.time_ns)


@dataclass
class _Environment:
    spec: SandboxSpec
    key: bytes
    files: dict[str, _File]
    running: bool = True
    connections: set[asyncio.Task[None]] = field(default_factory=set)
    execs: set[asyncio.Task[Any]] = field(default_factory=set)


class FakeBackend(GuestBackend):
    """Environments in memory, behind the real wire."""

    name = "fake"
    capabilities = Capabilities(
        isolation="process",
        guest=True,
        notes={"isolation": "a made-up daemon in the server's own process, for tests", "enforces": "no limit"},
        enforces=frozenset({"cpus", "memory", "pids", "disk", "network"}),
    )

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.environments: dict[str, _Environment] = {}
        self.failures: dict[str, list[SandboxError]] = {}

    def _maybe_fail(self, method: str) -> None:
        if self.failures.get(method):
            raise self.failures[method].pop(0)

    async def start(self) -> None:
        self._maybe_fail("start")

    async def ping(self) -> None:
        self._maybe_fail("ping")

    async def resolve_image(self, name: str) -> ResolvedImage:
        if name == "missing":
            raise NotFoundError(f"there is no image {name!r}")
        return ResolvedImage(name=name, digest="", pinned=False)

    async def create(self, id: str, spec: SandboxSpec) -> None:
        if not spec.read_only_rootfs:
            raise UnsupportedError("writable_rootfs", self.name)
        if spec.network != "none":
            raise UnsupportedError("network", self.name)
        environment = _Environment(spec, os.urandom(32), {WORKSPACE: _File(None, 0o755), "/tmp": _File(None, 0o1777)})
        self.environments[id] = environment
        try:
            await asyncio.sleep(0)
            self._maybe_fail("create")
            await self.guest_ready(id)
        except BaseException:
            await self.destroy(id)
            raise

    async def destroy(self, id: str) -> None:
        self._maybe_fail("destroy")
        await self.drop_guest(id)
        environment = self.environments.pop(id, None)
        if environment is not None:
            environment.running = False
            for task in [*environment.connections, *environment.execs]:
                task.cancel()

    async def list_ids(self) -> list[str]:
        return list(self.environments)

    async def is_running(self, id: str) -> bool:
        environment = self.environments.get(id)
        return environment is not None and environment.running

    async def inspect(self, id: str) -> EnvironmentInfo:
        if id not in self.environments:
            raise NotFoundError(f"there is no environment {id!r}")
        return EnvironmentInfo(id, self.environments[id].running)

    async def import_workspace(self, id: str, src: Any, max_bytes: int) -> None:
        self._maybe_fail("import_workspace")
        await super().import_workspace(id, src, max_bytes)

    async def export_workspace(self, id: str, dest: Any, max_bytes: int) -> Any:
        self._maybe_fail("export_workspace")
        return await super().export_workspace(id, dest, max_bytes)

    async def endpoint(self, id: str) -> Endpoint:
        environment = self.environments.get(id)
        if environment is None:
            raise NotFoundError(f"there is no environment {id!r}")
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        task = asyncio.create_task(_serve(environment, theirs))
        environment.connections.add(task)
        task.add_done_callback(environment.connections.discard)
        task.add_done_callback(lambda _: theirs.close())  # also when it was cancelled before its first step
        return Endpoint(ours, environment.key, environment.spec, {"FAKE": "1"})

    async def kill_guest(self, id: str) -> None:
        environment = self.environments.get(id)
        if environment is not None:
            environment.running = False
            for task in [*environment.connections, *environment.execs]:
                task.cancel()

    def oom_kills(self, id: str) -> int | None:
        return 0 if id in self.environments else None


class _Failure(Exception):
    """An operation's error as the wire says it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# -- the daemon's side of the wire -------------------------------------------------------------------


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
    def __init__(self, environment: _Environment, sock: socket.socket) -> None:
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
                raise _Failure("unsupported", f"there is no operation {op!r}")
            result = await handler(self.environment, operation, args)
        except _Failure as failure:
            result = {"error": {"code": failure.code, "message": str(failure)}}
        except (KeyError, TypeError, ValueError) as error:
            result = {"error": {"code": "invalid_request", "message": f"{op}: {error}"}}
        self.wire.end(operation.number, result)
        try:
            await self.flush()
        except OSError:
            pass


async def _serve(environment: _Environment, sock: socket.socket) -> None:
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


# -- files ----------------------------------------------------------------------------------------------


def _text(path: bytes) -> str:
    if not path.startswith(b"/") or b"\0" in path or len(path) > 4095:
        raise _Failure("invalid_request", "a path is absolute, without NUL, and at most 4,095 bytes")
    return posixpath.normpath(os.fsdecode(path))


def _find(environment: _Environment, path: str) -> _File:
    found = environment.files.get(path)
    if found is None:
        raise _Failure("not_found", f"{path}: {os.strerror(errno.ENOENT)}")
    return found


def _entry(path: str, file: _File) -> dict[str, Any]:
    return {
        "name": os.fsencode(posixpath.basename(path)),
        "path": os.fsencode(path),
        "type": "directory" if file.data is None else "file",
        "size": len(file.data or b""),
        "mode": file.mode,
        "mtime_ns": file.mtime_ns,
    }


def _put(environment: _Environment, path: str, data: bytes, mode: int) -> _File:
    if not path.startswith(WORKSPACE + "/"):
        raise _Failure("invalid_request", f"{path}: files are written beneath {WORKSPACE} only")
    _make_directories(environment, posixpath.dirname(path))
    old = environment.files.get(path)
    if old is not None and old.data is None:
        raise _Failure("invalid_request", f"{path}: {os.strerror(errno.EISDIR)}")
    file = environment.files[path] = _File(data, mode)
    return file


def _make_directories(environment: _Environment, path: str) -> None:
    for parent in [path, *_parents(path)]:
        if environment.files.setdefault(parent, _File(None, 0o755)).data is not None:
            raise _Failure("invalid_request", f"{parent}: {os.strerror(errno.ENOTDIR)}")


def _parents(path: str) -> list[str]:
    parents = []
    while (path := posixpath.dirname(path)) not in ("/", WORKSPACE):
        parents.append(path)
    return parents


async def _stat(environment: _Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = _text(args["path"])
    return {"entry": _entry(path, _find(environment, path))}


async def _list(environment: _Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = _text(args["path"])
    if _find(environment, path).data is not None:
        raise _Failure("invalid_request", f"{path}: {os.strerror(errno.ENOTDIR)}")
    children = [_entry(p, f) for p, f in environment.files.items() if posixpath.dirname(p) == path]
    for start in range(0, len(children), 100):
        await operation.send(wire.CHANNEL_OUT, msgspec.msgpack.encode(children[start : start + 100]))
    return {"count": len(children)}


async def _read(environment: _Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = _text(args["path"])
    data = _find(environment, path).data
    if data is None:
        raise _Failure("invalid_request", f"{path}: {os.strerror(errno.EISDIR)}")
    if len(data) > args.get("max_bytes", len(data)):
        raise _Failure("too_large", f"{path}: {len(data)} bytes")
    start = args.get("offset", 0)
    data = data[start : start + args.get("length", len(data))]
    await operation.send(wire.CHANNEL_OUT, data)
    return {"size": len(data)}


async def _write(environment: _Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    path = _text(args["path"])
    data = await operation.receive()
    return {"entry": _entry(path, _put(environment, path, data, args["mode"]))}


async def _export(environment: _Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
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
        raise _Failure("too_large", f"the workspace holds {size} bytes")
    await operation.send(wire.CHANNEL_OUT, buffer.getvalue())
    return {"entries": entries, "file_bytes": size, "skipped": [], "skipped_total": 0}


async def _import(environment: _Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    data, size, entries = await operation.receive(), 0, 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as archive:
            for info in archive:
                path = posixpath.normpath(posixpath.join(WORKSPACE, info.name))
                if path != WORKSPACE and not path.startswith(WORKSPACE + "/"):
                    raise _Failure("invalid_request", f"{info.name!r} leads out of the workspace")
                content = archive.extractfile(info) if info.isreg() else None
                if content is not None:
                    file = _put(environment, path, content.read(), info.mode)
                    size += len(file.data or b"")
                else:
                    _make_directories(environment, path)
                    file = environment.files[path]
                    file.mode = info.mode
                seconds, _, fraction = str(info.pax_headers.get("mtime", info.mtime)).partition(".")
                file.mtime_ns = int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0"))
                entries += 1
                if size > args["max_bytes"]:
                    raise _Failure("too_large", f"the archive holds more than {args['max_bytes']} bytes")
    except tarfile.TarError as error:
        raise _Failure("invalid_request", f"this is no tar: {error}") from error
    return {"entries": entries, "file_bytes": size}


async def _info(environment: _Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    return {"version": "fake", "pid": 1, "uid": 1000, "gid": 1000, "execs": len(environment.execs), "uptime_ms": 0}


# -- commands ----------------------------------------------------------------------------------------------


@dataclass
class _Process:
    """What a made-up program sees."""

    environment: _Environment
    argv: list[str]
    env: dict[str, str]
    cwd: str
    out: Callable[[bytes], Awaitable[None]]
    err: Callable[[bytes], Awaitable[None]]

    def path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.cwd, name))


class _Exit(Exception):
    def __init__(self, code: int | None, signal: int | None = None) -> None:
        super().__init__()
        self.code, self.signal = code, signal


async def _exec(environment: _Environment, operation: _Operation, args: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    cwd = _text(args["cwd"])
    if environment.files.get(cwd, _File(b"", 0)).data is not None:
        raise _Failure("workdir", f"{cwd}: {os.strerror(errno.ENOENT)}")
    end: dict[str, Any] = {"timed_out": False, "user_us": 0, "system_us": 0, "max_rss_kb": 0}
    process = _Process(
        environment,
        [os.fsdecode(arg) for arg in args["argv"]],
        {os.fsdecode(name): os.fsdecode(value) for name, value in args["env"]},
        cwd,
        lambda data: operation.send(wire.CHANNEL_OUT, data),
        lambda data: operation.send(wire.CHANNEL_ERR, data),
    )
    try:
        async with asyncio.timeout(args["timeout_ms"] / 1000):
            code = await _run(process)
            end |= {"code": code}
            if code == 127:
                end["message"] = f"{process.argv[0]}: not found"
    except _Exit as done:
        end |= {"code": done.code} if done.signal is None else {"signal": done.signal}
    except TimeoutError:
        end |= {"signal": 9, "timed_out": True}
    end["wall_us"] = int((time.monotonic() - started) * 1e6)
    return end


async def _run(process: _Process) -> int:
    program = PROGRAMS.get(posixpath.basename(process.argv[0]))
    return 127 if program is None else await program(process)


async def _sh(process: _Process) -> int:
    if len(process.argv) < 3 or process.argv[1] != "-c":
        return 2
    lexer = shlex.shlex(process.argv[2], posix=True, punctuation_chars=";&>")
    lexer.whitespace_split = True
    words: list[str] = []
    code = 0
    for word in [*lexer, ";"]:
        if word not in (";", "&&"):
            words.append(word)
            continue
        if words:
            code = await _simple(process, words)
        words = []
        if word == "&&" and code:
            return code
    return code


async def _simple(shell: _Process, words: list[str]) -> int:
    expand = re.compile(r"\$(\$|\w+)")
    words = [expand.sub(lambda m: "1" if m[1] == "$" else shell.env.get(m[1], ""), word) for word in words]
    process = _Process(shell.environment, words, shell.env, shell.cwd, shell.out, shell.err)
    if len(words) > 2 and words[-2] in (">", ">>"):
        target, kept = shell.path(words[-1]), bytearray()
        if words[-2] == ">>" and target in shell.environment.files:
            kept += shell.environment.files[target].data or b""

        async def keep(data: bytes) -> None:
            kept.extend(data)

        process.argv, process.out = words[:-2], keep
        code = await _run(process)
        if target.startswith("/tmp/"):
            shell.environment.files[target] = _File(bytes(kept), 0o644)
        else:
            _put(shell.environment, target, bytes(kept), 0o644)
        return code
    if len(words) > 2 and words[-2:] == [">&", "2"]:
        process.argv, process.out = words[:-2], shell.err
    code = await _run(process)
    if code == 127:
        await shell.err(f"sh: {words[0]}: not found\n".encode())
    return code


async def _true(process: _Process) -> int:
    return 0


async def _false(process: _Process) -> int:
    return 1


async def _echo(process: _Process) -> int:
    words = process.argv[1:]
    newline = b"" if words[:1] == ["-n"] else b"\n"
    await process.out(os.fsencode(" ".join(words[1:] if not newline else words)) + newline)
    return 0


async def _cat(process: _Process) -> int:
    for name in process.argv[1:]:
        file = process.environment.files.get(process.path(name))
        if file is None or file.data is None:
            await process.err(f"cat: {name}: {os.strerror(errno.ENOENT)}\n".encode())
            return 1
        await process.out(file.data)
    return 0


async def _sleep(process: _Process) -> int:
    await asyncio.sleep(float(process.argv[1]))
    return 0


async def _pwd(process: _Process) -> int:
    await process.out(os.fsencode(process.cwd) + b"\n")
    return 0


async def _printenv(process: _Process) -> int:
    names = process.argv[1:] or sorted(process.env)
    for name in names:
        if name in process.env:
            text = process.env[name] if process.argv[1:] else f"{name}={process.env[name]}"
            await process.out(os.fsencode(text) + b"\n")
    return 0 if all(name in process.env for name in names) else 1


async def _rm(process: _Process) -> int:
    for name in process.argv[1:]:
        path = process.path(name)
        for known in [p for p in process.environment.files if p == path or p.startswith(path + "/")]:
            if known not in (WORKSPACE, "/tmp"):
                del process.environment.files[known]
    return 0


async def _mkdir(process: _Process) -> int:
    for name in process.argv[1:]:
        if not name.startswith("-"):
            _make_directories(process.environment, process.path(name))
    return 0


async def _yes(process: _Process) -> int:
    block, sent = b"y\n" * 16_384, 0
    while sent < MAX_OUTPUT:
        await process.out(block)
        sent += len(block)
    return 0


async def _leave(process: _Process) -> int:
    raise _Exit(int(process.argv[1]) & 255 if process.argv[1:] else 0)


async def _kill(process: _Process) -> int:
    if process.argv[2:] == ["1"]:
        raise _Exit(None, int(process.argv[1].lstrip("-")))
    return 1


Program = Callable[[_Process], Awaitable[int]]
PROGRAMS: Mapping[str, Program] = {
    "cat": _cat,
    "echo": _echo,
    "exit": _leave,
    "false": _false,
    "kill": _kill,
    "mkdir": _mkdir,
    "printenv": _printenv,
    "pwd": _pwd,
    "rm": _rm,
    "sh": _sh,
    "sleep": _sleep,
    "true": _true,
    "yes": _yes,
}

Operation = Callable[[_Environment, _Operation, dict[str, Any]], Awaitable[dict[str, Any]]]
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
