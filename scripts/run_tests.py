#!/usr/bin/env python3
"""Run every test, in parts side by side: scripts/run_tests.py [--jobs N] [PART...]

A part is a process of its own: cargo's tests, or pytest over some of the files. Most tests on a real runtime wait more
than they compute, so that three parts on two cores need little more than a third of the time, while the tests within a
part follow each other as ever. Files are given to parts by name (PARTS); one that no pattern names is of the last part,
so none is left out. A part's output goes to build/logs, and is printed when the part fails; each part ends with one
line.

A few tests that failed are asked again at the end, with nothing beside them: on a busy machine one of thousands meets a
limit of time that it never meets alone. Which ones were, the last lines say. Each is a fault of the test or of what it
tests, to be mended; only it does not hold up everything else. What fails alone too has failed.

This process is the reaper of everything that the tests start. What still runs at the end, say a server that a test
forgot, is named and ended.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build/logs"
CARGO = ["cargo", "test", "--locked", "--workspace", "--quiet"]
PYTEST = [sys.executable, "-m", "pytest"]
AGAIN = 3
"""Failed tests that are asked again, in all parts together. More are no accident."""
PARTS: dict[str, tuple[str, ...]] = {
    "docker": ("*/test_docker*.py",),
    "e2e": ("e2e/test_*.py",),
    "gvisor": ("*/test_gvisor*.py",),
    "microvm": ("*/test_microvm*.py",),
    "runtime": ("conformance/test_*.py", "real/test_*.py"),
    "store": ("unit/store/test_*.py",),
    "unit": ("**/test_*.py",),
}
"""The files of each part, in the order in which parts begin: the long ones first, so that none ends late and alone.

The parts of one backend take theirs from every directory, since they share an engine that is started for them.
"""
BACKENDS = ("docker", "gvisor", "microvm")
PART_SECONDS = 45 * 60
"""For what hangs behind the last test, where pytest has no limit. No part takes a third of it on a slow machine."""
ENDING_SECONDS = 20
"""What an interrupted pytest gets for its fixtures, and a process on its way out at the end of the run."""
NEWS_SECONDS = 60
SHOWN_BYTES = 200_000
PR_SET_CHILD_SUBREAPER = 36
SIGNALS = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@dataclass
class Part:
    """A process that runs some of the tests."""

    name: str
    argv: list[str]
    pid: int = 0
    began: float = 0.0
    late: bool = False

    @property
    def log(self) -> Path:
        return LOGS / f"test-{self.name}.log"

    def start(self) -> None:
        environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self.began = time.monotonic()
        self.pid = os.posix_spawnp(
            self.argv[0],
            self.argv,
            environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self.log), flags, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=[],
            # Python ignores the first two, a shell the next two of what runs in the background, nohup the last.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP],
        )
        say(f"{self.name}: begins; its output is in {self.log.relative_to(ROOT)}")

    def text(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - SHOWN_BYTES))
            return file.read().decode(errors="replace")

    def state(self) -> str:
        """How far it is, of what it has printed."""
        found = re.findall(r"\[ *(\d+%)\]$", self.text(), re.MULTILINE)
        return f"{self.name} {found[-1] if found else ''}".rstrip()

    def result(self) -> str:
        """What its runner counted."""
        text = self.text()
        if self.argv == CARGO:
            counted = [int(number) for number in re.findall(r"^test result: .*?(\d+) passed", text, re.MULTILINE)]
            failed = [int(number) for number in re.findall(r"^test result: .*? (\d+) failed", text, re.MULTILINE)]
            return f"{sum(counted)} passed" + (f", {sum(failed)} failed" if sum(failed) else "")
        counts = re.findall(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", text, re.MULTILINE)
        return counts[-1] if counts else "no result"

    def failed(self) -> list[str]:
        """The tests that failed, as its runner has written them down; none where it wrote nothing."""
        with contextlib.suppress(OSError, ValueError):
            return list(json.loads((ROOT / cache_of(self.name) / "v/cache/lastfailed").read_text()))
        return []

    def failures(self) -> str:
        """The part of its output that says what failed."""
        text = self.text()
        match = re.search(r"^=+ (ERRORS|FAILURES) =+$", text, re.MULTILINE)
        return text[match.start() :] if match else text[-20_000:]


def say(line: str) -> None:
    print(line, flush=True)


def span(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def cache_of(name: str) -> str:
    return f"build/pytest/{name}"


def make_parts() -> list[Part]:
    """Give each file of tests to the first part that names it, the parts of one backend before all."""
    left = set((ROOT / "tests").glob("**/test_*.py"))
    files: dict[str, list[str]] = {}
    for name in sorted(PARTS, key=lambda name: name not in BACKENDS):
        mine = {path for pattern in PARTS[name] for path in (ROOT / "tests").glob(pattern)} & left
        left -= mine
        files[name] = sorted(str(path.relative_to(ROOT)) for path in mine)
    parts = [
        Part(name, [*PYTEST, "-o", f"cache_dir={cache_of(name)}", "--cache-clear", *files[name]])
        for name in PARTS
        if files[name]
    ]
    return [*parts[:2], Part("rust", CARGO), *parts[2:]]


def children() -> dict[int, str]:
    """The processes whose parent this one is, with their command lines; one that has ended is none."""
    found: dict[int, str] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state not in "ZX":
                found[int(place.name)] = (place / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
        except OSError:
            continue
    return found


def reap() -> dict[int, int]:
    """The exit codes of the children that have ended, below zero for a signal."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def end_what_is_left() -> list[str]:
    """Wait a little for processes on their way out, end the others, and return what they were."""
    deadline = time.monotonic() + ENDING_SECONDS
    while (left := children()) and time.monotonic() < deadline:
        reap()
        signal.sigtimedwait({signal.SIGCHLD}, 0.2)
    named = [f"{pid} {line[:200]}" for pid, line in left.items()]
    deadline = time.monotonic() + ENDING_SECONDS
    while (left := children()) and time.monotonic() < deadline:  # the children of those that we end come to us
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.2)
        reap()
    return named


def stop(parts: list[Part]) -> None:
    """Interrupt parts, which then clean up, and end them."""
    for part in parts:
        os.killpg(part.pid, signal.SIGINT)
    deadline = time.monotonic() + ENDING_SECONDS
    left = {part.pid for part in parts}
    while left and time.monotonic() < deadline:
        signal.sigtimedwait({signal.SIGCHLD}, 0.5)
        left -= set(reap())
    for pid in left:
        os.killpg(pid, signal.SIGKILL)


def run(parts: list[Part], jobs: int) -> tuple[list[Part], int]:
    """Run parts, and return those that failed, and how many tests passed."""
    waiting, running, failed, passed = list(parts), list[Part](), list[Part](), 0
    began = news = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(waiting.pop(0))
            running[-1].start()
        caught = signal.sigtimedwait(SIGNALS, 5)
        if caught is not None and caught.si_signo != signal.SIGCHLD:
            say("stopped: the parts that run are ended")
            stop(running)
            end_what_is_left()
            sys.exit(128 + caught.si_signo)
        ended = reap()
        now = time.monotonic()
        for part in [part for part in running if part.pid in ended]:
            running.remove(part)
            code, took = ended[part.pid], span(now - part.began)
            passed += sum(int(count) for count in re.findall(r"(\d+) passed", part.result()))
            if code == 0:
                say(f"{part.name}: {part.result()} in {took}")
                continue
            failed.append(part)
            why = f"ran longer than {span(PART_SECONDS)}" if part.late else f"exit code {code}"
            say(f"{part.failures()}\n{part.name}: FAILED, {part.result()} in {took}, {why}")
        for part in running:
            if now - part.began > PART_SECONDS and not part.late:
                part.late = True
                os.killpg(part.pid, signal.SIGKILL)
        if running and now - news > NEWS_SECONDS:
            news = now
            say(f"after {span(now - began)}: {', '.join(part.state() for part in running)} running")
    for line in end_what_is_left():
        say(f"left behind and ended now: {line}")
    return failed, passed


def run_all(parts: list[Part], jobs: int) -> bool:
    """Run parts, ask a few tests that failed again, and say whether all passed."""
    began = time.monotonic()
    failed, passed = run(parts, jobs)
    names = {part.name: part.failed() for part in failed}
    if failed and all(names.values()) and sum(map(len, names.values())) <= AGAIN:
        say("what failed is asked again, alone")
        again = [
            Part(f"{name}-again", [*PYTEST, "-o", f"cache_dir={cache_of(f'{name}-again')}", *tests])
            for name, tests in names.items()
        ]
        failed, more = run(again, 1)
        passed += more
        if not failed:
            for name, tests in names.items():
                for test in tests:
                    say(f"failed beside the others, passed alone: {test} (build/logs/test-{name}.log)")
    took = span(time.monotonic() - began)
    left = ", ".join(part.name for part in failed)
    say(f"FAILED after {took}: {left}" if failed else f"All tests passed: {passed} in {took}")
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the tests in parts.")
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="how many parts run at a time")
    parts = make_parts()
    parser.add_argument("part", nargs="*", choices=[[], *(part.name for part in parts)], help="only these")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    LOGS.mkdir(parents=True, exist_ok=True)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    sys.exit(0 if run_all([part for part in parts if not chosen.part or part.name in chosen.part], chosen.jobs) else 1)


if __name__ == "__main__":
    main()
