"""A slice of ``python -m tests.kills``, and proof that it sees what it looks for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from agent_sandbox.store import walk
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.packs import pack_name
from tests.kills.campaign import Campaign, target
from tests.real.leaks import resources

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def test_twenty_kills_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    with target(tmp_path) as server:
        campaign = Campaign(server, seed=20)
        campaign.run(20)
    print(campaign.summary())
    assert campaign.findings == []
    assert campaign.kills >= 20
    assert sum(worker.outlived for worker in campaign.workers) > 0
    assert sum(worker.undone for worker in campaign.workers) > 0
    done = sum((worker.done for worker in campaign.workers), Counter[str]())
    assert {"create", "write", "exec", "detach", "attach", "snapshot", "rollback", "fork", "stop"} <= set(done)


def damage(path: Path, snapshot: str) -> None:
    """Overwrite the record of the directory that a snapshot shows."""
    with ObjectDatabase.open(path) as database:
        commit = next(pin.commit for pin in database.index.pins() if pin.name == snapshot)
        tree = walk.commit(database, commit).root.content
        assert tree is not None
        (place,) = database.locate([tree])
        assert place is not None
        with (database.packs / pack_name(place.pack)).open("r+b") as pack:
            pack.seek(place.offset)
            pack.write(bytes(place.length))


def meddle(campaign: Campaign) -> None:
    """Do what a server that loses things would do, to each worker's oldest."""
    data = campaign.served.data
    lost, later = list[str](), list[str]()
    for worker in campaign.workers:
        for snap in worker.snaps[:1]:
            damage(data / "store", snap.id)
        ids = [box.id for box in worker.boxes if not box.is_brief]
        lost, later = lost + ids[:1], later + ids[1:2]
    with contextlib.closing(sqlite3.connect(data / "state.db")) as state, state:
        state.executemany("DELETE FROM sandboxes WHERE id = ?", [(id,) for id in lost])
        for id in later:
            ((text,),) = state.execute("SELECT record FROM sandboxes WHERE id = ?", (id,))
            record = json.loads(text)
            record["expires_at"] += 60
            state.execute("UPDATE sandboxes SET record = ? WHERE id = ?", (json.dumps(record), id))
    for pid in resources(data).get("processes", []):
        with contextlib.suppress(OSError):  # some end by themselves
            if b"head -c" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


def test_what_is_lost_is_found(tmp_path: Path) -> None:
    wanted = ("was acknowledged and cannot be restored", "was acknowledged: 404", " expires at ", "it ended with")
    with target(tmp_path) as server:
        campaign = Campaign(server, seed=4, meddle=meddle, settle_seconds=5)

        def missed() -> list[str]:
            return [text for text in wanted if not any(text in finding for finding in campaign.findings)]

        campaign.run(12, enough=lambda: not missed())  # how much there is to lose at a kill hangs on the machine
    assert missed() == [], campaign.findings
