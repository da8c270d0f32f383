"""Commands: plain ones, which live with their call, and those that are kept in the sandbox as objects.

A plain command takes no lock and no database: it is the hot path. Status and output of a kept one live in the sandbox's
daemon, so they survive this server; nothing of them is written here. Both keep their sandbox from expiring while they
run (``entries.py``).
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing

from agent_sandbox.backends.base import Backend
from agent_sandbox.errors import BackendError, SandboxError, UnsupportedError
from agent_sandbox.manager import policy
from agent_sandbox.manager.core import Core, new_id
from agent_sandbox.manager.policy import CommandOptions
from agent_sandbox.manager.records import CommandResult
from agent_sandbox.types import (
    WORKSPACE,
    AttachEvent,
    ExecEvent,
    ExecExit,
    ExecOutput,
    ExecRequest,
    ExecStatus,
    TerminalSize,
)

# What a command may take beyond its deadline, until its tree is ended and its output read.
_GRACE_SECONDS = 10.0
_SHOWN_ARGV_BYTES = 4_096


class Commands(Core):
    """The calls on commands."""

    def exec_stream(
        self,
        id: str,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[ExecEvent, None]:
        """Run a command: output as it arrives, then exactly one exit. Close the generator to end the command's tree.

        What is wrong with the request is raised by the call itself; what the backend refuses (a missing ``workdir``: an
        :class:`InvalidRequestError`) with the first item. A sandbox that is destroyed, stopped or rolled back meanwhile
        gives :class:`NotFoundError` or :class:`ConflictError` in place of the exit.
        """
        self._fleet.usable(id)
        return self._events(
            id,
            policy.command_argv(command),
            policy.validate_env(env or {}),
            WORKSPACE if workdir is None else policy.normalize_path(workdir),
            policy.exec_timeout(timeout_seconds, self._settings),
        )

    async def exec(
        self,
        id: str,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout_seconds: float | None = None,
    ) -> CommandResult:
        """Run a command to its end. Output beyond MAX_EXEC_OUTPUT_BYTES of both streams is drained and dropped."""
        started = time.monotonic()
        kept = {"stdout": bytearray(), "stderr": bytearray()}
        room, truncated = self._settings.max_exec_output_bytes, False
        events = self.exec_stream(id, command, env=env, workdir=workdir, timeout_seconds=timeout_seconds)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ExecExit):
                    duration = round((time.monotonic() - started) * 1000)
                    return CommandResult(bytes(kept["stdout"]), bytes(kept["stderr"]), event, truncated, duration)
                kept[event.stream] += event.data[:room]
                truncated = truncated or len(event.data) > room
                room -= min(room, len(event.data))
        raise AssertionError("a stream of events ends with an exit or an error")

    async def _events(
        self, id: str, argv: list[str], env: Mapping[str, str], workdir: str, timeout: float
    ) -> AsyncGenerator[ExecEvent, None]:
        with self._active():
            entry, backend = self._fleet.usable(id)
            life = entry.life
            token = self._fleet.begin_command(entry, timeout + _GRACE_SECONDS)
            try:
                stream = backend.exec(life.env_id, argv, env=env, workdir=workdir, timeout_seconds=timeout)
                async with aclosing(stream) as events:
                    async for event in events:
                        if isinstance(event, ExecOutput):
                            yield event
                            continue
                        if (ended := entry.ended(life)) is not None:
                            raise ended
                        yield event
                        return
            except SandboxError as error:
                if (told := await self._explained(entry, backend, life, error)) is not error:
                    raise told from error
                raise
            finally:
                self._fleet.end_command(entry, token)
            raise entry.ended(life) or BackendError("the command ended and the guest did not say how")

    # Commands as objects

    def open_exec(self, id: str, options: CommandOptions) -> tuple[str, AsyncGenerator[AttachEvent, None]]:
        """Give the id of a new command, and what it yields as its one lossless reader: it starts with the first item.

        The rules of :meth:`exec_stream` hold; the first item is an :class:`ExecStarted`, unless the program cannot be
        started. A server that dies does not end the command.
        """
        request = self._request(id, options)
        return request.id, self._opened(id, request)

    async def _opened(self, id: str, request: ExecRequest) -> AsyncGenerator[AttachEvent, None]:
        entry, _ = self._fleet.usable(id)
        life = entry.life
        token = self._fleet.begin_command(entry, request.timeout_seconds + _GRACE_SECONDS)
        try:
            async with aclosing(self._stream(id, lambda backend, env: backend.open_exec(env, request))) as events:
                async for event in events:
                    if isinstance(event, ExecExit) and (ended := entry.ended(life)) is not None:
                        raise ended
                    yield event
        finally:
            self._fleet.end_command(entry, token)

    async def start_exec(self, id: str, options: CommandOptions) -> ExecStatus:
        """Start a command that outlives the caller and this server, and give its status at that moment.

        A program that cannot be started is one that has ended, with code 127 or 126 and a message. Errors as of
        :meth:`exec_stream`; :class:`LimitExceededError` when the sandbox has no room for another command.
        """
        request = self._request(id, options)
        entry, _ = self._fleet.usable(id)
        entry.kept[request.id] = self._clock() + request.timeout_seconds + _GRACE_SECONDS
        try:
            pid = await self._on(id, lambda backend, env: backend.start_exec(env, request))
            if pid == 0:
                return await self.exec_status(id, request.id)
        except SandboxError:
            entry.kept.pop(request.id, None)
            raise
        return ExecStatus(
            id=request.id,
            tag=request.tag,
            argv=_shown(request.argv),
            pid=pid,
            started_at=self._clock(),
            running=True,
            tty=request.tty is not None,
            cursor=0,
            first=0,
            exit=None,
        )

    def _request(self, id: str, options: CommandOptions) -> ExecRequest:
        _, backend = self._fleet.usable(id)
        request = policy.kept_command(options, self._settings, new_id("ex"))
        if options.root:
            raise UnsupportedError(
                "user root", backend.name, "the kernel is shared; leave user out to run as the sandbox's own"
            )
        return request

    async def list_execs(self, id: str) -> list[ExecStatus]:
        """Give the commands that are kept, oldest first."""
        return await self._on(id, lambda backend, env: backend.list_execs(env))

    async def exec_status(self, id: str, exec_id: str) -> ExecStatus:
        """Give one command. :class:`NotFoundError` for an unknown or forgotten one, here and below."""
        return await self._on(id, lambda backend, env: backend.exec_status(env, exec_id))

    def attach_exec(self, id: str, exec_id: str, *, cursor: int, follow: bool) -> AsyncGenerator[AttachEvent, None]:
        """Read a command's output from a byte on, then what comes and its exit; without ``follow`` what there is now.

        :class:`InvalidRequestError` for a cursor ahead of the output.
        """

        def open(backend: Backend, env: str) -> AsyncGenerator[AttachEvent, None]:
            return backend.attach_exec(env, exec_id, cursor=cursor, follow=follow)

        return self._stream(id, open)

    async def write_stdin(self, id: str, exec_id: str, src: AsyncIterator[bytes]) -> int:
        """Send bytes to a command's standard input and give how many it took; waits while it does not read.

        :class:`NotFoundError` also when it has ended or takes no input.
        """
        return await self._on(id, lambda backend, env: backend.write_stdin(env, exec_id, src))

    async def close_stdin(self, id: str, exec_id: str) -> None:
        """End a command's standard input behind what was sent before."""
        await self._on(id, lambda backend, env: backend.close_stdin(env, exec_id))

    async def signal_exec(self, id: str, exec_id: str, signal: str | int) -> int:
        """Send a signal, by name or number, to every process of a command; give how many those were."""
        number = policy.signal_number(signal)
        return await self._on(id, lambda backend, env: backend.signal_exec(env, exec_id, number))

    async def resize_exec(self, id: str, exec_id: str, size: TerminalSize) -> None:
        """Change the size of a command's terminal. :class:`InvalidRequestError` when it has none."""
        wanted = policy.terminal_size(size)
        await self._on(id, lambda backend, env: backend.resize_exec(env, exec_id, wanted))

    async def forget_exec(self, id: str, exec_id: str) -> None:
        """End a command with its whole tree if it runs, and forget it."""
        await self._on(id, lambda backend, env: backend.forget_exec(env, exec_id))
        if (entry := self._fleet.entries.get(id)) is not None:
            entry.kept.pop(exec_id, None)


def _shown(argv: Sequence[str]) -> tuple[str, ...]:
    """Cut an argument list as the daemon does."""
    shown, left = [], _SHOWN_ARGV_BYTES
    for argument in argv:
        if left <= 0:
            break
        raw = os.fsencode(argument)[:left]
        left -= len(raw)
        shown.append(os.fsdecode(raw))
    return tuple(shown)
