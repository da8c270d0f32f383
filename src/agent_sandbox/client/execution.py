"""Kept commands of one sandbox: :class:`Execution`, and the part of ``Sandbox`` that starts and lists them."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Self

from agent_sandbox import models
from agent_sandbox.client import exec_requests, requests
from agent_sandbox.client.errors import ReplyLostError, from_last_line
from agent_sandbox.client.exec_requests import Collected, Reading, Size
from agent_sandbox.client.http import Http
from agent_sandbox.client.local_files import Input, of_input
from agent_sandbox.client.terminal import Terminal, terminal_parameters
from agent_sandbox.errors import ConflictError, NotFoundError, SandboxError


class Execution:
    """A command that is kept inside the sandbox under its :attr:`id`; ``info`` is the server's last word on it."""

    def __init__(self, http: Http, sandbox_id: str, info: models.Exec) -> None:
        self._http = http
        self._sandbox_id = sandbox_id
        self._live: Generator[models.ExecOutputEvent, None, None] | None = None
        self.info = info

    @classmethod
    def _attached(cls, http: Http, sandbox_id: str, events: Generator[models.ExecOutputEvent, None, None]) -> Self:
        first = next(events, None)
        if first is None:
            raise ReplyLostError("the command's output ended before it began; how it ended is unknown")
        if first.type == "error":
            raise exec_requests.broken(first)
        execution = cls(http, sandbox_id, exec_requests.first_seen(first))
        execution._live = _after(first, events)
        return execution

    @property
    def id(self) -> str:
        """The command's id in its sandbox."""
        return self.info.id

    def __repr__(self) -> str:
        return f"Execution(id={self.id!r}, status={self.info.status!r})"

    def refresh(self) -> Self:
        """Ask the server for its present state."""
        self.info = self._http.send(exec_requests.get(self._sandbox_id, self.id))
        return self

    def output(self, cursor: int = 0, *, follow: bool = True) -> Generator[models.ExecOutputEvent, None, None]:
        """Yield output from byte ``cursor`` on, then what comes, at last ``exit``; without ``follow`` what is there.

        A connection that breaks is made again, and reading goes on behind the last byte that came. Of a command that
        was started with ``detach=False`` the first call reads the stream that loses nothing, from the start: closing
        it ends the command. No stream just ends before the command does.
        """
        live, self._live = self._live, None
        reading = Reading(self._sandbox_id, self.id, cursor, follow=follow)
        while True:
            source, live = live or self._http.lines(reading.call()), None
            try:
                with closing(source) as events:
                    for event in events:
                        yield reading.take(event)
                        if reading.over:
                            return
                reading.end()
                return
            except SandboxError as error:
                pause = reading.pause(error)
            time.sleep(pause)

    def wait(self) -> models.Exec:
        """Wait for the command's end and return how it ended; its output stays where it is."""
        while self.refresh().info.status == "running":
            with closing(self.output(self.info.cursor)) as events:
                for _ in events:
                    pass
        return self.info

    def signal(self, signal: str | int = "TERM") -> int:
        """Send a signal, by name or number, to every process of the command; return how many those are.

        :class:`NotFoundError` when it has ended.
        """
        return self._http.send(exec_requests.signal(self._sandbox_id, self.id, signal))

    def write_stdin(self, data: Input, *, close: bool = False) -> int:
        """Send bytes to standard input, and with ``close`` its end behind them; return how many were taken.

        Waits while the command does not read. :class:`NotFoundError` when it has ended or takes none.
        """
        if isinstance(data, (bytes, str)):
            content = data.encode() if isinstance(data, str) else data
            return self._http.send(exec_requests.stdin(self._sandbox_id, self.id, content, close=close))
        return self._http.send(exec_requests.stdin(self._sandbox_id, self.id, None, close=close), of_input(data))

    def close_stdin(self) -> None:
        """End standard input behind what was sent before."""
        self._http.send(exec_requests.stdin(self._sandbox_id, self.id, b"", close=True))

    def resize(self, rows: int, cols: int) -> None:
        """Change the size of the command's terminal."""
        self._http.send(exec_requests.resize(self._sandbox_id, self.id, rows, cols))

    def delete(self) -> None:
        """End the command with every process that it started, if it runs, and forget it."""
        self._http.send(exec_requests.delete(self._sandbox_id, self.id))

    @contextmanager
    def feeding(self, stdin: Input) -> Iterator[None]:
        """Send standard input to its end on a thread of its own while the block reads the output.

        An error while ``stdin`` is read or sent ends the command, and is raised at the end of the block. That the
        command ends, or closes its input, before it has taken all is no error.
        """
        failed: list[Exception] = []

        def feed() -> None:
            try:
                self.write_stdin(stdin, close=True)
            except (NotFoundError, ConflictError):
                pass  # it has ended, or wants no more: both are its own affair
            except Exception as error:  # noqa: BLE001 - told to who reads the output
                failed.append(error)
                self._end_quietly()

        # It may be reading a pipe that never ends, so nobody waits for it.
        threading.Thread(target=feed, name="stdin", daemon=True).start()
        yield
        if failed:
            raise failed[0]

    def communicate(self, stdin: Input) -> models.ExecResult:
        """Send standard input to its end, collect the output until the command's end, and return both as a result.

        The first 10 MiB of output are kept. An error while ``stdin`` is read ends the command and is raised.
        """
        collected = Collected()
        with closing(self.output()) as events, self.feeding(stdin):
            for event in events:
                if (result := collected.take(event)) is not None:
                    break
            else:
                raise AssertionError("a stream ends with an exit or raises")
        return result

    def _end_quietly(self) -> None:
        try:
            self.signal("KILL")
        except SandboxError:
            pass


def _after(
    first: models.ExecOutputEvent, events: Generator[models.ExecOutputEvent, None, None]
) -> Generator[models.ExecOutputEvent, None, None]:
    with closing(events):
        yield first
        yield from events


class SandboxCommands:
    """Commands: a string is run by ``/bin/sh -c``, a sequence as it is."""

    _http: Http

    @property
    def id(self) -> str:
        raise NotImplementedError

    def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout_seconds: float | None = None,
        stdin: Input | None = None,
    ) -> models.ExecResult:
        """Run a command to its end: a string by ``/bin/sh -c``, a sequence as it is.

        Waits as long as the command may run. A non-zero exit code is a result, not an error. ``stdin`` is bytes, text,
        an open binary file or pieces of bytes; without it standard input is empty.
        """
        if stdin is None:
            call = requests.exec(self.id, command, env=env, workdir=workdir, timeout_seconds=timeout_seconds)
            return self._http.send(call)
        execution = self.start_exec(
            command, env=env, workdir=workdir, timeout_seconds=timeout_seconds, stdin=True, detach=False
        )
        return execution.communicate(stdin)

    def exec_stream(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Generator[models.ExecEvent, None, None]:
        """Run a command and yield its output as it arrives, at last the ``exit`` event.

        Closing the iterator early kills the command. A stream that breaks raises the server's reason, or
        :class:`ReplyLostError`; it never just ends.
        """
        call = requests.exec_stream(self.id, command, env=env, workdir=workdir, timeout_seconds=timeout_seconds)
        with closing(self._http.lines(call)) as events:
            for event in events:
                if event.type == "error":
                    raise from_last_line(event.data)
                yield event
                if event.type == "exit":
                    return
        raise ReplyLostError("the command's output ended without an exit status; how it ended is unknown")

    def start_exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout_seconds: float | None = None,
        stdin: bool = False,
        tty: Size | None = None,
        tag: str = "",
        detach: bool = True,
        idempotency_key: str | None = None,
    ) -> Execution:
        """Start a command that is kept, and return its handle once the program runs.

        It outlives this program and the server, and nobody has to read its output, of which the newest 1 MiB is kept.
        With ``detach=False`` the handle's first :meth:`Execution.output` loses nothing, holds the command back, and
        ends it when it is closed. ``stdin`` leaves standard input open; ``tty`` is a terminal's (rows, columns).
        A program that cannot be started has exited, with code 127 or 126 and a ``message``. A broken connection is
        tried again under the same ``idempotency_key``, made up where none is given, so that it starts once.
        """
        options: dict[str, Any] = {"env": env, "workdir": workdir, "timeout_seconds": timeout_seconds}
        options |= {"stdin": stdin, "tty": tty, "tag": tag}
        if detach:
            call = exec_requests.start(self.id, command, **options, idempotency_key=idempotency_key)
            return Execution(self._http, self.id, self._http.send(call))
        events = self._http.lines(exec_requests.start_attached(self.id, command, **options))
        try:
            return Execution._attached(self._http, self.id, events)
        except BaseException:
            events.close()
            raise

    def execs(self) -> list[Execution]:
        """List the commands that are kept, oldest first: those that run, and the last that ended."""
        found = self._http.send(exec_requests.list_execs(self.id))
        return [Execution(self._http, self.id, info) for info in found]

    def get_exec(self, exec_id: str) -> Execution:
        """Find a kept command by its id."""
        return Execution(self._http, self.id, self._http.send(exec_requests.get(self.id, exec_id)))

    def terminal(
        self,
        command: str | None = None,
        *,
        size: Size = (24, 80),
        workdir: str | None = None,
        term: str | None = None,
        timeout_seconds: float | None = None,
        tag: str = "",
    ) -> Terminal:
        """Start a command (a login shell when it is left out) on a terminal of ``size`` (rows, columns).

        Closing it ends the command. Needs the extra ``terminal``.
        """
        parameters = terminal_parameters(command, workdir, term, timeout_seconds, tag)
        return Terminal.open(self._http, exec_requests.terminal_path(self.id, size, **parameters))

    def attach_terminal(self, exec_id: str, *, size: Size = (24, 80), cursor: int = 0) -> Terminal:
        """Attach to a kept command that has a terminal, from byte ``cursor`` of its output on.

        Closing it ends nothing. Needs the extra ``terminal``.
        """
        path = exec_requests.terminal_path(self.id, size, exec=exec_id, cursor=str(cursor))
        return Terminal.open(self._http, path)
