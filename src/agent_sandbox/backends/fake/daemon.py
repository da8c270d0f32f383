"""The operations of the made-up daemon."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from typing import Any

from agent_sandbox import wire
from agent_sandbox.backends.fake import execs, files
from agent_sandbox.backends.fake.session import Handler, Operation, Session
from agent_sandbox.backends.fake.state import Environment, Failure, text


async def _dial(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    where = args.get("port") or text(args["path"])
    if where not in environment.listeners:
        raise Failure("not_found", f"{where}: {os.strerror(errno.ECONNREFUSED)}")
    await operation.note(connected=True)
    size = 0
    async for piece in operation.pieces():
        size += len(piece)
        await operation.send(wire.CHANNEL_OUT, piece)
    await operation.send_eof(wire.CHANNEL_OUT)
    return {"sent": size, "received": size}


async def _info(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    return {"version": "fake", "pid": 1, "uid": 1000, "gid": 1000, "execs": len(environment.commands), "uptime_ms": 0}


async def _stats(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    commands = environment.commands.values()
    return {
        "processes": 1 + len(environment.execs),
        "execs": len(commands),
        "memory_bytes": sum(len(file.data or b"") for file in environment.files.values()),
        "ring_bytes": sum(command.cursor - command.first for command in commands),
    }


async def _sync(environment: Environment, operation: Operation, args: dict[str, Any]) -> dict[str, Any]:
    return {}


OPERATIONS: Mapping[str, Handler] = {
    "exec.start": execs.start,
    "exec.attach": execs.attach,
    "exec.list": execs.list_all,
    "exec.status": execs.status,
    "exec.stdin": execs.stdin,
    "exec.close": execs.close,
    "exec.signal": execs.signal,
    "exec.resize": execs.resize,
    "exec.forget": execs.forget,
    "fs.stat": files.stat,
    "fs.list": files.list_directory,
    "fs.read": files.read,
    "fs.write": files.write,
    "fs.mkdir": files.mkdir,
    "fs.move": files.move,
    "fs.remove": files.remove,
    "fs.chmod": files.chmod,
    "fs.watch": files.watch,
    "tar.export": files.export_tar,
    "tar.import": files.import_tar,
    "net.dial": _dial,
    "sys.info": _info,
    "sys.stats": _stats,
    "sys.sync": _sync,
}


async def serve(environment: Environment, sock: socket.socket) -> None:
    """Serve one connection until it ends."""
    await Session(environment, sock, OPERATIONS).serve()
