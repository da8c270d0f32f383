"""Every call on projects, built as a value."""

from __future__ import annotations

from urllib.parse import quote

from agent_sandbox import models
from agent_sandbox.client.call import TAR, Call, as_list, as_nothing, as_shape, new_key, post, with_query
from agent_sandbox.client.file_requests import ARCHIVE_SECONDS
from agent_sandbox.errors import InvalidRequestError


def list_projects() -> Call[list[models.Project]]:
    """List projects."""
    return Call("GET", "/v1/projects", as_list("projects", models.Project.from_json))


def create(name: str) -> Call[models.Project]:
    """Make a project of a tar, which the client sends as the body, or an empty one without."""
    return Call("PUT", _path(name), as_shape(models.Project), None, TAR, wait=ARCHIVE_SECONDS)


def get(name: str, limit: int | None) -> Call[models.Project]:
    """Look at a project."""
    parameters = {} if limit is None else {"limit": str(limit)}
    return Call("GET", with_query(_path(name), **parameters), as_shape(models.Project))


def delete(name: str) -> Call[None]:
    """Delete a project."""
    return Call("DELETE", _path(name), as_nothing)


def add(name: str, state: models.Snapshot | str, idempotency_key: str | None) -> Call[models.LayerAdded]:
    """Publish a state as the next layer."""
    body = {"from": state if isinstance(state, str) else state.id}
    decode = as_shape(models.LayerAdded)
    return post(_path(name) + "/layers", body, decode, idempotency_key=idempotency_key or new_key())


def _path(name: str) -> str:
    if not name:
        raise InvalidRequestError("a project's name must not be empty")
    return f"/v1/projects/{quote(name, safe='')}"
