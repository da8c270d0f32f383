"""What a creation comes to when its client asks twice, or goes away before the answer.

The header ``Idempotency-Key`` makes one creation of however many requests: see ``manager/idempotency.py``. Its result
stays when the client goes away, since a retry asks for it.

Without a key nobody will ever ask for it. A sandbox holds memory and one of MAX_SANDBOXES places, so that one is ended
with its creation (:func:`new_sandbox`); an answer that is on its way already, the server cannot tell from one that
arrived. A snapshot, a layer and a detached command stay: the first two are what somebody wanted kept, the third is
meant to outlive its client, and all are listed under the sandbox or the project that they are of.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from agent_sandbox.errors import InvalidRequestError, SandboxError
from agent_sandbox.manager import Reply, SandboxRecord
from agent_sandbox.manager.idempotency import MAX_KEY_LENGTH
from agent_sandbox.server import views
from agent_sandbox.server.codec import JsonReply
from agent_sandbox.server.context import manager_of
from agent_sandbox.server.gate import KEY_ID
from agent_sandbox.server.streams import Abandonment

log = logging.getLogger("agent_sandbox.server")

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


async def new_sandbox(request: Request, make: Callable[[], Awaitable[SandboxRecord]]) -> Response:
    """Answer with the sandbox that ``make`` creates, as :func:`once` does.

    One without a key, whose client goes away before the answer, is destroyed: :class:`ClientDisconnect`. The request
    must have been read to its end before.
    """
    if "idempotency-key" in request.headers:

        async def reply() -> Response:
            return JsonReply(views.sandbox(await make()), status=201)

        return await once(request, reply)
    with Abandonment(request.receive):
        record = await make()
    is_told = False
    try:
        # Both may have ended in the same moment.
        if await request.is_disconnected():
            raise ClientDisconnect
        is_told = True
    finally:
        if not is_told:
            await _destroy(request, record.id)
    return JsonReply(views.sandbox(record), status=201)


async def _destroy(request: Request, id: str) -> None:
    try:
        await manager_of(request).destroy(id)
    except SandboxError as error:
        log.warning("sandbox %s, whose client went away, is left to its time to live: %s", id, error)
