"""The header ``Idempotency-Key``: one creation, however often it is asked for. See ``manager/idempotency.py``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.manager import Reply
from agent_sandbox.manager.idempotency import MAX_KEY_LENGTH
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.gate import KEY_ID

REPLAYED = "Idempotency-Replayed"

KEY_HEADER: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Makes a repeated request get the first one's reply, with `Idempotency-Replayed: true`.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
}


async def once(request: Request, make: Callable[[], Awaitable[Response]]) -> Response:
    """Answer with ``make``'s reply, or with the one that an earlier request with the same key got."""
    keys = request.headers.getlist("idempotency-key")
    if not keys:
        return await make()
    if len(keys) > 1:
        raise InvalidRequestError("Idempotency-Key is given more than once")

    async def reply() -> Reply:
        made = await make()
        return Reply(made.status_code, bytes(made.body))

    owner = request.scope.get("state", {}).get(KEY_ID, "")
    wanted = b"%s %s\0%s" % (request.method.encode(), request.scope["path"].encode(), await request.body())
    given = await manager_of(request).replies.once(owner, keys[0], wanted, reply)
    headers = {REPLAYED: "true"} if given.replayed else None
    return Response(given.body, given.status, headers, media_type="application/json")
