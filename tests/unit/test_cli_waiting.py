"""What is said while the server fetches an image that a sandbox waits for."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from agent_sandbox.cli import waiting
from agent_sandbox.client import requests
from agent_sandbox.errors import BackendError

NAMES = "isolation accelerated enforces network userns guest layered_workspace checkpoint pause resize fuse"
CAPABILITIES = dict.fromkeys([*NAMES.split(), "nested_containers", "notes"])


class Server:
    """A client of a server that fetches more at each look; ``asked`` is set once it was looked at often enough."""

    def __init__(self, *looks: list[dict[str, Any]] | Exception) -> None:
        self._looks = list(looks)
        self.asked = threading.Event()

    def backends(self) -> Any:
        if not self._looks:
            self.asked.set()
            return []
        look = self._looks.pop(0)
        if isinstance(look, Exception):
            self.asked.set()
            raise look
        backend = {"name": "docker", "default": True, "healthy": True, "message": "", "capabilities": CAPABILITIES}
        return [requests._backend({**backend, "pulls": look})]


def pull(image: str, done: int, total: int) -> dict[str, Any]:
    return {"image": image, "done_bytes": done, "total_bytes": total, "of_a_later_version": 1}


def told(server: Server, image: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "AGAIN_SECONDS", 0.0)
    with waiting.fetching_told(cast(Any, server), image):
        assert server.asked.wait(60)
    return capsys.readouterr().err


def test_it_says_how_far_the_image_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    looks: list[list[dict[str, Any]]] = [
        [pull("x", 0, 0)],
        [pull("x", 1 << 20, 4 << 20), pull("y", 1, 2)],
        [pull("x", 1 << 20, 4 << 20)],
        [],
    ]
    assert told(Server(*looks), "x", monkeypatch, capsys).splitlines() == [
        "agent-sandbox: the server prepares image x: begun",
        "agent-sandbox: the server prepares image x: 1.0 MiB of 4.0 MiB",
    ]
    assert "image y" in told(Server([pull("y", 1, 2)]), None, monkeypatch, capsys)


def test_what_goes_wrong_meanwhile_is_not_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(Server(BackendError("no")), "x", monkeypatch, capsys) == ""
    assert told(Server([]), "x", monkeypatch, capsys) == ""
