"""What a rollback replaced, and where histories begin, on a whole server: undone, counted, and found after a kill."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from agent_sandbox.client import Sandbox
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError
from agent_sandbox.models import Snapshot
from agent_sandbox.store import Store
from tests.e2e.serving import KEY, PROGRAM, Served, serving

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("undo") / "data") as served:
        yield served


@pytest.fixture
def sandbox(server: Served) -> Iterator[Sandbox]:
    with server.client() as client, client.create(disk_mb=64) as sandbox:
        yield sandbox


def automatic(server: Served, sandbox: Sandbox) -> list[Snapshot]:
    with server.client() as client:
        named = [snapshot.id for snapshot in client.list_snapshots(sandbox.id)]
        return [item for item in client.list_snapshots(sandbox.id, auto=True) if item.auto and item.id not in named]


def settled(server: Served, count: int) -> bool:
    """Whether so many environments are left; the rest of what a rollback or removal leaves goes behind its back."""
    latest = time.monotonic() + 60
    while len(server.environments()) != count and time.monotonic() < latest:
        time.sleep(0.05)
    return len(server.environments()) == count


def test_a_rollback_can_be_undone(server: Served, sandbox: Sandbox) -> None:
    sandbox.write_file("/workspace/f", b"before")
    snapshot = sandbox.snapshot()
    sandbox.exec(
        "echo after > f; mkdir d; echo new > d/g; (while sleep 0.01; do date +%N > t; done) > /dev/null 2>&1 &"
    )
    sandbox.rollback(snapshot)
    assert sandbox.exec("cat f; ls").stdout == "beforef\n"
    (undo,) = automatic(server, sandbox)
    assert (undo.name, undo.sandbox_id) == (f"before rollback to {snapshot.id}", sandbox.id)
    listed = subprocess.run(
        [PROGRAM, "snapshots", sandbox.id, "--auto", "--json"],
        env={**os.environ, "AGENT_SANDBOX_URL": server.url, "AGENT_SANDBOX_API_KEY": KEY},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert [item["id"] for item in json.loads(listed.stdout)] == [snapshot.id, undo.id]
    sandbox.rollback(undo)
    assert sandbox.exec("cat f d/g").stdout == "after\nnew\n"
    (redo,) = automatic(server, sandbox)
    with server.client() as client:
        with pytest.raises(NotFoundError):
            client.get_snapshot(undo.id)
        with client.fork(redo) as fork:
            assert fork.read_file("/workspace/f") == b"before"
    assert settled(server, 1)
    sandbox.destroy()
    assert automatic(server, sandbox) == []
    with server.client() as client:
        with pytest.raises(NotFoundError):
            client.get_snapshot(redo.id)
        client.delete_snapshot(snapshot.id)


def test_rollbacks_one_after_the_other_keep_the_last(server: Served, sandbox: Sandbox) -> None:
    snapshot = sandbox.snapshot()
    for turn in range(4):
        sandbox.write_file("/workspace/turn", str(turn).encode())
        sandbox.exec("head -c 5000000 /dev/urandom > big")
        sandbox.rollback(snapshot)
    (undo,) = automatic(server, sandbox)
    assert undo.size_bytes == 5_000_001
    sandbox.rollback(undo)
    assert sandbox.read_file("/workspace/turn") == b"3"
    assert settled(server, 1)


@pytest.mark.parametrize("stopped", [False, True])
def test_what_was_replaced_outlives_the_server(tmp_path: pathlib.Path, stopped: bool) -> None:
    with serving(tmp_path / "data") as server, server.client() as client:
        sandbox = client.create(disk_mb=64)
        sandbox.write_file("/workspace/f", b"before")
        snapshot = sandbox.snapshot()
        sandbox.exec("head -c 20000000 /dev/urandom > big; echo after > f")
        expected = sandbox.exec("sha256sum big").stdout
        if stopped:
            sandbox.stop()
        sandbox.rollback(snapshot)
        server.stop(signal.SIGKILL)
        assert len(server.environments()) == 2
        server.start()
        (undo,) = automatic(server, sandbox)
        sandbox.rollback(undo)
        assert sandbox.exec("sha256sum big; cat f").stdout == expected + "after\n"
        assert len(automatic(server, sandbox)) == 1
        sandbox.destroy()
        assert settled(server, 0)
        client.delete_snapshot(snapshot)
        assert client.list_snapshots(auto=True) == []
        server.stop()
        with Store.open(server.data / "store") as store:
            assert list(store.pins()) == []
            assert [ref.name for ref in store.refs("sandboxes")] == ["main"]
            assert store.check().clean


def test_a_history_begins_where_the_workspace_did(server: Served, sandbox: Sandbox) -> None:
    """The snapshot that a fork came from is deleted before the fork was ever kept."""
    sandbox.exec("seq 100 > kept; echo 1 > changed")
    snapshot = sandbox.snapshot()
    with server.client() as client, client.fork(snapshot) as fork, client.fork(snapshot) as other:
        client.delete_snapshot(snapshot)
        fork.exec("echo 2 > changed; echo 3 > new")
        other.exec("echo 4 > another")
        assert [item.path for item in fork.changes().changes] == ["/workspace/changed", "/workspace/new"]
        assert fork.merge(other.snapshot()).outcome == "merged"
        assert fork.exec("cat changed new another; wc -l < kept").stdout == "2\n3\n4\n100\n"


def test_a_snapshot_of_a_fork_reads_what_changed_alone(server: Served, sandbox: Sandbox) -> None:
    made = (
        "for i in $(seq 400); do mkdir d$i; seq 9 > d$i/f; done; ln d1/f linked; truncate -s 1G holes; echo x >> holes"
    )
    sandbox.exec(made)
    first = sandbox.snapshot()
    with server.client() as client, client.fork(first) as fork:
        server.stop()  # what it began with is known from its record
        server.start()
        fork.exec("echo change >> d7/f; rm -r d8; mv d9 e9; truncate -s 2G holes; head -c 70000 /dev/urandom > big")
        second = fork.snapshot()
        fork.exec("truncate -s 0 big; ln e9/f e9/g; echo more >> e9/g")
        third = fork.snapshot()
        fork.exec("echo both >> linked")  # a name of a linked file below: the whole is read
        fourth = fork.snapshot()
        sizes = [snapshot.size_bytes for snapshot in (first, second, third, fourth)]
        fork.rollback(fourth)
        assert fork.exec("cat d1/f | tail -1; tail -1 e9/f; ls | wc -l").stdout == "both\nmore\n402\n"
    server.stop()
    try:
        with Store.open(server.data / "store") as store:
            pins = {pin.name: pin.commit.hex() for pin in store.pins()}
            assert sizes == [store.data_bytes(pins[snapshot.id]) for snapshot in (first, second, third, fourth)]
    finally:
        server.start()


def remove_layers(server: Served) -> None:
    for path in (server.data / "checkouts").iterdir():
        shutil.rmtree(path)


def test_layers_that_somebody_removed_are_laid_out_again(server: Served, sandbox: Sandbox) -> None:
    sandbox.exec("seq 100 > kept; mkdir d; echo 1 > d/f; echo x > one; ln one two")
    first = sandbox.snapshot()
    with server.client() as client:
        with client.fork(first) as fork:
            fork.exec("echo 2 > d/f; rm kept; echo new > n; mv d e")
            second = fork.snapshot()
        with client.fork(second) as fork:
            fork.exec("rm n; mv e g; echo 3 >> g/f")
            fork.stop()
            remove_layers(server)
            fork.start()
            assert fork.exec("cat g/f two; ls").stdout == "2\n3\nx\ng\none\ntwo\n"
            fork.exec("echo 4 >> g/f")
            told = [(item.kind, item.path) for item in fork.changes().changes]
            assert told == [
                ("removed", "/workspace/e"),
                ("removed", "/workspace/e/f"),
                ("added", "/workspace/g"),
                ("added", "/workspace/g/f"),
                ("removed", "/workspace/n"),
            ]
            with client.fork(fork.snapshot()) as other:
                assert other.exec("cat g/f; ls").stdout == "2\n3\n4\ng\none\ntwo\n"
        with client.fork(first) as fork:
            fork.exec("echo y >> one")  # its other name is known by the layers' own files
            fork.stop()
            remove_layers(server)
            with pytest.raises(BackendError, match="linked files"):
                fork.start()
            fork.rollback(first)
            assert fork.exec("cat one two").stdout == "x\nx\n"


def test_a_store_that_was_lost_costs_snapshots_and_no_workspace(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as client, client.create(disk_mb=64) as sandbox:
        sandbox.write_file("/workspace/f", b"before")
        snapshot = sandbox.snapshot()
        with client.fork(snapshot) as fork:
            fork.write_file("/workspace/g", b"mine")
            server.stop()
            (server.data / "store").rename(tmp_path / "damaged")
            server.start()
            for path, content in (("f", b"before"), ("g", b"mine")):
                assert fork.read_file(f"/workspace/{path}") == content
            fork.stop()
            fork.start()
            with pytest.raises(ConflictError, match="take a snapshot"):
                fork.changes()
            with pytest.raises(NotFoundError):
                client.fork(snapshot)
            with pytest.raises(NotFoundError):
                sandbox.rollback(snapshot)
            sandbox.rollback(fork.snapshot())
            assert sandbox.exec("cat f g").stdout == "beforemine"
            assert [item.path for item in fork.changes().changes] == []
            client.delete_snapshot(snapshot)
