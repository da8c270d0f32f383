"""``GET /v1/backends``: what this server can isolate with, and how well."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from agent_sandbox import models
from agent_sandbox.server import routing, views
from agent_sandbox.server.codec import JsonReply
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.errors import common

router = routing.router("backends")


@router.get("/backends", response_model=models.BackendList, responses=common())
async def list_backends(request: Request) -> Response:
    """List the backends with their capabilities, health and versions, the default one first."""
    described = await manager_of(request).describe_backends()
    shown = [
        models.Backend(
            name=one.name,
            default=one.default,
            healthy=one.healthy,
            message=one.message,
            capabilities=views.capabilities(one.capabilities),
            versions=dict(one.versions),
            pulls=[
                models.ImagePull(image=pull.image, done_bytes=pull.done_bytes, total_bytes=pull.total_bytes)
                for pull in one.pulls
            ],
        )
        for one in described
    ]
    return JsonReply(models.BackendList(backends=shown))
