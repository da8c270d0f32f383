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
from starlette.requests import HTTPConnection
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


def query(request: HTTPConnection, *allowed: str) -> dict[str, str]:
    """Decode the query by its raw bytes (surrogate escapes where it is not UTF-8).

    Raises :class:`ValidationError` that names an unknown or repeated parameter, :class:`InvalidRequestError` for NUL.
    """
    values: dict[str, str] = {}
    for name, value in pairs(request, *allowed):
        if name in values:
            raise bad_field(name, "given more than once")
        values[name] = value
    return values


def pairs(request: HTTPConnection, *allowed: str) -> list[tuple[str, str]]:
    """Decode the query as :func:`query` does, for parameters that may come several times."""
    raw: bytes = request.scope["query_string"]
    if len(raw) > MAX_QUERY_BYTES:
        raise InvalidRequestError(f"the query is longer than {MAX_QUERY_BYTES} bytes")
    values: list[tuple[str, str]] = []
    for pair in raw.split(b"&"):
        if not pair:
            continue
        name, value = (_decoded(part) for part in (pair.partition(b"=")[::2]))
        if name not in allowed:
            raise bad_field(name, "unknown parameter")
        if "\0" in value:
            raise InvalidRequestError(f"parameter {name}: a NUL byte cannot be part of it")
        values.append((name, value))
    return values


def required(values: Mapping[str, str], name: str) -> str:
    """Take a parameter; :class:`ValidationError` when it is not there."""
    if name not in values:
        raise bad_field(name, "is required")
    return values[name]


def boolean(values: Mapping[str, str], name: str, default: bool) -> bool:
    """Take ``true`` or ``false``; :class:`ValidationError` for anything else."""
    value = values.get(name)
    if value is None:
        return default
    if value not in ("true", "false"):
        raise bad_field(name, "must be true or false")
    return value == "true"


def number(values: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    """Take a whole number in decimal digits; :class:`ValidationError` for anything else."""
    value = values.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) <= 16 and low <= int(value) <= high):
        raise bad_field(name, f"must be a whole number from {low} to {high}")
    return int(value)


def parameter(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """Describe a parameter of the query for the OpenAPI document; one with a default is optional."""
    return {
        "name": name,
        "in": "query",
        "required": "default" not in schema,
        "description": description,
        "schema": {"type": "string", **schema},
    }


def _decoded(part: bytes) -> str:
    return unquote_to_bytes(part.replace(b"+", b" ")).decode("utf-8", "surrogateescape")


def bad_field(name: str, problem: str) -> ValidationError:
    """Make the error that names one field."""
    return ValidationError(f"{name[:200]}: {problem}", details={"fields": [{"field": name[:200], "problem": problem}]})
