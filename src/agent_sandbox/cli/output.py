"""What the commands print: tables for people, JSON for programs, raw bytes for a command's output.

Whatever came from a sandbox or a server is data: control characters in it never reach the terminal by way of a table
or an error line, and markup in it is not interpreted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_sandbox.client import ExecOutputEvent

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def plain(text: object) -> str:
    """Return the text with every control character and lone surrogate made visible, on one line."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in str(text)
    )


def size(count: int) -> str:
    """Return a count of bytes for people, in binary units."""
    value = float(count)
    for unit in _SIZES[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_SIZES[-1]}"


@contextmanager
def writing(what: str = "standard output") -> Iterator[None]:
    """Let an :class:`OSError` of the block that names no file say that it is about what is written in it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = what
        raise


def data(value: object) -> None:
    """Print one JSON document."""
    with writing():
        print(json.dumps(value, indent=2))


def line(text: str) -> None:
    """Print one line of text that may hold foreign characters."""
    with writing():
        print(plain(text))


def at_once(text: str) -> None:
    """Print one line of text of ours where more may be long in coming."""
    with writing():
        print(text, flush=True)


def flush() -> None:
    """Bring out what was printed."""
    with writing():
        sys.stdout.flush()


def note(text: str) -> None:
    """Print one line for people on the standard error."""
    print(f"agent-sandbox: {plain(text)}", file=sys.stderr)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns: a Rich table on a terminal, bare columns that fit ``awk`` elsewhere."""
    cells = [[plain(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        shown = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            shown.add_column(name)
        for row in cells:
            shown.add_row(*(Text(cell) for cell in row))
        Console().print(shown)
        return
    widths = [max(len(row[at]) for row in [list(columns), *cells]) for at in range(len(columns))]
    with writing():
        for row in [list(columns), *cells]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def raw(stream: str, data: bytes) -> None:
    """Write a piece of a command's output to the stream it came from, at once and as it is."""
    target = sys.stderr if stream == "stderr" else sys.stdout
    with writing():
        target.buffer.write(data)
        target.buffer.flush()


def follow(events: Iterable[ExecOutputEvent], *, deadline_hint: bool = False) -> int:
    """Write a command's output as it comes, byte by byte as it was; return its exit code, 0 while it still runs.

    Why it could not be started, what is not kept any more, its deadline and want of memory are notes.
    """
    from agent_sandbox.client.exec_requests import exit_status

    for event in events:
        if event.type in ("stdout", "stderr"):
            raw(event.type, event.raw)
        elif event.type == "gap":
            note(f"{event.bytes} bytes of output are not kept any more")
        elif event.type == "exit":
            if event.message:
                raw("stderr", f"{event.message}\n".encode("utf-8", "surrogateescape"))
            why_killed(event, deadline_hint=deadline_hint)
            return exit_status(event)
    return 0


def why_killed(event: ExecOutputEvent, *, deadline_hint: bool = False) -> None:
    """Say in a note what killed a command, where that was not the user's own doing, and what to do about it."""
    if event.timed_out and deadline_hint:
        seconds = (event.duration_ms or 0) / 1000
        note(f"the command was killed at its deadline, after {seconds:.1f} s: --timeout sets it")
    elif event.oom_killed:
        note("the command was killed: the sandbox's memory is used up; -m MIB makes one with more")


def drop_unwritten() -> None:
    """Forget what was printed and cannot be written, which the flush at exit would try, and complain about, again."""
    try:
        sys.stdout.flush()
    except OSError:
        close_broken_stdout()


def close_broken_stdout() -> None:
    """Point the standard output at nothing, after its reader has gone: the flush at exit finds no broken pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def fields(value: Mapping[str, Any], *names: str) -> list[object]:
    """Pick fields of a JSON object for a table row; ``-`` stands for one that is absent or null."""
    return ["-" if value.get(name) is None else value[name] for name in names]
