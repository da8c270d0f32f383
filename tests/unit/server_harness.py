"""A real server on the fake backend: uvicorn in a thread, real sockets, the real manager."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.config import Settings
from agent_sandbox.manager import Manager
from agent_sandbox.server.listen import tcp_socket, unix_socket
from agent_sandbox.server.run import make_server
from tests.ports import free_port

KEY = "key-of-the-tests-0123456789"
AUTH = {"Authorization": f"Bearer {KEY}"}

T = TypeVar("T")


def settings_for(directory: Path, **changes: Any) -> Settings:
    values = {"data_dir": directory / "data", "backends": ("fake",), "api_keys": (KEY,), "port": free_port()}
    return Settings(**{**values, **changes})


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}, self.body
        error: dict[str, Any] = self.json["error"]
        assert {"code", "message"} <= set(error) <= {"code", "message", "details"}
        return error


class Running:
    """A running server and what is behind it."""

    def __init__(self, settings: Settings, uds: Path | None) -> None:
        self.settings = settings
        self.uds = uds
        self.backend = FakeBackend(settings)
        self.manager = Manager(settings, {"fake": self.backend})
        self.loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"unix://{self.uds}" if self.uds else f"http://127.0.0.1:{self.settings.port}"

    def connect(self) -> socket.socket:
        if self.uds is None:
            return socket.create_connection(("127.0.0.1", self.settings.port), timeout=20)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(20)
        sock.connect(str(self.uds))
        return sock

    def call(self, method: str, path: str, body: Any = None, *, key: bool = True, **headers: str) -> Reply:
        """Send one request; a body that is not bytes goes as JSON."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key and not any(name.lower() in ("authorization", "x-api-key") for name in sent):
            sent |= AUTH
        content = body
        if body is not None and not isinstance(body, bytes):
            content = json.dumps(body).encode()
        if body is not None and not any(name.lower() == "content-type" for name in sent):
            sent["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection("localhost")
        connection.sock = self.connect()
        try:
            connection.request(method, path, content, sent)
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, names, response.read())
        finally:
            connection.close()

    def create(self, **options: Any) -> str:
        reply = self.call("POST", "/v1/sandboxes", options)
        assert reply.status == 201, reply.body
        sandbox_id: str = reply.json["id"]
        return sandbox_id

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)


@contextmanager
def running(settings: Settings, *, uds: Path | None = None) -> Iterator[Running]:
    """Run a server until the end of the ``with``."""
    it = Running(settings, uds)
    ready = threading.Event()
    failed: list[BaseException] = []

    async def serve(sock: socket.socket) -> None:
        it.loop = asyncio.get_running_loop()
        await it.manager.start()
        try:
            server = make_server(it.manager, settings, ready.set)
            it.stop = lambda: setattr(server, "should_exit", True)  # type: ignore[attr-defined]
            await server.serve(sockets=[sock])
        finally:
            await it.manager.close()

    def main(sock: socket.socket) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(sock))
        except BaseException as error:  # noqa: BLE001 - told to the test's thread
            failed.append(error)
            ready.set()

    with ExitStack() as stack:
        sock = stack.enter_context(unix_socket(uds) if uds else tcp_socket(settings.host, settings.port))
        thread = threading.Thread(target=main, args=(sock,))
        thread.start()
        try:
            assert ready.wait(20)
            if failed:
                raise failed[0]
            yield it
        finally:
            if not failed:
                it.stop()  # type: ignore[attr-defined]
            thread.join(20)
        assert not thread.is_alive()
        assert not failed
