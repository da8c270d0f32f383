"""What the checks of checkpoints are asked with: the diary that a process writes, and checkpoints as files."""

from __future__ import annotations

import asyncio
import itertools
import os
import pathlib
import time
from collections.abc import Sequence

from agent_sandbox.backends.base import Backend
from agent_sandbox.conformance.box import Box
from agent_sandbox.types import WORKSPACE

DIARY = """
import os, time
diary, number = os.open("diary", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 0
while True:
    number += 1
    os.write(diary, b"%d %s\\n" % (number, os.urandom(8).hex().encode()))
    time.sleep(0.02)
"""
HOLDER = """
import os, time
held = open("gone", "w+")
held.write("still here")
held.flush()
os.unlink("gone")
open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.05)
held.seek(0)
with open("found.new", "w") as found:
    found.write(held.read())
os.rename("found.new", "found")
"""
SECONDS = 120.0
"""For what takes a moment, on an emulated machine beside others."""
DAMAGED_BYTES = 65_536
"""At most so much is left of a file that is cut off."""


def lines_of(data: bytes) -> list[str]:
    """A diary's whole lines, whose numbers must follow each other."""
    lines = data.decode().split("\n")[:-1]
    numbers = [int(line.partition(" ")[0]) for line in lines]
    assert numbers == list(range(1, len(lines) + 1)), (
        "a process did not go on with the memory and workspace that it had"
    )
    return lines


def in_common(one: Sequence[str], other: Sequence[str]) -> int:
    """With how many equal lines two diaries begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


async def written(box: Box) -> list[str]:
    """The diary of an environment as it is now."""
    return lines_of(await box.get("diary"))


async def goes_on(box: Box, beyond: int) -> list[str]:
    """Wait until the diary has more than so many lines, and return it."""
    deadline = time.monotonic() + SECONDS
    while len(lines := await written(box)) <= beyond:
        assert time.monotonic() < deadline, f"the process of {box.id} does not go on beyond {len(lines)}"
        await asyncio.sleep(0.05)
    return lines


async def names(box: Box) -> set[str]:
    """The names in the workspace."""
    return {entry.name for entry in await box.backend.list_files(box.id, WORKSPACE)}


async def appears(box: Box, name: str) -> None:
    """Wait until the workspace has a name."""
    deadline = time.monotonic() + SECONDS
    while name not in await names(box):
        assert time.monotonic() < deadline, f"{name} does not appear in {box.id}"
        await asyncio.sleep(0.05)


async def none_but(backend: Backend, ids: list[str]) -> None:
    """Wait until the backend holds these and nothing else."""
    deadline = time.monotonic() + SECONDS
    while sorted(left := await backend.list_ids()) != sorted(ids):
        assert time.monotonic() < deadline, f"these are left: {left}"
        await asyncio.sleep(0.05)


def directory(path: pathlib.Path, mode: int = 0o700) -> pathlib.Path:
    """Make an empty directory, private unless said otherwise."""
    path.mkdir(mode=mode)
    path.chmod(mode)
    return path


def own(tree: pathlib.Path, uid: int, gid: int) -> None:
    """Give a tree to a user, where this process may."""
    if os.geteuid() == 0:
        for place, _, files in os.walk(tree):
            for name in ("", *files):
                os.chown(pathlib.Path(place) / name, uid, gid, follow_symlinks=False)


def facts_of(place: pathlib.Path) -> dict[str, tuple[int, int, int]]:
    """What of a checkpoint's files changes when somebody writes to them."""
    return {path.name: (path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) for path in place.iterdir()}


def link_all(source: pathlib.Path, but: str, target: pathlib.Path) -> None:
    """Make a directory with the files of another, all but one, without copying them."""
    directory(target)
    for path in source.iterdir():
        if path.name != but:
            os.link(path, target / path.name)


def cut_off(source: pathlib.Path, name: str, target: pathlib.Path) -> pathlib.Path:
    """A copy of a checkpoint of which one file has lost its end."""
    link_all(source, name, target)
    with (source / name).open("rb") as whole:
        left = whole.read(min((source / name).stat().st_size // 2, DAMAGED_BYTES))
    (target / name).write_bytes(left)
    return target
