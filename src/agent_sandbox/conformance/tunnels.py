"""Connections to servers inside, carried over the wire: also where the sandbox has no network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import pytest

from agent_sandbox.backends.base import Backend, Tunnel
from agent_sandbox.conformance.box import Box
from agent_sandbox.conformance.execs import request
from agent_sandbox.conformance.suite import SuiteBase
from agent_sandbox.errors import ConflictError, InvalidRequestError, NotFoundError, SandboxError
from agent_sandbox.types import WORKSPACE

SERVER = """
import socket, sys, threading
where = sys.argv[1]
if where.isdigit():
    server = socket.create_server(('127.0.0.1', int(where)), backlog=100)
else:
    server = socket.socket(socket.AF_UNIX); server.bind(where); server.listen(100)
def serve(connection):
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
print('listening', flush=True)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
PATH = f"{WORKSPACE}/server.sock"


async def received(tunnel: Tunnel, size: int | None = None) -> bytes:
    """What comes through a tunnel: so many bytes, or everything."""
    data = b""
    while (size is None or len(data) < size) and (piece := await tunnel.receive()):
        data += piece
    return data


class TunnelSuite(SuiteBase):
    """``dial``."""

    def echo_server(self, where: str) -> Sequence[str]:
        """The command of a server inside that answers on a port, or at a path, what it was sent."""
        return ["python3", "-c", SERVER, where]

    async def serve(self, box: Box, where: int | str) -> None:
        """Start such a server and return once it listens."""
        id = f"server-{abs(hash(where))}"
        await box.backend.start_exec(box.id, request([*self.echo_server(str(where))], id))
        async with asyncio.timeout(10):
            while (await box.backend.exec_status(box.id, id)).cursor < len("listening\n"):
                await asyncio.sleep(0.05)

    async def test_a_port_is_reached_without_a_network(self, box: Box) -> None:
        assert box.spec.network == "none"
        await self.serve(box, 8000)
        async with asyncio.timeout(20), await box.backend.dial(box.id, port=8000) as tunnel:
            await tunnel.send(b"hello")
            assert await received(tunnel, 5) == b"hello"
            await tunnel.send_eof()
            assert await received(tunnel) == b""
            assert await tunnel.receive() == b""

    async def test_a_unix_socket_is_reached(self, box: Box) -> None:
        await self.serve(box, PATH)
        async with asyncio.timeout(20), await box.backend.dial(box.id, path=PATH) as tunnel:
            await tunnel.send(b"hello")
            await tunnel.send_eof()
            assert await received(tunnel) == b"hello"

    async def test_much_goes_both_ways_at_once(self, box: Box) -> None:
        await self.serve(box, 8000)
        data = os.urandom(5_000_000)
        async with asyncio.timeout(60), await box.backend.dial(box.id, port=8000) as tunnel:

            async def send() -> None:
                for start in range(0, len(data), 700_000):
                    await tunnel.send(data[start : start + 700_000])
                await tunnel.send_eof()

            sending = asyncio.ensure_future(send())
            assert await received(tunnel) == data
            await sending

    async def test_many_tunnels_at_once(self, box: Box) -> None:
        await self.serve(box, 8000)

        async def one(number: int) -> bytes:
            async with await box.backend.dial(box.id, port=8000) as tunnel:
                await tunnel.send(str(number).encode())
                await tunnel.send_eof()
                return await received(tunnel)

        async with asyncio.timeout(30):
            assert await asyncio.gather(*map(one, range(40))) == [str(n).encode() for n in range(40)]

    async def test_nobody_listens(self, box: Box) -> None:
        with pytest.raises(NotFoundError):
            await box.backend.dial(box.id, port=8001)
        with pytest.raises(NotFoundError):
            await box.backend.dial(box.id, path=f"{WORKSPACE}/none.sock")

    @pytest.mark.parametrize(
        ("port", "path"), [(None, None), (0, None), (65_536, None), (-1, None), (None, "relative"), (1, PATH)]
    )
    async def test_places_that_cannot_be(self, box: Box, port: int | None, path: str | None) -> None:
        with pytest.raises(InvalidRequestError):
            await box.backend.dial(box.id, port=port, path=path)

    async def test_a_full_tunnel_holds_its_sender_and_nobody_else(self, box: Box) -> None:
        await self.serve(box, 8000)
        async with await box.backend.dial(box.id, port=8000) as tunnel:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(tunnel.send(bytes(100_000_000)), 2)
            assert await box.shell("echo others go on") == "others go on\n"

    async def test_closing_wakes_whoever_waits(self, box: Box) -> None:
        await self.serve(box, 8000)
        tunnel = await box.backend.dial(box.id, port=8000)
        waiting = asyncio.ensure_future(tunnel.receive())
        await asyncio.sleep(0.05)
        tunnel.close()
        tunnel.close()
        async with asyncio.timeout(5):
            assert await waiting == b""
        assert await tunnel.receive() == b""
        with pytest.raises(ConflictError):
            await tunnel.send(b"x")

    async def test_nothing_is_sent_behind_the_end(self, box: Box) -> None:
        await self.serve(box, 8000)
        async with await box.backend.dial(box.id, port=8000) as tunnel:
            await tunnel.send_eof()
            await tunnel.send_eof()
            with pytest.raises(ConflictError):
                await tunnel.send(b"x")

    async def test_a_sandbox_that_goes_ends_its_tunnels(self, backend: Backend, box: Box) -> None:
        await self.serve(box, 8000)
        tunnel = await backend.dial(box.id, port=8000)
        waiting = asyncio.ensure_future(tunnel.receive())
        await asyncio.sleep(0.05)
        await backend.destroy(box.id)
        with pytest.raises(SandboxError):
            async with asyncio.timeout(10):
                await waiting
        tunnel.close()
