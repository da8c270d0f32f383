"""A whole server on the Docker backend: the public client, the program that it was made for, history, and a restart."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.public_client import LIMITS, public_directory, run_flow
from tests.e2e.serving import KEY, serving
from tests.ports import free_port
from tests.real.rootfs import build_rootfs

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def test_the_public_client_works_unchanged(docker_host: str, tmp_path: Path) -> None:
    with serving(tmp_path / "data", "docker", docker_host=docker_host, **LIMITS) as server:
        with server.client() as client:
            assert client.health()["backend"] == "docker"
        assert run_flow(server.url, KEY, "docker").endswith("done\n")


def test_history_and_a_server_that_is_killed(docker_host: str, tmp_path: Path) -> None:
    with serving(tmp_path / "data", "docker", docker_host=docker_host) as server:
        with server.client() as client:
            sandbox = client.create(env={"NAME": "value"})
            assert sandbox.exec("mkdir d; echo one > d/f; ln d/f g; chmod 700 d").exit_code == 0
            snapshot = sandbox.snapshot("one")
            assert sandbox.exec("rm -r d g; echo late > late; echo $NAME").stdout == "value\n"
            sandbox.rollback(snapshot)
            assert sandbox.exec("cat d/f; test d/f -ef g; stat -c %a d; ls").stdout == "one\n700\nd\ng\n"
            forks = [client.fork(snapshot) for _ in range(2)]
            assert [fork.exec("echo mine >> g; cat d/f").stdout for fork in forks] == ["one\nmine\n"] * 2
            assert sandbox.exec("cat g").stdout == "one\n"
            background = sandbox.exec("sleep 1000 & echo $!").stdout
        server.stop(signal.SIGKILL)
        server.start()
        with server.client() as client:
            again = client.get(sandbox.id)
            assert again.exec(f"kill -0 {background.strip()} && echo runs on").stdout == "runs on\n"
            assert again.exec("cat g; echo $NAME").stdout == "one\nvalue\n"
            assert len(client.list_sandboxes()) == 3
            for one in client.list_sandboxes():
                one.destroy()


class Peer:
    """The reference implementation as a process of its own, on the same engine."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    def call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(self._url + path, method=method)
        request.add_header("Authorization", f"Bearer {self._key}")
        data = None
        if body is not None:
            request.add_header("Content-Type", "application/json")
            data = json.dumps(body).encode()
        with urllib.request.urlopen(request, data, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if text else None


@contextlib.contextmanager
def peer_serving(docker_host: str, image: str, data: Path) -> Iterator[Peer]:
    key, port = secrets.token_hex(16), free_port()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(data),
        "DOCKER_HOST": docker_host,
        "AGENT_SANDBOX_DATA_DIR": str(data),
        "AGENT_SANDBOX_API_KEYS": key,
        "AGENT_SANDBOX_DEFAULT_IMAGE": image,
        "AGENT_SANDBOX_REAP_INTERVAL_SECONDS": "1",
    }
    program = str(public_directory() / "agent-sandbox")
    log = data.parent / "peer.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "serve", "--host", "127.0.0.1", "--port", str(port)], env=env, stdout=output, stderr=output
        )
    try:
        peer = Peer(f"http://127.0.0.1:{port}", key)
        for _ in range(600):
            with contextlib.suppress(OSError):
                peer.call("GET", "/healthz")
                break
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.1)
        yield peer
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def image(docker_host: str, tmp_path: Path) -> Iterator[str]:
    """A small image that both programs can run: the peer needs a shell and some tools in it."""
    root = build_rootfs(tmp_path / "root", more=("sleep", "chown", "chmod", "tar", "stat", "rm", "kill", "env", "mv"))
    name = f"asb-test-peer:{secrets.token_hex(4)}"
    subprocess.run(["tar", "-C", str(root), "-cf", str(tmp_path / "root.tar"), "."], check=True)
    docker = ["docker", "--host", docker_host]
    subprocess.run([*docker, "import", str(tmp_path / "root.tar"), name], check=True, capture_output=True)
    yield name
    subprocess.run([*docker, "rmi", "-f", name], check=False, capture_output=True)


def test_the_peer_on_the_same_engine_and_we_leave_each_other_alone(
    docker_host: str, image: str, tmp_path: Path
) -> None:
    (tmp_path / "peer").mkdir()
    with (
        serving(tmp_path / "data", "docker", docker_host=docker_host, default_image=image) as server,
        server.client() as client,
    ):
        ours = client.create()
        ours.exec("echo ours > f")
        with peer_serving(
            docker_host, image, tmp_path / "peer"
        ) as peer:  # reaps what it takes for an orphan of its own
            theirs = peer.call("POST", "/v1/sandboxes", {"timeout_seconds": 300})
            run = {"command": "echo theirs > f; cat f"}
            assert peer.call("POST", f"/v1/sandboxes/{theirs['id']}/exec", run)["stdout"] == "theirs\n"
            assert [one["id"] for one in peer.call("GET", "/v1/sandboxes")["sandboxes"]] == [theirs["id"]]
            assert [one.id for one in client.list_sandboxes()] == [ours.id]
            server.stop()  # the next one removes what it takes for an orphan of its own
            server.start()
            with server.client() as again:
                assert again.get(ours.id).exec("cat f").stdout == "ours\n"
            assert peer.call("POST", f"/v1/sandboxes/{theirs['id']}/exec", {"command": "cat f"})["stdout"] == "theirs\n"
            with server.client() as again:
                again.get(ours.id).destroy()
            assert peer.call("POST", f"/v1/sandboxes/{theirs['id']}/exec", {"command": "cat f"})["stdout"] == "theirs\n"
            peer.call("DELETE", f"/v1/sandboxes/{theirs['id']}")
