"""Commands as objects over HTTP, the terminal over a WebSocket, and the header that makes a creation happen once."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect, unix_connect

from agent_sandbox import models
from agent_sandbox.errors import BackendError, InvalidRequestError
from agent_sandbox.server import terminal
from agent_sandbox.server.execs import ExecLines
from agent_sandbox.types import ExecExit, ExecGap, ExecOutput, TerminalSize
from tests.unit.server_harness import AUTH, KEY, Running, running, settings_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(tmp_path_factory.mktemp("server"), max_file_bytes=300_000)) as it:
        yield it


@pytest.fixture
def execs(server: Running) -> Iterator[str]:
    sandbox_id = server.create()
    yield f"/v1/sandboxes/{sandbox_id}/execs"
    server.call("DELETE", f"/v1/sandboxes/{sandbox_id}")


def lines(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.splitlines()]


def wait_for_end(server: Running, path: str) -> dict[str, Any]:
    return lines(server.call("GET", f"{path}/output").body)[-1]


def test_an_attached_command_streams_and_is_kept(server: Running, execs: str) -> None:
    reply = server.call("POST", execs, {"command": "echo out; echo err >&2; exit 3", "tag": "t"})
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
    started, out, err, end = lines(reply.body)
    assert started == {"type": "started", "id": started["id"], "pid": started["pid"]}
    assert out == {"type": "stdout", "cursor": 4, "data": "out\n"}
    assert err == {"type": "stderr", "cursor": 8, "data": "err\n"}
    assert set(end) == {
        *("type", "exit_code", "signal", "timed_out", "oom_killed", "message", "usage", "duration_ms"),
    }
    assert (end["type"], end["exit_code"], end["signal"], end["timed_out"]) == ("exit", 3, None, False)
    assert set(end["usage"]) == {"user_seconds", "system_seconds", "max_rss_kb", "wall_seconds"}
    shown = server.call("GET", f"{execs}/{started['id']}").json
    assert server.call("GET", execs).json == {"execs": [shown]}
    assert set(shown) == {
        *("id", "tag", "command", "pid", "status", "started_at", "exit_code", "signal", "timed_out", "tty", "cursor"),
        *("first_cursor", "usage", "oom_killed", "message"),
    }
    assert (shown["status"], shown["tag"], shown["cursor"], shown["first_cursor"]) == ("exited", "t", 8, 0)
    rest = server.call("GET", f"{execs}/{started['id']}/output?cursor=4&follow=false")
    assert lines(rest.body)[0] == err
    assert models.Exec.from_json(shown).usage == models.ExecUsage(**shown["usage"])


def test_a_detached_command_is_an_object_at_once(server: Running, execs: str) -> None:
    reply = server.call("POST", execs, {"command": ["sleep", "60"], "detach": True})
    assert reply.status == 201
    assert (reply.json["status"], reply.json["exit_code"], reply.json["usage"]) == ("running", None, None)
    path = f"{execs}/{reply.json['id']}"
    assert server.call("POST", f"{path}/signal", {"signal": "TERM"}).json == {"processes": 1}
    assert (wait_for_end(server, path)["exit_code"], wait_for_end(server, path)["signal"]) == (None, 15)
    for method, tail, body in (
        ("POST", "/signal", {"signal": 9}),
        ("POST", "/stdin", b"x"),
        ("POST", "/stdin?close=true", b""),
        ("POST", "/resize", {"rows": 1, "cols": 1}),
    ):
        assert server.call(method, path + tail, body).status == 404
    assert server.call("DELETE", path).status == 204
    for method, tail in (("DELETE", ""), ("GET", ""), ("GET", "/output")):
        assert server.call(method, path + tail).error["code"] == "not_found"


def test_a_program_that_is_missing(server: Running, execs: str) -> None:
    (end,) = lines(server.call("POST", execs, {"command": ["nothing"]}).body)
    assert (end["exit_code"], end["message"]) == (127, "nothing: not found")
    reply = server.call("POST", execs, {"command": ["nothing"], "detach": True})
    assert reply.status == 201
    assert wait_for_end(server, f"{execs}/{reply.json['id']}")["exit_code"] == 127


def test_stdin_comes_in_pieces_and_ends_on_demand(server: Running, execs: str) -> None:
    body = {"command": ["cat"], "stdin": True, "detach": True}
    path = f"{execs}/{server.call('POST', execs, body).json['id']}"
    assert server.call("POST", f"{path}/stdin", b"\xff\x00").json == {"taken": 2}
    assert server.call("POST", f"{path}/stdin", b"").json == {"taken": 0}
    assert server.call("POST", f"{path}/stdin?close=true", b"end").json == {"taken": 3}
    got = lines(server.call("GET", f"{path}/output").body)
    pieces = [base64.b64decode(line["data_b64"]) if "data_b64" in line else line["data"].encode() for line in got[:-1]]
    assert b"".join(pieces) == b"\xff\x00end"
    assert server.call("POST", f"{path}/stdin", b"x" * 300_001).status == 413


def test_what_a_command_took_before_it_ended_is_told_though_there_is_nothing_left_to_close(
    server: Running, execs: str
) -> None:
    body = {"command": ["cat"], "stdin": True, "detach": True}
    path = f"{execs}/{server.call('POST', execs, body).json['id']}"
    head = f"POST {path}/stdin?close=true HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n"
    with server.connect() as sock:
        sock.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n4\r\nline\r\n")
        for _ in range(2_000):
            if b"line" in server.call("GET", f"{path}/output?follow=false").body:
                break
            time.sleep(0.01)
        server.call("POST", f"{path}/signal", {"signal": "KILL"})
        wait_for_end(server, path)
        sock.sendall(b"0\r\n\r\n")
        reply = sock.recv(65536)
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert reply.endswith(b'{"taken":4}')
    assert server.call("POST", f"{path}/stdin?close=true", b"").status == 404


def test_closing_the_starters_connection_ends_the_command(server: Running, execs: str) -> None:
    request = json.dumps({"command": "echo x; sleep 60"}).encode()
    with server.connect() as sock:
        sock.sendall(
            f"POST {execs} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(request)}\r\n\r\n".encode()
            + request
        )
        seen = b""
        while b'"x\\n"' not in seen:
            seen += sock.recv(65536)
    exec_id = json.loads(seen[seen.index(b'{"type":"started"') :].splitlines()[0])["id"]
    assert wait_for_end(server, f"{execs}/{exec_id}")["signal"] == 9


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"command": ""}, 400),
        ({}, 422),
        ({"command": "true", "user": "nobody"}, 422),
        ({"command": "true", "user": "root"}, 501),
        ({"command": "true", "tty": {"rows": 0, "cols": 80}}, 422),
        ({"command": "true", "tty": {"rows": 24}}, 422),
        ({"command": "true", "tty": {"rows": 24, "cols": 65536}}, 422),
        ({"command": "true", "tty": True}, 422),
        ({"command": "true", "stdin": 1}, 422),
        ({"command": "true", "detach": "yes"}, 422),
        ({"command": "true", "tag": "x" * 257}, 422),
        ({"command": "true", "tag": "é" * 200}, 400),
        ({"command": "true", "tag": "\ud800"}, 400),
        ({"command": "true", "workdir": "/nowhere"}, 400),
        ({"command": "true", "timeout_seconds": 0}, 422),
        ({"command": "true", "timeout_seconds": 1e9}, 400),
        ({"command": "true", "id": "mine"}, 422),
    ],
)
@pytest.mark.parametrize("detach", [False, True])
def test_a_command_that_cannot_be(server: Running, execs: str, body: Any, status: int, detach: bool) -> None:
    reply = server.call("POST", execs, {"detach": detach, **body})
    assert (reply.status, reply.error["code"] != "") == (status, True)
    assert server.call("GET", execs).json == {"execs": []}


@pytest.mark.parametrize(
    ("method", "tail", "body", "status"),
    [
        ("GET", "", None, 404),
        ("GET", "/output", None, 404),
        ("GET", "/output?cursor=-1", None, 422),
        ("GET", "/output?cursor=x", None, 422),
        ("GET", "/output?cursor=9007199254740992", None, 422),
        ("GET", "/output?cursor=1&cursor=2", None, 422),
        ("GET", "/output?follow=1", None, 422),
        ("GET", "/output?tail=1", None, 422),
        ("POST", "/signal", {"signal": "TERM"}, 404),
        ("POST", "/signal", {"signal": "NOPE"}, 400),
        ("POST", "/signal", {"signal": 0}, 422),
        ("POST", "/signal", {"signal": 65}, 422),
        ("POST", "/signal", {"signal": True}, 422),
        ("POST", "/signal", {"signal": 1.5}, 422),
        ("POST", "/signal", {"signal": ""}, 422),
        ("POST", "/signal", {}, 422),
        ("POST", "/resize", {"rows": 24, "cols": 80}, 404),
        ("POST", "/resize", {"rows": -1, "cols": 80}, 422),
        ("POST", "/stdin", b"x", 404),
        ("POST", "/stdin?close=maybe", b"x", 422),
        ("DELETE", "", None, 404),
    ],
)
@pytest.mark.parametrize("exec_id", ["exnothing0000000000", "UPPER", "x" * 65])
def test_requests_on_no_command(
    server: Running, execs: str, method: str, tail: str, body: Any, status: int, exec_id: str
) -> None:
    reply = server.call(method, f"{execs}/{exec_id}{tail}", body)
    assert (reply.status, reply.error["code"] != "") == (status, True)


def test_a_cursor_ahead_of_the_output(server: Running, execs: str) -> None:
    started, *_ = lines(server.call("POST", execs, {"command": ["true"]}).body)
    assert server.call("GET", f"{execs}/{started['id']}/output?cursor=1").error["code"] == "invalid_request"


def test_lines_count_bytes_and_keep_them() -> None:
    shown = ExecLines("ex1", 10)
    assert shown.event(ExecOutput("stdout", "é".encode())) == {"type": "stdout", "cursor": 12, "data": "é"}
    assert shown.event(ExecOutput("stderr", b"\xc3")) == {"type": "stderr", "cursor": 13, "data_b64": "ww=="}
    assert shown.event(ExecGap(5)) == {"type": "gap", "bytes": 5, "cursor": 18}
    end = shown.event(ExecExit(None, 11, wall_seconds=0.25, oom_killed=None))
    assert (end["exit_code"], end["signal"], end["oom_killed"], end["duration_ms"]) == (None, 11, None, 250)
    event = models.ExecOutputEvent.from_json({"type": "stderr", "data_b64": "ww==", "new": 1})
    assert event.raw == b"\xc3"


def test_a_stream_that_breaks_says_why_and_is_cut_off(
    server: Running, execs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = server.backend.attach_exec

    async def broken(id: str, exec_id: str, **named: Any) -> Any:
        async for event in real(id, exec_id, **named):
            if isinstance(event, ExecExit):
                raise BackendError("lost")
            yield event

    started, *_ = lines(server.call("POST", execs, {"command": "echo x"}).body)
    monkeypatch.setattr(server.backend, "attach_exec", broken)
    with server.connect() as sock:
        sock.sendall(
            f"GET {execs}/{started['id']}/output HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n\r\n".encode()
        )
        seen = b""
        while data := sock.recv(65536):
            seen += data
    assert b'{"type":"error","code":"backend_error","message":"lost"}\n' in seen
    assert not seen.endswith(b"0\r\n\r\n")


# -- the terminal -----------------------------------------------------------------------------------------


def dial(server: Running, path: str, **options: Any) -> ClientConnection:
    url = f"ws://127.0.0.1:{server.settings.port}{path}"
    return cast(ClientConnection, connect(url, **{"additional_headers": AUTH, **options}))


def events_of(socket: ClientConnection) -> tuple[bytes, list[dict[str, Any]]]:
    """Everything until the server closes: the terminal's bytes, and the text frames."""
    output, told = b"", []
    try:
        while True:
            message = socket.recv(20)
            if isinstance(message, bytes):
                output += message
            else:
                told.append(json.loads(message))
    except ConnectionClosed:
        return output, told


@pytest.fixture
def box(execs: str) -> str:
    return execs.removesuffix("/execs")


def test_a_terminal_runs_a_command_with_a_size(server: Running, box: str) -> None:
    with dial(server, f"{box}/terminal?rows=30&cols=100&command=stty+size;printenv+TERM&term=vt100") as socket:
        output, told = events_of(socket)
    assert output == b"30 100\nvt100\n"
    assert [event["type"] for event in told] == ["started", "exit"]
    assert (told[1]["exit_code"], socket.protocol.close_code) == (0, 1000)
    assert server.call("GET", f"{box}/execs").json["execs"][0]["tty"] is True


def test_a_terminals_command_is_not_in_the_log(server: Running, box: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), dial(server, f"{box}/terminal?command=echo+a-secret") as socket:
        output, _ = events_of(socket)
        logging.getLogger("uvicorn.error").info("so that something was heard")
    assert b"a-secret" in output
    assert "so that something was heard" in caplog.text
    assert "a-secret" not in caplog.text


def test_typing_and_resizing(server: Running, box: str) -> None:
    with dial(server, f"{box}/terminal?command=cat") as socket:
        started = json.loads(socket.recv(20))
        socket.send(json.dumps({"type": "resize", "rows": 50, "cols": 120}))
        socket.send(b"typed\xff")
        assert socket.recv(20) == b"typed\xff"
        exec_id = started["id"]
        environment = next(e for e in server.backend.environments.values() if exec_id in e.commands)
        assert environment.commands[exec_id].tty == {"rows": 50, "cols": 120}
        socket.send(b"\x03")
        _, told = events_of(socket)
    assert told[-1]["signal"] == 2


def test_closing_the_socket_ends_the_command(server: Running, box: str) -> None:
    with dial(server, f"{box}/terminal?command=sleep+60") as socket:
        exec_id = json.loads(socket.recv(20))["id"]
    assert wait_for_end(server, f"{box}/execs/{exec_id}")["signal"] == 9


def test_a_client_that_vanishes_ends_the_command(server: Running, box: str) -> None:
    with dial(server, f"{box}/terminal?command=sleep+60") as socket:
        exec_id = json.loads(socket.recv(20))["id"]
        socket.socket.shutdown(2)
        assert wait_for_end(server, f"{box}/execs/{exec_id}")["signal"] == 9


def test_attaching_to_a_terminal_that_runs(server: Running, box: str) -> None:
    body = {"command": "echo hello; cat", "tty": {"rows": 24, "cols": 80}, "detach": True}
    exec_id = server.call("POST", f"{box}/execs", body).json["id"]
    for _ in range(2):  # closing it ends nothing
        with dial(server, f"{box}/terminal?exec={exec_id}&rows=10&cols=20") as socket:
            assert socket.recv(20) == b"hello\n"
            socket.send(b"")
    with dial(server, f"{box}/terminal?exec={exec_id}&cursor=6") as socket:
        socket.send(b"more")
        assert socket.recv(20) == b"more"
        server.call("POST", f"{box}/execs/{exec_id}/signal", {"signal": "KILL"})
        assert events_of(socket)[1][-1]["signal"] == 9


def test_a_silent_terminal_is_attached_to_at_once(server: Running, box: str) -> None:
    body = {"command": ["cat"], "tty": {"rows": 24, "cols": 80}, "detach": True}
    exec_id = server.call("POST", f"{box}/execs", body).json["id"]
    with dial(server, f"{box}/terminal?exec={exec_id}", open_timeout=5) as socket:
        socket.send(b"x")
        assert socket.recv(20) == b"x"


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("rows=0", 422),
        ("rows=x", 422),
        ("cols=65536", 422),
        ("cursor=1", 422),
        ("timeout_seconds=x", 422),
        ("timeout_seconds=0", 400),
        ("workdir=/nowhere&command=true", 400),
        ("exec=nothing", 404),
        ("exec=nothing&command=true", 422),
        (f"key={KEY}", 422),
        ("tag=%00", 400),
        ("tag=%ff", 400),
    ],
)
def test_what_is_wrong_is_a_status_before_the_socket(server: Running, box: str, query: str, status: int) -> None:
    with pytest.raises(InvalidStatus) as refused:
        dial(server, f"{box}/terminal?{query}")
    response = refused.value.response
    assert response.status_code == status
    assert set(json.loads(response.body or b"")) == {"error"}


def test_only_commands_with_a_terminal_have_one(server: Running, box: str) -> None:
    exec_id = server.call("POST", f"{box}/execs", {"command": ["sleep", "60"], "detach": True}).json["id"]
    with pytest.raises(InvalidStatus) as refused:
        dial(server, f"{box}/terminal?exec={exec_id}")
    assert refused.value.response.status_code == 400


def test_a_program_that_cannot_start_is_an_exit(server: Running, box: str) -> None:
    with dial(server, f"{box}/terminal?command=nothing") as socket:
        assert events_of(socket)[1][-1]["exit_code"] == 127


def test_keys_come_by_header_or_subprotocol(server: Running, box: str) -> None:
    path = f"{box}/terminal?command=true"
    coded = base64.urlsafe_b64encode(KEY.encode()).decode().rstrip("=")
    wrong = base64.urlsafe_b64encode(b"another-key-0123456789").decode().rstrip("=")
    with dial(server, path, additional_headers={}, subprotocols=["agent-sandbox", f"key.{coded}"]) as socket:
        assert socket.subprotocol == "agent-sandbox"
        assert events_of(socket)[1][-1]["type"] == "exit"
    for protocols in ([], ["agent-sandbox"], [f"key.{wrong}"], ["key.a"], [f"key.{coded}x"]):
        with pytest.raises(InvalidStatus) as refused:
            dial(server, path, additional_headers={}, subprotocols=protocols or None)
        assert refused.value.response.status_code == 401
        assert KEY.encode() not in (refused.value.response.body or b"")
    with pytest.raises(InvalidStatus) as refused:
        dial(server, path, additional_headers={**AUTH, "Host": "evil.example"})
    assert refused.value.response.status_code == 403


def test_a_terminal_over_the_unix_socket(tmp_path: Path) -> None:
    socket_path = tmp_path / "run" / "s.sock"
    with running(settings_for(tmp_path), uds=socket_path) as server:
        sandbox_id = server.create()
        path = f"ws://localhost/v1/sandboxes/{sandbox_id}/terminal?command=echo+hello"
        with unix_connect(str(socket_path), path) as socket:
            assert events_of(socket)[0] == b"hello\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"type":"resize"}',
        '{"type":"resize","rows":0,"cols":1}',
        '{"type":"resize","rows":1.0,"cols":1}',
        '{"type":"resize","rows":true,"cols":1}',
        '{"type":"resize","rows":1,"cols":65536}',
        '{"type":"resize","rows":1,"cols":1,"x":1}',
        '{"type":"exit","rows":1,"cols":1}',
        "[" * 1000,
        " " * 2000,
    ],
)
def test_a_text_frame_that_is_no_size(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        terminal.parse_resize(text)


def test_a_wrong_text_frame_closes_the_socket_and_ends_the_command(server: Running, box: str) -> None:
    assert terminal.parse_resize('{"type":"resize","rows":3,"cols":65535}') == TerminalSize(3, 65535)
    with dial(server, f"{box}/terminal?command=sleep+60") as socket:
        exec_id = json.loads(socket.recv(20))["id"]
        socket.send("nonsense")
        _, told = events_of(socket)
    assert (told[-1]["type"], told[-1]["code"]) == ("error", "invalid_request")
    assert socket.protocol.close_code == 1008
    assert wait_for_end(server, f"{box}/execs/{exec_id}")["signal"] == 9


def test_a_frame_that_is_too_large_closes_the_socket(server: Running, box: str) -> None:
    with dial(server, f"{box}/terminal?command=cat") as socket:
        socket.recv(20)
        socket.send(b"x" * (256 * 1024 + 1))
        events_of(socket)
    assert socket.protocol.close_code == 1009


def test_input_that_nobody_takes_is_bounded(server: Running, box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "STALL_SECONDS", 0.3)
    with dial(server, f"{box}/terminal?command=sleep+60") as socket:
        exec_id = json.loads(socket.recv(20))["id"]

        def flood() -> None:
            try:
                while True:
                    socket.send(b"x" * 100_000)
            except ConnectionClosed:
                pass

        flooding = threading.Thread(target=flood)
        flooding.start()
        assert events_of(socket)[1][-1]["code"] == "conflict"
        flooding.join(20)
    assert wait_for_end(server, f"{box}/execs/{exec_id}")["signal"] == 9


def test_a_sandbox_that_is_destroyed_ends_its_terminals(server: Running) -> None:
    sandbox_id = server.create()
    with dial(server, f"/v1/sandboxes/{sandbox_id}/terminal?command=sleep+60") as socket:
        socket.recv(20)
        server.call("DELETE", f"/v1/sandboxes/{sandbox_id}")
        _, told = events_of(socket)
    assert (told[-1]["type"], told[-1]["code"]) == ("error", "not_found")


# -- Idempotency-Key ------------------------------------------------------------------------------------------


def test_a_creation_with_a_key_happens_once(server: Running) -> None:
    before = len(server.call("GET", "/v1/sandboxes").json["sandboxes"])
    first = server.call("POST", "/v1/sandboxes", {"timeout_seconds": 60}, Idempotency_Key="one")
    again = server.call("POST", "/v1/sandboxes", {"timeout_seconds": 60}, Idempotency_Key="one")
    assert (first.status, again.status, again.body) == (201, 201, first.body)
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["content-type"] == "application/json"
    assert len(server.call("GET", "/v1/sandboxes").json["sandboxes"]) == before + 1
    other = server.call("POST", "/v1/sandboxes", {"timeout_seconds": 61}, Idempotency_Key="one")
    assert (other.status, other.error["code"]) == (409, "conflict")
    sandbox = f"/v1/sandboxes/{first.json['id']}"
    assert server.call("POST", f"{sandbox}/snapshots", Idempotency_Key="one").status == 409
    snapshot = server.call("POST", f"{sandbox}/snapshots", Idempotency_Key="two")
    assert server.call("POST", f"{sandbox}/snapshots", Idempotency_Key="two").body == snapshot.body
    fork = f"/v1/snapshots/{snapshot.json['id']}/fork"
    assert server.call("POST", fork, Idempotency_Key="3").body == server.call("POST", fork, Idempotency_Key="3").body
    body = {"command": ["sleep", "1"], "detach": True}
    started = [server.call("POST", f"{sandbox}/execs", body, Idempotency_Key="4") for _ in range(2)]
    assert [reply.status for reply in started] == [201, 201]
    assert len(server.call("GET", f"{sandbox}/execs").json["execs"]) == 1
    attached = server.call("POST", f"{sandbox}/execs", {"command": "true"}, Idempotency_Key="5")
    assert attached.error["code"] == "validation_error"
    for wrong in ("", "x" * 256, "é"):
        assert server.call("POST", "/v1/sandboxes", {}, Idempotency_Key=wrong).error["code"] == "invalid_request"
    # An error is not kept.
    for _ in range(2):
        failed = server.call("POST", "/v1/sandboxes", {"image": "missing"}, Idempotency_Key="6")
        assert (failed.status, "idempotency-replayed" in failed.headers) == (404, False)


def test_parallel_creations_with_one_key_make_one(server: Running) -> None:
    replies = []

    def create() -> None:
        replies.append(server.call("POST", "/v1/sandboxes", {"metadata": {"run": "p"}}, Idempotency_Key="parallel"))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({reply.body for reply in replies}) == 1
    assert len(server.call("GET", "/v1/sandboxes?metadata=run=p").json["sandboxes"]) == 1


# -- sandboxes: labels, stopping, stats --------------------------------------------------------------------


def test_labels(server: Running) -> None:
    sandbox_id = server.create(metadata={"team": "a", "job": "ü"})
    shown = server.call("GET", f"/v1/sandboxes/{sandbox_id}").json
    assert shown["metadata"] == {"team": "a", "job": "ü"}
    for query, found in (
        ("metadata=team=a", True),
        ("metadata=team=a&metadata=job=%C3%BC", True),
        ("metadata=team=b", False),
        ("metadata=nothing=", False),
    ):
        listed = server.call("GET", f"/v1/sandboxes?{query}").json["sandboxes"]
        assert (sandbox_id in [one["id"] for one in listed]) is found
    for query in ("metadata=team", "metadata==a", "metadata=a=1&metadata=a=2", "label=a"):
        assert server.call("GET", f"/v1/sandboxes?{query}").status == 422
    for wrong in ({"a=b": "c"}, {"": "x"}, {"a": 1}, {"a": "x" * 257}, {str(n): "" for n in range(17)}, ["a"]):
        assert server.call("POST", "/v1/sandboxes", {"metadata": wrong}).status == 422
    server.call("DELETE", f"/v1/sandboxes/{sandbox_id}")


def test_stop_start_and_stats(server: Running) -> None:
    sandbox_id = server.create()
    path = f"/v1/sandboxes/{sandbox_id}"
    server.call("PUT", f"{path}/files?path=kept", b"here")
    stats = server.call("GET", f"{path}/stats").json
    assert stats == {
        "memory_bytes": 4,
        "cpu_seconds": 0.25,
        "processes": 1,
        "execs": 0,
        "output_bytes": 0,
        "daemon_memory_bytes": 4,
    }
    stopped = server.call("POST", f"{path}/stop")
    assert (stopped.status, stopped.json["status"], stopped.json["state"]) == (200, "stopped", "stopped")
    for method, tail, body in (
        ("POST", "/exec", {"command": "true"}),
        ("POST", "/exec/stream", {"command": "true"}),
        ("POST", "/execs", {"command": "true"}),
        ("POST", "/execs", {"command": "true", "detach": True}),
        ("GET", "/execs", None),
        ("GET", "/execs/x/output", None),
        ("GET", "/files?path=kept", None),
        ("PUT", "/files?path=kept", b"x"),
        ("GET", "/files/stat?path=kept", None),
        ("GET", "/archive", None),
        ("GET", "/watch", None),
        ("GET", "/stats", None),
        ("POST", "/snapshots", None),
    ):
        reply = server.call(method, path + tail, body)
        assert (reply.status, "start it" in reply.error["message"]) == (409, True), tail
    with pytest.raises(InvalidStatus) as refused:
        dial(server, f"{path}/terminal")
    assert refused.value.response.status_code == 409
    assert server.call("POST", f"{path}/start").json["status"] == "running"
    assert server.call("GET", f"{path}/files?path=kept").body == b"here"
    server.call("DELETE", path)
    for tail in ("/stop", "/start"):
        assert server.call("POST", path + tail).status == 404


def test_many_terminals_end_with_their_clients(server: Running, box: str) -> None:
    with ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(dial(server, f"{box}/terminal?command=sleep+60"))
        assert server.call("GET", "/healthz").status == 200
        assert len([e for e in server.call("GET", f"{box}/execs").json["execs"] if e["status"] == "running"]) == 30
    deadline = time.monotonic() + 20
    while [e for e in server.call("GET", f"{box}/execs").json["execs"] if e["status"] == "running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
