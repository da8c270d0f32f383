"""Processes that go on from a snapshot in microVMs, with a server that may be killed.

On a real QEMU, emulated here, or a real Firecracker (``tests/nested``).
"""

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
from agent_sandbox.errors import ConflictError
from tests.e2e.serving import KEY, Served, serving
from tests.microvms import MONITOR, PROCESSOR

pytestmark = pytest.mark.real

COUNT = """
import itertools, time
with open("at", "a") as at:
    for n in itertools.count(1):
        print(n, flush=True)
        print(n, file=at, flush=True)
        time.sleep(0.2)
"""
COUNTER = ["python3", "-S", "-c", COUNT]
"""One process, which starts no others: that costs an emulated machine most of its time."""
SECONDS = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, machine_dir: pathlib.Path) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("machines") / "data"
    with serving(place, MONITOR, machine_dir=str(machine_dir), allow_tcg="true") as served:
        yield served


def until(what: Callable[[], object], why: str) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < end, why
        time.sleep(0.05)


def numbers(sandbox: Sandbox, id: str) -> int:
    """What a counter has come to; it printed every number once, in order."""
    printed = b"".join(event.raw for event in sandbox.get_exec(id).output(follow=False) if event.type == "stdout")
    found = [int(line) for line in printed.split(b"\n")[:-1]]
    assert found == list(range(1, len(found) + 1))
    return len(found)


def counting(sandbox: Sandbox) -> Execution:
    command = sandbox.start_exec(COUNTER, timeout_seconds=3000)
    goes_on(sandbox, command.id, 3)
    return command


def goes_on(sandbox: Sandbox, id: str, beyond: int) -> None:
    until(lambda: numbers(sandbox, id) > beyond, f"the counter stays at {beyond}")


def own(sandbox: Sandbox) -> tuple[str, str, str]:
    """What a machine has that no other has: its name, its id, and random numbers."""
    said = sandbox.exec("uname -n; cat /etc/machine-id; od -An -N16 -tx1 /dev/urandom").stdout.split("\n")
    return said[0], said[1], said[2]


def clock(sandbox: Sandbox) -> float:
    """How far a machine's clock is from between the moments before and after it was asked, in seconds."""
    before = time.time()
    shown = float(sandbox.exec("date +%s.%N").stdout)
    return max(before - shown, shown - time.time(), 0.0)


def test_a_counter_goes_on_after_a_rollback_and_in_three_forks(server: Served) -> None:
    with server.client() as client, client.create(backend=MONITOR, memory_mb=64, disk_mb=64) as sandbox:
        command = counting(sandbox)
        sandbox.exec("echo in memory > /tmp/t")
        before = numbers(sandbox, command.id)
        first = own(sandbox)
        snapshot = sandbox.snapshot("with memory", memory=True)
        assert snapshot.memory
        assert snapshot.memory_bytes < 64 << 20 << 2
        goes_on(sandbox, command.id, before)
        sandbox.exec("echo later > /tmp/later; echo later > later")

        sandbox.rollback(snapshot)
        assert sandbox.exec("ls /tmp").stdout == "t\n"
        assert sandbox.exec("ls").stdout == "at\n"
        at = numbers(sandbox, command.id)
        assert at >= before - 1
        goes_on(sandbox, command.id, at)
        assert clock(sandbox) < 1

        forks = [client.fork(snapshot) for _ in range(3)]
        try:
            told = [first, own(sandbox), *(own(fork) for fork in forks)]
            for values in zip(*told, strict=True):
                assert len(set(values)) == len(told)
            assert max(clock(fork) for fork in forks) < 1
            forks[0].get_exec(command.id).signal("KILL")
            for fork in forks[1:]:
                at = numbers(fork, command.id)
                assert at >= before - 1
                goes_on(fork, command.id, at + 1)
                (running,) = fork.execs()
                assert (running.id, running.info.status) == (command.id, "running")
                assert fork.exec("cat /tmp/t").stdout == "in memory\n"
            forks[1].exec("rm at; echo mine > mine")
            assert "mine" not in forks[2].exec("ls").stdout
            # What went on once can be kept and go on again.
            again = forks[2].snapshot(memory=True)
            with client.fork(again) as grandchild:
                goes_on(grandchild, command.id, numbers(forks[2], command.id))
        finally:
            for fork in forks:
                fork.destroy()


def test_a_snapshot_goes_on_only_in_the_machine_that_it_was_taken_of(server: Served) -> None:
    with server.client() as client, client.create(backend=MONITOR, memory_mb=64, disk_mb=64) as sandbox:
        sandbox.write_file("/workspace/f", b"kept")
        snapshot = sandbox.snapshot(memory=True)
        with pytest.raises(ConflictError, match="another size of memory"):
            client.fork(snapshot, memory_mb=128)
        manifest = server.data / "checkpoints" / snapshot.id / "state" / "manifest.json"
        text = manifest.read_text()
        for fact, reason in ((f"{MONITOR} ", "monitor"), (PROCESSOR, "processor"), ("-cloud-", "kernel")):
            changed = text.replace(fact, fact.upper(), 1)
            assert changed != text
            manifest.write_text(changed)
            with pytest.raises(ConflictError, match=f"another {reason}.*memory: false"):
                client.fork(snapshot)
        manifest.write_text(text)
        with client.fork(snapshot, memory=False) as plain:
            assert plain.read_file("/workspace/f") == b"kept"
        with client.fork(snapshot) as fork:
            assert fork.read_file("/workspace/f") == b"kept"


STEPS: dict[str, Callable[[pathlib.Path], object]] = {
    "begun": lambda place: list(place.glob(".new-*/state")),
    "written": lambda place: list(place.glob(".new-*/state/memory")),
}


def test_a_server_that_is_killed_while_it_keeps_memory(server: Served) -> None:
    with server.client() as client:
        sandbox = client.create(backend=MONITOR, timeout_seconds=3000, memory_mb=64, disk_mb=64)
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
            goes_on(sandbox, command.id, numbers(sandbox, command.id))  # it was not left frozen
            kept = {snapshot.id for snapshot in client.list_snapshots()}
            assert {path.name for path in place.iterdir()} == kept, step
        sandbox.destroy()
        until(lambda: not server.environments(), "the machine is not removed")
