"""Drives one ``sandboxd`` over a connected socket.

The daemon on the other end is hostile input: a sandbox may have taken it over. So

* each reply is checked against the shape that ``spec/wire.md`` gives, and a name or count that cannot be right ends in
  :class:`BackendError`;
* what the daemon can make this process hold is bounded: the credit window for each open stream, ``MAX_BACKLOG`` of
  unsent bytes for the connection, the caller's limit for a whole reply;
* no wait is without a limit: ``STALL_SECONDS`` without progress for files and archives, the command's own deadline and
  ``EXEC_GRACE_SECONDS`` for commands, after which the caller is told by :class:`GuestStalled` and ends the guest.

One reader, many streams: bytes are turned into events by :class:`agent_sandbox.wire.Connection` and put on the queue of
their stream, whose consumer gives the credit back as it takes them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec

from agent_sandbox import wire
from agent_sandbox.errors import (
    BackendError,
    ConnectionLostError,
    ForbiddenError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    PayloadTooLargeError,
    SandboxError,
)
from agent_sandbox.types import ExecEvent, ExecExit, ExecOutput, ExportReport, FileEntry

HELLO_SECONDS = 10.0
STALL_SECONDS = 30.0
EXEC_GRACE_SECONDS = 10.0
"""The daemon has 5 s to end a tree; twice that, and the host ends the sandbox's processes itself."""
AFTER_DEADLINE_BYTES = 4 * 1024 * 1024
"""What may still come after a deadline: two pipes of at most 1 MiB, and a window."""
MAX_BACKLOG = 8 * 1024 * 1024
"""Unsent bytes beyond which a peer that does not read is dropped; uploads wait long before."""
MAX_LISTING_ENTRIES = 100_000
MAX_LISTING_BYTES = 32 * 1024 * 1024


class GuestStalled(BackendError):
    """The daemon did not end a command in time: only the host can now."""


ERRORS: Mapping[str, type[SandboxError]] = {
    "invalid_request": InvalidRequestError,
    "not_found": NotFoundError,
    "workdir": InvalidRequestError,
    "permission": ForbiddenError,
    "too_large": PayloadTooLargeError,
    "no_space": LimitExceededError,
    "exhausted": LimitExceededError,
    "stuck": GuestStalled,
    "unsupported": BackendError,
    "internal": BackendError,
}
"""The error codes of ``spec/wire.md`` as the caller's situation."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""What is counted: never below zero, and small enough for whatever stores it."""


class _Entry(msgspec.Struct):
    name: bytes
    path: bytes
    type: Literal["file", "directory", "symlink", "other"]
    size: _Count
    mode: _Count
    mtime_ns: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Exit(msgspec.Struct):
    timed_out: bool
    code: int | None = None
    signal: int | None = None
    message: str = ""
    user_us: _Count = 0
    system_us: _Count = 0
    max_rss_kb: _Count = 0
    wall_us: _Count = 0


class _Exported(msgspec.Struct):
    entries: _Count
    file_bytes: _Count
    skipped: list[tuple[bytes, str]] = []
    skipped_total: _Count = 0


class _EntryResult(msgspec.Struct):
    entry: _Entry


class GuestInfo(msgspec.Struct, frozen=True):
    """What the daemon says of itself."""

    version: str
    pid: _Count
    uid: _Count
    gid: _Count
    execs: _Count
    uptime_ms: _Count


_T = TypeVar("_T")


class Guest(asyncio.Protocol):
    """One connection to one daemon. Made by :meth:`connect`; when it is ``closed`` the caller makes another."""

    def __init__(self, key: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._wire = wire.Connection("client", key)
        self._streams: dict[int, _Stream] = {}
        self._transport: asyncio.Transport | None = None
        self._hello: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._writable = asyncio.Event()
        self._writable.set()
        self._reason = "the connection was closed"
        self.closed = False

    @classmethod
    async def connect(cls, sock: socket.socket, key: bytes, *, timeout: float = HELLO_SECONDS) -> Guest:
        """Do the hello on a connected stream socket, which belongs to the guest from now on.

        Raises :class:`BackendError` when the daemon does not answer in ``timeout`` seconds or cannot prove the key.
        """
        loop = asyncio.get_running_loop()
        guest = cls(key)
        try:
            sock.setblocking(False)
            await loop.create_connection(lambda: guest, sock=sock)
        except OSError as error:
            sock.close()
            raise BackendError(f"cannot talk to the sandbox's daemon: {error}") from error
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(guest._hello)
        except TimeoutError:
            guest.close()
            raise BackendError(f"the sandbox's daemon did not answer within {timeout:g} s") from None
        except BaseException:
            guest.close()
            raise
        return guest

    def close(self) -> None:
        """Close the connection; what runs on it fails with :class:`ConnectionLostError`. Commands go on."""
        self._lost(self._reason)

    async def wait_closed(self) -> None:
        """Return when the connection is closed."""
        await asyncio.shield(self._gone)

    # -- asyncio.Protocol ----------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape, not by class
        self._transport = transport
        transport.set_write_buffer_limits(high=512 * 1024)
        self.flush()

    def data_received(self, data: bytes) -> None:
        for event in self._wire.receive(data):
            self._dispatch(event)
        self.flush()
        if self._wire.closed:
            self._lost(self._reason)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(f"the connection broke: {exc}" if exc else "the daemon closed the connection")

    def _dispatch(self, event: wire.Event) -> None:
        match event:
            case wire.Data() | wire.Eof() | wire.Credit() | wire.Ended() | wire.Reset():
                stream = self._streams.get(event.stream)
                if stream is not None:
                    stream.put(event)
            case wire.Ready():
                if not self._hello.done():
                    self._hello.set_result(None)
            case wire.Opened():
                self._wire.reset(event.stream, "nothing is served here")
            case wire.GoAway() | wire.Violation():
                self._reason = f"{event.code}: {event.message}"
            case wire.Pong():
                pass

    def flush(self) -> None:
        """Hand what the protocol wants sent to the transport."""
        transport = self._transport
        if transport is None or transport.is_closing() or not self._wire.has_output:
            return
        transport.writelines(self._wire.data_to_send())
        if transport.get_write_buffer_size() > MAX_BACKLOG:
            self._lost("the daemon does not read what it is sent")

    def _lost(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        if self._transport is not None:
            if self._transport.get_write_buffer_size() > 0:
                self._transport.abort()
            else:
                self._transport.close()
        error = ConnectionLostError(f"the connection to the sandbox's daemon was lost ({reason})")
        if not self._hello.done():
            self._hello.set_exception(BackendError(f"the sandbox's daemon refused the connection ({reason})"))
            self._hello.exception()
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self._writable.set()
        self._gone.set_result(None)

    # -- operations ------------------------------------------------------------

    def _open(self, op: str, args: Mapping[str, Any]) -> _Stream:
        if self.closed:
            raise ConnectionLostError("the connection to the sandbox's daemon was lost")
        if not self._wire.can_open():
            raise LimitExceededError("too many operations are running in this sandbox at once")
        number = self._wire.open(op, args)
        stream = self._streams[number] = _Stream(self, number)
        self.flush()
        return stream

    async def exec(
        self,
        argv: Sequence[bytes],
        env: Sequence[tuple[bytes, bytes]],
        cwd: bytes,
        timeout_seconds: float,
    ) -> AsyncGenerator[ExecEvent, None]:
        """Run a command with exactly this environment; yield its output, then one :class:`ExecExit`.

        Leaving the generator early kills the command's tree. Raises :class:`GuestStalled` when the daemon does not keep
        the deadline, and the typed errors of the wire.
        """
        loop = asyncio.get_running_loop()
        milliseconds = max(1, round(timeout_seconds * 1000))
        args = {"argv": argv, "env": env, "cwd": cwd, "timeout_ms": milliseconds}
        stream = self._open("exec.start", args)
        deadline, late = loop.time() + timeout_seconds, 0
        try:
            await stream.send_args()
            while True:
                limit = max(deadline - loop.time(), 0.0) + EXEC_GRACE_SECONDS
                try:
                    event = await stream.next(limit)
                except TimeoutError:
                    raise GuestStalled("the sandbox's daemon did not end a command in time") from None
                match event:
                    case wire.Data():
                        late += len(event.data) if loop.time() > deadline else 0
                        if late > AFTER_DEADLINE_BYTES:
                            raise GuestStalled("the sandbox's daemon goes on after a command's deadline")
                        yield ExecOutput("stdout" if event.channel == wire.CHANNEL_OUT else "stderr", event.data)
                    case wire.Ended():
                        yield _exit(stream.result(event, _Exit))
                        return
                    case _:
                        pass
        finally:
            stream.close("the caller went away")

    async def info(self) -> GuestInfo:
        """What the daemon says of itself."""
        return await self._call("sys.info", {}, GuestInfo)

    async def stat(self, path: bytes, *, follow: bool = True) -> FileEntry:
        """One file's entry; links are followed inside the sandbox unless ``follow`` is false."""
        return _entry((await self._call("fs.stat", {"path": path, "follow": follow}, _EntryResult)).entry, path)

    async def list_files(self, path: bytes) -> list[FileEntry]:
        """The children of a directory by name. :class:`PayloadTooLargeError` above 100,000 entries or 32 MiB."""
        entries: list[FileEntry] = []
        total = 0
        async with aclosing(self._download("fs.list", {"path": path}, dict[str, Any], lambda _: None)) as pieces:
            async for piece in pieces:
                total += len(piece)
                entries += _decode_listing(piece, path)
                if len(entries) > MAX_LISTING_ENTRIES or total > MAX_LISTING_BYTES:
                    raise PayloadTooLargeError(f"the directory has more than {MAX_LISTING_ENTRIES:,} entries")
        entries.sort(key=lambda entry: os.fsencode(entry.name))
        return entries

    async def read_file(self, path: bytes, max_bytes: int) -> bytes:
        """The bytes of a regular file. :class:`PayloadTooLargeError` above ``max_bytes``."""
        content: list[bytes] = []
        size = 0
        args = {"path": path, "max_bytes": max_bytes}
        async with aclosing(self._download("fs.read", args, dict[str, Any], lambda _: None)) as pieces:
            async for piece in pieces:
                size += len(piece)
                if size > max_bytes:
                    raise PayloadTooLargeError(f"{os.fsdecode(path)!r} is larger than {max_bytes:,} bytes")
                content.append(piece)
        return b"".join(content)

    async def write_file(self, path: bytes, data: bytes, mode: int) -> FileEntry:
        """Create or replace a file beneath the workspace; parents are created."""
        view = memoryview(data)
        size = 4 * 1024 * 1024

        async def pieces() -> AsyncIterator[memoryview]:
            for start in range(0, len(view), size):
                yield view[start : start + size]

        result = await self._upload("fs.write", {"path": path, "mode": mode}, pieces(), _EntryResult)
        return _entry(result.entry, path)

    async def export_workspace(self, dest: Callable[[bytes], Awaitable[None]], max_bytes: int) -> ExportReport:
        """Write the workspace as a tar stream to ``dest``; at most ``max_bytes`` of regular files."""
        report: list[_Exported] = []
        most, size = 2 * max_bytes + 64 * 1024 * 1024, 0
        download = self._download("tar.export", {"max_bytes": max_bytes}, _Exported, report.append)
        async with aclosing(download) as pieces:
            async for piece in pieces:
                size += len(piece)
                if size > most:
                    raise PayloadTooLargeError(f"the archive of the workspace is larger than {most:,} bytes")
                await dest(piece)
        done = report[0]
        skipped = tuple((os.fsdecode(path), reason[:200]) for path, reason in done.skipped[:100])
        return ExportReport(min(done.file_bytes, size), done.entries, skipped, max(done.skipped_total, len(skipped)))

    async def import_workspace(self, src: AsyncIterator[bytes], max_bytes: int) -> None:
        """Extract a tar stream into the workspace."""
        await self._upload("tar.import", {"max_bytes": max_bytes}, src, dict[str, Any])

    async def _call(self, op: str, args: Mapping[str, Any], kind: type[_T]) -> _T:
        stream = self._open(op, args)
        try:
            return await self._finish(stream, kind)
        finally:
            stream.close("the caller went away")

    async def _finish(self, stream: _Stream, kind: type[_T]) -> _T:
        while True:
            event = await self._next(stream)
            if isinstance(event, wire.Ended):
                return stream.result(event, kind)

    async def _next(self, stream: _Stream) -> wire.Event:
        try:
            return await stream.next(STALL_SECONDS)
        except TimeoutError:
            raise BackendError(f"the sandbox's daemon did not answer for {STALL_SECONDS:g} s") from None

    async def _download(
        self, op: str, args: Mapping[str, Any], kind: type[_T], done: Callable[[_T], None]
    ) -> AsyncGenerator[bytes, None]:
        stream = self._open(op, args)
        try:
            while True:
                event = await self._next(stream)
                if isinstance(event, wire.Data):
                    yield event.data
                elif isinstance(event, wire.Ended):
                    done(stream.result(event, kind))
                    return
        finally:
            stream.close("the caller went away")

    async def _upload(
        self, op: str, args: Mapping[str, Any], pieces: AsyncIterator[bytes | memoryview], kind: type[_T]
    ) -> _T:
        stream = self._open(op, args)
        try:
            async for piece in pieces:
                if not await stream.send(wire.CHANNEL_IN, piece):
                    break
            stream.send_eof(wire.CHANNEL_IN)
            return await self._finish(stream, kind)
        finally:
            stream.close("the caller went away")


class _Stream:
    """One operation: its queue of events, and who waits for the next."""

    def __init__(self, guest: Guest, number: int) -> None:
        self._guest = guest
        self._number = number
        self._events: deque[wire.Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: ConnectionLostError | None = None
        self._over = False

    def put(self, event: wire.Event) -> None:
        self._events.append(event) if not isinstance(event, wire.Credit) else None
        self._over = self._over or isinstance(event, wire.Ended | wire.Reset)
        self._wake()

    def fail(self, error: ConnectionLostError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        handle = loop.call_later(seconds, _time_out, waiter)
        try:
            await waiter
        finally:
            handle.cancel()
            self._waiter = None

    async def next(self, seconds: float) -> wire.Event:
        """The next event; ``TimeoutError`` after so many seconds without one, :class:`ConnectionLostError`."""
        while not self._events:
            if self._error is not None:
                raise self._error
            await self._wait(seconds)
        event = self._events.popleft()
        if isinstance(event, wire.Data):
            self._guest._wire.consumed(self._number, len(event.data) + 1)
            self._guest.flush()
        elif isinstance(event, wire.Reset):
            raise BackendError(f"the sandbox's daemon gave up: {event.reason[:200]}")
        return event

    async def send(self, channel: int, data: bytes | memoryview) -> bool:
        """Send all of ``data`` as credit allows; false when the daemon has ended the operation meanwhile."""
        view = memoryview(data)
        while view:
            if self._over:
                return False
            if self._error is not None:
                raise self._error
            sent = self._guest._wire.send(self._number, channel, view)
            view = view[sent:]
            self._guest.flush()
            try:
                if not sent:
                    await self._wait(STALL_SECONDS)
                elif not self._guest._writable.is_set():
                    async with asyncio.timeout(STALL_SECONDS):
                        await self._guest._writable.wait()
            except TimeoutError:
                raise BackendError(f"the sandbox's daemon took nothing for {STALL_SECONDS:g} s") from None
        return not self._over

    async def send_args(self) -> None:
        if args := self._guest._wire.pending_args(self._number):
            await self.send(wire.CHANNEL_ARGS, args)

    def send_eof(self, channel: int) -> None:
        self._guest._wire.send_eof(self._number, channel)
        self._guest.flush()

    def result(self, event: wire.Ended, kind: type[_T]) -> _T:
        """The END map in the shape it must have, or the error that it carries."""
        error = event.result.get("error")
        if isinstance(error, dict):
            code, message = error.get("code"), error.get("message")
            text = message[:1_000] if isinstance(message, str) else "no reason was given"
            raise ERRORS.get(code if isinstance(code, str) else "", BackendError)(text)
        try:
            return msgspec.convert(event.result, kind)
        except msgspec.ValidationError as problem:
            raise BackendError(f"the sandbox's daemon sent a reply of the wrong shape: {problem}") from problem

    def close(self, reason: str) -> None:
        """Forget the stream; give it up where it is not over."""
        self._guest._streams.pop(self._number, None)
        if not self._over and not self._guest.closed:
            self._guest._wire.reset(self._number, reason)
            self._guest.flush()


def _time_out(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


def _exit(told: _Exit) -> ExecExit:
    if (told.code is None) == (told.signal is None):
        raise BackendError("the sandbox's daemon gave neither exit code nor signal, or both")
    if not 0 <= (told.code or 0) <= 255 or not 0 <= (told.signal or 0) <= 64:
        raise BackendError("the sandbox's daemon gave an exit status that cannot be")
    return ExecExit(
        code=told.code,
        signal=told.signal,
        timed_out=told.timed_out,
        message=told.message[:1_000],
        wall_seconds=told.wall_us / 1e6,
        user_seconds=told.user_us / 1e6,
        system_seconds=told.system_us / 1e6,
        max_rss_kb=told.max_rss_kb,
    )


def _entry(told: _Entry, path: bytes) -> FileEntry:
    name = path.rstrip(b"/").rpartition(b"/")[2] or b"/"
    return _file_entry(told, os.fsdecode(name), os.fsdecode(path))


def _file_entry(told: _Entry, name: str, path: str) -> FileEntry:
    return FileEntry(name, path, told.type, told.size, told.mode & 0o7777, told.mtime_ns)


_listing_decoder = msgspec.msgpack.Decoder(list[_Entry])


def _decode_listing(piece: bytes, directory: bytes) -> list[FileEntry]:
    """The entries of one frame of a listing."""
    try:
        listed = _listing_decoder.decode(piece)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BackendError("the sandbox's daemon sent a broken listing") from error
    base = os.fsdecode(directory.rstrip(b"/") + b"/")
    entries: list[FileEntry] = []
    for told in listed:
        name = told.name
        if not name or len(name) > 255 or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise BackendError("the sandbox's daemon listed a name that cannot be")
        text = os.fsdecode(name)
        entries.append(_file_entry(told, text, base + text))
    return entries
