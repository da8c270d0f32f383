"""Routes that take the parameters of their documentation and no others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from agent_sandbox.server.codec import pairs


class StrictRoute(APIRoute):
    """Refuse a parameter of the query that ``openapi_extra`` does not name, before anything else of the request.

    A misspelt one would else be taken for one that is left out.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        described = (self.openapi_extra or {}).get("parameters", ())
        allowed = [parameter["name"] for parameter in described if parameter["in"] == "query"]

        async def strict(request: Request) -> Response:
            if request.scope["query_string"]:
                pairs(request, *allowed)
            return await handle(request)

        return strict


def router(tag: str) -> APIRouter:
    """Make the router of one file."""
    return APIRouter(tags=[tag], route_class=StrictRoute)
