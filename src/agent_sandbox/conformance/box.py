"""A backend and one environment on it, as the suites use them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from agent_sandbox.backends.base import Backend
from agent_sandbox.errors import LimitExceededError
from agent_sandbox.types import WORKSPACE, ExecExit, ExecOutput, SandboxSpec

_numbers = itertools.count(1)
_RUN = secrets.token_hex(2)
"""Two runs on one engine make things of different names."""
MAX_BYTES = 256 * 1024 * 1024


def new_id() -> str:
    """An environment id that nothing else in this run has."""
    return f"sbkit{_RUN}{next(_numbers):04d}-1"


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command gave."""

    stdout: bytes
    stderr: bytes
    exit: ExecExit
    chunks: int

    @property
    def text(self) -> str:
        return self.stdout.decode()

    @property
    def status(self) -> int:
        """The exit code as a shell shows it."""
        return self.exit.code if self.exit.code is not None else 128 + (self.exit.signal or 0)


@dataclasses.dataclass(frozen=True)
class Box:
    """One environment."""

    backend: Backend
    id: str
    spec: SandboxSpec

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str = WORKSPACE,
        timeout: float = 60.0,
    ) -> Result:
        """Run a shell command (text) or a program (list) to its end."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        end: ExecExit | None = None
        events = self.backend.exec(self.id, argv, env=env or {}, workdir=workdir, timeout_seconds=timeout)
        async with aclosing(events):
            async for event in events:
                assert end is None, "something came after the exit"
                if isinstance(event, ExecOutput):
                    assert event.data, "an empty chunk"
                    output[event.stream].append(event.data)
                else:
                    end = event
        assert end is not None, "no exit came"
        assert (end.code is None) != (end.signal is None), "exactly one of code and signal"
        chunks = len(output["stdout"]) + len(output["stderr"])
        return Result(b"".join(output["stdout"]), b"".join(output["stderr"]), end, chunks)

    async def shell(self, command: str, **options: Any) -> str:
        """Run a shell command that must succeed and return what it printed."""
        result = await self.run(command, **options)
        assert result.status == 0, f"{command!r} ended with {result.exit}: {result.stderr!r} {result.stdout!r}"
        return result.text

    async def python(self, program: str, **options: Any) -> Result:
        """Run a Python program inside (the image must have python3)."""
        return await self.run(["python3", "-c", program], **options)

    async def put(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file of the workspace through the backend."""
        await self.backend.write_file(self.id, f"{WORKSPACE}/{name}", data, mode)

    async def get(self, path: str) -> bytes:
        """Read a file through the backend; relative to the workspace."""
        path = path if path.startswith("/") else f"{WORKSPACE}/{path}"
        return await self.backend.read_file(self.id, path, MAX_BYTES)

    async def export(self) -> bytes:
        """The workspace as a tar."""
        pieces: list[bytes] = []

        async def keep(data: bytes) -> None:
            pieces.append(data)

        await self.backend.export_workspace(self.id, keep, MAX_BYTES)
        return b"".join(pieces)

    async def load(self, archive: bytes, max_bytes: int = MAX_BYTES) -> None:
        """Import a tar into the workspace."""

        async def pieces() -> Any:
            for start in range(0, len(archive), 65_536):
                yield archive[start : start + 65_536]

        await self.backend.import_workspace(self.id, pieces(), max_bytes)

    async def answers_again(self, seconds: float = 30.0) -> bool:
        """Whether a command runs, now or soon: the kernel gives processes back a little after they have ended."""
        for _ in range(int(seconds / 0.1)):
            try:
                return (await self.run(["echo", "alive"])).text == "alive\n"
            except LimitExceededError:
                await asyncio.sleep(0.1)
        return False

    async def processes(self, needle: str) -> int:
        """How many processes inside have ``needle`` in their command line, this search left out."""
        script = (
            "import os,sys\nn=0\nfor p in os.listdir('/proc'):\n"
            " if p.isdigit() and int(p)!=os.getpid():\n"
            "  try: n+=sys.argv[1].encode() in open(f'/proc/{p}/cmdline','rb').read()\n"
            "  except OSError: pass\nprint(n)"
        )
        return int((await self.run(["python3", "-c", script, needle])).text)

    async def gone(self, needle: str, seconds: float = 30.0) -> bool:
        """Whether no process inside has ``needle`` in its command line, now or soon."""
        for _ in range(int(seconds / 0.1)):
            if await self.processes(needle) == 0:
                return True
            await asyncio.sleep(0.1)
        return False
