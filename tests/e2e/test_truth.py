"""What is said when something under the server breaks: a daemon killed, a record damaged, a time that runs out.

Numbers are the fault list's.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import signal
import sqlite3
import time
from collections.abc import Iterator

import pytest

from agent_sandbox.client import Sandbox
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError, SandboxError
from tests.e2e.serving import Served, serving

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("truth") / "data", reap_interval_seconds="0.2") as served:
        yield served


def first_process(server: Served, sandbox: Sandbox) -> int:
    """The host's number of a sandbox's daemon: in the sandbox's control group, with a parent that is not."""
    inside = set()
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"/{sandbox.id}-" in (place / "cgroup").read_text():
                inside.add(int(place.name))
        except OSError:
            continue
    for pid in inside:
        parent = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent not in inside:
            return pid
    raise AssertionError("the sandbox has no process")


def test_f05_a_client_that_leaves_a_stream_ends_the_commands_tree(server: Served) -> None:
    with server.client() as client, client.create() as sandbox:
        leaving = server.client()
        events = leaving.get(sandbox.id).exec_stream("setsid sleep 505050 & echo go; sleep 505050")
        assert next(iter(events)).data == "go\n"
        leaving.close()
        del events
        count = "ls /proc | grep -c '^[0-9]'"
        for _ in range(300):
            if int(sandbox.exec(count).stdout) <= 5:
                break
            time.sleep(0.1)
        assert "505050" not in sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout.replace("cat", "")


def test_f09_a_killed_daemon_is_an_error_and_never_a_success(server: Served) -> None:
    with server.client() as client:
        sandbox = client.create(disk_mb=64)
        sandbox.write_file("/workspace/f", b"kept")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            running = pool.submit(sandbox.exec, "echo partial; sleep 300; echo never")
            time.sleep(0.5)
            os.kill(first_process(server, sandbox), signal.SIGKILL)
            assert isinstance(running.exception(timeout=60), SandboxError)
        for operation in (lambda: sandbox.exec("echo hi"), lambda: sandbox.read_file("f"), sandbox.snapshot):
            with pytest.raises((BackendError, ConflictError)):
                operation()
        assert sandbox.refresh().status == "stopped"
        sandbox.start()
        assert sandbox.read_file("/workspace/f") == b"kept"
        assert sandbox.exec("echo back").stdout == "back\n"
        os.kill(first_process(server, sandbox), signal.SIGKILL)
        sandbox.destroy()
        with pytest.raises(NotFoundError):
            client.get(sandbox.id)


def test_f09_on_a_full_disk_a_command_has_its_own_exit_code(server: Served) -> None:
    with server.client() as client, client.create(disk_mb=16) as sandbox:
        sandbox.exec("head -c 100000000 /dev/zero > fill")
        assert sandbox.exec("echo fine; exit 3").exit_code == 3
        # The filesystem may give back some blocks that it held for metadata: more files than it has blocks.
        full = sandbox.exec("for i in $(seq 10000); do echo text > more$i || exit 7; done")
        assert (full.stdout, full.exit_code) == ("", 7)


def test_f23_a_renewal_at_the_moment_of_expiry_lives_or_says_that_it_is_gone(server: Served) -> None:
    def renew(lifetime: int, offset: float) -> bool:
        with server.client() as client:
            sandbox = client.create(timeout_seconds=lifetime)
            time.sleep(offset)
            try:
                sandbox.set_timeout(60)
            except NotFoundError:
                with pytest.raises(NotFoundError):
                    sandbox.exec("true")
                return False
            time.sleep(1.5)
            assert sandbox.exec("echo alive").stdout == "alive\n"
            sandbox.destroy()
            return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        times = [(60, 0.3), *((1, offset) for offset in (0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.5))]
        lived = list(pool.map(renew, *zip(*times, strict=True)))
    assert lived[0]
    assert not lived[-1]


def test_a_second_server_on_one_data_directory_leaves_the_first_alone(server: Served) -> None:
    refused = Served(server.data, "runc").spawn()
    assert refused.wait(30) != 0
    with server.client() as client, client.create() as sandbox:
        assert sandbox.exec("echo made").stdout == "made\n"


def test_f25_a_record_that_cannot_be_read_costs_no_workspace(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as client:
        damaged, sound = client.create(), client.create()
        damaged.write_file("/workspace/f", b"precious")
        sound.write_file("/workspace/f", b"sound")
        server.stop(signal.SIGKILL)
        database = sqlite3.connect(server.data / "state.db")
        with database:
            database.execute("UPDATE sandboxes SET record = substr(record, 1, 40) WHERE id = ?", (damaged.id,))
        database.close()
        server.start()
        assert sound.read_file("/workspace/f") == b"sound"
        with pytest.raises(BackendError, match="cannot be read"):
            damaged.exec("true")
        assert any(name.startswith(damaged.id) for name in server.environments())
        kept = next(pathlib.Path("/run/agent-sandbox").glob(f"*/box/{damaged.id}-*/workspace/f"))
        assert kept.read_bytes() == b"precious"
        damaged.destroy()
        with pytest.raises(NotFoundError):
            client.get(damaged.id)
