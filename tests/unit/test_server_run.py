"""Serving: sockets and who may use them, the ready line, signals, idleness."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sandbox.errors import BackendError, ConflictError, InvalidRequestError
from agent_sandbox.server import peer
from agent_sandbox.server.listen import tcp_socket, unix_socket
from agent_sandbox.server.run import serve
from tests.ports import free_port
from tests.unit.server_harness import KEY, Running, running, settings_for

PROGRAM = """
import sys
from pathlib import Path
from agent_sandbox.config import load_settings
from agent_sandbox.server.run import serve
serve(load_settings(), uds=Path(sys.argv[1]) if sys.argv[1:] else None)
"""

SOON = 60.0
"""What it may take at most; nothing here ends by itself so soon."""

STUCK = """
import asyncio
from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.config import load_settings
from agent_sandbox.server.run import serve
class Stuck(FakeBackend):
    async def close(self):
        await asyncio.sleep(3600)
settings = load_settings()
serve(settings, backends={"fake": Stuck(settings)})
"""


@contextmanager
def process(
    directory: Path, *arguments: str, program: str = PROGRAM, **settings: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    values = {"BACKENDS": "fake", "DATA_DIR": str(directory / "data"), "PORT": str(port), "API_KEYS": KEY, **settings}
    environ = {**os.environ, **{f"AGENT_SANDBOX_{name}": value for name, value in values.items()}}
    command = [sys.executable, "-c", program, *arguments]
    child = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child, port
    finally:
        child.kill()
        child.communicate()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.communicate()[1]
    return line


# -- unix sockets ------------------------------------------------------------------------------------------------------


def test_a_unix_socket_is_private_and_needs_no_key(tmp_path: Path) -> None:
    path = tmp_path / "run" / "server.sock"
    with running(settings_for(tmp_path, api_keys=()), uds=path) as server:
        assert path.stat().st_mode & 0o7777 == 0o600
        assert path.parent.stat().st_mode & 0o7777 == 0o700
        assert server.call("GET", "/v1/sandboxes", key=False).json == {"sandboxes": []}
        assert server.call("GET", "/v1/sandboxes", key=False, Host="anything.example").status == 200
    assert not path.exists()


def test_another_user_is_cut_off_before_a_byte_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "peer_uid", lambda sock: os.geteuid() + 1)
    with running(settings_for(tmp_path), uds=tmp_path / "run" / "s") as server, server.connect() as sock:
        try:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(100) == b""
        except (BrokenPipeError, ConnectionResetError):
            pass


def test_the_kernel_names_the_peer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer.peer_uid(ours) == os.geteuid()


def test_a_header_cannot_make_a_client_trusted(tmp_path: Path) -> None:
    with running(settings_for(tmp_path)) as server:
        headers = {"agent_sandbox.trusted_peer": "True", "X-Forwarded-For": "127.0.0.1"}
        assert server.call("GET", "/v1/sandboxes", key=False, **headers).status == 401


def test_one_server_for_one_socket_and_a_dead_ones_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run" / "server.sock"
    with unix_socket(path):
        with pytest.raises(ConflictError, match="already"), unix_socket(path):
            pass
        assert path.exists()
    path.touch()
    with unix_socket(path):
        assert path.is_socket()


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701])
def test_a_directory_that_others_enter_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(InvalidRequestError, match="chmod 700"), unix_socket(directory / "s"):
        pass


def test_a_linked_directory_and_a_long_path_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(InvalidRequestError, match="directory"), unix_socket(tmp_path / "link" / "s"):
        pass
    with pytest.raises(InvalidRequestError, match="107"), unix_socket(tmp_path / ("s" * 108)):
        pass


# -- TCP ---------------------------------------------------------------------------------------------------------------


def test_a_taken_port_and_a_foreign_address_are_typed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ConflictError, match="AGENT_SANDBOX_PORT"):
            tcp_socket("127.0.0.1", taken).__enter__()
    with pytest.raises(ConflictError), tcp_socket("192.0.2.1", free_port()):
        pass
    with pytest.raises(InvalidRequestError, match="AGENT_SANDBOX_HOST"), tcp_socket("no such host", 1):
        pass


def test_a_server_without_keys_is_refused_before_it_listens(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no API key"):
        serve(settings_for(tmp_path, api_keys=()))


def test_a_backend_that_does_not_start_is_its_typed_error(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    it = Running(settings, None)
    it.backend.failures["start"] = [BackendError("runc is not installed; apt-get install runc")]
    with pytest.raises(BackendError, match="apt-get install runc"):
        serve(settings, backends={"fake": it.backend})


# -- connections -------------------------------------------------------------------------------------------------------


def test_what_is_no_http_gets_the_error_shape(tmp_path: Path) -> None:
    with running(settings_for(tmp_path)) as server:
        for rubbish in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with server.connect() as sock:
                sock.sendall(rubbish)
                text = sock.makefile("rb").read()
                assert text.startswith(b"HTTP/1.1 400 ")
                assert b'{"error":{"code":"invalid_request"' in text


@pytest.mark.parametrize("start", [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"GET /"])
def test_a_head_without_end_is_cut_off(tmp_path: Path, start: bytes) -> None:
    with running(settings_for(tmp_path)) as server, server.connect() as sock:
        sock.sendall(start)
        sent = 0
        try:
            while sent < 4 * 1024 * 1024:
                sent += sock.send(b"a" * 16_384)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 4 * 1024 * 1024


def test_many_small_requests_on_one_connection_are_not_one_long_head(tmp_path: Path) -> None:
    with running(settings_for(tmp_path)) as server, server.connect() as sock, sock.makefile("rb") as stream:
        request = b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\nX-Pad: " + b"a" * 2000 + b"\r\n\r\n"
        for _ in range(50):
            sock.sendall(request)
            assert stream.readline().startswith(b"HTTP/1.1 401 ")
            length = 0
            while (line := stream.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            stream.read(length)


# -- the process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_in_time(tmp_path: Path, number: signal.Signals) -> None:
    with process(tmp_path) as (child, port):
        assert first_line(child) == f"agent-sandbox listens on http://127.0.0.1:{port}\n"
        with socket.create_connection(("127.0.0.1", port)) as idle:
            child.send_signal(number)
            assert child.wait(SOON) == 0
            assert idle.recv(100) == b""
        out, err = child.communicate()
        assert (out, err) == ("", "")


def test_a_running_stream_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with process(tmp_path) as (child, port):
        first_line(child)
        server = Running(settings_for(tmp_path / "x", port=port), None)
        sandbox_id = server.create()
        body = b'{"command":"echo a; sleep 3600"}'
        with server.connect() as sock:
            head = f"POST /v1/sandboxes/{sandbox_id}/exec/stream HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            text = b""
            while b'"a\\n"' not in text:
                text += sock.recv(65536)
            child.terminate()
            assert child.wait(SOON) == 0
            while piece := sock.recv(65536):
                text += piece
        assert not text.endswith(b"0\r\n\r\n")
        assert "Traceback" not in child.communicate()[1]


def test_a_backend_that_does_not_let_go_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with process(tmp_path, program=STUCK) as (child, _):
        first_line(child)
        child.terminate()
        assert child.wait(SOON) == 0
        assert child.communicate()[1].count("\n") == 1


def test_a_command_that_the_end_cuts_off_is_told_so(tmp_path: Path) -> None:
    with process(tmp_path) as (child, port):
        first_line(child)
        server = Running(settings_for(tmp_path / "x", port=port), None)
        path = f"/v1/sandboxes/{server.create()}"
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.call, "POST", f"{path}/exec", {"command": "echo > begun; sleep 3600"})
            while server.call("GET", f"{path}/files?path=begun").status != 200:
                assert not running.done()
            child.terminate()
            reply = running.result(SOON)
        assert (reply.status, reply.error["code"]) == (503, "backend_error")
        assert "shutting down" in reply.error["message"]
        assert child.wait(10) == 0


def test_idleness_ends_it_but_not_while_a_sandbox_lives(tmp_path: Path) -> None:
    path = tmp_path / "run" / "server.sock"
    with process(tmp_path, str(path), IDLE_EXIT_SECONDS="3", API_KEYS="") as (child, _):
        assert first_line(child) == f"agent-sandbox listens on unix://{path}\n"
        server = Running(settings_for(tmp_path / "x"), path)
        sandbox_id = server.create()
        time.sleep(4.5)
        assert child.poll() is None
        assert server.call("DELETE", f"/v1/sandboxes/{sandbox_id}").status == 204
        assert child.wait(SOON) == 0
    assert not path.exists()


def test_any_request_keeps_an_idle_server_alive(tmp_path: Path) -> None:
    path = tmp_path / "run" / "server.sock"
    with process(tmp_path, str(path), IDLE_EXIT_SECONDS="3", API_KEYS="") as (child, _):
        first_line(child)
        server = Running(settings_for(tmp_path / "x"), path)
        until = time.monotonic() + 4.5
        while time.monotonic() < until:
            assert server.call("GET", "/healthz", key=False).status == 200
            time.sleep(0.1)
        assert child.wait(SOON) == 0


def test_the_key_is_in_no_argument_and_no_output(tmp_path: Path) -> None:
    with process(tmp_path) as (child, port):
        first_line(child)
        assert KEY.encode() not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
        Running(settings_for(tmp_path / "x", port=port), None).call("GET", "/v1/sandboxes")
        child.terminate()
        out, err = child.communicate(timeout=10)
        assert KEY not in out + err
