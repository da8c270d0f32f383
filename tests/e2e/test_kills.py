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
    done = sum((worker.done for worker in campaign.workers), Counter[str]())
    assert {"create", "write", "exec", "detach", "attach", "snapshot", "rollback", "fork", "stop"} <= set(done)


def meddle(campaign: Campaign) -> None:
    """Do what a server that loses things would do, to each worker's oldest."""
    data = campaign.served.data
    lost, later = list[str](), list[str]()
    for worker in campaign.workers:
        for snap in worker.snaps[:1]:
            (data / "snapshots" / f"{snap.id}.tar.zst").write_bytes(b"")
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
    with target(tmp_path) as server:
        campaign = Campaign(server, seed=4, meddle=meddle, settle_seconds=5)
        campaign.run(3)
    for text in ("was acknowledged and cannot be restored", "was acknowledged: 404", " expires at ", "it ended with"):
        assert any(text in finding for finding in campaign.findings), (text, campaign.findings)
