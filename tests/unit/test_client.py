"""The SDK against a real server on the fake backend, and against servers that misbehave: one suite for both SDKs."""

from __future__ import annotations

import asyncio
import gc
import inspect
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import agent_sandbox
from agent_sandbox import errors
from agent_sandbox.client import (
    AsyncExecution,
    AsyncSandbox,
    AsyncSandboxClient,
    AsyncTerminal,
    ExecEvent,
    Execution,
    ReplyLostError,
    Sandbox,
    SandboxAPIError,
    SandboxClient,
    ServerUnreachableError,
    SnapshotInfo,
    Terminal,
    http,
)
from agent_sandbox.client.errors import BY_CODE, api_error, from_reply
from tests.ports import free_port
from tests.unit.client_pair import (
    EXEC,
    SANDBOX,
    STREAM,
    Awaited,
    Scripted,
    all_of,
    chunk,
    json_reply,
    key_of,
    open_client,
    sandbox_of,
)
from tests.unit.server_harness import KEY, Running, running, settings_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(tmp_path_factory.mktemp("server"), max_file_bytes=100_000)) as it:
        yield it


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    which: str = request.param
    return which


@pytest_asyncio.fixture
async def client(server: Running, kind: str) -> AsyncIterator[Any]:
    async with open_client(kind, server.url, KEY) as it:
        yield it


@pytest_asyncio.fixture
async def sandbox(client: Any) -> AsyncIterator[Any]:
    async with await client.create() as it:
        yield it


async def test_the_whole_way_through(client: Any) -> None:
    assert (await client.health())["status"] == "ok"
    async with await client.create(env={"A": "b"}, timeout_seconds=60, metadata={"team": "a"}) as sandbox:
        assert sandbox.id in {one.id for one in await client.list_sandboxes()}
        assert [one.id for one in await client.list_sandboxes({"team": "a"})] == [sandbox.id]
        assert await client.list_sandboxes({"team": "b"}) == []
        assert (await client.get(sandbox.id)).data == sandbox.data
        done = await sandbox.exec("printenv A; false")
        assert (done.stdout, done.exit_code, done.ok) == ("b\n", 1, False)
        assert (await sandbox.exec(["true"])).ok
        *output, end = await all_of(sandbox.exec_stream("echo a; echo b >&2"))
        assert output == [ExecEvent("stdout", "a\n"), ExecEvent("stderr", "b\n")]
        assert (end.type, end.exit_code, end.timed_out) == ("exit", 0, False)
        written = await sandbox.write_file("d/f \udcff", "text", mode=0o600)
        assert (written.path, written.size) == ("/workspace/d/f \udcff", 4)
        assert await sandbox.read_text("d/f \udcff") == "text"
        assert [entry.name for entry in await sandbox.list_files("d")] == ["f \udcff"]
        snapshot = await sandbox.snapshot("first")
        assert await client.list_snapshots(sandbox.id) == [snapshot] == [await client.get_snapshot(snapshot.id)]
        await sandbox.write_file("other", b"x")
        assert (await sandbox.rollback(snapshot)).id == sandbox.id
        assert [entry.name for entry in await sandbox.list_files()] == ["d"]
        async with await client.fork(snapshot, memory_mb=64) as fork:
            assert await fork.read_file("/workspace/d/f \udcff") == b"text"
            assert (fork.info.memory_mb, fork.info.source_snapshot_id) == (64, snapshot.id)
        before = sandbox.expires_at
        assert (await sandbox.set_timeout(3600)).expires_at > before
        assert (await sandbox.refresh()).status == "running"
    with pytest.raises(errors.NotFoundError):
        await client.get(sandbox.id)
    await client.delete_snapshot(snapshot.id)
    assert await client.list_snapshots(sandbox.id) == []


async def test_a_stopped_sandbox_keeps_its_workspace(sandbox: Any) -> None:
    await sandbox.write_file("f", "kept")
    assert (await sandbox.stop()).status == "stopped"
    assert (await sandbox.stop()).status == "stopped"
    with pytest.raises(errors.ConflictError):
        await sandbox.exec("true")
    assert (await sandbox.start()).status == "running"
    assert await sandbox.read_file("f") == b"kept"
    stats = await sandbox.stats()
    assert stats.processes >= 1
    assert stats.output_bytes >= 0


async def test_a_context_manager_forgives_a_sandbox_that_is_gone(client: Any) -> None:
    async with await client.create() as sandbox:
        await sandbox.destroy()


async def test_backends(client: Any) -> None:
    (backend,) = await client.backends()
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
            lambda c, s: all_of(s.exec_stream("true", workdir="/nothing")),
            errors.InvalidRequestError,
            400,
            "invalid_request",
        ),
        (lambda c, s: s.write_file("/etc/x", ""), errors.InvalidRequestError, 400, "invalid_request"),
        (lambda c, s: s.write_file("x", bytes(100_001)), errors.PayloadTooLargeError, 413, "payload_too_large"),
        (lambda c, s: c.delete_snapshot("snapnothing"), errors.NotFoundError, 404, "not_found"),
    ],
)
async def test_errors_are_their_classes(
    client: Any, sandbox: Any, call: Callable[[Any, Any], Any], cls: type[Exception], status: int, code: str
) -> None:
    with pytest.raises(cls) as caught:
        await call(client, sandbox)
    error = caught.value
    assert isinstance(error, SandboxAPIError)
    assert (error.status_code, error.code) == (status, code)
    assert str(error).startswith(f"{status} {code}: ")
    if isinstance(error, errors.UnsupportedError):
        assert (error.capability, error.backend) == ("min_isolation vm", "fake")
    assert (await sandbox.exec(["true"])).ok, "the connection must not be left broken"


async def test_a_wrong_key_is_unauthorized(server: Running, kind: str) -> None:
    async with open_client(kind, server.url, "wrong-key-0123456789") as client:
        with pytest.raises(errors.UnauthorizedError):
            await client.list_sandboxes()


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


async def test_the_environment_says_where_and_with_which_key(
    server: Running, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_URL", server.url)
    monkeypatch.setenv("AGENT_SANDBOX_API_KEY", KEY)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    if kind == "async":
        made: Any = await agent_sandbox.AsyncSandbox.create()
    else:
        made = Awaited(await asyncio.to_thread(agent_sandbox.Sandbox.create))
    async with made as sandbox:
        assert (await sandbox.exec(["true"])).ok
    assert KEY not in repr(sandbox)


async def test_unix_sockets_by_address_and_by_argument(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run dir" / "s"
    with running(settings_for(tmp_path, api_keys=()), uds=path):
        for client in (open_client(kind, f"unix://{path}"), open_client(kind, uds=path)):
            async with client:
                assert await client.list_sandboxes() == []


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://localhost", "http://", "/run/x.sock"])
def test_an_address_that_cannot_be_right_is_refused(url: str, kind: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match="address"):
        open_client(kind, url)


# httpcore leaves the socket of a failed connection to a unix path to the garbage collector, which warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_nobody_there_says_what_to_do(tmp_path: Path, kind: str) -> None:
    for url in (f"http://127.0.0.1:{free_port()}", f"unix://{tmp_path}/nothing"):
        async with open_client(kind, url, KEY) as client:
            for call in (client.health, client.create):
                with pytest.raises(ServerUnreachableError, match="agent-sandbox serve") as caught:
                    await call()
                shown = "".join(traceback.format_exception(caught.value))
                assert (shown.count("Traceback"), "httpx." in shown, "httpcore" in shown) == (1, False, False)
                assert shown.splitlines()[-1].endswith(caught.value.message)
            with pytest.raises(ServerUnreachableError, match="agent-sandbox serve") as caught:
                await sandbox_of(client).terminal()
            assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
    gc.collect()


async def stream_of(kind: str, pieces: list[bytes]) -> tuple[list[ExecEvent], BaseException | None]:
    got: list[ExecEvent] = []
    async with open_client(kind, Scripted(pieces).url) as client:
        try:
            async for event in sandbox_of(client).exec_stream("x"):
                got.append(event)
        except errors.SandboxError as error:
            return got, error
    return got, None


async def test_a_reply_that_breaks_off_is_unknown(kind: str) -> None:
    for reply in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"):
        server = Scripted([reply])
        async with open_client(kind, server.url) as client:
            with pytest.raises(ReplyLostError, match="unknown"):
                await client.health()
        assert len(server.asked) == 1, "only what has an idempotency key is sent again"
        assert key_of(server.asked[0]) is None


async def test_what_creates_is_sent_again_under_the_same_key(kind: str) -> None:
    broken = [b"HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\n{"]
    server = Scripted([], broken, json_reply(SANDBOX, b"201 Created"))
    async with open_client(kind, server.url) as client:
        assert (await client.create()).id == "sb1"
    keys = [key_of(request) for request in server.asked]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert keys[0]
    first, second = Scripted(json_reply(SANDBOX)), Scripted(json_reply(SANDBOX))
    for server in (first, second):
        async with open_client(kind, server.url) as client:
            await client.create()
    assert key_of(first.asked[0]) != key_of(second.asked[0])


async def test_a_key_of_ones_own_is_used(kind: str) -> None:
    snapshot = {"id": "snap1", "sandbox_id": "sb1", "name": None, "image": "host", "size_bytes": 0, "created_at": ""}
    calls: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
        (SANDBOX, lambda c: c.create(idempotency_key="mine")),
        (SANDBOX, lambda c: c.fork("snap1", idempotency_key="mine")),
        (snapshot, lambda c: sandbox_of(c).snapshot(idempotency_key="mine")),
        (EXEC, lambda c: sandbox_of(c).start_exec("x", idempotency_key="mine")),
    )
    for reply, call in calls:
        server = Scripted(json_reply(reply))
        async with open_client(kind, server.url) as client:
            await call(client)
        assert key_of(server.asked[0]) == "mine"


async def test_a_server_that_stays_away_after_a_lost_reply_leaves_it_unknown(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PAUSES", (0.01, 0.01))
    server = Scripted([])
    async with open_client(kind, server.url) as client:
        with pytest.raises(ReplyLostError, match="unknown"):
            await client.create()
    assert len(server.asked) == 1


async def test_an_answer_of_the_server_is_not_asked_for_again(kind: str) -> None:
    server = Scripted(json_reply({"error": {"code": "backend_error", "message": "no"}}, b"502 Bad Gateway"))
    async with open_client(kind, server.url) as client:
        with pytest.raises(errors.BackendError):
            await client.create()


async def test_a_reply_that_takes_too_long_is_unknown(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with open_client(kind, url, timeout=0.1) as client:
            for call in (client.health, client.create):
                with pytest.raises(ReplyLostError, match="in time"):
                    await call()


async def test_lines_are_put_together_from_any_pieces(kind: str) -> None:
    text = b'{"type":"stdout","data":"\xc3\xa9\xe2\x80\xa8"}\n{"type":"exit","exit_code":0,"new":1}\n'
    pieces = [STREAM, *(chunk(text[at : at + 1]) for at in range(len(text))), b"0\r\n\r\n"]
    assert await stream_of(kind, pieces) == ([ExecEvent("stdout", "é\u2028"), ExecEvent("exit", exit_code=0)], None)


async def test_a_stream_that_breaks_raises_the_servers_reason(kind: str) -> None:
    got, error = await stream_of(
        kind, [STREAM, chunk(b'{"type":"stdout","data":"a"}\n'), chunk(b'{"type":"error","data":"conflict: no"}\n')]
    )
    assert got == [ExecEvent("stdout", "a")]
    assert isinstance(error, errors.ConflictError)
    assert error.message == "no"


@pytest.mark.parametrize("end", [b"", b"0\r\n\r\n"])
async def test_a_stream_without_an_exit_raises(kind: str, end: bytes) -> None:
    got, error = await stream_of(kind, [STREAM, chunk(b'{"type":"stdout","data":"a"}\n'), end])
    assert got == [ExecEvent("stdout", "a")]
    assert isinstance(error, ReplyLostError)


async def test_a_line_without_an_end_is_cut_off(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_LINE_BYTES", 1000)
    got, error = await stream_of(kind, [STREAM, *[chunk(b"x" * 100)] * 11, b"0\r\n\r\n"])
    assert got == []
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


def test_both_sdks_have_the_same_names_and_arguments() -> None:
    for blocking, waiting in (
        (SandboxClient, AsyncSandboxClient),
        (Sandbox, AsyncSandbox),
        (Execution, AsyncExecution),
        (Terminal, AsyncTerminal),
    ):
        ours = {name for name in dir(blocking) if not name.startswith("_")}
        assert ours == {name for name in dir(waiting) if not name.startswith("_")}
        for name in ours:
            one, other = getattr(blocking, name), getattr(waiting, name)
            if callable(one):
                assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters), name


def test_the_public_clients_names_are_kept() -> None:
    methods = {"health", "create", "get", "list_sandboxes", "list_snapshots", "get_snapshot", "delete_snapshot", "fork"}
    assert methods <= set(dir(SandboxClient))
    own = {"exec", "exec_stream", "write_file", "read_file", "read_text", "list_files", "snapshot", "rollback"}
    assert own | {"set_timeout", "refresh", "destroy"} <= set(dir(agent_sandbox.Sandbox))
    assert SnapshotInfo.__dataclass_fields__.keys() >= {"id", "sandbox_id", "name", "image", "size_bytes", "created_at"}
