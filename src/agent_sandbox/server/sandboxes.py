"""Sandboxes: create, list, look at, give more time, destroy."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from agent_sandbox import models
from agent_sandbox.manager import CreateOptions, Manager
from agent_sandbox.server import views
from agent_sandbox.server.codec import JsonReply
from agent_sandbox.server.errors import common

router = APIRouter(tags=["sandboxes"])


def manager_of(request: Request) -> Manager:
    """Find the application's manager."""
    manager: Manager = request.app.state.manager
    return manager


@router.post("/sandboxes", status_code=201, response_model=models.Sandbox, responses=common(404, 409, 429, 501))
async def create_sandbox(body: models.SandboxCreate, request: Request) -> Response:
    """Create and start a sandbox with an empty workspace."""
    options = CreateOptions(
        image=body.image,
        cpus=body.cpus,
        memory_mb=body.memory_mb,
        pids_limit=body.pids_limit,
        disk_mb=body.disk_mb,
        network=body.network,
        read_only_rootfs=body.read_only_rootfs,
        timeout_seconds=body.timeout_seconds,
        env=body.env,
        backend=body.backend,
        min_isolation=body.min_isolation,
    )
    return JsonReply(views.sandbox(await manager_of(request).create(options)), status=201)


@router.get("/sandboxes", response_model=models.SandboxList, responses=common())
async def list_sandboxes(request: Request) -> Response:
    """List the sandboxes that are alive."""
    records = await manager_of(request).list_sandboxes()
    return JsonReply(models.SandboxList(sandboxes=[views.sandbox(record) for record in records]))


@router.get("/sandboxes/{sandbox_id}", response_model=models.Sandbox, responses=common(404))
async def get_sandbox(sandbox_id: str, request: Request) -> Response:
    """Look at one sandbox."""
    return JsonReply(views.sandbox(await manager_of(request).get(sandbox_id)))


@router.delete("/sandboxes/{sandbox_id}", status_code=204, responses=common(404, 409))
async def delete_sandbox(sandbox_id: str, request: Request) -> Response:
    """End every process of a sandbox and remove it with its workspace. Its snapshots remain."""
    await manager_of(request).destroy(sandbox_id)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/timeout", response_model=models.Sandbox, responses=common(404, 409))
async def set_timeout(sandbox_id: str, body: models.TimeoutUpdate, request: Request) -> Response:
    """Set the time to live, counted from now."""
    return JsonReply(views.sandbox(await manager_of(request).set_timeout(sandbox_id, body.timeout_seconds)))
