"""Snapshots, rollbacks and forks: small and large workspaces, long histories, many forks."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any

from tests.bench.contenders import BUILD, Contender

if TYPE_CHECKING:
    from tests.bench.__main__ import Bench

FILES, LARGE_BYTES = 10_000, 30 * 1024 * 1024
MANY_FILES = 100_000
FORKS, HISTORY = 100, 10
FILL = """
import os, sys
for number in range(int(sys.argv[1])):
    if number % 100 == 0: os.makedirs(f'd{number // 100}', exist_ok=True)
    with open(f'd{number // 100}/f{number}', 'wb') as file: file.write(os.urandom(512) + b'text ' * 102)
with open('large', 'wb') as file: file.write(os.urandom(int(sys.argv[2])))
"""
CHANGE = "for n in 0 1 2 3 4 5 6 7 8 9; do echo again >> d$n/f${n}00; done 2>/dev/null || true; echo $$ >> d0/f0"


def snapshots(bench: Bench, rounds: int) -> None:
    """Snapshot, rollback and fork of a workspace of one file of 1 KB, then of 10,000 small files and 30 MB."""
    for title, files, large, times in (("small", 1, 0, rounds), ("large", FILES, LARGE_BYTES, max(3, rounds // 3))):
        boxes = {contender.name: contender.create() for contender in bench.contenders}
        for contender in bench.contenders:
            contender.exec(boxes[contender.name], ["python3", "-c", FILL, str(files), str(large)])
        if title == "large":
            for contender in bench.contenders:
                bench.note("tar -cf and fsync, large, by hand", contender.name, _tar(FILES, LARGE_BYTES))
                _snapshot(bench, "first snapshot, large", contender, boxes[contender.name])
        for _ in range(times):
            for contender in bench.contenders:
                _cycle(bench, title, contender, boxes[contender.name])
        for contender in bench.contenders:
            contender.destroy(boxes[contender.name])


def histories(bench: Bench) -> None:
    """Ours alone: what a long history, many forks and a huge workspace cost, beside the first of their kind."""
    contender = bench.contenders[0]
    id = contender.create()
    contender.exec(id, ["python3", "-c", FILL, str(FILES), str(LARGE_BYTES)])
    made: list[str] = []
    for number in range(HISTORY + 1):
        contender.exec(id, ["sh", "-c", CHANGE])
        row = (
            "first snapshot of a history" if number == 0 else "snapshots 2 to 4" if number < 4 else "snapshots 8 to 11"
        )
        if number in (0, 1, 2, 3, 7, 8, 9, 10):
            snapshot = _snapshot(bench, row, contender, id)
        else:
            snapshot = contender.lean.call("POST", f"/v1/sandboxes/{id}/snapshots", {})
        if snapshot:
            made.append(snapshot["id"])
    before = _used()
    forks: list[str] = []
    for number in range(FORKS):
        row = (
            "forks 1 to 10 of 100"
            if number < 10
            else "forks 91 to 100 of 100"
            if number >= FORKS - 10
            else "forks between"
        )
        started = time.perf_counter()
        forks.append(contender.lean.call("POST", f"/v1/snapshots/{made[-1]}/fork", {})["id"])
        bench.note(row, "ours", time.perf_counter() - started)
        if number == 49:
            bench.facts.append(f"50 forks of a workspace of {FILES} files and 30 MB: {_used() - before:,} KiB of disk")
    bench.facts.append(f"100 forks: {_used() - before:,} KiB of disk")
    for fork in forks:
        contender.destroy(fork)
    contender.destroy(id)
    _one_line_in_many(bench, contender)


def _one_line_in_many(bench: Bench, contender: Contender) -> None:
    """A workspace of 100,000 files that stands on a snapshot, as a forked or rolled back one does."""
    body = {"image": contender.image, "timeout_seconds": 3600, "disk_mb": 4096}
    first = str(contender.lean.call("POST", "/v1/sandboxes", body)["id"])
    contender.exec(first, ["python3", "-c", FILL, str(MANY_FILES), "0"])
    snapshot = _snapshot(bench, f"first snapshot, {MANY_FILES:,} files", contender, first)
    forked = bench.measure(
        f"fork, {MANY_FILES:,} files, laid out for the first time",
        "ours",
        contender.lean.call,
        "POST",
        f"/v1/snapshots/{snapshot['id']}/fork",
        {},
    )
    for _ in range(5):
        for id, row in ((forked["id"], "on layers"), (first, "never forked")):
            contender.exec(id, ["sh", "-c", "echo line >> d7/f700"])
            _snapshot(bench, f"snapshot, one line in {MANY_FILES:,} files, {row}", contender, id)
    contender.destroy(first)
    contender.destroy(forked["id"])


def _cycle(bench: Bench, title: str, contender: Contender, id: str) -> None:
    contender.exec(id, ["sh", "-c", CHANGE])
    made = _snapshot(bench, f"snapshot, {title}, 10 files changed", contender, id)
    if made is None:
        return
    snapshot, body = f"/v1/snapshots/{made['id']}", {"snapshot_id": made["id"]}
    call = contender.lean.call
    bench.measure(f"rollback, {title}", contender.name, call, "POST", f"/v1/sandboxes/{id}/rollback", body)
    forked = bench.measure(f"fork, {title}", contender.name, call, "POST", f"{snapshot}/fork", {})
    if forked:
        contender.destroy(forked["id"])
    call("DELETE", snapshot)


def _snapshot(bench: Bench, row: str, contender: Contender, id: str) -> Any:
    return bench.measure(row, contender.name, contender.lean.call, "POST", f"/v1/sandboxes/{id}/snapshots", {})


def _tar(files: int, large: int) -> float:
    """Seconds that tar takes for such a tree, with one fsync of what it wrote."""
    with tempfile.TemporaryDirectory(dir=BUILD) as directory:
        tree = pathlib.Path(directory, "tree")
        tree.mkdir()
        subprocess.run(["python3", "-c", FILL, str(files), str(large)], cwd=tree, check=True)
        started = time.perf_counter()
        with pathlib.Path(directory, "tree.tar").open("wb") as file:
            subprocess.run(["tar", "-cf", "-", "."], cwd=tree, stdout=file, check=True)
            os.fsync(file.fileno())
        return time.perf_counter() - started


def _used() -> int:
    """KiB that are used of the disk that the servers are on."""
    return shutil.disk_usage(BUILD).used // 1024
