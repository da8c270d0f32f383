"""Replies that are given again: one creation for one ``Idempotency-Key``.

The rules
---------
* A key belongs to who presented it (the API key), so nobody meets another's. With it the hash of the request is kept
  (method, path, body): the same key with another request is a conflict.
* Only the reply of a success is kept, once it is complete. An error, or a crash before that, leaves nothing: the next
  request makes the thing anew. A crash in the moment between the creation and its note leaves a sandbox that nobody was
  told of: it is listed, and its time to live ends it.
* While the first request is under way, others with its key wait for it; when it fails, the next one tries.
* Bounds: a reply is kept for 24 hours, and the newest 10,000 of them. A reply is the JSON of one resource.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agent_sandbox.errors import ConflictError, InvalidRequestError, SandboxError
from agent_sandbox.manager.state import StateStore, StoredReply

log = logging.getLogger(__name__)

KEEP_SECONDS = 24 * 3600.0
KEEP_REPLIES = 10_000
MAX_KEY_LENGTH = 255


@dataclass(frozen=True)
class Reply:
    """A status and a body; ``replayed`` where it was made by an earlier request."""

    status: int
    body: bytes
    replayed: bool = False


class Idempotency:
    """The kept replies of one server."""

    def __init__(self, state: StateStore, clock: Callable[[], float]) -> None:
        self._state = state
        self._clock = clock
        self._under_way: dict[str, tuple[str, asyncio.Event]] = {}

    async def once(self, owner: str, key: str, request: bytes, make: Callable[[], Awaitable[Reply]]) -> Reply:
        """Give the reply of ``make``, or the one that an earlier request with this key got.

        ``owner`` is whose key it is, ``request`` what must be the same. :class:`InvalidRequestError` for a key that
        cannot be one, :class:`ConflictError` for one of another request; and what ``make`` raises.
        """
        if not 1 <= len(key) <= MAX_KEY_LENGTH or not (key.isascii() and key.isprintable()):
            raise InvalidRequestError(f"Idempotency-Key is 1 to {MAX_KEY_LENGTH} printable ASCII characters")
        name = hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()
        wanted = hashlib.sha256(request).hexdigest()
        while (first := self._under_way.get(name)) is not None:
            _require_same(first[0], wanted)
            await first[1].wait()
        ended = asyncio.Event()
        self._under_way[name] = wanted, ended
        try:
            if (kept := await self._state.get_reply(name, self._clock() - KEEP_SECONDS)) is not None:
                _require_same(kept.request, wanted)
                return Reply(kept.status, kept.body, replayed=True)
            reply = await make()
            await self._keep(StoredReply(name, wanted, self._clock(), reply.status, reply.body))
            return reply
        finally:
            del self._under_way[name]
            ended.set()

    async def _keep(self, reply: StoredReply) -> None:
        try:
            await self._state.put_reply(reply, reply.created_at - KEEP_SECONDS, KEEP_REPLIES)
        except SandboxError as error:
            # What was made is there, and its maker must be told of it; only the promise to say so again is lost.
            log.warning("a reply could not be kept for its Idempotency-Key: %s", error)


def _require_same(one: str, other: str) -> None:
    if one != other:
        raise ConflictError("this Idempotency-Key was used for another request; choose a new one")
