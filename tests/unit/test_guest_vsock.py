"""Reaching a machine's port through its monitor's socket: the handshake, and what may lie in the socket's place."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from agent_sandbox.backends.guest_backend import Endpoint, GuestBackend
from agent_sandbox.errors import BackendError
from agent_sandbox.guest import Carrier, vsock
from agent_sandbox.types import SandboxSpec

from .guest_harness import KEY, Daemon, answering

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def dialled(place: Path, answer: Answer, seconds: float = 30) -> AsyncGenerator[socket.socket, None]:
    """What dialling gives where a monitor answers so; everything is closed at the end."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await answer(reader, writer)
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_unix_server(begin, place)
    try:
        with await vsock.dial(lambda: vsock.connect_to(place), seconds) as connection:
            yield connection
    finally:
        server.close()
        await asyncio.gather(*serving)


async def test_the_line_is_answered_byte_by_byte_and_what_follows_is_the_daemons(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(13) == b"CONNECT 1024\n"
        for byte in b"OK 1073741824\nhello":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write_eof()

    async with dialled(tmp_path / "guest.sock", answer) as connection:
        received = b""
        while piece := await asyncio.get_running_loop().sock_recv(connection, 64):
            received += piece
    assert received == b"hello"


async def test_a_machine_that_does_not_listen_yet_is_asked_again(tmp_path: Path) -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readline()
        if asked == 3:
            writer.write(b"OK 5\n")
            await writer.drain()
        else:
            writer.close()

    async with dialled(tmp_path / "guest.sock", answer):
        pass
    assert asked == 3


async def test_a_monitor_that_does_not_answer_is_asked_again_while_it_keeps_the_first_question(tmp_path: Path) -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readline()
        if asked == 2:
            writer.write(b"OK 5\n")
            await writer.drain()

    async with dialled(tmp_path / "guest.sock", answer):
        pass
    assert asked == 2


async def test_a_machine_that_never_listens_is_given_up(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with pytest.raises(BackendError, match="did not listen within"):
        async with dialled(tmp_path / "guest.sock", answer, 0.2):
            pass


@pytest.mark.parametrize("words", [b"NO\n", b"OK \n", b"OK x\n", b"OK 1 2\n", b"OK 1" * 9, b"\n", b"ok 1\n"])
async def test_what_is_no_monitor_is_refused(tmp_path: Path, words: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        await writer.drain()

    with pytest.raises(BackendError, match="does not answer as one"):
        async with dialled(tmp_path / "guest.sock", answer):
            pass


def test_a_link_in_the_sockets_place_is_not_followed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "other.sock"))
        listener.listen()
        (tmp_path / "guest.sock").symlink_to("other.sock")
        with pytest.raises(BackendError, match="is none"):
            vsock.connect_to(tmp_path / "guest.sock")
    (tmp_path / "file.sock").touch()
    with pytest.raises(BackendError, match="is none"):
        vsock.connect_to(tmp_path / "file.sock")
    with pytest.raises(BackendError, match="has no socket"):
        vsock.connect_to(tmp_path / "absent.sock")


def test_the_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        (tmp_path / "s").rename(deep / "guest.sock")
        with vsock.connect_to(deep / "guest.sock") as connection:
            connection.send(b"here")
            with listener.accept()[0] as peer:
                assert peer.recv(8) == b"here"


async def test_a_daemon_that_leaves_the_first_hello_unanswered_is_asked_again() -> None:
    spec = SandboxSpec("host", "", cpus=1, memory_mb=64, pids_limit=16, disk_mb=16, tmp_mb=16)
    pairs: list[tuple[socket.socket, socket.socket]] = []
    daemons: list[asyncio.Task[None]] = []

    async def endpoint(id: str) -> Endpoint:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        pairs.append((ours, theirs))
        if len(pairs) == 2:
            daemons.append(asyncio.create_task(Daemon(theirs, answering({})).run()))
        return Endpoint(ours, KEY, spec, {}, carrier=Carrier.VSOCK, seconds=60)

    reached = {"endpoint": endpoint, **dict.fromkeys(GuestBackend.__abstractmethods__ - {"endpoint"})}
    backend = type("Machines", (GuestBackend,), {name: staticmethod(one) for name, one in reached.items() if one})
    backend.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    machines = backend()
    await machines.guest_ready("machine")
    assert len(pairs) == 2
    await machines.drop_guest("machine")
    await asyncio.gather(*daemons)
    for _, theirs in pairs:
        theirs.close()


async def test_a_monitor_at_whom_many_wait_is_asked_when_there_is_room(tmp_path: Path) -> None:
    place = tmp_path / "guest.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(0)
        waiting = vsock.connect_to(place)
        with pytest.raises(BlockingIOError):
            vsock.connect_to(place)
        dialling = asyncio.create_task(vsock.dial(lambda: vsock.connect_to(place), 30))
        await asyncio.sleep(0.1)
        assert not dialling.done()
        waiting.close()
        listener.accept()[0].close()
        listener.settimeout(30)
        peer, _ = await asyncio.to_thread(listener.accept)
        with peer:
            peer.sendall(b"OK 1\n")
            (await dialling).close()
