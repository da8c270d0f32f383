"""What one copy has done so far, held against its bounds and shown while it runs."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agent_sandbox.cli import output
from agent_sandbox.cli.version_control import Noticed
from agent_sandbox.errors import PayloadTooLargeError

MAX_ENTRIES = 1_000_000
MAX_DEPTH = 100
MAX_TOTAL_BYTES = 64 << 30
"""Bounds of one copy: a hostile sandbox can offer a tree without an end. Holes count, though they cost nothing."""
SHOWN = 10


@dataclass
class Copied:
    """Counts of one copy. ``tick`` is called whenever they change."""

    files: int = 0
    bytes: int = 0
    entries: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    noticed: Noticed = field(default_factory=Noticed)
    tick: Callable[[], object] = lambda: None
    expect: Callable[[int], object] = lambda total: None

    def entry(self, depth: int) -> None:
        """Count one more name; :class:`PayloadTooLargeError` above a bound."""
        self.entries += 1
        if self.entries > MAX_ENTRIES or depth > MAX_DEPTH:
            raise PayloadTooLargeError(f"the tree has more than {MAX_ENTRIES} entries or {MAX_DEPTH} levels")

    def file(self) -> None:
        """Count one more file."""
        self.files += 1
        self.tick()

    def piece(self, size: int) -> None:
        """Count the bytes of a piece; :class:`PayloadTooLargeError` above the bound."""
        self.bytes += size
        if self.bytes > MAX_TOTAL_BYTES:
            raise PayloadTooLargeError(f"the tree holds more than {output.size(MAX_TOTAL_BYTES)}")
        self.tick()

    def counted(self, pieces: Iterable[builtins.bytes]) -> Iterator[builtins.bytes]:
        """Yield pieces and count them."""
        for piece in pieces:
            self.piece(len(piece))
            yield piece

    def skip(self, path: str, reason: str) -> None:
        """Note a name that is left out."""
        self.skipped.append((path, reason))

    def report(self) -> None:
        """Tell a person what was done and what was left out."""
        for path, reason in self.skipped[:SHOWN]:
            output.note(f"left out {path}: {reason}")
        if len(self.skipped) > SHOWN:
            output.note(f"left out {len(self.skipped) - SHOWN} more")
        programs = self.noticed.told()
        if programs:
            more = f" and {len(programs) - 1} more" if len(programs) > 1 else ""
            output.note(f"look at {programs[0]}{more} before you go there: git and the like run programs that it names")
        output.note(f"copied {self.files} {'file' if self.files == 1 else 'files'}, {output.size(self.bytes)}")


@contextmanager
def progress() -> Iterator[Copied]:
    """Yield the counts of a copy; on a terminal they are a bar while it runs."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    done = Copied()
    console = Console(stderr=True)
    if not console.is_terminal:
        yield done
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("copying", total=None)
        done.tick = lambda: bar.update(task, description=f"{done.files} files", completed=done.bytes)
        done.expect = lambda total: bar.update(task, total=total)
        yield done
