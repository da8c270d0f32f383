"""The REST API as the workers use it: one attempt for each call, and a lost reply told apart from a refusal.

The SDK is not used here because it sends again what was lost: whether a call was acknowledged is the point.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

SECONDS = 90.0
"""No call of this load takes a tenth of it on a busy machine with two cores: one that does hangs."""


class Lost(Exception):
    """The connection broke or could not be made: what was asked may have happened or not."""


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status} {body.decode(errors='replace')[:300]}")
        self.status = status


class Stuck(Exception):
    """The server did not answer in time."""


class Api:
    """A connection of one thread. JSON is decoded, other bodies are bytes."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=SECONDS, trust_env=False
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content: bytes | None = None,
        params: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> Any:
        """Make a call; ``key`` is its Idempotency-Key."""
        headers = {} if key is None else {"Idempotency-Key": key}
        with _translated():
            reply = self._client.request(method, path, json=body, content=content, params=params, headers=headers)
        if reply.status_code >= 300:
            raise Refused(reply.status_code, reply.content)
        return reply.json() if reply.headers.get("content-type") == "application/json" else reply.content

    def lines(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None
    ) -> Generator[dict[str, Any], None, None]:
        """Make a call whose reply is NDJSON, to its end. An ``error`` line is a refusal."""
        with _translated(), self._client.stream(method, path, json=body, params=params) as reply:
            if reply.status_code >= 300:
                raise Refused(reply.status_code, reply.read())
            for line in reply.iter_lines():
                event: dict[str, Any] = json.loads(line)
                if event["type"] == "error":
                    raise Refused(reply.status_code, line.encode())
                yield event


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        raise Stuck(f"no answer in {SECONDS:.0f} seconds") from error
    except httpx.TransportError as error:
        raise Lost(str(error)) from error
