"""Many commands, long ones and much output: nothing is left of them, and the server stays small and answers.

``SOAK_EXECS`` is how many short commands are run; ``make soak`` runs as many as are promised.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.client import Sandbox, SandboxClient
from tests.bench.lean import Lean
from tests.e2e.serving import KEY, Served, serving
from tests.kills.api import Api
from tests.real.leaks import resources

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SHORT_EXECS = int(os.environ.get("SOAK_EXECS", "1000"))
AT_ONCE = 8
LONG_EXECS = 100
OUTPUT_BYTES = 50_000_000
MEMORY_BYTES = 60 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("load") / "data") as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[SandboxClient]:
    with server.client() as client:
        yield client


@pytest.fixture
def api(server: Served) -> Iterator[Api]:
    with contextlib.closing(Api(server.url, KEY)) as api:
        yield api


@pytest.fixture
def sandbox(client: SandboxClient) -> Iterator[Sandbox]:
    with client.create(memory_mb=256, pids_limit=1024) as sandbox:
        yield sandbox


def stat(pid: str) -> tuple[str, str]:
    """A process's state and its parent."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone", ""
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[1]


def held(server: Served) -> dict[str, int]:
    """What the server and everything in its sandboxes have now, counted by the kernel."""
    inside = set(resources(server.data).get("processes", []))
    ours = {str(server.pid), *inside}
    counts = {"processes": len(inside), "zombies": 0, "descriptors": 0, "threads": 0}
    for entry in Path("/proc").glob("[0-9]*"):
        state, parent = stat(entry.name)
        counts["zombies"] += state == "Z" and (entry.name in ours or parent in ours)
    for pid in ours:
        with contextlib.suppress(OSError):
            counts["descriptors"] += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            counts["threads"] += len(list(Path(f"/proc/{pid}/task").iterdir()))
    return counts


def settled(count: Callable[[], dict[str, int]], most: dict[str, int], seconds: float = 30.0) -> dict[str, int]:
    """Wait until nothing is above ``most``; what is then counted."""
    end = time.monotonic() + seconds
    while any((now := count())[kind] > most[kind] for kind in most) and time.monotonic() < end:
        time.sleep(0.2)
    return now


def run_short(server: Served, sandbox: Sandbox, count: int) -> list[tuple[int, str]]:
    """Run so many short commands, some at once; what went wrong."""
    numbers, wrong = iter(range(count)), list[tuple[int, str]]()

    def work() -> None:
        with contextlib.closing(Lean(server.port, KEY)) as lean:
            for number in numbers:
                body = json.dumps({"command": ["sh", "-c", f"echo {number}; exit {number % 7}"]}).encode()
                status, reply = lean.request("POST", f"/v1/sandboxes/{sandbox.id}/exec", body)
                seen = json.loads(reply)
                if (status, seen.get("stdout"), seen.get("exit_code")) != (200, f"{number}\n", number % 7):
                    wrong.append((number, f"{status} {seen}"))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for future in [pool.submit(work) for _ in range(AT_ONCE)]:
            future.result()
    return wrong


@pytest.mark.timeout(120 + SHORT_EXECS // 10)
def test_short_commands_leave_no_zombie_descriptor_or_thread(server: Served, sandbox: Sandbox) -> None:
    assert run_short(server, sandbox, 200) == []  # pools have as many threads as they will ever have
    before = settled(lambda: held(server), {"zombies": 0})
    started = time.monotonic()
    assert run_short(server, sandbox, SHORT_EXECS) == []
    took = time.monotonic() - started
    after = settled(lambda: held(server), before)
    print(f"{SHORT_EXECS} commands in {took:.1f} s; before {before}, after {after}")
    assert before["zombies"] == after["zombies"] == 0
    assert all(after[kind] <= before[kind] for kind in before), (before, after)


def test_64_at_once_never_hang(server: Served, sandbox: Sandbox) -> None:
    barrier = threading.Barrier(64, timeout=60)

    def work(number: int) -> list[Any]:
        with contextlib.closing(Api(server.url, KEY)) as api:
            barrier.wait()
            seen = []
            for turn in range(3):
                command = f"head -c {number * 100} /dev/zero | tr '\\0' x; echo {turn} >&2; exit {number}"
                reply = api.ask("POST", f"/v1/sandboxes/{sandbox.id}/exec", {"command": command})
                seen.append((len(reply["stdout"]), reply["stderr"], reply["exit_code"]))
            return seen

    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(work, range(64)))
    assert results == [[(number * 100, f"{turn}\n", number) for turn in range(3)] for number in range(64)]


def test_long_commands_do_not_hold_up_the_others(server: Served, client: SandboxClient, api: Api) -> None:
    boxes = [client.create(memory_mb=256, pids_limit=256) for _ in range(4)]
    running, over = threading.Semaphore(0), threading.Event()

    def work(number: int) -> None:
        with contextlib.closing(Api(server.url, KEY)) as own:
            body = {"command": "echo on; sleep 250", "timeout_seconds": 280}
            for _ in own.lines("POST", f"/v1/sandboxes/{boxes[number % 4].id}/exec/stream", body):
                running.release()
                over.wait(240)
                return

    with ThreadPoolExecutor(LONG_EXECS) as pool:
        futures = [pool.submit(work, number) for number in range(LONG_EXECS)]
        try:
            for _ in range(LONG_EXECS):
                assert running.acquire(timeout=120), "a command did not start"
            for _ in range(20):
                assert api.ask("GET", "/healthz")["status"] == "ok"
            assert boxes[0].exec("echo still").stdout == "still\n"
            assert not any(future.done() for future in futures), "they were to run meanwhile"
        finally:
            over.set()
        for future in futures:
            future.result()
    for box in boxes:  # what their clients left has ended
        assert settled(lambda b=box: {"sleeps": sleeps(b)}, {"sleeps": 0}) == {"sleeps": 0}  # type: ignore[misc]
        box.destroy()


def sleeps(box: Sandbox) -> int:
    """How many of the long commands run."""
    program = (
        "import glob; print(sum(open(p, 'rb').read().startswith(b'sleep') for p in glob.glob('/proc/[0-9]*/cmdline')))"
    )
    return int(box.exec(["python3", "-c", program]).stdout)


@contextlib.contextmanager
def memory_watched(pid: int) -> Iterator[Callable[[], int]]:
    """By how many bytes a process's resident memory grew at most."""
    over, most, before = threading.Event(), 0, resident(pid)

    def watch() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, resident(pid) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: most
    finally:
        over.set()
        thread.join()


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


WRITE_MUCH = f"head -c {OUTPUT_BYTES} /dev/zero | tr '\\0' x"


@pytest.mark.parametrize("route", ["exec/stream", "execs"])
def test_much_output_streams_through_a_small_server(server: Served, sandbox: Sandbox, api: Api, route: str) -> None:
    started = time.monotonic()
    with memory_watched(server.pid) as grown:
        count = 0
        for event in api.lines("POST", f"/v1/sandboxes/{sandbox.id}/{route}", {"command": WRITE_MUCH}):
            if event["type"] == "stdout":
                count += len(event["data"])
        end = event
    print(f"{OUTPUT_BYTES >> 20} MiB in {time.monotonic() - started:.1f} s; memory grew by {grown() >> 20} MiB")
    assert (count, end["type"], end["exit_code"]) == (OUTPUT_BYTES, "exit", 0)
    assert grown() < MEMORY_BYTES


def test_much_output_of_a_plain_command_is_cut_off(server: Served, sandbox: Sandbox) -> None:
    with memory_watched(server.pid) as grown:
        result = sandbox.exec(WRITE_MUCH)
    print(f"memory grew by {grown() >> 20} MiB")
    assert (len(result.stdout), result.truncated, result.exit_code) == (10_485_760, True, 0)
    assert grown() < MEMORY_BYTES


@pytest.mark.parametrize("route", ["exec/stream", "execs"])
def test_stalled_readers_hold_their_command_back(server: Served, sandbox: Sandbox, route: str) -> None:
    counted = f"/workspace/{route.replace('/', '-')}"
    write = f"head -c 1000000 /dev/zero | tr '\\0' x; n=$((n+1)); echo $n > {counted}"
    command = f"n=0; echo 0 > {counted}; while :; do {write}; done"
    with contextlib.ExitStack() as stack:
        grown = stack.enter_context(memory_watched(server.pid))
        for _ in range(4):
            own = stack.enter_context(contextlib.closing(Api(server.url, KEY)))
            lines = own.lines("POST", f"/v1/sandboxes/{sandbox.id}/{route}", {"command": command})
            stack.enter_context(contextlib.closing(lines))
            next(lines)
        time.sleep(3)
        first = int(sandbox.read_text(counted))
        time.sleep(2)
        assert int(sandbox.read_text(counted)) == first, "nobody reads, and it goes on writing"
        print(f"memory grew by {grown() >> 20} MiB, {first} MB were written")
        assert grown() < MEMORY_BYTES
