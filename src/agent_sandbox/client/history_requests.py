"""Every call that looks back at a workspace, built as a value."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from agent_sandbox import models
from agent_sandbox.client.call import Call, as_object, as_shape, flag, post, sandbox_path, snapshot_path
from agent_sandbox.client.file_requests import ARCHIVE_SECONDS
from agent_sandbox.errors import InvalidRequestError

Snapshot = models.Snapshot | str


def diff(old: Snapshot, new: Snapshot, *, text: bool, limit: int | None) -> Call[models.ChangeList]:
    """Compare two snapshots."""
    path = snapshot_path(_id(old), f"/diff/{quote(_id(new), safe='')}", **_comparison(text, limit))
    return Call("GET", path, as_shape(models.ChangeList))


def changes(sandbox_id: str, *, text: bool, limit: int | None) -> Call[models.ChangeList]:
    """Compare a workspace with what it was last kept as."""
    return Call("GET", sandbox_path(sandbox_id, "/changes", **_comparison(text, limit)), as_shape(models.ChangeList))


def log(snapshot: Snapshot, limit: int | None) -> Call[list[models.PastState]]:
    """Ask what led to a snapshot."""
    parameters = {} if limit is None else {"limit": str(limit)}
    decode: Any = as_shape(models.SnapshotLog)
    return Call("GET", snapshot_path(_id(snapshot), "/log", **parameters), lambda body: decode(body).states)


def archive(snapshot: Snapshot) -> Call[bytes]:
    """Read a snapshot as a tar."""
    return Call("GET", snapshot_path(_id(snapshot), "/archive"), bytes, wait=ARCHIVE_SECONDS)


def merge(sandbox_id: str, snapshot: Snapshot) -> Call[dict[str, Any]]:
    """Bring a snapshot's changes into a sandbox."""
    return post(sandbox_path(sandbox_id, "/merge"), {"snapshot_id": _id(snapshot)}, as_object)


def _comparison(text: bool, limit: int | None) -> dict[str, str]:
    parameters = {"text": flag(text)} if text else {}
    return parameters if limit is None else {**parameters, "limit": str(limit)}


def _id(snapshot: Snapshot) -> str:
    id = snapshot if isinstance(snapshot, str) else snapshot.id
    if not id:
        raise InvalidRequestError("a snapshot's id must not be empty")
    return id
