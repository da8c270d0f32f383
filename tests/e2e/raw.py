"""The API by plain HTTP, without the SDK between."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e.serving import KEY, Served

HEADERS = {"X-API-Key": KEY}


def call(server: Served, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    """Send one request below ``/v1`` on a connection of its own; a body that is not bytes goes as JSON."""
    with opened(server, method, path, body, **headers) as response:
        return response.status, response.read()


def ask(server: Served, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """As :func:`call`, for a request that succeeds with JSON."""
    status, content = call(server, method, path, body, **headers)
    assert status < 300, content
    return json.loads(content) if content else None


@contextmanager
def opened(
    server: Served, method: str, path: str, body: Any = None, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    """Send one request and give the reply to be read as it comes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if content is not body else {}
        connection.request(method, f"/v1{path}", content, {**HEADERS, **kind, **headers})
        yield connection.getresponse()
    finally:
        connection.close()


def lines(content: bytes) -> list[dict[str, Any]]:
    """Read newline-delimited JSON."""
    return [json.loads(line) for line in content.splitlines()]
