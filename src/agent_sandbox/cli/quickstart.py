"""``quickstart``: the main job from end to end, each step checked and timed.

Every step knows the result that it must have; the first one that has another ends the run with code 1. Whatever was
made is removed at the end, also after a failure or a signal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from agent_sandbox.cli import exit_codes, options, output, signals
from agent_sandbox.cli.commands import destroy, left_behind
from agent_sandbox.cli.connection import connect
from agent_sandbox.errors import NotFoundError

if TYPE_CHECKING:
    from agent_sandbox.client import Sandbox, SandboxClient, SnapshotInfo

LIMIT = 300_000
PRIMES = 25_997
"""The number of primes below 300,000; a test counts them another way."""
TTL_SECONDS = 300
"""Longer than the run ever takes: what a forced exit leaves behind is gone soon."""

PROGRAM = """\
from pathlib import Path
from primes import count

limit = int(Path("limit.txt").read_text())
print(f"{count(limit)} primes below {limit}")
"""
SIMPLE = """\
def count(limit):
    return sum(all(n % d for d in range(2, n)) for n in range(2, limit))
"""
CANDIDATES = {
    "trial division by odd numbers": """\
def count(limit):
    odd = (n for n in range(3, limit, 2) if all(n % d for d in range(3, int(n**0.5) + 1, 2)))
    return 1 + sum(1 for _ in odd)
""",
    "trial division by primes": """\
def count(limit):
    primes = []
    for n in range(2, limit):
        for p in primes:
            if p * p > n:
                primes.append(n)
                break
            if n % p == 0:
                break
        else:
            primes.append(n)
    return len(primes)
""",
    "sieve of Eratosthenes": """\
def count(limit):
    sieve = bytearray([1]) * limit
    sieve[0:2] = b"\\0\\0"
    for n in range(2, int(limit**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, limit, n)))
    return sum(sieve)
""",
}
CONTEST = f"""\
import json, time, primes

started = time.perf_counter()
found = primes.count({LIMIT})
print(json.dumps({{"found": found, "seconds": time.perf_counter() - started}}))
"""
COUNTDOWN = ["python3", "-uc", "import time\nfor n in (3, 2, 1):\n    print(n)\n    time.sleep(0.1)\nprint('go')"]


class Unexpected(Exception):
    """A step's result is not the one that it must have."""


@dataclass
class Report:
    """Prints each step with what it did and how long it took; keeps them for ``--json``."""

    as_json: bool
    steps: list[dict[str, object]] = field(default_factory=list)

    @contextmanager
    def step(self, title: str) -> Iterator[list[str]]:
        """Time one step; the block appends what it saw to the list that it gets."""
        seen: list[str] = []
        started = time.perf_counter()
        ok = False
        try:
            yield seen
            ok = True
        finally:
            elapsed = (time.perf_counter() - started) * 1000
            self.steps.append({"step": title, "ok": ok, "ms": round(elapsed, 1), "seen": seen})
            if not self.as_json:
                output.line(f"{len(self.steps):2}. {title:<58}{elapsed:8.0f} ms{'' if ok else '  FAILED'}")
                for text in seen:
                    output.line(f"      {text}")


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(quickstart)


def quickstart(as_json: options.Json = False) -> None:
    """Show the main job: run a program, break its workspace, roll back, fork, compare, clean up.

    Ends with 1 when a step's result is not the expected one. Nothing is left behind.
    """
    report = Report(as_json)
    started = time.perf_counter()
    failure = ""
    try:
        with report.step("find a server, or start the local one") as seen:
            client = connect()
            health = client.health()
            seen.append(f"backend {health['backend']}, version {health['version']}")
        with client:
            _main_job(client, report)
    except Unexpected as error:
        failure = str(error)
    total = time.perf_counter() - started
    if as_json:
        output.data({"ok": not failure, "seconds": round(total, 3), "failure": failure or None, "steps": report.steps})
    elif not failure:
        output.line("")
        output.line(f"Everything was as expected, in {total:.1f} s. Next: agent-sandbox run -- python3 -c 'print(6*7)'")
    if failure:
        output.note(f"unexpected: {failure}")
        raise typer.Exit(exit_codes.FAILED)


def _main_job(client: SandboxClient, report: Report) -> None:
    with ExitStack() as stack:
        with report.step("create a sandbox") as seen:
            sandbox = stack.enter_context(
                signals.owning(lambda: client.create(timeout_seconds=TTL_SECONDS), destroy, left_behind)
            )
            seen.append(f"{sandbox.id}: image {sandbox.image}, network off, limits on")
        with report.step("write a program into it") as seen:
            for name, text in (("main.py", PROGRAM), ("primes.py", SIMPLE), ("limit.txt", "10")):
                sandbox.write_file(f"/workspace/{name}", text)
            names = sorted(entry.name for entry in sandbox.list_files("/workspace"))
            _expect(names == ["limit.txt", "main.py", "primes.py"], f"the workspace holds {names}")
            seen.append(", ".join(names))
        with report.step("run it: python3 main.py") as seen:
            seen.append(_run(sandbox, ["python3", "main.py"], "4 primes below 10"))
        with report.step("snapshot the workspace") as seen:
            snapshot = stack.enter_context(_snapshot(client, sandbox))
            seen.append(f"{snapshot.id}: {output.size(snapshot.size_bytes)}")
        with report.step("break the workspace: rm -rf") as seen:
            result = sandbox.exec("rm -rf /workspace/* && ls -A /workspace | wc -l")
            _expect(result.exit_code == 0 and result.stdout.strip() == "0", f"rm left {result.stdout}{result.stderr}")
            seen.append("the workspace is empty")
        with report.step("run the program again: it must fail") as seen:
            result = sandbox.exec(["python3", "main.py"])
            _expect(result.exit_code == 2 and "No such file" in result.stderr, f"it ended with {result.exit_code}")
            seen.append(f"exit code {result.exit_code}: {result.stderr.strip()}")
        with report.step("roll back, in one call"):
            before = sandbox.id
            sandbox.rollback(snapshot)
            _expect(sandbox.id == before, "the sandbox has another id")
        with report.step("run the program again: it works") as seen:
            seen.append(_run(sandbox, ["python3", "main.py"], "4 primes below 10"))
        with report.step("stream a command's output") as seen:
            seen.extend(_stream(sandbox))
        with report.step("fork the snapshot into three sandboxes") as seen:
            forks = [
                stack.enter_context(
                    signals.owning(lambda: client.fork(snapshot, timeout_seconds=TTL_SECONDS), destroy, left_behind)
                )
                for _ in CANDIDATES
            ]
            seen.append(", ".join(fork.id for fork in forks))
        with report.step(f"count the primes below {LIMIT} in three ways at once") as seen:
            seen.extend(_contest(forks))
        with report.step("destroy everything") as seen:
            stack.close()
            made = {sandbox.id, *(fork.id for fork in forks)}
            left = made & {item.id for item in client.list_sandboxes()}
            left |= {snapshot.id} & {item.id for item in client.list_snapshots()}
            _expect(not left, f"left behind: {', '.join(sorted(left))}")
            seen.append("4 sandboxes and 1 snapshot removed")


def _run(sandbox: Sandbox, command: Sequence[str], expected: str) -> str:
    result = sandbox.exec(command)
    _expect(
        result.exit_code == 0 and result.stdout == expected + "\n",
        f"{' '.join(command)} ended with {result.exit_code}: {result.stdout}{result.stderr}",
    )
    return result.stdout.strip()


def _stream(sandbox: Sandbox) -> Iterator[str]:
    started = time.perf_counter()
    text, arrivals, code = "", [], None
    for event in sandbox.exec_stream(COUNTDOWN):
        if event.type == "exit":
            code = event.exit_code
        else:
            text += event.data
            arrivals.append((time.perf_counter() - started) * 1000)
    _expect(code == 0 and text == "3\n2\n1\ngo\n", f"the stream gave {text!r} and exit code {code}")
    _expect(len(arrivals) > 1, "the output came in one piece: it was not streamed")
    yield f"{' '.join(text.split())} (arrived after {', '.join(f'{arrival:.0f}' for arrival in arrivals)} ms)"


def _contest(forks: Sequence[Sandbox]) -> Iterator[str]:
    def attempt(fork: Sandbox, source: str) -> float:
        fork.write_file("/workspace/primes.py", source)
        fork.write_file("/workspace/contest.py", CONTEST)
        result = fork.exec(["python3", "contest.py"])
        _expect(result.exit_code == 0, f"a candidate ended with {result.exit_code}: {result.stderr}")
        try:
            answer = json.loads(result.stdout)
            found, seconds = int(answer["found"]), float(answer["seconds"])
        except (ValueError, TypeError, KeyError):
            raise Unexpected(f"a candidate printed {result.stdout!r}") from None
        _expect(found == PRIMES, f"a candidate found {found} primes, not {PRIMES}")
        return seconds

    with ThreadPoolExecutor(len(forks)) as pool:
        times = dict(zip(CANDIDATES, pool.map(attempt, forks, CANDIDATES.values()), strict=True))
    for name, seconds in sorted(times.items(), key=lambda item: item[1]):
        yield f"{name:<32}{seconds * 1000:8.1f} ms"
    yield f"fastest: {min(times, key=times.__getitem__)}"


@contextmanager
def _snapshot(client: SandboxClient, sandbox: Sandbox) -> Iterator[SnapshotInfo]:
    def delete(snapshot: SnapshotInfo) -> None:
        try:
            client.delete_snapshot(snapshot.id)
        except NotFoundError:
            pass

    with signals.owning(
        lambda: sandbox.snapshot("before-the-risky-step"),
        delete,
        lambda snapshot: f"snapshot {snapshot.id} may be left behind: agent-sandbox rm {snapshot.id}",
    ) as snapshot:
        yield snapshot


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Unexpected(otherwise)
