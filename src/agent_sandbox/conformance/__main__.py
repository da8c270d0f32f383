"""``python -m agent_sandbox.conformance``: what ``agent-sandbox conformance`` starts.

A process of its own, since pytest runs in it: an interrupt is pytest's, and a check that is cut off removes what it
made. Ends with 1 when something failed that is not a known failure, or a known failure passes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import sys

from agent_sandbox.cli import exit_codes, output
from agent_sandbox.conformance.page import page
from agent_sandbox.conformance.report import Check, Report, to_json
from agent_sandbox.conformance.run import Subject, Watcher, run
from agent_sandbox.errors import SandboxError

_INTERRUPTS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


def main() -> int:
    """Run the kit and print its table; the exit code says whether the backend passed."""
    parser = argparse.ArgumentParser(prog="agent-sandbox conformance")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--image", default="")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--html", type=pathlib.Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--name", default="")
    parser.add_argument("--timeout", type=float, default=300.0)
    told = parser.parse_args()
    subject = Subject(told.backend, told.image, tuple(told.only), told.name, told.timeout)
    interrupts = _Interrupts()
    try:
        for file in (told.json, told.html):
            if file is not None:
                file.open("a").close()  # a place that cannot be written is better known before than after
        report = run(subject, _watcher(), interrupts.taken)
        if told.json is not None:
            told.json.write_text(to_json(report))
        if told.html is not None:
            told.html.write_text(page(report))
        show(report)
    except SandboxError as error:
        output.note(error.message)
        return exit_codes.of(error)
    except OSError as error:
        output.note(f"{error.filename or 'this machine'}: {error.strerror or error}")
        return exit_codes.FAILED
    except KeyboardInterrupt:
        output.note("interrupted; what the checks made is removed")
        return 130
    return exit_codes.OK if report.passed else exit_codes.FAILED


class _Interrupts:
    """SIGINT as asyncio takes it, which cancels the check, and SIGTERM and SIGHUP alike; each is remembered.

    What is cancelled may swallow that, and a check that goes on is no answer to an interrupt. The signal's number is
    left in a pipe (:func:`signal.set_wakeup_fd`), since asyncio has the handler while a check runs.
    """

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        for end in (self._reading, writing):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: signal.raise_signal(signal.SIGINT))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
        self._taken = False

    def taken(self) -> bool:
        """Whether one has come."""
        with contextlib.suppress(BlockingIOError):
            self._taken |= not _INTERRUPTS.isdisjoint(os.read(self._reading, 64))  # a check's time limit is SIGALRM
        return self._taken


def show(report: Report) -> None:
    """Print the table of items, what failed, and the sum."""
    output.table(
        ("ITEM", "VERDICT", "TIME", "REQUIRED", "EVIDENCE"),
        ((row.item.id, row.verdict, f"{row.seconds:.1f}s", row.item.title, row.evidence) for row in report.rows()),
    )
    print()
    for check in report.checks:
        if check.verdict == "fail":
            output.line(f"FAIL  {check.name} ({' '.join(check.items)}): {check.reason}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts().items())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    output.line(f"{report.configuration}: {counts} in {report.seconds:.0f} s ({versions})")


def _watcher() -> Watcher:
    """A progress bar on a terminal; elsewhere a line for each failure as it comes."""
    if not sys.stderr.isatty():

        def tell(done: int, total: int, check: Check | None) -> None:
            if check is not None and check.verdict == "fail":
                output.note(f"{check.name} failed ({done} of {total} done): {check.reason}")

        return tell
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    # Its own descriptor: pytest takes those of the process while a check runs.
    terminal = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    progress = Progress(*columns, console=Console(file=terminal), transient=True)
    task = progress.add_task("", total=None)

    def move(done: int, total: int, check: Check | None) -> None:
        progress.start()
        progress.update(task, completed=done, total=total, description=check.name if check else "")
        if check is not None and check.verdict == "fail":
            progress.console.print(f"FAIL  {check.name}", markup=False)
        if done == total:
            progress.stop()

    return move


if __name__ == "__main__":
    sys.exit(main())
