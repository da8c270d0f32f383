"""Projects: lines of layers that sandboxes can start from. List, create, look at, delete, publish."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import Request
from starlette.responses import Response

from agent_sandbox import models
from agent_sandbox.manager.projects import MAX_LAYERS
from agent_sandbox.server import routing, views
from agent_sandbox.server.archives import TAR
from agent_sandbox.server.codec import JsonReply, number, parameter, query
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.errors import common
from agent_sandbox.server.idempotency import KEY_HEADER, once
from agent_sandbox.server.streams import uploaded

router = routing.router("projects")

_LAYERS = 100


@router.get("/projects", response_model=models.ProjectList, responses=common())
async def list_projects(request: Request) -> Response:
    """List the projects."""
    found = await manager_of(request).list_projects()
    return JsonReply(models.ProjectList(projects=[views.project(record) for record in found]))


@router.put(
    "/projects/{name}",
    status_code=201,
    response_model=models.Project,
    responses=common(409, 429),
    openapi_extra={"requestBody": {"required": False, "content": TAR}},
)
async def create_project(name: str, request: Request) -> Response:
    """Make a project. Its layer 0 is what is in the tar of the body, plain or compressed; without it, empty."""
    async with aclosing(uploaded(request)) as pieces:
        return JsonReply(views.project(await manager_of(request).create_project(name, pieces)), status=201)


@router.get(
    "/projects/{name}",
    response_model=models.Project,
    responses=common(404),
    openapi_extra={
        "parameters": [
            parameter(
                "limit",
                "At most this many layers, the newest.",
                type="integer",
                default=_LAYERS,
                minimum=1,
                maximum=MAX_LAYERS,
            )
        ]
    },
)
async def get_project(name: str, request: Request) -> Response:
    """Look at a project and its layers."""
    limit = number(query(request, "limit"), "limit", _LAYERS, 1, MAX_LAYERS)
    return JsonReply(views.project(await manager_of(request).get_project(name, limit=limit)))


@router.delete("/projects/{name}", status_code=204, responses=common(404))
async def delete_project(name: str, request: Request) -> Response:
    """Delete a project with its layers. Sandboxes that started from it live on; snapshots stay."""
    await manager_of(request).delete_project(name)
    return Response(status_code=204)


@router.post(
    "/projects/{name}/layers",
    response_model=models.LayerAdded,
    responses=common(404, 409, 429),
    openapi_extra={"parameters": [KEY_HEADER]},
)
async def add_layer(name: str, body: models.LayerCreate, request: Request) -> Response:
    """Publish the state of a sandbox or snapshot as the next layer. Done twice, it is one layer.

    The state must come from the newest layer; when the line has moved meanwhile, this is refused.
    """

    async def publish() -> Response:
        return JsonReply(views.layer_added(await manager_of(request).publish(name, body.from_)))

    return await once(request, publish)
