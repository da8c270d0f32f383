"""The public client's whole way through a server; run by its own interpreter: URL, key and backend are the arguments.

Every call and attribute here is the public client's (sic-agent-sandbox 0.2.1); the server's limits are those of
``test_public_client.py``. Prints one line for each step, and ends with an assertion error at the first that is wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from agent_sandbox.client import SandboxAPIError, SandboxClient, SnapshotInfo

URL, KEY, BACKEND = sys.argv[1:4]


def step(words: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.2f} s  {words}", flush=True)


def refused(call: Callable[[], Any], status: int, code: str) -> str:
    """Demand an error reply with this status and code; give its message."""
    try:
        call()
    except SandboxAPIError as error:
        met = error
    else:
        raise AssertionError(f"expected {status} {code}")
    assert (met.status_code, met.code) == (status, code), met
    return str(met.message)


def names(sandbox: Any, path: str = "/workspace") -> list[str]:
    return sorted(entry.name for entry in sandbox.list_files(path))


def lifecycle(client: Any) -> Any:
    health = client.health()
    assert (health["status"], health["backend"]) == ("ok", BACKEND), health
    step("health")
    sandbox = client.create(cpus=1, memory_mb=256, pids_limit=64, timeout_seconds=300, env={"GREETING": "hello"})
    assert (sandbox.status, sandbox.image) == ("running", "host"), sandbox
    assert sandbox.data["memory_mb"] == 256
    assert sandbox.data["network"] is False
    assert sandbox.data["source_snapshot_id"] is None
    assert sandbox.id in [other.id for other in client.list_sandboxes()]
    assert client.get(sandbox.id).data == sandbox.data
    before = sandbox.expires_at
    assert sandbox.set_timeout(600).expires_at > before
    assert sandbox.refresh().status == "running"
    step(f"create, list, get, set_timeout: {sandbox.id}")
    return sandbox


def files(sandbox: Any) -> None:
    written = sandbox.write_file("notes/a.txt", "one\n")
    assert (written.name, written.path, written.type, written.size) == ("a.txt", "/workspace/notes/a.txt", "file", 4)
    data = bytes(range(256)) * 100
    sandbox.write_file("/workspace/data.bin", data, mode=0o600)
    assert sandbox.read_file("data.bin") == data
    assert sandbox.read_text("notes/a.txt") == "one\n"
    assert names(sandbox) == ["data.bin", "notes"]
    (entry,) = sandbox.list_files("/workspace/notes")
    assert (entry.name, entry.type, entry.size) == ("a.txt", "file", 4)
    assert entry.modified_at.endswith("Z")
    step("write, read, list files")


def commands(sandbox: Any) -> None:
    done = sandbox.exec("printenv GREETING; echo no >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code, done.ok) == ("hello\n", "no\n", 3, False), done
    assert (done.timed_out, done.truncated) == (False, False)
    assert sandbox.exec(["printenv", "MORE"], env={"MORE": "x y"}).stdout == "x y\n"
    assert sandbox.exec(["pwd"], workdir="/workspace/notes").stdout == "/workspace/notes\n"
    assert sandbox.exec(["cat", "a.txt"], workdir="/workspace/notes").stdout == "one\n"
    assert sandbox.exec(["no-such-program"]).exit_code == 127
    late = sandbox.exec("echo early; sleep 600", timeout_seconds=5)
    assert (late.stdout, late.exit_code, late.timed_out) == ("early\n", 137, True), late
    step("exec: environment, directory, exit codes, timeout")
    events, times = [], []
    for event in sandbox.exec_stream("echo out; sleep 3; echo err >&2; exit 5"):
        times.append(time.monotonic())
        events.append(event)
    *output, end = events
    assert [(event.type, event.data) for event in output] == [("stdout", "out\n"), ("stderr", "err\n")], events
    assert (end.type, end.exit_code, end.timed_out) == ("exit", 5, False), end
    assert end.duration_ms >= 3000
    assert times[-1] - times[0] > 1, "output arrives while the command runs"
    step("exec_stream")


def history(client: Any, sandbox: Any) -> None:
    before = client.list_snapshots(sandbox.id)
    snapshot = sandbox.snapshot("before")
    assert isinstance(snapshot, SnapshotInfo)
    assert (snapshot.sandbox_id, snapshot.name, snapshot.image) == (sandbox.id, "before", "host")
    assert snapshot.size_bytes == 4 + 25_600, snapshot
    unnamed = sandbox.snapshot()
    assert unnamed.name is None
    assert sandbox.exec("rm data.bin; echo broken > notes/a.txt; echo new > late.txt").exit_code == 0
    assert names(sandbox) == ["late.txt", "notes"]
    same = sandbox.id
    assert sandbox.rollback(snapshot).id == same
    assert sandbox.data["source_snapshot_id"] == snapshot.id
    assert names(sandbox) == ["data.bin", "notes"]
    assert sandbox.read_text("notes/a.txt") == "one\n"
    assert sandbox.exec(["printenv", "GREETING"]).stdout == "hello\n", "rollback keeps the environment"
    step("snapshot, rollback")
    with client.fork(snapshot, timeout_seconds=3600, memory_mb=128) as one, client.fork(snapshot.id) as two:
        assert one.data["memory_mb"] == 128
        assert one.data["source_snapshot_id"] == snapshot.id
        one.write_file("only-one", b"1")
        assert names(one) == ["data.bin", "notes", "only-one"]
        assert names(two) == ["data.bin", "notes"]
        assert two.exec(["printenv", "GREETING"]).stdout == "hello\n"
    refused(lambda: client.get(one.id), 404, "not_found")
    step("fork, context managers")
    listed = [made.id for made in client.list_snapshots(sandbox.id) if made not in before]
    assert sorted(listed) == sorted([snapshot.id, unnamed.id])
    assert client.get_snapshot(snapshot.id) == snapshot
    assert {snapshot.id, unnamed.id} <= {made.id for made in client.list_snapshots()}
    client.delete_snapshot(unnamed.id)
    refused(lambda: client.get_snapshot(unnamed.id), 404, "not_found")
    refused(lambda: sandbox.rollback(unnamed), 404, "not_found")
    sandbox.destroy()
    assert client.get_snapshot(snapshot.id) == snapshot, "snapshots outlive their sandbox"
    client.delete_snapshot(snapshot.id)
    step("list, get, delete snapshots; destroy")


def mistakes(client: Any) -> None:
    refused(lambda: client.get("sbnothing"), 404, "not_found")
    with SandboxClient(URL, api_key="not-the-key-0123456789") as stranger:
        refused(stranger.list_sandboxes, 401, "unauthorized")
        assert stranger.health()["status"] == "ok"
    refused(lambda: client.create(memory_mb=1), 422, "validation_error")
    refused(lambda: client.create(cpus=1000), 400, "invalid_request")
    refused(lambda: client.create(image="missing"), 404, "not_found")
    refused(lambda: client.create(network=True), 403, "forbidden")
    assert "colour" in refused(
        lambda: client._request("POST", "/v1/sandboxes", json={"colour": 1}), 422, "validation_error"
    )
    with client.create() as sandbox:
        refused(lambda: sandbox.exec("true", workdir="/nowhere"), 400, "invalid_request")
        refused(lambda: list(sandbox.exec_stream("true", workdir="/nowhere")), 400, "invalid_request")
        refused(lambda: sandbox.write_file("/etc/passwd", "x"), 400, "invalid_request")
        refused(lambda: sandbox.write_file("../x", "x"), 400, "invalid_request")
        refused(lambda: sandbox.write_file("big", bytes(200_001)), 413, "payload_too_large")
        sandbox.write_file("fits", bytes(200_000))
        refused(lambda: sandbox.read_file("nothing"), 404, "not_found")
        refused(lambda: sandbox.read_file("/workspace"), 400, "invalid_request")
        refused(lambda: sandbox.exec("true", env={"A=B": "c"}), 400, "invalid_request")
        refused(lambda: sandbox.rollback("snapnothing"), 404, "not_found")
        big = sandbox.exec(["cat", "fits"])
        assert big.truncated
        assert len(big.stdout) == 100_000
        with client.create(), client.create():
            refused(client.create, 429, "limit_exceeded")
        assert sandbox.exec(["true"]).ok
    assert client.list_sandboxes() == []
    step("errors, each with its status and code")


BEGAN = time.monotonic()
assert version("sic-agent-sandbox") == "0.2.1"
with SandboxClient(URL, api_key=KEY) as main:
    sandbox = lifecycle(main)
    files(sandbox)
    commands(sandbox)
    history(main, sandbox)
    mistakes(main)
step("done")
