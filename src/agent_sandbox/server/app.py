"""The application: routes, error replies and the gate put together around one manager."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from agent_sandbox import __version__
from agent_sandbox.config import Settings
from agent_sandbox.errors import SandboxError
from agent_sandbox.manager import Manager
from agent_sandbox.server import (
    archives,
    backends,
    commands,
    errors,
    execs,
    files,
    health,
    history,
    projects,
    sandboxes,
    snapshots,
    terminal,
)
from agent_sandbox.server.gate import KEYED_PREFIX, Gate

_DESCRIPTION = (
    "Sandboxes in which AI agents run code: create, run, snapshot, roll back, fork. "
    "Every `/v1` route needs a key: `Authorization: Bearer KEY` or `X-API-Key: KEY`. "
    'Every error has the shape `{"error": {"code", "message", "details"?}}`.'
)

_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def create_app(manager: Manager, settings: Settings, *, manager_started: bool = False) -> FastAPI:
    """Make the ASGI application of a manager.

    Its lifespan starts and closes the manager, unless ``manager_started`` says that the caller does. Keys are those of
    ``settings``; without any, and without ``insecure_no_auth``, every ``/v1`` request is refused.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if manager_started:
            yield
            return
        await manager.start()
        try:
            yield
        finally:
            await manager.close()

    app = FastAPI(
        title="agent-sandbox",
        version=__version__,
        description=_DESCRIPTION,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        lifespan=lifespan,
        redirect_slashes=False,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
        exception_handlers={
            SandboxError: errors.handle_typed,
            HTTPException: errors.handle_http,
            RequestValidationError: errors.handle_invalid,
        },
    )
    app.state.manager = manager
    app.state.settings = settings
    app.state.pulse = health.Pulse(manager.ping)
    app.include_router(health.router)
    keyed = APIRouter(prefix=KEYED_PREFIX)
    for module in (sandboxes, commands, execs, terminal, files, archives, snapshots, history, projects, backends):
        keyed.include_router(module.router)
    app.include_router(keyed)
    app.add_middleware(Gate, settings=settings)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name


def _document(app: FastAPI) -> dict[str, Any]:
    """Describe the routes as FastAPI does, and what the gate does before them."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            license_info=app.license_info,
            routes=app.routes,
        )
        document["components"]["securitySchemes"] = _SCHEMES
        for path, operations in document["paths"].items():
            if path.startswith(KEYED_PREFIX):
                for operation in operations.values():
                    operation["security"] = [{name: []} for name in _SCHEMES]
        app.openapi_schema = document
    return app.openapi_schema
