"""What every request passes before it is routed: host, key, size of the body; and what catches what nobody caught.

One plain ASGI layer around the whole application, so that its answers come before 404, 405 and 422, and a streaming
reply passes through untouched. Order: host (who is being spoken to), key (who speaks), declared size, then the
application with a body that stops at its bound.
"""

from __future__ import annotations

import asyncio
import base64
import binascii

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, SandboxError, UnauthorizedError
from agent_sandbox.server import errors
from agent_sandbox.server.auth import Hosts, Keys

TRUSTED_PEER = "agent_sandbox.trusted_peer"
"""Set in a connection's state by :mod:`agent_sandbox.server.peer`, and by nothing that a client can send."""

KEY_ID = "agent_sandbox.key_id"
"""In the state of a request: which key it came with, as a digest; empty where none was asked for."""

KEY_SUBPROTOCOL = "key."

KEYED_PREFIX = "/v1"

MAX_JSON_BYTES = 6 * 1024 * 1024 + 64 * 1024
"""Largest body but for uploads: a script of 1 MiB in which JSON writes every byte as six, and what is around it."""


class Gate:
    """Wrap an application; see the module."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._keys = Keys(settings.api_keys)
        self._hosts = Hosts(settings.host)
        self._open = settings.insecure_no_auth
        self._max_file_bytes = settings.max_file_bytes
        # What the guest side allows as well: an honest archive has about 2.5 KiB for each entry beside the files.
        self._max_archive_bytes = 2 * settings.max_snapshot_bytes + 64 * 1024 * 1024

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._admit(scope, receive, watched)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # Only the end of the server cancels a request; its task ends here either way.
            if not started:
                answer = errors.for_error(BackendError("the server is shutting down"), status=503)
                await answer(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - the outermost layer: it is logged, and the caller gets a number
            answer = errors.for_crash(error)
            if not started:
                await answer(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        try:
            self._check(scope, headers)
        except SandboxError as error:
            await errors.for_error(error)(scope, receive, send)
            return
        limit = self._limit(scope)
        fields = dict(headers)
        declared = fields.get(b"content-length")
        if declared is not None and declared.isdigit() and (len(declared) > 19 or int(declared) > limit):
            answer = errors.for_http(errors.BodyTooLarge(limit))
            if b"expect" in fields:
                # The client may now leave the body out, and then what follows is not what the parser waits for.
                answer.headers["connection"] = "close"
            await answer(scope, receive, send)
            return
        if declared == b"0" or (declared is None and b"transfer-encoding" not in fields):
            await self._app(scope, receive, send)
            return
        await self._app(scope, _bounded(receive, limit), send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope, [*scope["headers"], *key_headers(scope)])
        except SandboxError as error:
            await receive()
            await WebSocket(scope, receive, send).send_denial_response(errors.for_error(error))
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> None:
        state = scope.setdefault("state", {})
        if not state.get(TRUSTED_PEER):
            self._hosts.check(headers, same_origin=self._open)
            if not self._open and is_keyed(scope["path"]):
                state[KEY_ID] = self._keys.check(headers)

    def _limit(self, scope: Scope) -> int:
        method, path = scope["method"], scope["path"]
        if (method == "PUT" and path.endswith("/files")) or (method == "POST" and path.endswith("/stdin")):
            return self._max_file_bytes
        if method == "PUT" and (path.endswith("/archive") or path.startswith(f"{KEYED_PREFIX}/projects/")):
            return self._max_archive_bytes
        return MAX_JSON_BYTES


def is_keyed(path: str) -> bool:
    """Whether a decoded path needs a key, be there such a route or not."""
    return path == KEYED_PREFIX or path.startswith(KEYED_PREFIX + "/")


def key_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Take the key that a browser hands over as a subprotocol, because it cannot set a header on a WebSocket."""
    found = []
    for protocol in scope["subprotocols"]:
        if protocol.startswith(KEY_SUBPROTOCOL):
            text = protocol.removeprefix(KEY_SUBPROTOCOL)
            try:
                found.append((b"x-api-key", base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)))
            except (binascii.Error, ValueError):
                raise UnauthorizedError("the subprotocol key.… is not the key in base64url without padding") from None
    return found


def _bounded(receive: Receive, limit: int) -> Receive:
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > limit:
                raise errors.BodyTooLarge(limit)
        return message

    return bounded
