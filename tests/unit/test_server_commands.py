"""Commands over HTTP: what a stream looks like, how it ends, and that a client's leaving ends the command."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from agent_sandbox.errors import ConnectionLostError, InvalidRequestError
from agent_sandbox.server import streams
from agent_sandbox.server.commands import EventStream, Lines
from agent_sandbox.types import ExecEvent, ExecExit, ExecOutput
from tests.unit.server_harness import KEY, Running, running, settings_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(tmp_path_factory.mktemp("server"), max_exec_output_bytes=1000)) as it:
        yield it


@pytest.fixture(scope="module")
def sandbox(server: Running) -> str:
    return server.create()


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.splitlines()]


# -- lines, without a server -----------------------------------------------------------------------------------------


def test_each_stream_is_utf8_of_its_own_and_one_byte_at_a_time_is_the_same() -> None:
    lines = Lines()
    text = "aé€😀\x00\r\n"
    pieces = []
    for byte in text.encode():
        pieces.append(lines.output(ExecOutput("stdout", bytes([byte]))))
        assert lines.output(ExecOutput("stderr", b"e")) == b'{"type":"stderr","data":"e"}\n'
    assert "".join(event["data"] for event in events(b"".join(pieces))) == text


def test_bytes_that_are_not_utf8_are_replaced_and_a_cut_character_shows_at_the_end() -> None:
    lines = Lines()
    assert events(lines.output(ExecOutput("stdout", b"\xff\xe2\x82"))) == [{"type": "stdout", "data": "\ufffd"}]
    assert lines.output(ExecOutput("stderr", b"\xf0")) == b""
    assert events(lines.exit(ExecExit(code=3), 12)) == [
        {"type": "stdout", "data": "\ufffd"},
        {"type": "stderr", "data": "\ufffd"},
        {"type": "exit", "exit_code": 3, "timed_out": False, "duration_ms": 12},
    ]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (ExecExit(code=0), 0),
        (ExecExit(code=None, signal=9), 137),
        (ExecExit(code=None, signal=15), 143),
        (ExecExit(code=None, signal=9, timed_out=True), 137),
    ],
)
def test_the_exit_code_is_never_null(event: ExecExit, code: int) -> None:
    (line,) = events(Lines().exit(event, 0))
    assert (line["exit_code"], line["timed_out"]) == (code, event.timed_out)


def test_lines_are_lines_to_every_client() -> None:
    # Clients that split text by str.splitlines() must find one line for each event.
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj\nk"
    line = Lines().output(ExecOutput("stdout", text.encode()))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line)["data"] == text


# -- through a server --------------------------------------------------------------------------------------------------


def test_output_then_one_exit(server: Running, sandbox: str) -> None:
    reply = server.call("POST", f"/v1/sandboxes/{sandbox}/exec/stream", {"command": "echo out; echo err >&2; exit 7"})
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
    assert reply.headers["transfer-encoding"] == "chunked"
    *output, end = events(reply.body)
    assert output == [{"type": "stdout", "data": "out\n"}, {"type": "stderr", "data": "err\n"}]
    assert list(end) == ["type", "exit_code", "timed_out", "duration_ms"]
    assert (end["type"], end["exit_code"], end["timed_out"]) == ("exit", 7, False)


def test_a_timeout_is_said_and_keeps_the_output(server: Running, sandbox: str) -> None:
    body = {"command": "echo early; sleep 30", "timeout_seconds": 0.2}
    done = server.call("POST", f"/v1/sandboxes/{sandbox}/exec", body).json
    assert (done["stdout"], done["exit_code"], done["timed_out"]) == ("early\n", 137, True)
    assert 200 <= done["duration_ms"] < 5000
    *_, end = events(server.call("POST", f"/v1/sandboxes/{sandbox}/exec/stream", body).body)
    assert (end["exit_code"], end["timed_out"]) == (137, True)


def test_a_signal_is_128_and_its_number(server: Running, sandbox: str) -> None:
    done = server.call("POST", f"/v1/sandboxes/{sandbox}/exec", {"command": "kill -15 $$"}).json
    assert (done["exit_code"], done["timed_out"]) == (143, False)


def test_a_missing_program_is_127(server: Running, sandbox: str) -> None:
    assert server.call("POST", f"/v1/sandboxes/{sandbox}/exec", {"command": ["nothing"]}).json["exit_code"] == 127


def test_output_above_the_limit_is_cut_and_said(server: Running, sandbox: str) -> None:
    server.call("PUT", f"/v1/sandboxes/{sandbox}/files?path=big", b"x" * 1001)
    done = server.call("POST", f"/v1/sandboxes/{sandbox}/exec", {"command": "cat big"}).json
    assert (done["stdout"], done["truncated"], done["exit_code"]) == ("x" * 1000, True, 0)
    *output, end = events(server.call("POST", f"/v1/sandboxes/{sandbox}/exec/stream", {"command": "cat big"}).body)
    assert "".join(event["data"] for event in output) == "x" * 1001


def test_fifty_megabytes_arrive_whole(server: Running, sandbox: str) -> None:
    reply = server.call("POST", f"/v1/sandboxes/{sandbox}/exec/stream", {"command": "yes"})
    *output, end = events(reply.body)
    assert sum(len(event["data"]) for event in output) == 64 * 1024 * 1024
    assert end["exit_code"] == 0


def request(server: Running, path: str, body: Any) -> socket.socket:
    sock = server.connect()
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n"
    sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    return sock


def until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_output_arrives_while_the_command_runs(server: Running, sandbox: str) -> None:
    with request(server, f"/v1/sandboxes/{sandbox}/exec/stream", {"command": "echo now; sleep 3600"}) as sock:
        text = b""
        while b"now" not in text:
            text += sock.recv(65536)


def test_headers_of_a_silent_command_come_before_its_end(
    server: Running, sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HEADERS_WITHIN_SECONDS", 0.05)
    with request(server, f"/v1/sandboxes/{sandbox}/exec/stream", {"command": "sleep 3600"}) as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")


def running_commands(server: Running) -> int:
    return sum(len(environment.execs) for environment in server.backend.environments.values())


@pytest.mark.parametrize("path", ["exec", "exec/stream"])
@pytest.mark.parametrize("command", ["sleep 60", "echo a; sleep 60", "yes; yes; yes; sleep 60"])
def test_a_client_that_leaves_takes_its_command_along(
    server: Running, sandbox: str, path: str, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert until(lambda: running_commands(server) == 0)
    sock = request(server, f"/v1/sandboxes/{sandbox}/{path}", {"command": command})
    try:
        assert until(lambda: running_commands(server) == 1)
        if path == "exec/stream" and command != "sleep 60":
            sock.recv(1000)
    finally:
        sock.close()
    assert until(lambda: running_commands(server) == 0)
    assert "unexpected error" not in caplog.text
    assert server.call("POST", f"/v1/sandboxes/{sandbox}/exec", {"command": "true"}).json["exit_code"] == 0


def test_a_slow_reader_holds_the_command_back(server: Running, sandbox: str) -> None:
    with request(server, f"/v1/sandboxes/{sandbox}/exec/stream", {"command": "yes; echo done > end"}) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert until(lambda: running_commands(server) == 1)
        time.sleep(0.5)
        assert running_commands(server) == 1
        assert server.call("GET", f"/v1/sandboxes/{sandbox}/files?path=end").status == 404
    assert until(lambda: running_commands(server) == 0)


class Script:
    """In place of a manager's stream: yields what it is told and remembers whether it was closed."""

    def __init__(self, *steps: ExecEvent | Exception | float) -> None:
        self.steps = steps
        self.closed = threading.Event()
        self.made: list[AsyncGenerator[ExecEvent, None]] = []

    def start(self) -> AsyncGenerator[ExecEvent, None]:
        # Kept, so that only closing it closes it, and not the garbage collector.
        self.made.append(self.run())
        return self.made[-1]

    async def run(self) -> AsyncGenerator[ExecEvent, None]:
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                yield step
        finally:
            self.closed.set()


@pytest.fixture
def scripted(server: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Script]:
    def install(*steps: ExecEvent | Exception | float) -> Script:
        script = Script(*steps)
        monkeypatch.setattr(server.manager, "exec_stream", lambda *args, **options: script.start())
        return script

    return install


def whole(sock: socket.socket) -> bytes:
    text = b""
    while piece := sock.recv(65536):
        text += piece
    return text


async def test_a_client_that_leaves_while_it_does_not_read_closes_the_stream() -> None:
    script = Script(ExecOutput("stdout", b"a"), ExecOutput("stdout", b"b"))
    left = asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            left.set()
            await asyncio.sleep(60)

    with pytest.raises(ClientDisconnect):
        await EventStream(script.start())({}, receive, send)
    assert script.closed.is_set()


def test_streams_are_closed_before_the_manager_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(ExecOutput("stdout", b"a"), 60.0)
    closed_first: list[bool] = []
    with running(settings_for(tmp_path)) as server:
        close = server.manager.close

        async def watched() -> None:
            closed_first.append(script.closed.is_set())
            await close()

        monkeypatch.setattr(server.manager, "close", watched)
        monkeypatch.setattr(server.manager, "exec_stream", lambda *args, **options: script.start())
        sock = request(server, f"/v1/sandboxes/{server.create()}/exec/stream", {"command": "x"})
        assert sock.recv(1000)
    sock.close()
    assert closed_first == [True]


LOST = ConnectionLostError("the wire broke")


@pytest.mark.parametrize("steps", [(LOST,), (InvalidRequestError("no such directory"),), (0.01, LOST)])
def test_an_error_before_the_first_event_is_an_ordinary_reply(
    server: Running, sandbox: str, scripted: Callable[..., Script], steps: Any
) -> None:
    script = scripted(*steps)
    reply = server.call("POST", f"/v1/sandboxes/{sandbox}/exec/stream", {"command": "x"})
    assert reply.status == (400 if isinstance(steps[-1], InvalidRequestError) else 502)
    assert reply.error["code"] == steps[-1].code
    assert script.closed.wait(5)


@pytest.mark.parametrize("late", [False, True])
def test_an_error_in_the_middle_is_said_and_cuts_the_stream_off(
    server: Running, sandbox: str, scripted: Callable[..., Script], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr(streams, "HEADERS_WITHIN_SECONDS", 0.05)
    script = scripted(0.3, LOST) if late else scripted(ExecOutput("stdout", b"some"), LOST)
    with request(server, f"/v1/sandboxes/{sandbox}/exec/stream", {"command": "x"}) as sock:
        text = whole(sock)
    assert text.startswith(b"HTTP/1.1 200 ")
    assert not text.endswith(b"0\r\n\r\n"), "a client would take this for a whole reply"
    assert b'{"type":"error","data":"backend_error: the wire broke"}\n' in text
    assert (b"some" in text) is not late
    assert b'"exit"' not in text
    assert script.closed.wait(5)


@pytest.mark.parametrize("end", [RuntimeError("a fault of ours"), None])
def test_a_stream_without_an_exit_never_looks_whole(
    server: Running, sandbox: str, scripted: Callable[..., Script], end: Exception | None
) -> None:
    scripted(ExecOutput("stdout", b"some"), *([end] if end else []))
    with request(server, f"/v1/sandboxes/{sandbox}/exec/stream", {"command": "x"}) as sock:
        text = whole(sock)
    assert b"some" in text
    assert not text.endswith(b"0\r\n\r\n")
    assert b"a fault of ours" not in text
