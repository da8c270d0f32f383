"""Kill processes that work on a store, at random moments, and hold the store to everything that was acknowledged.

``python -m tests.kills.store --kills 1000 --seed 1`` lets one or two processes commit random edits, move names and run
gc on one store, kills them with SIGKILL, lets some more be killed while they mend, and looks, again and again. After
each round:

* the store opens and ``check`` finds nothing;
* every name that was acknowledged is where it was put, and nothing else is there; what was under way when the process
  died happened or did not, but not half;
* every acknowledged commit holds what was committed, entry by entry (a digest of the directory, taken before);
* after gc nothing is left over: no object, pack, row or temporary file.

Kills fall at a moment, soon after a certain operation was begun, or at a certain step of writing packs (before it,
after it, or with half of the bytes written). A run is repeated by its seed, up to when within an operation the kill
falls. The parent never opens the store: workers and lookers are forked from a process that is clean.

``store_worker.py`` is the work, ``store_truth.py`` what must hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import select
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kills.store_truth import Truth, begin, look
from tests.kills.store_worker import ENGINES, OPS, Worker, collect, message
from tests.unit.store.trees import scratch

PROJECTS = ["one", "two"]
ROUNDS = 15
"""Rounds on one store, before a fresh one is made."""
LONGEST_SECONDS = 1.0
"""A process that its plan does not kill by then is killed."""
PATIENCE_SECONDS = 120.0


@dataclass
class Plan:
    """How one process dies: at a step, or ``delay`` seconds after it began an operation ``op``, or after its start."""

    steps: int
    op: str | None
    delay: float

    @classmethod
    def draw(cls, rng: random.Random) -> Plan:
        """Draw the next one."""
        how = rng.randrange(10)
        if how < 4:
            return cls(rng.choice((rng.randrange(1, 20), rng.randrange(1, 60))), None, LONGEST_SECONDS)
        if how < 8:
            return cls(0, rng.choices(list(OPS), list(OPS.values()))[0], rng.random() ** 2 * 0.04)
        return cls(0, None, rng.uniform(0.01, 0.6))


@dataclass
class Process:
    """A forked process, and what came through its pipe."""

    pid: int
    pipe: int
    plan: Plan
    name: str
    due: float
    rest: bytes = b""
    seen: int = 0

    def lines(self) -> list[dict[str, Any]] | None:
        """Read what is there; None when it has ended."""
        data = os.read(self.pipe, 1 << 16)
        if not data:
            return None
        *whole, self.rest = (self.rest + data).split(b"\n")
        return [json.loads(line) for line in whole]


def spawn(plan: Plan, name: str, work: Callable[[int], None], delay: float) -> Process:
    """Fork a process that does ``work``, which is given the end of a pipe."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            work(writing)
        except BaseException:  # noqa: BLE001 (told to the parent)
            message(writing, {"failed": traceback.format_exc()})
        finally:
            os._exit(1)
    os.close(writing)
    return Process(pid, reading, plan, name, time.monotonic() + delay)


@dataclass
class Campaign:
    """A run. ``meddle`` is called before each look, for the test that what is lost is found."""

    place: Path
    seed: int
    engines: tuple[str, ...] = tuple(sorted(ENGINES))
    say: Callable[[str], None] = lambda text: None
    meddle: Callable[[Path, Truth], None] | None = None
    kills: int = 0
    rounds: int = 0
    acknowledged: int = 0
    compared: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def run(self, kills: int, seconds: float = float("inf")) -> None:
        """Kill until there were so many kills, a finding, or the time is over."""
        rng = random.Random(self.seed)
        until = time.monotonic() + seconds
        while self.kills < kills and not self.findings and time.monotonic() < until:
            store = self.place / f"store {self.rounds}"
            truth = Truth()
            if not self._begin(store, truth):
                return
            for _ in range(ROUNDS):
                if self.kills >= kills or self.findings or time.monotonic() >= until:
                    break
                self._round(rng, truth, store)
            self.acknowledged += truth.acknowledged
            if not self.findings:
                remove(store)

    def _begin(self, store: Path, truth: Truth) -> bool:
        made = self._apart(lambda: begin(store, PROJECTS, self.place / "empty"))
        if made is not None:
            truth.names.update(made["names"])
        return made is not None

    def summary(self) -> str:
        """One line."""
        ops = ", ".join(f"{count} {op}" for op, count in sorted(self.ops.items()))
        return (
            f"{self.kills} kills in {self.rounds} rounds; {self.acknowledged} operations acknowledged ({ops});"
            f" {self.compared} states compared; {len(self.findings)} findings"
        )

    def _round(self, rng: random.Random, truth: Truth, store: Path) -> None:
        self.rounds += 1
        where = f"seed {self.seed}, round {self.rounds}"
        place = self.place / f"round {self.rounds}"
        (place / "look").mkdir(parents=True)
        processes = []
        for project in rng.sample(PROJECTS, rng.choice((1, 2))):
            plan = Plan.draw(rng)
            worker = Worker(
                store,
                place / project,
                project,
                rng.randrange(1 << 30),
                rng.choice(self.engines),
                plan.steps,
                truth.of(project),
                dict(truth.parents),
                lambda what: None,
                truth.forgotten | truth.maybe_forgotten,
            )
            processes.append(
                spawn(plan, project, lambda pipe, worker=worker: _work(worker, pipe), _start(plan))  # type: ignore[misc]
            )
        self._watch(processes, truth, where)
        if rng.random() < 0.2:
            plan = Plan(rng.choice((0, rng.randrange(1, 60))), None, rng.uniform(0.01, 0.2))
            seed = rng.randrange(1 << 30)
            mender = spawn(plan, "mender", lambda pipe: collect(store, seed, plan.steps), _start(plan))
            self._watch([mender], truth, where)
        if self.meddle is not None:
            self.meddle(store, truth)
        seed = rng.randrange(1 << 30)
        result = self._apart(lambda: look(truth, store, place / "look", random.Random(seed), self.engines))
        remove(place)
        if result is None:
            return
        self.findings += [f"{where}: {finding}" for finding in result["findings"]]
        self.compared += result["compared"]
        for project, line in result["settled"].items():
            truth.heard(project, line)
        truth.pending.clear()
        truth.fresh.clear()
        if self.rounds % 20 == 0:
            self.say(self.summary())

    def _watch(self, processes: list[Process], truth: Truth, where: str) -> None:
        """Listen, kill when it is time, and go on until all are dead."""
        alive = {process.pipe: process for process in processes}
        while alive:
            now = time.monotonic()
            for process in alive.values():
                if now >= process.due:
                    os.kill(process.pid, signal.SIGKILL)
                    process.due = float("inf")
            wait = min(process.due for process in alive.values()) - now
            ready, _, _ = select.select(list(alive), [], [], max(0.0, min(wait, 1.0)))
            for pipe in ready:
                process = alive[pipe]
                lines = process.lines()
                if lines is None:
                    os.close(pipe)
                    del alive[pipe]
                    _, status = os.waitpid(process.pid, 0)
                    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                        self.kills += 1
                        self._hurry(alive.values())
                    elif not any(finding.startswith(where) for finding in self.findings):
                        self.findings.append(f"{where}: {process.name} ended by itself: {status}")
                    continue
                for line in lines:
                    self._heard(process, line, truth, where)

    def _heard(self, process: Process, line: dict[str, Any], truth: Truth, where: str) -> None:
        if "failed" in line:
            self.findings.append(f"{where}: {process.name}: {line['failed']}")
            return
        truth.heard(process.name, line)
        if "done" in line:
            self.ops[line["done"]["op"]] += 1
        elif process.plan.op == line["try"]["op"]:
            process.due = min(process.due, time.monotonic() + process.plan.delay)

    @staticmethod
    def _hurry(others: Any) -> None:
        """The others live on a little, and see that one died."""
        for other in others:
            other.due = min(other.due, time.monotonic() + 0.2)

    def _apart(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Do something in a process of its own, and return its answer; a failure is a finding."""
        process = spawn(Plan(0, None, 0), "look", lambda pipe: message(pipe, work()), PATIENCE_SECONDS)
        data = b""
        while time.monotonic() < process.due:
            if select.select([process.pipe], [], [], 1.0)[0]:
                piece = os.read(process.pipe, 1 << 16)
                if not piece:
                    break
                data += piece
        else:
            os.kill(process.pid, signal.SIGKILL)
        os.close(process.pipe)
        os.waitpid(process.pid, 0)
        answer: dict[str, Any] = json.loads(data.split(b"\n")[0]) if data else {"failed": "it took too long"}
        if "failed" in answer:
            self.findings.append(f"seed {self.seed}, round {self.rounds}: {answer['failed']}")
            return None
        return answer


def _start(plan: Plan) -> float:
    return plan.delay if plan.op is None and not plan.steps else LONGEST_SECONDS


def _work(worker: Worker, pipe: int) -> None:
    worker.say = lambda what: message(pipe, what)
    worker.run()


def remove(path: Path) -> None:
    """Remove a tree, however its modes are."""
    if path.exists():
        if os.geteuid() != 0:
            subprocess.run(["chmod", "-R", "u+rwx", "--", path], check=True)
        subprocess.run(["rm", "-rf", "--", path], check=True)


def main() -> int:
    """Run a campaign; exit code 1 for any finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills.store", description="Kill users of a store and look.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; drawn and printed when left out")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so many seconds")
    parser.add_argument("--engines", default=",".join(sorted(ENGINES)), help="use only these, to narrow something down")
    parser.add_argument("--keep", action="store_true", help="leave the store of a finding where it is")
    arguments = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that it cleans up
    begun = time.monotonic()
    with scratch() as place:
        engines = tuple(arguments.engines.split(","))
        campaign = Campaign(place, seed, engines, say=lambda text: print(text, flush=True))
        print(f"seed {seed}", flush=True)
        try:
            campaign.run(arguments.kills, arguments.seconds)
        finally:
            for text in campaign.findings:
                print(text)
            print(f"{campaign.summary()}; {time.monotonic() - begun:.0f} s", flush=True)
        if campaign.findings and arguments.keep:
            place.rename(place.with_name(f"{place.name}-kept"))
            print(f"kept in {place.name}-kept beside {place}")
            place.mkdir()
    return 1 if campaign.findings else 0


if __name__ == "__main__":
    sys.exit(main())
