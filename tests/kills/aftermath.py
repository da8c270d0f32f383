"""After a kill: what became of the request that was under way, and whether all that was acknowledged is there.

A request whose reply was lost is looked up by its label. Half of those with an Idempotency-Key are also made again
with the same key: the thing must then be one. A second one is only right where the server died between making it and
noting its reply, which the project's pages say; those are counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tests.kills.api import Refused
from tests.kills.expected import Box, Program, Snap, Workspace

if TYPE_CHECKING:
    from tests.kills.worker import Worker

RESTORED_AT_ONCE = 2
"""Snapshots that are restored after one kill, for each worker; at the end all are."""

UNDONE_AT_ONCE = 1
"""Of the same, automatic snapshots: what a rollback replaced."""

CLOCK_SECONDS = 1.0
"""How far a time may be from what follows from ours: the reply's way, on a busy machine."""


def check(worker: Worker) -> None:
    """Settle what was open, then compare everything."""
    when_lost, worker.pending = worker.pending, None
    if when_lost is not None:
        when_lost()
    for box in list(worker.boxes):
        try:
            _check_brief(worker, box) if box.is_brief else _check(worker, box)
        except Refused as error:
            worker.find(f"{box.id} ({box.label}) was acknowledged: {error}")
            worker.abandon(box)
    for box in [box for box in worker.boxes if box.undo is not None][:UNDONE_AT_ONCE]:
        undo(worker, box)
    fresh = [snap for snap in worker.snaps if not snap.is_checked]
    for snap in list(worker.snaps):
        if snap in fresh[:RESTORED_AT_ONCE]:
            restore(worker, snap)
        elif not _is_there(worker, f"/v1/snapshots/{snap.id}"):
            worker.find(f"snapshot {snap.id} was acknowledged and is missing")
            worker.snaps.remove(snap)
    for path in worker.gone[-6:]:
        worker.expect(not _is_there(worker, path), f"{path} was deleted and is there again")


def finish(worker: Worker) -> None:
    """Read every command to its end, restore every snapshot, and delete everything."""
    for box in list(worker.boxes):
        if box.undo is not None:
            undo(worker, box)
        for program in list(box.programs):
            try:
                worker.follow(box, program, 0, to_the_end=True)
            except Refused as error:
                worker.find(f"{box.id}: command {program.id} ({program.tag}): {error}")
            worker.expect(program.ended, f"{box.id}: command {program.id} ({program.tag}) did not end")
        worker.remove(box.path)
        worker.gone.append(box.path)
    worker.boxes.clear()
    for snap in list(worker.snaps):
        restore(worker, snap)
        worker.remove(f"/v1/snapshots/{snap.id}")
    worker.snaps.clear()
    for path in worker.gone:
        worker.expect(not _is_there(worker, path), f"{path} was deleted and is there again")


def restore(worker: Worker, snap: Snap) -> None:
    """Fork a snapshot, and compare the tree."""
    snap.is_checked = True
    box = Box(worker.label("restore"), snap.workspace())
    try:
        made = worker.api.ask("POST", f"/v1/snapshots/{snap.id}/fork", {"timeout_seconds": 600}, key=box.label)
    except Refused as error:
        worker.find(f"snapshot {snap.id} was acknowledged and cannot be restored: {error}")
        worker.snaps.remove(snap)
        return
    box.id = made["id"]
    tree = worker.look(box)
    if tree != snap.tree:
        differing = sorted({*tree.splitlines()} ^ {*snap.tree.splitlines()})
        worker.find(f"snapshot {snap.id} restores to another tree: {differing[:4]}")
    worker.remove(box.path)
    worker.gone.append(box.path)


def undo(worker: Worker, box: Box) -> None:
    """Fork what the last rollback of a sandbox replaced, and compare it with what that was."""
    assert box.undo is not None
    before, box.undo = box.undo, None
    params = {"sandbox_id": box.id, "auto": "true"}
    ids = [item["id"] for item in worker.api.ask("GET", "/v1/snapshots", params=params)["snapshots"] if item["auto"]]
    worker.expect(len(ids) == 1, f"{box.id} was rolled back, and its automatic snapshots are {ids}")
    for id in ids:
        forked = Box(worker.label("undo"), before)
        body = {"timeout_seconds": 600}
        forked.id = worker.api.ask("POST", f"/v1/snapshots/{id}/fork", body, key=forked.label)["id"]
        worker.compare(forked)
        worker.undone += 1
        worker.remove(forked.path)
        worker.gone.append(forked.path)


# What became of it


def made(worker: Worker, path: str, body: Mapping[str, Any], box: Box, asked: float) -> None:
    """A creation: it is there once, or not at all."""
    listed = worker.api.ask("GET", "/v1/sandboxes", params={"metadata": f"op={box.label}"})["sandboxes"]
    found = [item for item in listed if item["state"] != "destroying"]
    worker.expect(len(found) <= 1, f"one request of {box.label} made {[item['id'] for item in found]}")
    if worker.rng.random() < 0.5:
        data = worker.api.ask("POST", path, body, key=box.label)
    elif found:
        data = found[0]
    else:
        return
    for item in found:
        if item["id"] != data["id"]:
            worker.made_twice += 1
            worker.remove(f"/v1/sandboxes/{item['id']}")
    worker.adopt(box, data)
    lives = _seconds(box.expires) - body["timeout_seconds"]
    worker.expect(
        asked - CLOCK_SECONDS <= lives <= time.time() + CLOCK_SECONDS,
        f"{box.id} ({box.label}), asked for {time.time() - asked:.1f} s ago, expires at {box.expires}: {body}",
    )


def stopped_or_not(worker: Worker, box: Box) -> None:
    """A stop or start: either, and then really so."""
    is_stopped = worker.api.ask("GET", box.path)["status"] == "stopped"
    if is_stopped:
        box.programs = []
    box.is_stopped = is_stopped


def detached(worker: Worker, box: Box, program: Program, body: Mapping[str, Any]) -> None:
    """A detached start: it runs once, or not at all."""
    ids = _with_tag(worker, box, program)
    worker.expect(len(ids) <= 1, f"{box.id}: one request of {program.tag} started {ids}")
    if worker.rng.random() < 0.5:
        again = worker.api.ask("POST", f"{box.path}/execs", body, key=program.tag)["id"]
        worker.made_twice += bool(ids) and again not in ids
        ids = list({*ids, again})
    box.programs += [program.started(id) for id in ids]


def attached(worker: Worker, box: Box, program: Program, id: str) -> None:
    """A command whose starter's stream broke: it goes on if it had been started."""
    ids = [id] if id else _with_tag(worker, box, program)
    worker.expect(len(ids) <= 1, f"{box.id}: one request of {program.tag} started {ids}")
    box.programs += [program.started(id) for id in ids]


def snapshot(worker: Worker, box: Box, tree: str, label: str) -> None:
    """A snapshot: it is there whole, or not at all."""
    listed = worker.api.ask("GET", "/v1/snapshots", params={"sandbox_id": box.id})["snapshots"]
    ids = [item["id"] for item in listed if item["name"] == label]
    worker.expect(len(ids) <= 1, f"one request of {label} made {ids}")
    worker.snaps += [Snap(id, tree) for id in ids]
    if worker.rng.random() < 0.5:
        tree = worker.compare(box)
        again = worker.api.ask("POST", f"{box.path}/snapshots", {"name": label}, key=label)["id"]
        if again not in ids:
            worker.made_twice += bool(ids)
            worker.snaps.append(Snap(again, tree))


def rollback(worker: Worker, box: Box, snap: Snap, before: Workspace) -> None:
    """A rollback: the sandbox is the snapshot, or as it was, processes included."""
    if worker.look(box) == snap.tree:
        worker.rolled_back(box, snap, before)


def _with_tag(worker: Worker, box: Box, program: Program) -> list[str]:
    return [item["id"] for item in worker.api.ask("GET", f"{box.path}/execs")["execs"] if item["tag"] == program.tag]


# Whether it is there


def _check(worker: Worker, box: Box) -> None:
    data = worker.api.ask("GET", box.path)
    expires = data["expires_at"]
    if expires != box.expires:
        low, high = box.until or (0.0, 0.0)
        right = low <= _seconds(expires) <= high
        worker.expect(right, f"{box.id} expires at {expires}, and {box.expires} was acknowledged")
    box.expires, box.until = expires, None
    worker.expect(data["source_snapshot_id"] == box.source, f"{box.id} came from {box.source} and shows {data}")
    wanted = "stopped" if box.is_stopped else "running"
    worker.expect(data["status"] == wanted, f"{box.id} ({box.label}) is {data['status']} and should be {wanted}")
    if data["status"] == "stopped":
        box.is_stopped, box.programs = True, []
        if worker.rng.random() < 0.3:
            worker.start(box)
        return
    box.is_stopped = False
    worker.compare(box)
    listed = {item["id"]: item["tag"] for item in worker.api.ask("GET", f"{box.path}/execs")["execs"]}
    unknown = set(listed) - {program.id for program in box.programs}
    worker.expect(not unknown, f"{box.id}: nobody started {[(id, listed[id]) for id in unknown]}")
    for program in list(box.programs):
        if program.id in listed:
            program.has_survived = program.has_survived or not program.ended
            worker.follow(box, program, program.cursor if worker.rng.random() < 0.5 else 0)
        else:
            worker.find(f"{box.id}: command {program.id} ({program.tag}) was acknowledged and is missing")
            box.programs.remove(program)


def _check_brief(worker: Worker, box: Box) -> None:
    due = _seconds(box.expires)
    asked = time.time()
    is_there = _is_there(worker, box.path)
    if not is_there:
        worker.expect(time.time() >= due, f"{box.id} is gone {due - time.time():.1f} s before {box.expires}")
        worker.boxes.remove(box)
        worker.gone.append(box.path)
    else:
        worker.expect(asked <= due, f"{box.id} is there {asked - due:.1f} s after {box.expires}")


def _is_there(worker: Worker, path: str) -> bool:
    try:
        worker.api.ask("GET", path)
    except Refused as error:
        if error.status != 404:
            worker.find(f"GET {path}: {error}")
        return False
    return True


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
