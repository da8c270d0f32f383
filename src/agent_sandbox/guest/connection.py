"""One connection to one daemon, and the operations that run on it.

One reader, many streams: bytes are turned into events by :class:`agent_sandbox.wire.Connection` and put on the queue of
their stream, whose consumer gives the credit back as it takes them. A timer asks the daemon for a sign of life while
anything waits for it.

::

    Connection   connect ──hello──► open ──close, GOAWAY, violation, no PONG, backlog──► closed (all streams fail)
    Stream       open ──END / RESET either way──► over
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Self, TypeVar, cast

from agent_sandbox import wire
from agent_sandbox.errors import BackendError, ConnectionLostError, LimitExceededError
from agent_sandbox.guest import limits, replies
from agent_sandbox.guest.channel import Carrier, Channel

T = TypeVar("T")


class Connection(asyncio.Protocol):
    """A connection. Made by :meth:`connect`; when it is ``closed`` the caller makes another."""

    def __init__(self, key: bytes, *, carrier: Carrier = Carrier.SOCKET) -> None:
        loop = asyncio.get_running_loop()
        self._in_machine = carrier is not Carrier.SOCKET
        self.wire = wire.Connection("client", key, clock=time.time_ns if self._in_machine else None)
        self._channel = Channel() if carrier is Carrier.PORT else None
        self.writable = asyncio.Event()
        self.writable.set()
        self.closed = False
        self._streams: dict[int, Stream] = {}
        self._transport: asyncio.Transport | None = None
        self._hello: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._reason = "the connection was closed"
        self._heart: asyncio.TimerHandle | None = None
        self._pings = 0
        self._asked = b""
        self._missed = 0

    @classmethod
    async def connect(
        cls,
        sock: socket.socket,
        key: bytes,
        *,
        timeout: float = limits.HELLO_SECONDS,
        carrier: Carrier = Carrier.SOCKET,
    ) -> Self:
        """Do the hello on a connected stream socket, which belongs to the guest from now on.

        In a machine the clock is set by the hello. Raises :class:`BackendError` when the daemon does not answer in
        ``timeout`` seconds or cannot prove the key, :class:`ConnectionLostError` when it ends the connection.
        """
        loop = asyncio.get_running_loop()
        guest = cls(key, carrier=carrier)
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

    @property
    def grace_seconds(self) -> float:
        """How long after its deadline a command may take to be ended."""
        return limits.MACHINE_GRACE_SECONDS if self._in_machine else limits.EXEC_GRACE_SECONDS

    async def wait_closed(self) -> None:
        """Return when the connection is closed."""
        await asyncio.shield(self._gone)

    # -- asyncio.Protocol ----------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape, not by class
        self._transport = transport
        transport.set_write_buffer_limits(high=512 * 1024)
        if self._channel is not None:
            transport.write(self._channel.begin())
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._channel is not None and not self._channel.open:
            try:
                data = self._channel.receive(data)
            except wire.ProtocolError as error:
                self._lost(str(error))
                return
        for event in self.wire.receive(data):
            self._dispatch(event)
        self.flush()
        if self.wire.closed:
            self._lost(self._reason)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

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
                self.wire.reset(event.stream, "nothing is served here")
            case wire.GoAway() | wire.Violation():
                self._reason = f"{event.code}: {event.message}"
            case wire.Pong():
                if event.payload == self._asked:
                    self._asked, self._missed = b"", 0

    def flush(self) -> None:
        """Hand what the protocol wants sent to the transport."""
        transport = self._transport
        if transport is None or transport.is_closing() or not self.wire.has_output:
            return
        if self._channel is None:
            transport.writelines(self.wire.data_to_send())
        elif self._channel.open:
            transport.writelines(self._channel.send(self.wire.data_to_send()))
        if transport.get_write_buffer_size() > limits.MAX_BACKLOG:
            self._lost("the daemon does not read what it is sent")

    def _beat(self) -> None:
        """Ask whether the daemon lives, while something waits for it.

        Beats are counted, not seconds: when this process itself was held up, the answer is there before the next one.
        """
        self._heart = None
        if self.closed or not self._streams:
            return
        if self._asked:
            self._missed += 1
            if self._missed >= limits.PINGS_MISSED:
                self._lost(f"the daemon did not answer for {limits.PING_SECONDS * self._missed:g} s")
                return
        else:
            self._pings += 1
            self._asked = self._pings.to_bytes(8, "big")
            self.wire.ping(self._asked)
            self.flush()
        self._arm()

    def _arm(self) -> None:
        if self._heart is None and not self.closed:
            self._heart = asyncio.get_running_loop().call_later(limits.PING_SECONDS, self._beat)

    def _lost(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        if self._heart is not None:
            self._heart.cancel()
        if self._transport is not None:
            if self._transport.get_write_buffer_size() > 0:
                self._transport.abort()
            else:
                self._transport.close()
        error = ConnectionLostError(f"the connection to the sandbox's daemon was lost ({reason})")
        if not self._hello.done():
            self._hello.set_exception(ConnectionLostError(f"the sandbox's daemon refused the connection ({reason})"))
            self._hello.exception()
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self.writable.set()
        self._gone.set_result(None)

    # -- operations ------------------------------------------------------------

    def open(self, op: str, args: Mapping[str, Any]) -> Stream:
        """Start an operation. Its user calls :meth:`Stream.close` at the end, whatever that is."""
        if self.closed:
            raise ConnectionLostError("the connection to the sandbox's daemon was lost")
        if not self.wire.can_open():
            raise LimitExceededError("too many operations are running in this sandbox at once")
        number = self.wire.open(op, args)
        stream = self._streams[number] = Stream(self, number)
        self.flush()
        self._arm()
        return stream

    def forget(self, number: int) -> None:
        """Drop what still comes for a stream."""
        self._streams.pop(number, None)

    async def call(self, op: str, args: Mapping[str, Any], kind: type[T], *, seconds: float | None = None) -> T:
        """An operation without data. :class:`BackendError` after ``seconds`` (or the usual time) without its answer."""
        stream = self.open(op, args)
        try:
            await stream.send_args()
            return await stream.answer(kind, seconds)
        finally:
            stream.close()

    async def download(
        self, op: str, args: Mapping[str, Any], kind: type[T], done: Callable[[T], None]
    ) -> AsyncGenerator[bytes, None]:
        """An operation that sends bytes; ``done`` gets its result, behind the last of them."""
        stream = self.open(op, args)
        try:
            while True:
                event = await stream.progress()
                if isinstance(event, wire.Data):
                    if event.channel != wire.CHANNEL_OUT:
                        raise BackendError(f"the sandbox's daemon sent data of {op} on another channel")
                    yield event.data
                elif isinstance(event, wire.Ended):
                    done(replies.result(event.result, kind))
                    return
        finally:
            stream.close()

    async def upload(
        self,
        op: str,
        args: Mapping[str, Any],
        pieces: AsyncIterator[bytes | memoryview],
        kind: type[T],
        *,
        patient: bool = False,
    ) -> T:
        """An operation that takes bytes. A ``patient`` one waits for the daemon as long as it lives."""
        seconds = None if patient else limits.STALL_SECONDS
        stream = self.open(op, args)
        try:
            async for piece in pieces:
                if not await stream.send(wire.CHANNEL_IN, piece, seconds):
                    break
            stream.send_eof(wire.CHANNEL_IN)
            return await stream.answer(kind, patient=patient)
        finally:
            stream.close()


class Stream:
    """One operation: its queue of events, and who waits for the next. One task reads; another may send."""

    def __init__(self, guest: Connection, number: int) -> None:
        self._guest = guest
        self._number = number
        self._events: deque[wire.Event] = deque()
        self._waiters: set[asyncio.Future[None]] = set()
        self._error: ConnectionLostError | None = None
        self.over = False

    def put(self, event: wire.Event) -> None:
        """Take an event from the connection."""
        if not isinstance(event, wire.Credit):
            self._events.append(event)
        self.over = self.over or isinstance(event, wire.Ended | wire.Reset)
        self._wake()

    def fail(self, error: ConnectionLostError) -> None:
        """Tell who waits that the connection is gone."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self, deadline: float | None) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        handle = None if deadline is None else loop.call_at(deadline, _time_out, waiter)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if handle is not None:
                handle.cancel()

    async def next(self, seconds: float | None) -> wire.Event:
        """The next event; ``TimeoutError`` after so many seconds without one, :class:`ConnectionLostError`."""
        if not self._events:
            deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
            while not self._events:
                if self._error is not None:
                    raise self._error
                await self._wait(deadline)
        event = self._events.popleft()
        if isinstance(event, wire.Data):
            self._guest.wire.consumed(self._number, len(event.data) + 1)
            self._guest.flush()
        elif isinstance(event, wire.Reset):
            raise BackendError(f"the sandbox's daemon gave up: {event.reason[:200]}")
        return event

    async def progress(self, seconds: float | None = None) -> wire.Event:
        """The next event; :class:`BackendError` when the daemon does nothing for so long (or the usual time)."""
        seconds = limits.STALL_SECONDS if seconds is None else seconds
        try:
            return await self.next(seconds)
        except TimeoutError:
            raise BackendError(f"the sandbox's daemon did not answer for {seconds:g} s") from None

    async def answer(self, kind: type[T], seconds: float | None = None, *, patient: bool = False) -> T:
        """The result of an operation that sends no data."""
        while True:
            event = await (self.next(None) if patient else self.progress(seconds))
            if isinstance(event, wire.Ended):
                return replies.result(event.result, kind)
            if isinstance(event, wire.Data):
                raise BackendError("the sandbox's daemon sent data where none belongs")

    async def note(self, name: str) -> None:
        """Wait for the note ``{name: true}`` that comes before everything else; raises what the daemon says instead."""
        event = await self.progress()
        if isinstance(event, wire.Ended):
            replies.result(event.result, dict[str, Any])
        told = isinstance(event, wire.Data) and event.channel == wire.CHANNEL_NOTE
        if not told or replies.note(cast(wire.Data, event).data, dict[str, Any]).get(name) is not True:
            raise BackendError(f"the sandbox's daemon did not say {name!r} first")

    async def send(self, channel: int, data: bytes | memoryview, seconds: float | None) -> bool:
        """Send all of ``data`` as credit allows; false when the daemon has ended the operation meanwhile.

        :class:`BackendError` when it takes nothing for so many seconds; with ``None`` it waits as long as the daemon
        lives.
        """
        view = memoryview(data)
        loop = asyncio.get_running_loop()
        while view:
            if self.over:
                return False
            if self._error is not None:
                raise self._error
            sent = self._guest.wire.send(self._number, channel, view)
            view = view[sent:]
            self._guest.flush()
            try:
                if not sent:
                    await self._wait(None if seconds is None else loop.time() + seconds)
                elif not self._guest.writable.is_set():
                    async with asyncio.timeout(seconds):
                        await self._guest.writable.wait()
            except TimeoutError:
                raise BackendError(f"the sandbox's daemon took nothing for {seconds:g} s") from None
        return not self.over

    async def send_args(self) -> None:
        """Send the arguments that did not fit into the first frame."""
        if args := self._guest.wire.pending_args(self._number):
            await self.send(wire.CHANNEL_ARGS, args, limits.STALL_SECONDS)

    def send_eof(self, channel: int) -> None:
        """Say that no more comes on a channel."""
        self._guest.wire.send_eof(self._number, channel)
        self._guest.flush()

    def close(self) -> None:
        """Forget the stream; give it up where it is not over. Who waits on it gets :class:`ConnectionLostError`."""
        self._guest.forget(self._number)
        self.fail(self._error or ConnectionLostError("the operation was given up"))
        if not self.over and not self._guest.closed:
            self._guest.wire.reset(self._number, "the caller went away")
            self._guest.flush()


def _time_out(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
