"""The pure request builders."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_sandbox import models
from agent_sandbox.client import file_requests, requests
from agent_sandbox.client.call import Call
from agent_sandbox.errors import ValidationError


def sent(call: Call[Any]) -> Any:
    assert call.content is not None
    return json.loads(call.content)


def test_create_sends_what_is_given_and_nothing_a_first_server_does_not_know() -> None:
    call = requests.create(None, network=False, read_only_rootfs=True, env=None, cpus=None, backend=None)
    assert (call.method, call.path) == ("POST", "/v1/sandboxes")
    assert sent(call) == {"network": False, "read_only_rootfs": True, "env": {}}
    call = requests.create("host", network=True, read_only_rootfs=False, env={"A": "b"}, cpus=0.5, backend="runc")
    body = {
        "image": "host",
        "network": True,
        "read_only_rootfs": False,
        "env": {"A": "b"},
        "cpus": 0.5,
        "backend": "runc",
    }
    assert sent(call) == body


@pytest.mark.parametrize(
    ("command", "options", "body", "wait"),
    [
        ("ls", {}, {"command": "ls"}, 3630.0),
        (("ls", "-l"), {"timeout_seconds": 5}, {"command": ["ls", "-l"], "timeout_seconds": 5}, 35.0),
        ("ls", {"env": {}, "workdir": "/tmp"}, {"command": "ls", "workdir": "/tmp"}, 3630.0),
        ("\udcff", {"env": {"A": "\udcfe"}}, {"command": "\udcff", "env": {"A": "\udcfe"}}, 3630.0),
    ],
)
def test_a_command_is_waited_for_as_long_as_it_may_run(command: Any, options: Any, body: Any, wait: float) -> None:
    for build, path in ((requests.exec, "exec"), (requests.exec_stream, "exec/stream")):
        call = build("sb1", command, **options)
        assert (call.method, call.path, call.wait) == ("POST", f"/v1/sandboxes/sb1/{path}", wait)
        assert sent(call) == body


@pytest.mark.parametrize(
    ("path", "encoded"),
    [
        ("a b", "a+b"),
        ("a+b", "a%2Bb"),
        ("/workspace/é", "%2Fworkspace%2F%C3%A9"),
        ("\udcff", "%FF"),
        ("%2F", "%252F"),
        ("a&path=b#c", "a%26path%3Db%23c"),
    ],
)
def test_paths_go_as_bytes(path: str, encoded: str) -> None:
    assert file_requests.read("sb1", path).path == f"/v1/sandboxes/sb1/files?path={encoded}"


@pytest.mark.parametrize(("mode", "text"), [(0o644, "644"), (0o7, "007"), (0, "000"), (0o4755, "4755")])
def test_modes_are_octal(mode: int, text: str) -> None:
    call = file_requests.write("sb1", "a", "é", mode)
    assert call.path.endswith(f"&mode={text}")
    assert (call.method, call.content, call.content_type) == ("PUT", "é".encode(), "application/octet-stream")


def test_ids_cannot_leave_their_place_in_the_path() -> None:
    assert requests.get("../snapshots?x=/#").path == "/v1/sandboxes/..%2Fsnapshots%3Fx%3D%2F%23"
    assert requests.delete_snapshot("a/b").path == "/v1/snapshots/a%2Fb"


def test_snapshots_are_named_by_value_or_id() -> None:
    made = models.Snapshot(id="snap1", sandbox_id="sb1", name=None, image="host", size_bytes=0, created_at="")
    for snapshot in (made, "snap1"):
        assert requests.delete_snapshot(snapshot).path == "/v1/snapshots/snap1"
        assert sent(requests.rollback("sb1", snapshot)) == {"snapshot_id": "snap1"}
        assert sent(requests.rollback("sb1", snapshot, memory=False)) == {"snapshot_id": "snap1", "memory": False}
        fork = requests.fork(snapshot, cpus=None, network=False)
        assert (fork.path, sent(fork)) == ("/v1/snapshots/snap1/fork", {"network": False})


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"sandboxes": 7}', b"{}"])
def test_a_reply_that_is_not_one_is_a_typed_error(body: bytes) -> None:
    with pytest.raises(ValidationError, match="server's reply"):
        requests.list_sandboxes().decode(body)
