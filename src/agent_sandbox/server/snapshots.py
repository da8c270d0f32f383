"""Snapshots: take, list, look at, delete, go back to, fork."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from agent_sandbox import models
from agent_sandbox.manager import ForkOptions
from agent_sandbox.server import routing, views
from agent_sandbox.server.codec import JsonReply, boolean, parameter, query
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.errors import common
from agent_sandbox.server.idempotency import KEY_HEADER, new_sandbox, once

router = routing.router("snapshots")

_SANDBOX_ID: dict[str, Any] = {
    "name": "sandbox_id",
    "in": "query",
    "required": False,
    "description": "Only the snapshots of this sandbox.",
    "schema": {"type": "string"},
}
_AUTO = parameter("auto", "With those that rollbacks made of what they replaced.", type="boolean", default=False)


@router.post(
    "/sandboxes/{sandbox_id}/snapshots",
    status_code=201,
    response_model=models.Snapshot,
    responses=common(404, 409, 429, 501),
    openapi_extra={"parameters": [KEY_HEADER]},
)
async def create_snapshot(sandbox_id: str, request: Request, body: models.SnapshotCreate | None = None) -> Response:
    """Keep the state of the workspace, and on request what its processes have in memory: a crash loses neither."""
    wish = body or models.SnapshotCreate()

    async def take() -> Response:
        record = await manager_of(request).snapshot(sandbox_id, wish.name, memory=wish.memory)
        return JsonReply(views.snapshot(record), status=201)

    return await once(request, take)


@router.post("/sandboxes/{sandbox_id}/rollback", response_model=models.Sandbox, responses=common(404, 409, 429, 501))
async def rollback(sandbox_id: str, body: models.RollbackRequest, request: Request) -> Response:
    """Go back to a snapshot: every process ends, changes outside the workspace are cleared, the id stays.

    The processes of a snapshot that has them go on from where they were.
    """
    record = await manager_of(request).rollback(sandbox_id, body.snapshot_id, memory=body.memory)
    return JsonReply(views.sandbox(record))


@router.get(
    "/snapshots",
    response_model=models.SnapshotList,
    responses=common(),
    openapi_extra={"parameters": [_SANDBOX_ID, _AUTO]},
)
async def list_snapshots(request: Request) -> Response:
    """List snapshots. With ``auto`` those too that rollbacks made, also one that is still being made."""
    values = query(request, "sandbox_id", "auto")
    auto = boolean(values, "auto", False)
    records = await manager_of(request).list_snapshots(values.get("sandbox_id"), auto=auto)
    return JsonReply(models.SnapshotList(snapshots=[views.snapshot(record) for record in records]))


@router.get("/snapshots/{snapshot_id}", response_model=models.Snapshot, responses=common(404))
async def get_snapshot(snapshot_id: str, request: Request) -> Response:
    """Look at one snapshot."""
    return JsonReply(views.snapshot(await manager_of(request).get_snapshot(snapshot_id)))


@router.delete("/snapshots/{snapshot_id}", status_code=204, responses=common(404, 409))
async def delete_snapshot(snapshot_id: str, request: Request) -> Response:
    """Delete a snapshot."""
    await manager_of(request).delete_snapshot(snapshot_id)
    return Response(status_code=204)


@router.post(
    "/snapshots/{snapshot_id}/fork",
    status_code=201,
    response_model=models.Sandbox,
    responses=common(404, 409, 429, 501),
    openapi_extra={"parameters": [KEY_HEADER]},
)
async def fork(snapshot_id: str, request: Request, body: models.ForkRequest | None = None) -> Response:
    """Create a sandbox whose workspace begins as a snapshot."""
    wish = body or models.ForkRequest()
    options = ForkOptions(
        timeout_seconds=wish.timeout_seconds,
        network=wish.network,
        cpus=wish.cpus,
        memory_mb=wish.memory_mb,
        backend=wish.backend,
        memory=wish.memory,
        metadata=wish.metadata,
    )

    return await new_sandbox(request, lambda: manager_of(request).fork(snapshot_id, options))
