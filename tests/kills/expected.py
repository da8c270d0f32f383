"""What must be there: the workspaces, commands, snapshots and sandboxes of one worker. Pure."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

RING_BYTES = 1 << 20
"""What is kept of each command's output at least, as long as the sandbox's 8 MiB are not used up."""

RING_SLACK = 64 << 10
"""A ring is trimmed by whole pieces, so that a little less than its size may be kept."""

STALL_SECONDS = 30.0
"""A command that prints every tenth of a second has stopped when nothing comes for so long, on any machine."""

LOOK = """
import hashlib, json, os
for folder, names, files in sorted(os.walk('/workspace')):
    for name in sorted(names + files) + ['.']:
        path = os.path.join(folder, name)
        seen = os.lstat(path)
        is_link = os.path.islink(path)
        data = open(path, 'rb').read() if os.path.isfile(path) and not is_link else b''
        link = os.readlink(path) if is_link else ''
        print(json.dumps([path, seen.st_mode, seen.st_mtime_ns, hashlib.sha256(data).hexdigest(), link]))
"""
"""A program for the inside that prints everything of the workspace, an entry a line."""

_PRINT = """
head -c "$4" /dev/zero | tr '\\0' x
n=0
while [ "$n" -lt "$2" ]; do n=$((n+1)); echo "$1 $n"; sleep "$3"; done
exit "$5"
"""


def digest(data: bytes) -> str:
    """How a file's content is remembered."""
    return hashlib.sha256(data).hexdigest()


def files_of(tree: str) -> dict[str, str]:
    """The regular files of what :data:`LOOK` printed, with their digests."""
    entries = [json.loads(line) for line in tree.splitlines()]
    return {path: sha for path, mode, _, sha, _ in entries if stat.S_ISREG(mode)}


@dataclass
class Workspace:
    """Files by path. ``unsure`` are those whose last write was not acknowledged: any of these, or absent (``None``).

    ``lasting`` are paths that a command may still write: it goes on when the server dies.
    """

    sure: dict[str, str] = field(default_factory=dict)
    unsure: dict[str, set[str | None]] = field(default_factory=dict)
    lasting: set[str] = field(default_factory=set)

    def doubt(self, path: str, *possible: str | None, lasting: bool = False) -> None:
        """Note a write of unknown outcome."""
        self.unsure[path] = {self.sure.pop(path, None), *possible}
        if lasting:
            self.lasting.add(path)

    def settle(self, seen: Mapping[str, str]) -> list[str]:
        """Compare with what is there; what was open is then known. Returns what is wrong."""
        wrong = []
        for path, content in self.sure.items():
            if path not in seen:
                wrong.append(f"{path} was acknowledged and is missing")
            elif seen[path] != content:
                wrong.append(f"{path} has not the content that was acknowledged")
        wrong += [f"{path} is there and nobody wrote it" for path in seen if path not in {*self.sure, *self.unsure}]
        for path, possible in list(self.unsure.items()):
            if seen.get(path) not in possible:
                wrong.append(f"{path} is neither what it was nor what was written")
            if path not in self.lasting or path in seen:
                del self.unsure[path]
                self.lasting.discard(path)
                if path in seen:
                    self.sure[path] = seen[path]
        return wrong

    def copy(self) -> Workspace:
        """The same, apart."""
        return Workspace(dict(self.sure), {k: set(v) for k, v in self.unsure.items()}, set(self.lasting))


@dataclass
class Program:
    """A command that prints ``head`` bytes, then ``lines`` numbered lines, and exits with ``code``.

    ``has_survived`` is one that was seen to run before and after a kill.
    """

    tag: str
    lines: int
    pause: float
    head: int
    code: int
    id: str = ""
    cursor: int = 0
    ended: bool = False
    has_survived: bool = False
    moved_at: float = 0.0

    def argv(self) -> list[str]:
        """The command."""
        numbers = [str(value) for value in (self.lines, self.pause, self.head, self.code)]
        return ["/bin/sh", "-c", _PRINT, "sh", self.tag, *numbers]

    def output(self) -> bytes:
        """All that it prints."""
        return b"x" * self.head + "".join(f"{self.tag} {n}\n" for n in range(1, self.lines + 1)).encode()

    def started(self, id: str) -> Program:
        """It runs under this id."""
        return dataclasses.replace(self, id=id, moved_at=time.monotonic())

    def follow(self, events: Iterable[Mapping[str, Any]], start: int = 0) -> list[str]:
        """Compare output read from byte ``start`` on with what it prints; returns what is wrong."""
        output, at, wrong = self.output(), start, []
        for event in events:
            if event["type"] == "started":
                continue
            if event["type"] == "gap":
                at += event["bytes"]
                if start == 0 and event["bytes"] > max(0, len(output) - RING_BYTES + RING_SLACK):
                    wrong.append(f"a gap of {event['bytes']} of {len(output)} bytes")
            elif event["type"] == "stdout":
                data = base64.b64decode(event["data_b64"]) if event.get("data_b64") else event["data"].encode()
                if output[at : at + len(data)] != data:
                    wrong.append(f"bytes {at} to {at + len(data)} are not what it printed: {data[:80]!r}")
                at += len(data)
            elif event["type"] == "exit":
                wrong += self._end(event, at, len(output))
            else:
                wrong.append(f"an event {event['type']}")
            if event["type"] in ("gap", "stdout") and event["cursor"] != at:
                wrong.append(f"the cursor is {event['cursor']} behind byte {at}")
        if at < self.cursor:
            wrong.append(f"byte {self.cursor} had been read, and now it ends at {at}")
        if at > self.cursor:
            self.cursor, self.moved_at = at, time.monotonic()
        if not self.ended and time.monotonic() - self.moved_at > STALL_SECONDS:
            wrong.append(f"it runs and has printed nothing for {STALL_SECONDS:.0f} seconds, at byte {at}")
        return [f"command {self.id} ({self.tag}): {text}" for text in wrong]

    def _end(self, event: Mapping[str, Any], at: int, total: int) -> list[str]:
        self.ended = True
        wrong = [] if at == total else [f"it ended after {at} of {total} bytes"]
        if (event["exit_code"], event["signal"], event["timed_out"]) != (self.code, None, False):
            wrong.append(f"it ended with {event} in place of {self.code}")
        return wrong


@dataclass
class Snap:
    """A snapshot: what the workspace was when it was taken."""

    id: str
    tree: str
    is_checked: bool = False

    def workspace(self) -> Workspace:
        """The workspace of a sandbox that begins as it."""
        return Workspace(files_of(self.tree))


@dataclass
class Box:
    """A sandbox. ``expires`` is what the server said last; ``until`` bounds it where its last change is unknown.

    ``undo`` is what its last rollback replaced, until it was looked at.
    """

    label: str
    work: Workspace
    source: str | None = None
    id: str = ""
    expires: str = ""
    until: tuple[float, float] | None = None
    is_stopped: bool = False
    is_brief: bool = False
    undo: Workspace | None = None
    programs: list[Program] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Its resource."""
        return f"/v1/sandboxes/{self.id}"
