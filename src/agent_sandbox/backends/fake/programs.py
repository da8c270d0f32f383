"""The made-up programs and their shell."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from agent_sandbox.backends.fake.state import Environment, File, make_directories, put
from agent_sandbox.types import WORKSPACE

MAX_OUTPUT = 64 * 1024 * 1024
"""Most output of one made-up command; ``yes`` stops there."""


@dataclass
class Process:
    """What a made-up program sees."""

    environment: Environment
    argv: list[str]
    env: dict[str, str]
    cwd: str
    out: Callable[[bytes], Awaitable[None]]
    err: Callable[[bytes], Awaitable[None]]
    input: Callable[[], Awaitable[bytes]] | None
    """The next bytes of standard input; ``None`` where it is empty."""
    terminal: Callable[[], Mapping[str, int] | None]

    def path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.cwd, name))


class Exit(Exception):
    def __init__(self, code: int | None, signal: int | None = None) -> None:
        super().__init__()
        self.code, self.signal = code, signal


async def run(process: Process) -> int:
    program = PROGRAMS.get(posixpath.basename(process.argv[0]))
    return 127 if program is None else await program(process)


async def _sh(process: Process) -> int:
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


async def _simple(shell: Process, words: list[str]) -> int:
    expand = re.compile(r"\$(\$|\w+)")
    words = [expand.sub(lambda m: "1" if m[1] == "$" else shell.env.get(m[1], ""), word) for word in words]
    process = replace(shell, argv=words)
    if len(words) > 2 and words[-2] in (">", ">>"):
        target, kept = shell.path(words[-1]), bytearray()
        if words[-2] == ">>" and target in shell.environment.files:
            kept += shell.environment.files[target].data or b""

        async def keep(data: bytes) -> None:
            kept.extend(data)

        process.argv, process.out = words[:-2], keep
        code = await run(process)
        if target.startswith("/tmp/"):
            shell.environment.files[target] = File(bytes(kept), 0o644)
        else:
            put(shell.environment, target, bytes(kept), 0o644)
        return code
    if len(words) > 2 and words[-2:] == [">&", "2"]:
        process.argv, process.out = words[:-2], shell.err
    code = await run(process)
    if code == 127:
        await shell.err(f"sh: {words[0]}: not found\n".encode())
    return code


async def _true(process: Process) -> int:
    return 0


async def _false(process: Process) -> int:
    return 1


async def _echo(process: Process) -> int:
    words = process.argv[1:]
    newline = b"" if words[:1] == ["-n"] else b"\n"
    await process.out(os.fsencode(" ".join(words[1:] if not newline else words)) + newline)
    return 0


async def _copy(process: Process) -> bytes:
    copied = bytearray()
    while process.input is not None and (data := await process.input()):
        copied += data
        await process.out(data)
    return bytes(copied)


async def _cat(process: Process) -> int:
    if not process.argv[1:]:
        await _copy(process)
    for name in process.argv[1:]:
        file = process.environment.files.get(process.path(name))
        if file is None or file.data is None:
            await process.err(f"cat: {name}: {os.strerror(errno.ENOENT)}\n".encode())
            return 1
        await process.out(file.data)
    return 0


async def _tee(process: Process) -> int:
    copied = await _copy(process)
    for name in process.argv[1:]:
        put(process.environment, process.path(name), copied, 0o644)
    return 0


async def _stty(process: Process) -> int:
    size = process.terminal()
    if process.argv[1:] != ["size"] or size is None:
        await process.err(f"stty: 'standard input': {os.strerror(errno.ENOTTY)}\n".encode())
        return 1
    await process.out(f"{size['rows']} {size['cols']}\n".encode())
    return 0


async def _echo_server(process: Process) -> int:
    """Answer on a port, or at a path, what was sent; for as long as it runs."""
    where = int(process.argv[1]) if process.argv[1].isdigit() else process.path(process.argv[1])
    process.environment.listeners.add(where)
    try:
        await process.out(b"listening\n")
        await asyncio.Event().wait()
    finally:
        process.environment.listeners.discard(where)
    return 0


async def _sleep(process: Process) -> int:
    await asyncio.sleep(float(process.argv[1]))
    return 0


async def _pwd(process: Process) -> int:
    await process.out(os.fsencode(process.cwd) + b"\n")
    return 0


async def _printenv(process: Process) -> int:
    names = process.argv[1:] or sorted(process.env)
    for name in names:
        if name in process.env:
            text = process.env[name] if process.argv[1:] else f"{name}={process.env[name]}"
            await process.out(os.fsencode(text) + b"\n")
    return 0 if all(name in process.env for name in names) else 1


async def _rm(process: Process) -> int:
    for name in process.argv[1:]:
        path = process.path(name)
        for known in [p for p in process.environment.files if p == path or p.startswith(path + "/")]:
            if known not in (WORKSPACE, "/tmp"):
                del process.environment.files[known]
    return 0


async def _mkdir(process: Process) -> int:
    for name in process.argv[1:]:
        if not name.startswith("-"):
            make_directories(process.environment, process.path(name))
    return 0


async def _yes(process: Process) -> int:
    block, sent = b"y\n" * 16_384, 0
    while sent < MAX_OUTPUT:
        await process.out(block)
        sent += len(block)
    return 0


async def _leave(process: Process) -> int:
    raise Exit(int(process.argv[1]) & 255 if process.argv[1:] else 0)


async def _hog(process: Process) -> int:
    """Take more memory than there is."""
    process.environment.oom_kills += 1
    raise Exit(None, 9)


async def _kill(process: Process) -> int:
    if process.argv[2:] == ["1"]:
        raise Exit(None, int(process.argv[1].lstrip("-")))
    return 1


Program = Callable[[Process], Awaitable[int]]
PROGRAMS: Mapping[str, Program] = {
    "cat": _cat,
    "echo": _echo,
    "echo-server": _echo_server,
    "exit": _leave,
    "false": _false,
    "hog": _hog,
    "kill": _kill,
    "mkdir": _mkdir,
    "printenv": _printenv,
    "pwd": _pwd,
    "rm": _rm,
    "sh": _sh,
    "sleep": _sleep,
    "stty": _stty,
    "tee": _tee,
    "true": _true,
    "yes": _yes,
}
