"""What happened to workspaces: differences, where a state comes from, states as tar streams, merges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.responses import Response

from agent_sandbox import models
from agent_sandbox.manager.history import MAX_CHANGES, MAX_LOG
from agent_sandbox.server import routing, views
from agent_sandbox.server.archives import HEADERS, TAR
from agent_sandbox.server.codec import JsonReply, boolean, number, parameter, query
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.errors import common
from agent_sandbox.server.streams import PieceStream

router = routing.router("history")

_CHANGES, _LOG = 1_000, 100


def _most(what: str, default: int, high: int) -> dict[str, Any]:
    return parameter("limit", f"At most this many {what}.", type="integer", default=default, minimum=1, maximum=high)


_COMPARISON = [
    _most("paths", _CHANGES, MAX_CHANGES),
    parameter("text", "With the lines of text files that differ.", type="boolean", default=False),
]


@router.get(
    "/snapshots/{snapshot_id}/diff/{later_id}",
    response_model=models.ChangeList,
    responses=common(404, 501),
    openapi_extra={"parameters": _COMPARISON},
)
async def diff_snapshots(snapshot_id: str, later_id: str, request: Request) -> Response:
    """Compare two snapshots, of one sandbox or of two."""
    limit, text = _comparison(request)
    found = await manager_of(request).diff(snapshot_id, later_id, limit=limit, text=text)
    return JsonReply(views.differences(found))


@router.get(
    "/sandboxes/{sandbox_id}/changes",
    response_model=models.ChangeList,
    responses=common(404, 409, 429, 501),
    openapi_extra={"parameters": _COMPARISON},
)
async def workspace_changes(sandbox_id: str, request: Request) -> Response:
    """Compare a workspace with the last snapshot or rollback of its sandbox, or with what it began as."""
    limit, text = _comparison(request)
    return JsonReply(views.differences(await manager_of(request).changes(sandbox_id, limit=limit, text=text)))


@router.get(
    "/snapshots/{snapshot_id}/archive",
    response_class=Response,
    responses={**common(404), 200: {"description": "A POSIX tar stream.", "content": TAR}},
)
async def export_snapshot(snapshot_id: str, request: Request) -> Response:
    """Read a snapshot as a tar stream, names relative to the workspace."""
    return PieceStream(manager_of(request).archive(snapshot_id), media_type="application/x-tar", headers=HEADERS)


@router.get(
    "/snapshots/{snapshot_id}/log",
    response_model=models.SnapshotLog,
    responses=common(404, 501),
    openapi_extra={"parameters": [_most("states", _LOG, MAX_LOG)]},
)
async def snapshot_log(snapshot_id: str, request: Request) -> Response:
    """Tell what led to a snapshot."""
    limit = number(query(request, "limit"), "limit", _LOG, 1, MAX_LOG)
    states = await manager_of(request).log(snapshot_id, limit=limit)
    return JsonReply(models.SnapshotLog(states=[views.past(state) for state in states]))


@router.post("/sandboxes/{sandbox_id}/merge", response_model=models.MergeResult, responses=common(404, 409, 429, 501))
async def merge_snapshot(sandbox_id: str, body: models.MergeRequest, request: Request) -> Response:
    """Bring a snapshot's changes into a sandbox. Its processes end, unless there are conflicts or nothing new."""
    return JsonReply(views.merge(await manager_of(request).merge(sandbox_id, body.snapshot_id)))


def _comparison(request: Request) -> tuple[int, bool]:
    values: Mapping[str, str] = query(request, "limit", "text")
    return number(values, "limit", _CHANGES, 1, MAX_CHANGES), boolean(values, "text", False)
