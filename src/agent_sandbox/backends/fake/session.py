"""The daemon's side of one connection: streams, credit, and who does which operation."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_sandbox import wire
from agent_sandbox.backends.fake.state import Environment, Failure


@dataclass
class Operation:
    """One stream. What the other side sends is in :meth:`pieces`; ``send`` waits for credit.

    ``given_up`` says that the other side has reset it; a connection that broke only leaves it ``gone``.
    """

    session: Session
    number: int
    inbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    credit: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: bool = False
    gone: bool = False

    async def send(self, channel: int, data: bytes) -> bool:
        """Send all of it; false when nobody is there any more."""
        while data and not self.gone:
            self.credit.clear()
            data = data[self.session.wire.send(self.number, channel, data) :]
            await self.session.flush()
            if data:
                await self.credit.wait()
        return not self.gone

    async def note(self, **fields: Any) -> None:
        await self.send(wire.CHANNEL_NOTE, wire.pack_note(fields))

    async def send_eof(self, channel: int) -> None:
        self.session.wire.send_eof(self.number, channel)
        await self.session.flush()

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is sent on channel 0, up to its end; credit goes back once the consumer comes for the next."""
        while (piece := await self.inbox.get()) is not None:
            yield piece
            self.session.wire.consumed(self.number, len(piece) + 1)
            await self.session.flush()

    async def receive(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    def leave(self) -> None:
        self.gone = True
        self.credit.set()


Handler = Callable[[Environment, Operation, dict[str, Any]], Awaitable[dict[str, Any]]]


class Session:
    """One connection of an environment."""

    def __init__(self, environment: Environment, sock: socket.socket, operations: Mapping[str, Handler]) -> None:
        self.environment = environment
        self.sock = sock
        self.wire = wire.Connection("daemon", environment.key)
        self._operations = operations
        self._running: dict[int, tuple[Operation, asyncio.Task[None]]] = {}
        self._sending = asyncio.Lock()

    async def flush(self) -> None:
        """Send what there is; a connection that broke is seen by the reader."""
        async with self._sending:
            for piece in self.wire.data_to_send():
                try:
                    await asyncio.get_running_loop().sock_sendall(self.sock, piece)
                except OSError:
                    return

    async def serve(self) -> None:
        """Read until the connection ends; what ran on it stops, but for commands."""
        loop = asyncio.get_running_loop()
        try:
            while not self.wire.closed:
                data = await loop.sock_recv(self.sock, 262_144)
                if not data:
                    break
                for event in self.wire.receive(data):
                    self._event(event)
                await self.flush()
        except OSError:
            pass
        finally:
            for operation, task in list(self._running.values()):
                operation.leave()
                task.cancel()

    def _event(self, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            operation = Operation(self, event.stream)
            task = asyncio.create_task(self._operate(operation, event.op, event.args))
            self._running[event.stream] = (operation, task)
            task.add_done_callback(lambda _: self._running.pop(event.stream, None))
        elif isinstance(event, wire.Data | wire.Eof | wire.Credit | wire.Reset) and event.stream in self._running:
            operation, task = self._running[event.stream]
            if isinstance(event, wire.Data):
                operation.inbox.put_nowait(event.data)
            elif isinstance(event, wire.Eof):
                operation.inbox.put_nowait(None)
            elif isinstance(event, wire.Credit):
                operation.credit.set()
            else:
                operation.given_up = True
                operation.leave()
                task.cancel()

    async def _operate(self, operation: Operation, op: str, args: dict[str, Any]) -> None:
        try:
            handler = self._operations.get(op)
            if handler is None:
                raise Failure("unsupported", f"there is no operation {op!r}")
            result = await handler(self.environment, operation, args)
        except Failure as failure:
            result = {"error": {"code": failure.code, "message": str(failure)}}
        except (KeyError, TypeError, ValueError) as error:
            result = {"error": {"code": "invalid_request", "message": f"{op}: {error}"}}
        self.wire.end(operation.number, result)
        await self.flush()
