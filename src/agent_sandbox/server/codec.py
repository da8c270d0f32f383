"""JSON out and raw query strings in, where the framework's own ways lose bytes or time.

Replies are encoded straight from dataclasses, without validating what we made ourselves. File names that are not UTF-8
carry surrogate escapes, which a UTF-8 encoder refuses; such a reply is written in ASCII with ``\\udcXX`` escapes.
Query values are decoded from the raw bytes, since a path inside a sandbox is bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agent_sandbox.errors import InvalidRequestError, ValidationError

_encode = msgspec.json.Encoder().encode

MAX_QUERY_BYTES = 16_384
"""Longest query: a path of 4,095 bytes, each percent-encoded, and room for the other parameters."""


def encode(value: Any) -> bytes:
    """Encode a dataclass, mapping, list or plain value as JSON bytes."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, default=dataclasses.asdict, separators=(",", ":")).encode("ascii")


class JsonReply(Response):
    """A JSON reply, encoded at once."""

    def __init__(self, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encode(value), status, headers, media_type="application/json")


def query(request: Request, *allowed: str) -> dict[str, str]:
    """Decode the query by its raw bytes (surrogate escapes where it is not UTF-8).

    Raises :class:`ValidationError` that names an unknown or repeated parameter, :class:`InvalidRequestError` for NUL.
    """
    raw: bytes = request.scope["query_string"]
    if len(raw) > MAX_QUERY_BYTES:
        raise InvalidRequestError(f"the query is longer than {MAX_QUERY_BYTES} bytes")
    values: dict[str, str] = {}
    for pair in raw.split(b"&"):
        if not pair:
            continue
        name, value = (_decoded(part) for part in (pair.partition(b"=")[::2]))
        if name not in allowed:
            raise _bad(name, "unknown parameter")
        if name in values:
            raise _bad(name, "given more than once")
        if "\0" in value:
            raise InvalidRequestError(f"parameter {name}: a NUL byte cannot be part of it")
        values[name] = value
    return values


def required(values: Mapping[str, str], name: str) -> str:
    """Take a parameter; :class:`ValidationError` when it is not there."""
    if name not in values:
        raise _bad(name, "is required")
    return values[name]


def _decoded(part: bytes) -> str:
    return unquote_to_bytes(part.replace(b"+", b" ")).decode("utf-8", "surrogateescape")


def _bad(name: str, problem: str) -> ValidationError:
    return ValidationError(f"{name[:200]}: {problem}", details={"fields": [{"field": name[:200], "problem": problem}]})
