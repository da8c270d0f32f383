"""Workspaces on the store, on a whole server: what a snapshot costs, what forks share, what survives."""

from __future__ import annotations

import pathlib
import shutil
import time
from collections.abc import Iterator

import pytest

from agent_sandbox.client import Sandbox
from agent_sandbox.errors import PayloadTooLargeError
from tests.e2e.serving import Served, serving
from tests.unit.old_snapshots import turn_into_a_file

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("workspaces") / "data") as served:
        yield served


@pytest.fixture
def sandbox(server: Served) -> Iterator[Sandbox]:
    with server.client() as client, client.create(disk_mb=64) as sandbox:
        yield sandbox


def packs(server: Served) -> int:
    return sum(path.stat().st_size for path in (server.data / "store" / "packs").iterdir())


def test_a_snapshot_stores_what_is_new(server: Served, sandbox: Sandbox) -> None:
    sandbox.exec("head -c 5000000 /dev/urandom > big; for i in $(seq 300); do echo $i > f$i; done")
    before = packs(server)
    first = sandbox.snapshot()
    assert packs(server) - before > 5_000_000
    sandbox.exec("echo changed > f7; echo more >> big")
    before = packs(server)
    second = sandbox.snapshot()
    assert packs(server) - before < 20_000
    assert (first.size_bytes, second.size_bytes) == (5_001_092, 5_001_103)
    sandbox.rollback(first)
    assert sandbox.exec("cat f7").stdout == "7\n"
    sandbox.rollback(second)
    assert sandbox.exec("cat f7; tail -c 5 big").stdout == "changed\nmore\n"


def test_forks_of_one_snapshot_share_one_checkout(server: Served, sandbox: Sandbox) -> None:
    sandbox.exec("head -c 3000000 /dev/urandom > big")
    snapshot = sandbox.snapshot()
    before = {path.name for path in (server.data / "checkouts").iterdir()}
    with server.client() as client:
        forks = [client.fork(snapshot) for _ in range(6)]
        try:
            made = {path.name for path in (server.data / "checkouts").iterdir()} - before
            assert len(made) == 1
            expected = sandbox.exec("sha256sum big").stdout
            for number, fork in enumerate(forks):
                assert fork.exec(f"sha256sum big; echo {number} > mine; cat mine").stdout == f"{expected}{number}\n"
            assert forks[0].exec("cat mine").stdout == "0\n"
        finally:
            for fork in forks:
                fork.destroy()


def test_a_snapshot_is_one_point_in_time(server: Served, sandbox: Sandbox) -> None:
    sandbox.exec("head -c 20000000 /dev/urandom > between")
    program = "n=0; while true; do n=$((n+1)); echo $n > a; echo $n > z; done"
    sandbox.start_exec(program)
    time.sleep(0.3)
    with server.client() as client:
        for _ in range(3):
            fork = client.fork(sandbox.snapshot())
            first, last = (fork.exec(f"cat {name}").stdout.strip() for name in "az")
            fork.destroy()
            assert first == "" or last == "" or int(first) - int(last) in (0, 1)


def test_a_full_workspace_is_kept_and_put_back(sandbox: Sandbox) -> None:
    sandbox.write_file("/workspace/f", b"before")
    empty = sandbox.snapshot()
    sandbox.exec("head -c 100000000 /dev/urandom > fill; echo x > more")
    full = sandbox.snapshot()
    size = sandbox.exec("stat -c %s fill").stdout
    sandbox.rollback(empty)
    assert sandbox.exec("ls; echo room > more; cat more").stdout == "f\nroom\n"
    sandbox.rollback(full)
    assert sandbox.exec("stat -c %s fill").stdout == size
    assert "No space" in sandbox.exec("head -c 100000000 /dev/zero > again").stderr
    sandbox.rollback(empty)
    assert sandbox.exec("cat f").stdout == "before"


def test_a_checkout_that_somebody_removed_is_built_again(server: Served, sandbox: Sandbox) -> None:
    sandbox.write_file("/workspace/f", b"before")
    snapshot = sandbox.snapshot()
    with server.client() as client:
        with client.fork(snapshot) as fork:
            for path in (server.data / "checkouts").iterdir():
                shutil.rmtree(path)
        with client.fork(snapshot) as fork:
            assert fork.read_file("/workspace/f") == b"before"
    sandbox.rollback(snapshot)
    assert sandbox.read_file("/workspace/f") == b"before"


def test_a_deleted_snapshot_takes_nothing_from_who_stands_on_it(server: Served, sandbox: Sandbox) -> None:
    sandbox.write_file("/workspace/f", b"before")
    snapshot = sandbox.snapshot()
    with server.client() as client, client.fork(snapshot) as fork:
        client.delete_snapshot(snapshot)
        assert fork.read_file("/workspace/f") == b"before"
        fork.stop()
        fork.start()
        assert fork.read_file("/workspace/f") == b"before"
        again = fork.snapshot()
        fork.write_file("/workspace/f", b"after")
        fork.rollback(again)
        assert fork.read_file("/workspace/f") == b"before"


def test_snapshots_of_an_earlier_version_come_into_the_store(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as client, client.create(disk_mb=64) as sandbox:
        sandbox.exec("echo old > f; mkdir -p d/e; ln f d/g; ln -s ../f d/l")
        listing = "find . -printf '%p %y %m %T@ %l\\n' | sort; stat -c %h f"
        expected = sandbox.exec(listing).stdout
        snapshot = sandbox.snapshot()
        server.stop()
        turn_into_a_file(server.data, snapshot.id)
        server.start()
        file = server.data / "snapshots" / f"{snapshot.id}.tar.zst"
        for _ in range(200):
            if not file.exists():
                break
            time.sleep(0.1)
        assert not file.exists()
        sandbox.exec("rm -r d f; echo new > f")
        sandbox.rollback(snapshot)
        assert sandbox.exec(listing).stdout == expected
        assert sandbox.exec("cat f d/l").stdout == "old\nold\n"
        server.stop()
        server.start()
        with client.fork(snapshot) as fork:
            assert fork.exec("cat d/g").stdout == "old\n"


def test_the_limit_of_a_snapshot_counts_what_files_hold(tmp_path: pathlib.Path) -> None:
    with (
        serving(tmp_path / "data", max_snapshot_bytes="1000000") as server,
        server.client() as client,
        client.create(disk_mb=64) as sandbox,
    ):
        sandbox.exec("truncate -s 1T sparse; echo x >> sparse")
        assert sandbox.snapshot().size_bytes < 10_000
        sandbox.exec("head -c 2000000 /dev/urandom > big")
        with pytest.raises(PayloadTooLargeError):
            sandbox.snapshot()
        sandbox.exec("rm big; echo y > small")
        with client.fork(sandbox.snapshot()) as fork:
            assert fork.exec("ls; stat -c %s sparse; cat small").stdout == "small\nsparse\n1099511627778\ny\n"
