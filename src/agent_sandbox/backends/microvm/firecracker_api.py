"""Firecracker's API: HTTP/1.1 with JSON over a Unix socket, one request on one connection.

The other side may have been taken over by its guest: what is read of a reply is bounded in bytes and in time, its
socket is reached as :func:`agent_sandbox.guest.vsock.connect_to` does, and of its words only a short clean text reaches
a message.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h11

from agent_sandbox.backends.microvm.children import clean
from agent_sandbox.errors import BackendError
from agent_sandbox.guest import vsock

SECONDS = 10.0
"""For a request. An idle Firecracker answers in 1 ms, a host that swaps in seconds."""
REPLY_BYTES = 64 * 1024
"""Of a reply: the longest that is asked for has some hundred bytes."""
_RECEIVE_BYTES = 4096


class FirecrackerError(BackendError):
    """Firecracker refused a request: ``status`` is what HTTP calls it by."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"Firecracker refused: {words or f'status {status}'}")
        self.status = status


async def request(
    place: Path, method: str, target: str, body: Mapping[str, object] | None = None, *, seconds: float = SECONDS
) -> dict[str, Any]:
    """Ask for one thing; return the object that is answered, or an empty one.

    :class:`FirecrackerError` when it is refused, :class:`BackendError` when there is no answer in time or none that
    can be right.
    """
    try:
        async with asyncio.timeout(seconds):
            status, content = await _exchange(place, method, target, body)
    except TimeoutError:
        raise BackendError(f"Firecracker did not answer {method} {target} within {seconds:g} s") from None
    except (OSError, h11.RemoteProtocolError) as error:
        raise BackendError(f"Firecracker does not answer {method} {target}: {clean(str(error))}") from error
    try:
        answer = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise BackendError(f"Firecracker answers {method} {target} with what is no object")
    if not 200 <= status < 300:
        raise FirecrackerError(status, clean(str(answer.get("fault_message", ""))))
    return answer


async def _exchange(place: Path, method: str, target: str, body: Mapping[str, object] | None) -> tuple[int, bytes]:
    loop = asyncio.get_running_loop()
    content = b"" if body is None else json.dumps(body).encode()
    headers = [("Host", "localhost"), ("Accept", "application/json")]
    if body is not None:
        headers += [("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=REPLY_BYTES)
    sent = http.send(h11.Request(method=method, target=target, headers=headers)) or b""
    if content:
        sent += http.send(h11.Data(content)) or b""
    sent += http.send(h11.EndOfMessage()) or b""
    status, received = 0, bytearray()
    with vsock.connect_to(place) as connection:
        await loop.sock_sendall(connection, sent)
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await loop.sock_recv(connection, _RECEIVE_BYTES))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                received += event.data
                if len(received) > REPLY_BYTES:
                    raise h11.RemoteProtocolError("the reply is too long")
            elif isinstance(event, h11.EndOfMessage):
                return status, bytes(received)
            elif not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("the connection ended")


__all__ = ["SECONDS", "FirecrackerError", "request"]
