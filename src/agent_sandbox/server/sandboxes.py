"""Sandboxes: create, list, look at, give more time, stop, start, destroy."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from agent_sandbox import models
from agent_sandbox.manager import CreateOptions
from agent_sandbox.server import routing, views
from agent_sandbox.server.codec import JsonReply, bad_field, pairs, parameter
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.errors import common
from agent_sandbox.server.idempotency import KEY_HEADER, new_sandbox

router = routing.router("sandboxes")


_METADATA = parameter("metadata", "NAME=VALUE: only sandboxes with this label; may be given again.", default="")


@router.post(
    "/sandboxes",
    status_code=201,
    response_model=models.Sandbox,
    responses=common(404, 409, 429, 501),
    openapi_extra={"parameters": [KEY_HEADER]},
)
async def create_sandbox(body: models.SandboxCreate, request: Request) -> Response:
    """Create and start a sandbox. Its workspace is empty, or begins as a snapshot, a project or another state."""
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
        metadata=body.metadata,
        project=body.project,
        source=body.from_,
    )

    return await new_sandbox(request, lambda: manager_of(request).create(options))


@router.get(
    "/sandboxes",
    response_model=models.SandboxList,
    responses=common(),
    openapi_extra={"parameters": [_METADATA]},
)
async def list_sandboxes(request: Request) -> Response:
    """List the sandboxes that are alive."""
    labels: dict[str, str] = {}
    for _, pair in pairs(request, "metadata"):
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise bad_field("metadata", "must be NAME=VALUE")
        if labels.setdefault(name, value) != value:
            raise bad_field("metadata", "asks for two values of one name")
    records = await manager_of(request).list_sandboxes(labels)
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


@router.post("/sandboxes/{sandbox_id}/stop", response_model=models.Sandbox, responses=common(404, 409, 501))
async def stop_sandbox(sandbox_id: str, request: Request) -> Response:
    """End every process of a sandbox and keep its workspace. A stopped one stays as it is."""
    return JsonReply(views.sandbox(await manager_of(request).stop(sandbox_id)))


@router.post("/sandboxes/{sandbox_id}/start", response_model=models.Sandbox, responses=common(404, 409, 429, 501))
async def start_sandbox(sandbox_id: str, request: Request) -> Response:
    """Start a stopped sandbox again with its workspace. A running one goes on."""
    return JsonReply(views.sandbox(await manager_of(request).start_sandbox(sandbox_id)))


@router.get("/sandboxes/{sandbox_id}/stats", response_model=models.SandboxStats, responses=common(404, 409, 501))
async def sandbox_stats(sandbox_id: str, request: Request) -> Response:
    """Look at what a sandbox uses now."""
    return JsonReply(views.stats(await manager_of(request).stats(sandbox_id)))
