"""The fixed block on the fake backend: the good way through, and input that is not."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from agent_sandbox.errors import BackendError
from agent_sandbox.server import health
from tests.unit.server_harness import AUTH, KEY, Reply, Running, running, settings_for

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = settings_for(tmp_path_factory.mktemp("server"), max_file_bytes=100_000, max_sandboxes=10_000)
    with running(settings) as it:
        yield it


@pytest.fixture(scope="module")
def sandbox(server: Running) -> str:
    return server.create()


def is_error(reply: Reply, status: int, code: str, words: str = "") -> bool:
    assert (reply.status, reply.error["code"]) == (status, code), reply.body
    assert words in reply.error["message"]
    return True


def test_health(server: Running) -> None:
    reply = server.call("GET", "/healthz", key=False)
    assert (reply.status, reply.json) == (200, {"status": "ok", "backend": "fake", "version": "0.1.0"})


def test_a_sandbox_from_creation_to_end(server: Running) -> None:
    reply = server.call("POST", "/v1/sandboxes", {"cpus": 2, "env": {"A": "b"}, "timeout_seconds": 60})
    assert reply.status == 201
    made = reply.json
    assert TIME.fullmatch(made.pop("created_at"))
    assert TIME.fullmatch(made.pop("expires_at"))
    sandbox_id = made.pop("id")
    assert made == {
        "status": "running",
        "image": "host",
        "cpus": 2.0,
        "memory_mb": 512,
        "pids_limit": 256,
        "network": False,
        "read_only_rootfs": True,
        "source_snapshot_id": None,
        "backend": "fake",
        "disk_mb": 1024,
        "state": "running",
        "metadata": {},
        "project": None,
        "source": None,
    }
    path = f"/v1/sandboxes/{sandbox_id}"
    assert server.call("GET", path).json == reply.json
    assert reply.json in server.call("GET", "/v1/sandboxes").json["sandboxes"]
    later = server.call("POST", path + "/timeout", {"timeout_seconds": 3600}).json
    assert later["expires_at"] > reply.json["expires_at"]
    done = server.call("POST", path + "/exec", {"command": ["printenv", "A"]}).json
    assert done.pop("duration_ms") >= 0
    assert done == {"stdout": "b\n", "stderr": "", "exit_code": 0, "timed_out": False, "truncated": False}
    gone = server.call("DELETE", path)
    assert (gone.status, gone.body) == (204, b"")
    is_error(server.call("GET", path), 404, "not_found", sandbox_id)
    is_error(server.call("DELETE", path), 404, "not_found")


def test_a_sandbox_that_died_is_stopped_however_it_is_looked_at(server: Running) -> None:
    sandbox_id = server.create()
    path = f"/v1/sandboxes/{sandbox_id}"
    server.wait(server.backend.kill_guest(server.wait(server.manager.get(sandbox_id)).env_id))
    listed = {item["id"]: item for item in server.call("GET", "/v1/sandboxes").json["sandboxes"]}
    later = server.call("POST", path + "/timeout", {"timeout_seconds": 60}).json
    for shown in (listed[sandbox_id], server.call("GET", path).json, later):
        assert (shown["status"], shown["state"]) == ("stopped", "stopped")
    started = server.call("POST", path + "/start").json
    assert (started["status"], started["state"]) == ("running", "running")
    server.call("DELETE", path)


def test_snapshots_outlive_their_sandbox(server: Running) -> None:
    sandbox_id = server.create()
    path = f"/v1/sandboxes/{sandbox_id}"
    server.call("PUT", path + "/files?path=kept", b"12345")
    made = server.call("POST", path + "/snapshots", {"name": "first"})
    assert made.status == 201
    shown = made.json
    assert TIME.fullmatch(shown["created_at"])
    assert (shown["sandbox_id"], shown["name"], shown["image"], shown["size_bytes"]) == (sandbox_id, "first", "host", 5)
    assert (shown["backend"], shown["skipped_total"]) == ("fake", 0)
    assert shown["stored_bytes"] > 0
    server.call("PUT", path + "/files?path=other", b"x")
    back = server.call("POST", path + "/rollback", {"snapshot_id": shown["id"]}).json
    assert (back["id"], back["source_snapshot_id"]) == (sandbox_id, shown["id"])
    names = [entry["name"] for entry in server.call("GET", path + "/files/list").json["entries"]]
    assert names == ["kept"]
    assert server.call("DELETE", path).status == 204
    assert server.call("GET", f"/v1/snapshots/{shown['id']}").json == shown
    assert server.call("GET", f"/v1/snapshots?sandbox_id={sandbox_id}").json == {"snapshots": [shown]}
    assert server.call("GET", "/v1/snapshots?sandbox_id=sbother").json == {"snapshots": []}
    fork = server.call("POST", f"/v1/snapshots/{shown['id']}/fork", {"memory_mb": 64, "cpus": 0.5})
    assert (fork.status, fork.json["memory_mb"], fork.json["cpus"]) == (201, 64, 0.5)
    assert fork.json["source_snapshot_id"] == shown["id"]
    assert server.call("GET", f"/v1/sandboxes/{fork.json['id']}/files?path=kept").body == b"12345"
    assert server.call("DELETE", f"/v1/snapshots/{shown['id']}").status == 204
    is_error(server.call("GET", f"/v1/snapshots/{shown['id']}"), 404, "not_found")


@pytest.mark.parametrize("body", [None, b"", b"null", b"{}", b'{"name": null}'])
def test_the_bodies_of_snapshot_and_fork_are_optional(server: Running, sandbox: str, body: bytes | None) -> None:
    made = server.call("POST", f"/v1/sandboxes/{sandbox}/snapshots", body)
    assert (made.status, made.json["name"]) == (201, None)
    if body != b'{"name": null}':
        assert server.call("POST", f"/v1/snapshots/{made.json['id']}/fork", body).status == 201


def test_backends(server: Running) -> None:
    (only,) = server.call("GET", "/v1/backends").json["backends"]
    capabilities = only.pop("capabilities")
    assert only == {"name": "fake", "default": True, "healthy": True, "message": "", "versions": {}, "pulls": []}
    assert capabilities["isolation"] == "process"
    assert capabilities["enforces"] == ["cpus", "disk", "memory", "network", "pids"]


def test_what_the_backend_cannot_do_is_501_before_any_effect(server: Running, sandbox: str) -> None:
    path = f"/v1/sandboxes/{sandbox}"
    before = server.call("GET", f"/v1/snapshots?sandbox_id={sandbox}").json["snapshots"]
    reply = server.call("POST", path + "/snapshots", {"memory": True})
    is_error(reply, 501, "unsupported", "checkpoint")
    assert reply.error["details"] == {"capability": "checkpoint", "backend": "fake"}
    made = server.call("POST", path + "/snapshots", {"memory": False}).json
    assert (made["memory"], made["memory_bytes"]) == (False, 0)
    is_error(
        server.call("POST", path + "/rollback", {"snapshot_id": made["id"], "memory": True}), 409, "conflict", "memory"
    )
    fork = f"/v1/snapshots/{made['id']}/fork"
    is_error(server.call("POST", fork, {"memory": True}), 409, "conflict", "memory")
    is_error(server.call("POST", fork, {"backend": "other"}), 400, "invalid_request", "backend is one of fake")
    for options in ({"min_isolation": "vm"}, {"read_only_rootfs": False}):
        is_error(server.call("POST", "/v1/sandboxes", options), 501, "unsupported")
    listed = server.call("GET", f"/v1/snapshots?sandbox_id={sandbox}").json["snapshots"]
    assert listed == [*before, made]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"cpus": True}, "cpus", "number"),
        ({"cpus": "1"}, "cpus", "number"),
        ({"memory_mb": "512"}, "memory_mb", "integer"),
        ({"memory_mb": 512.0}, "memory_mb", "integer"),
        ({"colour": "red"}, "colour", "unknown field"),
        ({"env": {"A": 1}}, "env.A", "must be a string"),
        ([], "", "JSON object"),
        ("text", "", "JSON object"),
    ],
)
def test_a_bad_field_is_422_and_named(server: Running, body: Any, field: str, words: str) -> None:
    reply = server.call("POST", "/v1/sandboxes", body)
    is_error(reply, 422, "validation_error", words)
    assert [item["field"] for item in reply.error["details"]["fields"]] == [field]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"{", 422),
        (b"", 422),
        (b"null", 422),
        (b"\xff\xfe\xfd", 400),
        (b'{"cpus": NaN}', 422),
        (b'{"cpus": 1e999}', 422),
        (b'{"cpus": -Infinity}', 422),
        (b'{"memory_mb": ' + b"9" * 4000 + b"}", 422),
        (b'{"memory_mb": ' + b"9" * 5000 + b"}", 400),
        (b"[" * 200_000, 400),
        (b'{"env": ' * 50_000, 400),
    ],
)
def test_bad_json_is_a_typed_error(server: Running, raw: bytes, status: int) -> None:
    reply = server.call("POST", "/v1/sandboxes", raw)
    assert reply.status == status
    assert reply.error["code"] == {400: "invalid_request", 422: "validation_error"}[status]
    assert server.call("GET", "/healthz").status == 200


def test_a_body_that_is_not_called_json_is_refused_with_the_remedy(server: Running) -> None:
    reply = server.call("POST", "/v1/sandboxes", b"{}", Content_Type="text/plain")
    is_error(reply, 422, "validation_error", "Content-Type: application/json")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("exec", {}, 422),
        ("exec", {"command": []}, 400),
        ("exec", {"command": [""]}, 400),
        ("exec", {"command": "true", "timeout_seconds": 0}, 422),
        ("exec", {"command": "true", "timeout_seconds": 10**9}, 400),
        ("exec", {"command": "true", "workdir": ""}, 400),
        ("exec", {"command": "true", "workdir": "/nowhere"}, 400),
        ("exec", {"command": "a\0b"}, 400),
        ("exec", {"command": "true", "env": {"A=B": "c"}}, 400),
        ("exec", {"command": "true", "env": {"": "c"}}, 400),
        ("exec", {"command": "true", "shell": True}, 422),
        ("timeout", {"timeout_seconds": 0}, 422),
        ("timeout", {"timeout_seconds": 10**9}, 400),
        ("timeout", {}, 422),
        ("rollback", {}, 422),
        ("rollback", {"snapshot_id": "snapnothing"}, 404),
        ("snapshots", {"name": "n" * 129}, 422),
        ("snapshots", {"label": "n"}, 422),
    ],
)
def test_bad_requests_to_a_sandbox(server: Running, sandbox: str, path: str, body: Any, status: int) -> None:
    reply = server.call("POST", f"/v1/sandboxes/{sandbox}/{path}", body)
    assert reply.status == status, reply.body
    assert reply.error["code"] in ("invalid_request", "validation_error", "not_found")
    if path == "exec":
        same = server.call("POST", f"/v1/sandboxes/{sandbox}/exec/stream", body)
        assert (same.status, same.error) == (status, reply.error)


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"cpus": 1000}, 400, "invalid_request"),
        ({"image": "missing"}, 404, "not_found"),
        ({"network": True}, 403, "forbidden"),
        ({"read_only_rootfs": False}, 501, "unsupported"),
        ({"min_isolation": "vm"}, 501, "unsupported"),
        ({"backend": "nothing"}, 400, "invalid_request"),
        ({"env": {"A": "b\0"}}, 400, "invalid_request"),
    ],
)
def test_policy_refuses_before_anything_is_made(server: Running, options: Any, status: int, code: str) -> None:
    before = set(server.backend.environments)
    is_error(server.call("POST", "/v1/sandboxes", options), status, code)
    assert set(server.backend.environments) == before


@pytest.mark.parametrize("sandbox_id", ["nothing", "sb" + "0" * 5000, "%00", "%2e%2e", "%ff", "sb%2Fx", "..%2f..", "é"])
def test_strange_ids_are_not_found(server: Running, sandbox_id: str) -> None:
    path = sandbox_id if sandbox_id.isascii() else "%C3%A9"
    is_error(server.call("GET", f"/v1/sandboxes/{path}"), 404, "not_found")
    is_error(server.call("GET", f"/v1/snapshots/{path}"), 404, "not_found")


def test_a_big_script_passes_and_a_bigger_body_does_not(server: Running, sandbox: str) -> None:
    path = f"/v1/sandboxes/{sandbox}/exec"
    worst = b'{"command": ["true"' + b', "%s"' % (b"\\u0001" * 65_536) * 16 + b"]}"
    assert server.call("POST", path, worst).json["exit_code"] == 0
    is_error(server.call("POST", path, b" " * (7 * 1024 * 1024)), 413, "payload_too_large")


def test_a_crash_is_500_with_a_number(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    original = server.manager.list_snapshots

    async def broken(sandbox_id: str | None = None, *, auto: bool = False) -> Any:
        raise RuntimeError("the secret of the server")

    server.manager.list_snapshots = broken  # type: ignore[method-assign]
    try:
        reply = server.call("GET", "/v1/snapshots")
    finally:
        server.manager.list_snapshots = original  # type: ignore[method-assign]
    is_error(reply, 500, "internal_error")
    assert b"secret" not in reply.body
    assert reply.error["details"]["id"] in caplog.text


def test_a_backend_that_does_not_answer_is_503(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FRESH_SECONDS", 0.0)
    server.backend.failures["ping"] = [BackendError("the runtime is gone; install it")]
    is_error(server.call("GET", "/healthz", key=False), 503, "backend_error", "install it")
    assert server.call("GET", "/healthz", key=False).status == 200


async def test_pings_are_shared_remembered_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pings = 0.0, 0

    async def ping() -> str:
        nonlocal pings
        pings += 1
        if now >= 10:
            await asyncio.sleep(60)
        return "fake"

    pulse = health.Pulse(ping, lambda: now)
    assert await asyncio.gather(*(pulse.check() for _ in range(5))) == ["fake"] * 5
    assert pings == 1
    now = 0.9
    assert await pulse.check() == "fake"
    assert pings == 1
    now = 1.0
    assert await pulse.check() == "fake"
    assert pings == 2
    now = 2.0
    hasty, patient = asyncio.create_task(pulse.check()), asyncio.create_task(pulse.check())
    await asyncio.sleep(0)
    hasty.cancel()
    assert await patient == "fake"
    monkeypatch.setattr(health, "PING_SECONDS", 0.01)
    now = 10.0
    problem = await pulse.check()
    assert isinstance(problem, BackendError)


def test_keep_alive_survives_errors(server: Running, sandbox: str) -> None:
    with server.connect() as sock:
        stream = sock.makefile("rb")
        for body, status in ((b"{", 422), (b'{"command":["true"]}', 200), (b'{"x":1}', 422)):
            head = f"POST /v1/sandboxes/{sandbox}/exec HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            assert int(stream.readline().split()[1]) == status
            length = 0
            while (line := stream.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            json.loads(stream.read(length))


def test_the_key_is_nowhere_in_what_is_said(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    assert AUTH["Authorization"].endswith(KEY)
    replies = [
        server.call("GET", "/v1/sandboxes"),
        server.call("GET", f"/v1/{KEY[:4]}"),
        server.call("POST", "/v1/sandboxes", {"image": "missing"}),
        server.call("GET", "/v1/sandboxes", key=False, X_API_Key=KEY + "x"),
    ]
    assert not any(KEY.encode() in reply.body for reply in replies)
    assert KEY not in caplog.text
    assert KEY not in repr(server.settings)
