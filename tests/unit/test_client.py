"""The SDK against a real server on the fake backend, and against servers that misbehave."""

from __future__ import annotations

import gc
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import agent_sandbox
from agent_sandbox import errors
from agent_sandbox.client import (
    ExecEvent,
    ReplyLostError,
    SandboxAPIError,
    SandboxClient,
    ServerUnreachableError,
    SnapshotInfo,
)
from agent_sandbox.client.errors import BY_CODE, api_error, from_reply
from tests.unit.server_harness import KEY, Running, free_port, running, settings_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(tmp_path_factory.mktemp("server"), max_file_bytes=100_000)) as it:
        yield it


@pytest.fixture
def client(server: Running) -> Iterator[SandboxClient]:
    with SandboxClient(server.url, KEY) as it:
        yield it


def test_the_whole_way_through(client: SandboxClient) -> None:
    assert client.health()["status"] == "ok"
    with client.create(env={"A": "b"}, timeout_seconds=60) as sandbox:
        assert sandbox.id in {one.id for one in client.list_sandboxes()}
        assert client.get(sandbox.id).data == sandbox.data
        done = sandbox.exec("printenv A; false")
        assert (done.stdout, done.exit_code, done.ok) == ("b\n", 1, False)
        assert sandbox.exec(["true"]).ok
        *output, end = sandbox.exec_stream("echo a; echo b >&2")
        assert output == [ExecEvent("stdout", "a\n"), ExecEvent("stderr", "b\n")]
        assert (end.type, end.exit_code, end.timed_out) == ("exit", 0, False)
        written = sandbox.write_file("d/f \udcff", "text", mode=0o600)
        assert (written.path, written.size) == ("/workspace/d/f \udcff", 4)
        assert sandbox.read_text("d/f \udcff") == "text"
        assert [entry.name for entry in sandbox.list_files("d")] == ["f \udcff"]
        snapshot = sandbox.snapshot("first")
        assert client.list_snapshots(sandbox.id) == [snapshot] == [client.get_snapshot(snapshot.id)]
        sandbox.write_file("other", b"x")
        assert sandbox.rollback(snapshot) is sandbox
        assert [entry.name for entry in sandbox.list_files()] == ["d"]
        with client.fork(snapshot, memory_mb=64) as fork:
            assert fork.read_file("/workspace/d/f \udcff") == b"text"
            assert (fork.info.memory_mb, fork.info.source_snapshot_id) == (64, snapshot.id)
        before = sandbox.expires_at
        assert sandbox.set_timeout(3600).expires_at > before
        assert sandbox.refresh().status == "running"
    with pytest.raises(errors.NotFoundError):
        client.get(sandbox.id)
    client.delete_snapshot(snapshot.id)
    assert client.list_snapshots(sandbox.id) == []


def test_a_context_manager_forgives_a_sandbox_that_is_gone(client: SandboxClient) -> None:
    with client.create() as sandbox:
        sandbox.destroy()


def test_backends(client: SandboxClient) -> None:
    (backend,) = client.backends()
    assert (backend.name, backend.default, backend.capabilities.isolation) == ("fake", True, "process")


@pytest.mark.parametrize(
    ("call", "cls", "status", "code"),
    [
        (lambda c, s: c.get("sbnothing"), errors.NotFoundError, 404, "not_found"),
        (lambda c, s: c.create(cpus=-1), errors.ValidationError, 422, "validation_error"),
        (lambda c, s: c.create(network=True), errors.ForbiddenError, 403, "forbidden"),
        (lambda c, s: c.create(min_isolation="vm"), errors.UnsupportedError, 501, "unsupported"),
        (lambda c, s: s.exec("true", workdir="/nothing"), errors.InvalidRequestError, 400, "invalid_request"),
        (
            lambda c, s: list(s.exec_stream("true", workdir="/nothing")),
            errors.InvalidRequestError,
            400,
            "invalid_request",
        ),
        (lambda c, s: s.write_file("/etc/x", ""), errors.InvalidRequestError, 400, "invalid_request"),
        (lambda c, s: s.write_file("x", bytes(100_001)), errors.PayloadTooLargeError, 413, "payload_too_large"),
        (lambda c, s: c.delete_snapshot("snapnothing"), errors.NotFoundError, 404, "not_found"),
    ],
)
def test_errors_are_their_classes(
    client: SandboxClient, call: Callable[[SandboxClient, Any], Any], cls: type[Exception], status: int, code: str
) -> None:
    with client.create() as sandbox:
        with pytest.raises(cls) as caught:
            call(client, sandbox)
        error = caught.value
        assert isinstance(error, SandboxAPIError)
        assert (error.status_code, error.code) == (status, code)
        assert str(error).startswith(f"{status} {code}: ")
        if isinstance(error, errors.UnsupportedError):
            assert (error.capability, error.backend) == ("min_isolation vm", "fake")
        assert sandbox.exec(["true"]).ok, "the connection must not be left broken"


def test_a_wrong_key_is_unauthorized(server: Running) -> None:
    with SandboxClient(server.url, "wrong-key-0123456789") as client, pytest.raises(errors.UnauthorizedError):
        client.list_sandboxes()


def test_every_code_of_the_tree_has_a_class() -> None:
    codes = {
        cls.code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.SandboxError)
    }
    assert set(BY_CODE) == codes
    for code, cls in BY_CODE.items():
        error = api_error(418, code, "words", {"a": 1})
        assert type(error) is cls
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), copy.status_code, copy.message, copy.details) == (cls, 418, "words", {"a": 1})


@pytest.mark.parametrize(
    "body", [b"", b"<html>502</html>", b"[]", b'{"error": "x"}', b'{"error": {"code": 7}}', b"\xff"]
)
def test_a_reply_of_another_shape_is_still_an_error(body: bytes) -> None:
    error = from_reply(502, body)
    assert (error.status_code, error.code) == (502, "http_error")
    assert isinstance(error, errors.BackendError)


def test_the_environment_says_where_and_with_which_key(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_URL", server.url)
    monkeypatch.setenv("AGENT_SANDBOX_API_KEY", KEY)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    with agent_sandbox.Sandbox.create() as sandbox:
        assert sandbox.exec(["true"]).ok
    assert KEY not in repr(sandbox)


def test_unix_sockets_by_address_and_by_argument(tmp_path: Path) -> None:
    path = tmp_path / "run dir" / "s"
    with running(settings_for(tmp_path, api_keys=()), uds=path):
        for client in (SandboxClient(f"unix://{path}"), SandboxClient(uds=path)):
            with client:
                assert client.list_sandboxes() == []


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://localhost", "http://", "/run/x.sock"])
def test_an_address_that_cannot_be_right_is_refused(url: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match="address"):
        SandboxClient(url)


# httpcore leaves the socket of a failed connection to a unix path to the garbage collector, which warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nobody_there_says_what_to_do(tmp_path: Path) -> None:
    for url in (f"http://127.0.0.1:{free_port()}", f"unix://{tmp_path}/nothing"):
        with SandboxClient(url, KEY) as client, pytest.raises(ServerUnreachableError, match="agent-sandbox serve"):
            client.health()
    gc.collect()


def replying(pieces: list[bytes]) -> SandboxClient:
    """A client of a server that sends these bytes to whoever asks and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                for piece in pieces:
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # closing with something unread would reset the connection
                    pass

    threading.Thread(target=serve).start()
    return SandboxClient(f"http://127.0.0.1:{listener.getsockname()[1]}", KEY)


SANDBOX = {
    "id": "sb1",
    "status": "running",
    "image": "host",
    "cpus": 1.0,
    "memory_mb": 512,
    "pids_limit": 256,
    "network": False,
    "read_only_rootfs": True,
    "created_at": "2026-01-01T00:00:00Z",
    "expires_at": "2026-01-01T00:15:00Z",
}
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream_of(pieces: list[bytes]) -> tuple[list[ExecEvent], BaseException | None]:
    got: list[ExecEvent] = []
    with replying(pieces) as client:
        try:
            for event in agent_sandbox.client.Sandbox(client, dict(SANDBOX)).exec_stream("x"):
                got.append(event)
        except errors.SandboxError as error:
            return got, error
    return got, None


def test_a_reply_that_breaks_off_is_unknown() -> None:
    for reply in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"):
        with replying([reply]) as client, pytest.raises(ReplyLostError, match="unknown"):
            client.health()


def test_a_reply_that_takes_too_long_is_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with SandboxClient(url, timeout=0.1) as client, pytest.raises(ReplyLostError, match="in time"):
            client.health()


def test_lines_are_put_together_from_any_pieces() -> None:
    text = b'{"type":"stdout","data":"\xc3\xa9\xe2\x80\xa8"}\n{"type":"exit","exit_code":0,"new":1}\n'
    pieces = [STREAM, *(chunk(text[at : at + 1]) for at in range(len(text))), b"0\r\n\r\n"]
    assert stream_of(pieces) == ([ExecEvent("stdout", "é\u2028"), ExecEvent("exit", exit_code=0)], None)


def test_a_stream_that_breaks_raises_the_servers_reason() -> None:
    got, error = stream_of(
        [STREAM, chunk(b'{"type":"stdout","data":"a"}\n'), chunk(b'{"type":"error","data":"conflict: no"}\n')]
    )
    assert got == [ExecEvent("stdout", "a")]
    assert isinstance(error, errors.ConflictError)
    assert error.message == "no"


@pytest.mark.parametrize("end", [b"", b"0\r\n\r\n"])
def test_a_stream_without_an_exit_raises(end: bytes) -> None:
    got, error = stream_of([STREAM, chunk(b'{"type":"stdout","data":"a"}\n'), end])
    assert got == [ExecEvent("stdout", "a")]
    assert isinstance(error, ReplyLostError)


def test_an_own_http_client_is_used() -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"sandboxes": []})

    own = httpx.Client(base_url="http://proxy.example", transport=httpx.MockTransport(handle))
    with SandboxClient(api_key=KEY, http_client=own) as client:
        assert client.list_sandboxes() == []
    assert str(seen[0].url) == "http://proxy.example/v1/sandboxes"
    assert seen[0].headers["authorization"] == f"Bearer {KEY}"


def test_a_command_gets_its_own_wait_and_every_other_call_the_clients() -> None:
    waits: list[float] = []

    def handle(request: httpx.Request) -> httpx.Response:
        waits.append(request.extensions["timeout"]["read"])
        reply = {"stdout": "", "stderr": "", "exit_code": 0, "timed_out": False, "truncated": False, "duration_ms": 1}
        return httpx.Response(200, json=SANDBOX if request.method == "GET" else reply)

    own = httpx.Client(base_url="http://proxy.example", transport=httpx.MockTransport(handle))
    with SandboxClient(http_client=own, timeout=7) as client:
        sandbox = client.get("sb1")
        sandbox.exec("true", timeout_seconds=500)
        sandbox.exec("true")
    assert waits == [7, 530, 3630]


def test_the_sdk_loads_nothing_of_the_server() -> None:
    program = """
import sys
from agent_sandbox.client import SandboxClient
from agent_sandbox import Sandbox
SandboxClient("http://127.0.0.1:1").close()
heavy = {"fastapi", "pydantic", "pydantic_core", "msgspec", "uvicorn", "typer", "agent_sandbox.config"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", done.stdout


def test_the_server_loads_no_http_client() -> None:
    program = "import sys, agent_sandbox.server.run; print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_public_clients_names_are_kept() -> None:
    methods = {"health", "create", "get", "list_sandboxes", "list_snapshots", "get_snapshot", "delete_snapshot", "fork"}
    assert methods <= set(dir(SandboxClient))
    own = {"exec", "exec_stream", "write_file", "read_file", "read_text", "list_files", "snapshot", "rollback"}
    assert own | {"set_timeout", "refresh", "destroy"} <= set(dir(agent_sandbox.Sandbox))
    assert SnapshotInfo.__dataclass_fields__.keys() >= {"id", "sandbox_id", "name", "image", "size_bytes", "created_at"}
