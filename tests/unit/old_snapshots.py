"""Snapshots as the first version kept them, made of today's: what a server finds after an upgrade."""

from __future__ import annotations

import hashlib
import io
import json
import sqlite3
from pathlib import Path

import zstandard

from agent_sandbox.store import Store


def turn_into_a_file(data: Path, id: str) -> Path:
    """Make of a snapshot a compressed tar, and a record of version 1 that names its digest; no server may run."""
    out = io.BytesIO()
    with Store.open(data / "store") as store:
        commit = next(pin.commit for pin in store.pins() if pin.name == id)
        store.export_tar(commit.hex(), out)
        store.unpin(id)
    stored = zstandard.compress(out.getvalue())
    (data / "snapshots").mkdir(exist_ok=True, mode=0o700)
    file = data / "snapshots" / f"{id}.tar.zst"
    file.write_bytes(stored)
    with sqlite3.connect(data / "state.db") as connection:
        (text,) = connection.execute("SELECT record FROM snapshots WHERE id = ?", (id,)).fetchone()
        record = json.loads(text)
        del record["commit"]
        digest = hashlib.blake2b(stored, digest_size=32).hexdigest()
        record |= {"version": 1, "digest": digest, "stored_bytes": len(stored)}
        connection.execute("UPDATE snapshots SET record = ? WHERE id = ?", (json.dumps(record), id))
    connection.close()
    return file
