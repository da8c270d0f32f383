"""Processes that go on from a snapshot, on real gVisor beside runc in one server, which may be killed at any step."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from agent_sandbox.client import Execution, Sandbox
from agent_sandbox.errors import ConflictError, UnsupportedError
from tests.e2e.serving import KEY, Served, serving

pytestmark = pytest.mark.real

COUNTER = ["/bin/sh", "-c", "n=0; while :; do n=$((n+1)); echo $n; echo $n >> at; sleep 0.05; done"]
SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("checkpoints") / "data", "runc,gvisor") as served:
        yield served


def until(what: Callable[[], object], why: str) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < end, why
        time.sleep(0.02)


def numbers(sandbox: Sandbox, id: str) -> list[int]:
    """What a counter printed: every number once, in order."""
    printed = b"".join(event.raw for event in sandbox.get_exec(id).output(follow=False) if event.type == "stdout")
    found = [int(line) for line in printed.split(b"\n")[:-1]]
    assert found == list(range(1, len(found) + 1))
    return found


def counting(sandbox: Sandbox) -> Execution:
    command = sandbox.start_exec(COUNTER, timeout_seconds=600)
    until(lambda: len(numbers(sandbox, command.id)) > 3, "the counter does not count")
    return command


def goes_on(sandbox: Sandbox, id: str, beyond: int) -> None:
    until(lambda: len(numbers(sandbox, id)) > beyond, f"the counter stays at {numbers(sandbox, id)[-1:]}")


def test_a_counter_goes_on_after_a_rollback_and_in_three_forks(server: Served) -> None:
    with server.client() as client, client.create(backend="gvisor", memory_mb=128) as sandbox:
        command = counting(sandbox)
        before = len(numbers(sandbox, command.id))
        snapshot = sandbox.snapshot("with memory", memory=True)
        assert snapshot.memory
        assert snapshot.memory_bytes > 0
        after = len(numbers(sandbox, command.id))
        goes_on(sandbox, command.id, after + 60)
        with client.fork(snapshot, memory=False) as plain:
            at = len(plain.read_file("/workspace/at").split())
            assert plain.execs() == []
        assert before <= at + 1
        assert at <= after + 1
        sandbox.rollback(snapshot)
        assert at - 1 <= len(numbers(sandbox, command.id)) < after + 60
        goes_on(sandbox, command.id, after)
        forks = [client.fork(snapshot) for _ in range(3)]
        try:
            forks[0].get_exec(command.id).signal("KILL")
            for fork in forks[1:]:
                goes_on(fork, command.id, at + 5)
                (running,) = fork.execs()
                assert (running.id, running.info.status) == (command.id, "running")
            forks[1].exec("rm at; echo mine > mine")
            assert "mine" not in forks[2].exec("ls").stdout
        finally:
            for fork in forks:
                fork.destroy()


def test_what_is_kept_of_a_stopped_or_a_runc_sandbox_is_the_workspace(server: Served) -> None:
    with server.client() as client, client.create(backend="runc") as plain:
        with pytest.raises(UnsupportedError, match="checkpoint"):
            plain.snapshot(memory=True)
        assert client.list_snapshots(plain.id) == []
        plain.write_file("/workspace/f", b"from runc")
        with client.fork(plain.snapshot(), backend="gvisor") as moved:
            assert moved.info.backend == "gvisor"
            assert moved.exec("cat f; uname -v").stdout.startswith("from runc#1 SMP Sun Jan 10")
            moved.stop()
            with pytest.raises(ConflictError, match="stopped"):
                moved.snapshot(memory=True)


def test_a_file_that_is_open_and_deleted_is_named_and_the_sandbox_goes_on(server: Served) -> None:
    with server.client() as client, client.create(backend="gvisor", memory_mb=128) as sandbox:
        holding = "exec 3> held; rm held; echo ready; while :; do echo x >&3; sleep 0.1; done"
        command = sandbox.start_exec(holding)
        until(lambda: list(command.output(follow=False)), "the command does not start")
        before = set((server.data / "checkpoints").iterdir())
        with pytest.raises(ConflictError, match="deleted"):
            sandbox.snapshot(memory=True)
        assert set((server.data / "checkpoints").iterdir()) == before
        assert client.list_snapshots(sandbox.id) == []
        assert command.refresh().info.status == "running"
        command.delete()
        assert sandbox.snapshot(memory=True).memory


STEPS: dict[str, Callable[[pathlib.Path], object]] = {
    "begun": lambda place: list(place.glob(".new-*/state")),
    "written": lambda place: list(place.glob(".new-*/state/*.img")),
    "renamed": lambda place: list(place.glob("snap*")),
}


def test_a_server_that_is_killed_at_each_step_of_keeping_memory(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path / "data", "gvisor") as server, server.client() as client:
        sandbox = client.create(memory_mb=128, timeout_seconds=3000)
        command = counting(sandbox)
        place = server.data / "checkpoints"

        def take() -> None:
            # The server is killed under it, and the SDK would try it again for a while.
            with contextlib.suppress(httpx.TransportError):
                path, headers = f"/v1/sandboxes/{sandbox.id}/snapshots", {"X-API-Key": KEY}
                httpx.post(server.url + path, json={"memory": True}, headers=headers, timeout=SECONDS)

        for step, reached in STEPS.items():
            for snapshot in client.list_snapshots():
                client.delete_snapshot(snapshot)
            taking = threading.Thread(target=take)
            taking.start()
            until(lambda reached=reached: reached(place), f"the snapshot never came to {step}")  # type: ignore[misc]
            server.stop(signal.SIGKILL)
            taking.join()
            server.start()
            at = len(numbers(sandbox, command.id))
            goes_on(sandbox, command.id, at)  # it was not left frozen
            kept = {snapshot.id for snapshot in client.list_snapshots()}
            assert {path.name for path in place.iterdir()} == kept, step
            snapshot = sandbox.snapshot(memory=True)
            with client.fork(snapshot) as fork:
                goes_on(fork, command.id, at)
