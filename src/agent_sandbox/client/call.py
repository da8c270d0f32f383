"""A call of the API as a value, and what the builders of calls share. No I/O.

Paths inside a sandbox are ``str`` with surrogate escapes and go into a query as bytes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

from agent_sandbox.errors import ValidationError

T = TypeVar("T")

JSON, BYTES, TAR = "application/json", "application/octet-stream", "application/x-tar"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, and how to turn the body of a good reply into a value.

    ``wait`` is how long the reply may let us wait for its next bytes, in seconds, where the call itself says so;
    ``None`` leaves it to the client and ``math.inf`` is for ever. A call with an ``idempotency_key`` may be sent again.
    ``expect`` is the one good status where a server that ignores a header would answer with another. ``instead`` holds
    statuses that are no error here, and the body to decode in their place.
    """

    method: str
    path: str
    decode: Callable[[bytes], T]
    content: bytes | None = None
    content_type: str = JSON
    wait: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotency_key: str | None = None
    expect: int | None = None
    instead: Mapping[int, bytes] = field(default_factory=dict)

    def accepts(self, status: int) -> bool:
        """Whether a status is good. :class:`ValidationError` for a good one that means something else."""
        if status in self.instead:
            return True
        if 200 <= status < 300 and self.expect not in (None, status):
            raise ValidationError(f"the server answered {status} where {self.expect} was due: is it an older one?")
        return 200 <= status < 300


def new_key() -> str:
    """Make an idempotency key that nobody else makes."""
    return uuid.uuid4().hex


def post(
    path: str,
    body: Mapping[str, Any],
    decode: Callable[[bytes], T],
    *,
    wait: float | None = None,
    idempotency_key: str | None = None,
) -> Call[T]:
    """Send an object as JSON."""
    content = json.dumps(body, allow_nan=False).encode("ascii")
    return Call("POST", path, decode, content, wait=wait, idempotency_key=idempotency_key)


def given(**values: Any) -> dict[str, Any]:
    """Keep the values that are not ``None``."""
    return {name: value for name, value in values.items() if value is not None}


def flag(value: bool) -> str:
    """Write a boolean for a query."""
    return "true" if value else "false"


def with_query(path: str, /, **parameters: str) -> str:
    """Put parameters behind a path, as bytes."""
    if not parameters:
        return path
    return path + "?" + urlencode({name: text.encode("utf-8", "surrogateescape") for name, text in parameters.items()})


def sandbox_path(sandbox_id: str, suffix: str = "", /, **parameters: str) -> str:
    """The path of something of a sandbox."""
    return with_query(f"/v1/sandboxes/{quote(sandbox_id, safe='')}{suffix}", **parameters)


def snapshot_path(snapshot_id: str, suffix: str = "", /, **parameters: str) -> str:
    """The path of something of a snapshot."""
    return with_query(f"/v1/snapshots/{quote(snapshot_id, safe='')}{suffix}", **parameters)


def as_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object. :class:`ValidationError` for anything else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"the server's reply is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValidationError("the server's reply is not a JSON object")
    return value


def as_nothing(body: bytes) -> None:
    """Decode a reply that says nothing."""
    return


def as_shape(cls: Any) -> Callable[[bytes], Any]:
    """Decode a JSON object into a shape of ``models``."""
    return lambda body: cls.from_json(as_object(body))


def as_list(name: str, build: Callable[[Any], T]) -> Callable[[bytes], list[T]]:
    """Decode the list ``name`` of a JSON object."""

    def decode(body: bytes) -> list[T]:
        items = as_object(body).get(name)
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ValidationError(f"the server's reply has no list {name!r}")
        return [build(item) for item in items]

    return decode


def as_number(name: str) -> Callable[[bytes], int]:
    """Decode the number ``name`` of a JSON object."""

    def decode(body: bytes) -> int:
        value = as_object(body).get(name)
        if not isinstance(value, int):
            raise ValidationError(f"the server's reply has no number {name!r}")
        return value

    return decode
