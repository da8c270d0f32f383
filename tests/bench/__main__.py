"""``make bench``: ours beside the peer, on one machine in one run, alternating. Prints medians, spread and ratio.

Ours is on runc; its Docker backend and the peer run where a Docker engine answers, its gvisor backend where runsc is
installed; microVMs and memory have a table of their own (``machines.py``). All run the same image. A measurement is one
operation over a kept connection of the lean client, unless the row says otherwise; ``10–90 %`` is the spread of ours.
Every reply is checked; a row with a failure says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import machines
from tests.bench.contenders import (
    BUILD,
    Contender,
    Floor,
    docker_runs,
    gvisor_runs,
    ours,
    peer,
    qemu_runs,
    say,
    start_by_engine,
)
from tests.bench.lean import Lean
from tests.bench.workspaces import histories, snapshots

SPAWN = """
import os, time
started = time.perf_counter()
for _ in range(50): os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)
print((time.perf_counter() - started) / 50)
"""


class Bench:
    """Collects seconds by row and contender."""

    def __init__(self, contenders: list[Contender]) -> None:
        self.contenders = contenders
        self.rows: dict[str, dict[str, list[float]]] = {}
        self.failures: dict[str, list[str]] = {}
        self.facts: list[str] = []

    def measure(self, row: str, who: str, operation: Callable[..., Any], *args: Any) -> Any:
        """Time one operation; a failure is recorded and ends nothing."""
        started = time.perf_counter()
        try:
            result = operation(*args)
        except (RuntimeError, OSError) as error:
            self.failures.setdefault(row, []).append(f"{who}: {error}")
            return None
        self.note(row, who, time.perf_counter() - started)
        return result

    def note(self, row: str, who: str, seconds: float) -> None:
        """Record a time that was taken elsewhere."""
        self.rows.setdefault(row, {}).setdefault(who, []).append(seconds)


def lifecycle(bench: Bench, rounds: int) -> None:
    """Create and destroy, beside the runtime's own start."""
    floor = Floor()
    for _ in range(rounds):
        bench.note("runc run -d, by hand", "ours", floor.run())
        if any(contender.name == "docker" for contender in bench.contenders):
            bench.note("docker run -d, by hand", "docker", start_by_engine())
        for contender in bench.contenders:
            id = bench.measure("create", contender.name, contender.create)
            if id:
                bench.measure("destroy", contender.name, contender.destroy, id)


def commands(bench: Bench, rounds: int) -> None:
    """Short commands and small and large files in one sandbox each."""
    boxes = {contender.name: contender.create() for contender in bench.contenders}
    small, large = b"x" * 1024, os.urandom(30 * 1024 * 1024)
    for number in range(rounds):
        for contender in bench.contenders:
            slow = contender.name == "peer"
            if slow and number % 5:
                continue
            id, name = boxes[contender.name], contender.name
            files = f"/v1/sandboxes/{id}/files?path=/workspace"
            bench.measure('exec ["true"]', name, contender.exec, id, ["true"])
            bench.measure("write 1 KB", name, put, contender.lean, f"{files}/small", small)
            bench.measure("read 1 KB", name, get, contender.lean, f"{files}/small", small)
    for contender in bench.contenders:
        spent = float(contender.exec(boxes[contender.name], ["python3", "-c", SPAWN])["stdout"])
        bench.note("fork and exec of true inside, by the guest", contender.name, spent)
    for _ in range(max(3, rounds // 20)):
        for contender in bench.contenders:
            files, name = f"/v1/sandboxes/{boxes[contender.name]}/files?path=/workspace", contender.name
            bench.measure("write 30 MB", name, put, contender.lean, f"{files}/large", large)
            bench.measure("read 30 MB", name, get, contender.lean, f"{files}/large", large)
    for contender in bench.contenders:
        contender.destroy(boxes[contender.name])


def put(lean: Lean, path: str, data: bytes) -> None:
    """Upload, checked."""
    status, body = lean.request("PUT", path, data, "application/octet-stream")
    if status != 200:
        raise RuntimeError(f"PUT: {status} {body[:200]!r}")


def get(lean: Lean, path: str, data: bytes) -> None:
    """Download, checked to the byte."""
    status, body = lean.request("GET", path)
    if status != 200 or body != data:
        raise RuntimeError(f"GET: {status}, {len(body)} bytes")


def through_sdk(bench: Bench, rounds: int) -> None:
    """The same short command through our own client, whose cost is the difference."""
    from agent_sandbox.client import SandboxClient

    contender = bench.contenders[0]
    client = SandboxClient(f"http://127.0.0.1:{contender.port}", contender.key)
    with client, client.create(image=contender.image) as sandbox:
        for _ in range(rounds):
            bench.measure('exec ["true"], our SDK', "ours", sandbox.exec, ["true"])


def throughput(contender: Contender, seconds: float, connections: int = 32, sandboxes: int = 8) -> tuple[float, int]:
    """Short commands per second over many connections, and how many failed."""
    boxes = [contender.create() for _ in range(sandboxes)]
    done, failed = [0] * connections, [0] * connections
    end = time.perf_counter() + seconds

    def load(number: int) -> None:
        lean = Lean(contender.port, contender.key)
        path = f"/v1/sandboxes/{boxes[number % sandboxes]}/exec"
        while time.perf_counter() < end:
            try:
                failed[number] += lean.call("POST", path, {"command": ["true"]})["exit_code"] != 0
                done[number] += 1
            except (RuntimeError, OSError):
                failed[number] += 1
        lean.close()

    threads = [threading.Thread(target=load, args=(number,)) for number in range(connections)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = sum(done) / (time.perf_counter() - started)
    for box in boxes:
        contender.destroy(box)
    return rate, sum(failed)


def show(bench: Bench, rates: dict[str, tuple[float, int]], console: Console) -> None:
    """Print the table."""
    table = Table(title="median, milliseconds")
    others = [contender.name for contender in bench.contenders if contender.name != "ours"]
    ratios = [name for name in ("ours", "docker") if name in ("ours", *others) and "peer" in others]
    for column in ("operation", "ours", "10–90 %", "n", *others, *(f"peer / {name}" for name in ratios), "failed"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for row, times in bench.rows.items():
        mine = sorted(times.get("ours") or next(iter(times.values())))
        middles = {name: statistics.median(taken) for name, taken in times.items() if taken}
        low, high = mine[len(mine) // 10], mine[min(len(mine) - 1, len(mine) * 9 // 10)]
        both = [(middles.get("peer"), middles.get(name)) for name in ratios]
        table.add_row(
            row,
            f"{middles['ours'] * 1e3:.1f}" if "ours" in middles else "–",
            f"{low * 1e3:.1f}–{high * 1e3:.1f}",
            str(len(mine)),
            *(f"{middles[name] * 1e3:.1f}" if name in middles else "–" for name in others),
            *(f"{theirs / own:.1f}×" if theirs and own else "–" for theirs, own in both),
            str(len(bench.failures.get(row, []))),
        )
    console.print(table)
    for who, (rate, failed) in rates.items():
        console.print(f"exec throughput, 32 connections, 8 sandboxes, {who}: {rate:.0f}/s, {failed} failed")
    create = statistics.median(bench.rows["create"]["ours"])
    floor = statistics.median(bench.rows["runc run -d, by hand"]["ours"])
    console.print(f"create is {create / floor:.2f} times the runtime's own start")
    for fact in bench.facts:
        console.print(fact)
    for row, texts in bench.failures.items():
        console.print(f"[red]{row}: {len(texts)} failed, first: {texts[0]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="short commands to time; other rows take a share")
    parser.add_argument("--no-peer", action="store_true", help="leave the peer out")
    parser.add_argument("--json", type=pathlib.Path, default=BUILD / "bench.json", help="where the raw times go")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        contenders = [stack.enter_context(ours())]
        if docker_runs():
            contenders.append(stack.enter_context(ours("docker", "docker")))
        if gvisor_runs():
            contenders.append(stack.enter_context(ours("gvisor", "gvisor")))
        if not options.no_peer and docker_runs():
            contenders.append(stack.enter_context(peer()))
        else:
            say("no Docker engine answers (or --no-peer): ours alone")
        bench = Bench(contenders)
        say("create and destroy …")
        lifecycle(bench, max(5, options.rounds // 10))
        say("commands and files …")
        commands(bench, options.rounds)
        through_sdk(bench, options.rounds)
        say("snapshots …")
        snapshots(bench, max(3, options.rounds // 20))
        say("histories, forks and huge workspaces …")
        histories(bench)
        say("throughput …")
        rates = {c.name: throughput(c, 10.0 if c.name == "peer" else 5.0) for c in contenders}
        resident = {c.name: c.resident_kib() for c in contenders}
        say("microVMs and memory …")
        times: machines.Times = {}
        if qemu_runs():
            machines.kernel()
            with ours("qemu", "qemu", allow_tcg="true", machine_dir=str(machines.MACHINES)) as qemu:
                machines.machines(times, qemu, 5)
                machines.memory(times, qemu, 5)
                resident["qemu"] = qemu.resident_kib()
            asyncio.run(machines.channel(times, 5))
            machines.by_hand(times, 3)
        for contender in contenders:
            if contender.name == "gvisor":
                machines.memory(times, contender, 5)
    console = Console(width=120)
    show(bench, rates, console)
    machines.show(times, console)
    console.print(f"resident memory of the server afterwards, KiB: {resident}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    raw = {
        "rows": bench.rows,
        "machines": times,
        "failures": bench.failures,
        "facts": bench.facts,
        "throughput": rates,
        "resident_kib": resident,
    }
    options.json.write_text(json.dumps(raw))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
