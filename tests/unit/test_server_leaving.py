"""A client that goes away while a sandbox is made for it: without a key nothing stays, with one the result does."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from agent_sandbox.manager import CreateOptions, SandboxRecord
from agent_sandbox.server.idempotency import new_sandbox
from tests.unit.manager_harness import serving
from tests.unit.server_harness import KEY, Running, running, settings_for


class Held:
    """A backend's ``create`` that has made its environment and does not return until it is let go."""

    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = threading.Event()
        self.go = threading.Event()
        create = server.backend.create

        async def held(*args: Any, **options: Any) -> None:
            await create(*args, **options)
            self.arrived.set()
            while not self.go.is_set():
                await asyncio.sleep(0.01)

        monkeypatch.setattr(server.backend, "create", held)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(settings_for(tmp_path)) as it:
        yield it


def ways(server: Running) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every request that makes a sandbox."""
    first = server.create()
    taken = server.call("POST", f"/v1/sandboxes/{first}/snapshots").json["id"]
    server.call("DELETE", f"/v1/sandboxes/{first}")
    return {
        "create": ("/v1/sandboxes", {}),
        "restore": ("/v1/sandboxes", {"from": taken}),
        "fork": (f"/v1/snapshots/{taken}/fork", {}),
    }


def post(server: Running, path: str, body: dict[str, Any], *headers: str) -> socket.socket:
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"X-API-Key: {KEY}", "Content-Type: application/json"]
    sock = server.connect()
    sock.sendall("\r\n".join([*head, f"Content-Length: {len(content)}", *headers, "", ""]).encode() + content)
    return sock


def listed(server: Running) -> list[str]:
    return [sandbox["id"] for sandbox in server.call("GET", "/v1/sandboxes").json["sandboxes"]]


def until(condition: Callable[[], bool]) -> bool:
    for _ in range(2_000):
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("way", ["create", "restore", "fork"])
def test_nothing_stays_of_what_nobody_will_be_told_of(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    path, body = ways(server)[way]
    held = Held(server, monkeypatch)
    with post(server, path, body):
        assert held.arrived.wait(20)
        assert len(listed(server)) == 1
    assert until(lambda: not listed(server) and not server.backend.environments)
    server.wait(server.manager.settle())
    assert "unexpected error" not in caplog.text


@pytest.mark.parametrize("way", ["create", "restore", "fork"])
def test_with_a_key_the_result_waits_for_who_asks_again(
    server: Running, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path, body = ways(server)[way]
    held = Held(server, monkeypatch)
    with post(server, path, body, "Idempotency-Key: once"):
        assert held.arrived.wait(20)
    time.sleep(0.1)  # the connection's end has long been seen
    held.go.set()
    again = server.call("POST", path, body, Idempotency_Key="once")
    assert again.status == 201
    assert listed(server) == [again.json["id"]]


def test_a_client_that_stays_gets_its_sandbox_also_on_a_connection_used_before(server: Running) -> None:
    with post(server, "/v1/sandboxes", {}) as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 201 ")
        sock.sendall(b"GET /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: " + KEY.encode() + b"\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert len(listed(server)) == 1


@pytest.mark.parametrize("turns", range(-6, 7))
async def test_ready_and_left_in_the_same_moment_leaves_nothing_untold(tmp_path: Path, turns: int) -> None:
    """``turns`` of the loop lie between the two, and below 0 the creation is first."""
    async with serving(tmp_path) as server:
        left = asyncio.Event()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        app = SimpleNamespace(state=SimpleNamespace(manager=server.manager))
        request = Request({"type": "http", "headers": [], "app": app}, receive)
        ready = server.wire.hold("is_running")
        asking = asyncio.create_task(new_sandbox(request, lambda: server.manager.create(CreateOptions())))
        await ready.wait()
        moment: list[Callable[[], None]] = [left.set, lambda: server.wire.free("is_running")]
        if turns < 0:
            moment.reverse()
        moment[0]()
        for _ in range(abs(turns)):
            await asyncio.sleep(0)
        moment[1]()
        await asyncio.wait([asking])
        await server.manager.settle()
        if (error := asking.exception()) is None:
            told = [json.loads(bytes(asking.result().body))["id"]]
        else:
            assert isinstance(error, ClientDisconnect)
            told = []
        assert [record.id for record in await server.manager.list_sandboxes()] == told
        assert len(await server.fake.list_ids()) == len(told)
        assert not (turns >= 0 and told)


async def test_left_but_seen_only_behind_the_creation_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        left = asyncio.Event()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def make() -> SandboxRecord:
            record = await server.manager.create(CreateOptions())
            left.set()
            return record

        app = SimpleNamespace(state=SimpleNamespace(manager=server.manager))
        with pytest.raises(ClientDisconnect):
            await new_sandbox(Request({"type": "http", "headers": [], "app": app}, receive), make)
        assert await server.manager.list_sandboxes() == []
        assert await server.fake.list_ids() == []
