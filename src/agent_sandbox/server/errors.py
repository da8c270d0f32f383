"""The one table from error classes to HTTP statuses, and the one shape in which every error leaves the server.

Nothing else knows a status. An error that no table row covers is a fault of ours: the caller gets 500 with a number
under which the log holds the rest, and not a word of the exception.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from agent_sandbox import errors
from agent_sandbox.models import ErrorReply
from agent_sandbox.server.codec import JsonReply

log = logging.getLogger("agent_sandbox.server")

# When adding an error class to errors.py: add its row here, or its parent's status is used.
STATUS: Mapping[type[errors.SandboxError], int] = {
    errors.InvalidRequestError: 400,
    errors.UnauthorizedError: 401,
    errors.ForbiddenError: 403,
    errors.NotFoundError: 404,
    errors.ConflictError: 409,
    errors.PayloadTooLargeError: 413,
    errors.ValidationError: 422,
    errors.LimitExceededError: 429,
    errors.UnsupportedError: 501,
    errors.BackendError: 502,
    errors.StoreError: 500,
    errors.StoreBusyError: 503,
    errors.StoreFullError: 507,
    errors.SandboxError: 502,
}

INTERNAL_STATUS, INTERNAL_CODE = 500, "internal_error"

_HTTP_CODES = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "payload_too_large",
    416: "invalid_request",
    431: "payload_too_large",
}

_MEANINGS = {
    400: "The request cannot be right (`invalid_request`).",
    401: "No key, or an unknown one (`unauthorized`).",
    403: "The server's policy does not allow it (`forbidden`).",
    404: "No such sandbox, snapshot, image or file (`not_found`).",
    409: "The state of the thing does not allow it now (`conflict`).",
    413: "Above a limit of size (`payload_too_large`).",
    416: "The range begins behind the end of the file (`invalid_request`); `Content-Range` tells its size.",
    422: "A field is unknown, missing, of a wrong type or out of range (`validation_error`).",
    429: "A quota, or the sandbox's own budget, is used up (`limit_exceeded`).",
    500: "A fault of the server (`internal_error`) or of its store (`store_error`, `store_damaged`, `store_version`).",
    501: "The backend does not have the capability (`unsupported`).",
    502: "The isolation technology or the guest failed (`backend_error`).",
    503: "No backend answers (`backend_error`), or another process holds the store (`store_busy`).",
    507: "The disk of the store is full (`store_full`).",
}

MAX_PROBLEMS = 20
"""Problems listed in one reply to a bad body: enough for a person, small whatever the body."""


class BodyTooLarge(HTTPException):
    """The body of a request is above its bound; an ``HTTPException``, since frameworks hand those on from a read."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the body is larger than {limit} bytes")


def status_of(error: errors.SandboxError) -> int:
    """Look up the status of an error by its class, or the nearest parent with a row."""
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def reply(
    status: int,
    code: str,
    message: str,
    *,
    details: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Make the error reply: ``{"error": {"code", "message", "details"?}}``."""
    body: dict[str, Any] = {"code": code, "message": message}
    if details:
        body["details"] = dict(details)
    return JsonReply({"error": body}, status=status, headers=headers)


def for_error(error: errors.SandboxError, *, status: int | None = None) -> Response:
    """Make the reply of a typed error."""
    status = status or status_of(error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return reply(status, error.code, error.message, details=error.details, headers=headers)


def for_http(error: HTTPException) -> Response:
    """Make the reply of the framework's own errors: unknown route, wrong method, unreadable body."""
    default = "invalid_request" if error.status_code < 500 else INTERNAL_CODE
    code = _HTTP_CODES.get(error.status_code, default)
    return reply(error.status_code, code, str(error.detail), headers=error.headers)


def for_crash(error: BaseException) -> Response:
    """Log an error that nobody foresaw under a number, and make a reply that says the number alone."""
    number = secrets.token_hex(4)
    log.error("unexpected error %s", number, exc_info=error)
    message = f"the server failed unexpectedly; its log has the details under {number}"
    return reply(INTERNAL_STATUS, INTERNAL_CODE, message, details={"id": number})


def from_problems(problems: Iterable[Mapping[str, Any]]) -> errors.ValidationError:
    """Turn the validator's list of problems into one error that names each field."""
    fields = []
    for problem in list(problems)[:MAX_PROBLEMS]:
        path = [str(part) for part in problem["loc"] if part not in ("body", "query", "path")]
        fields.append({"field": ".".join(path)[:200], "problem": _in_words(problem)})
    shown = "; ".join(f"{item['field'] or 'body'}: {item['problem']}" for item in fields)
    return errors.ValidationError(shown or "the request is not valid", details={"fields": fields})


def _in_words(problem: Mapping[str, Any]) -> str:
    kind, text = str(problem["type"]), str(problem["msg"])
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return "unknown field"
    if kind == "missing":
        return "is required"
    if kind == "json_invalid":
        return f"not JSON ({problem.get('ctx', {}).get('error', 'malformed')} at position {problem['loc'][-1]})"
    if kind.startswith("dataclass_") and isinstance(problem.get("input"), bytes):
        return "must be sent with Content-Type: application/json"
    if kind.startswith("dataclass_"):
        return "must be a JSON object"
    return text.removeprefix("Value error, ")[:300]


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe error replies for the OpenAPI document; every route has 500, and 401 where it needs a key."""
    return {status: {"model": ErrorReply, "description": _MEANINGS[status]} for status in sorted({*statuses, 500})}


def common(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the error replies of a route that needs a key and asks a backend."""
    return documented(400, 401, 403, 413, 422, 502, *statuses)


async def handle_typed(request: Request, error: Exception) -> Response:
    """Answer a :class:`SandboxError`."""
    assert isinstance(error, errors.SandboxError)
    return for_error(error)


async def handle_http(request: Request, error: Exception) -> Response:
    """Answer an error of the framework."""
    assert isinstance(error, HTTPException)
    if error.detail in ("Not Found", "Method Not Allowed"):  # the router's own words, of a status alone
        method, path = request.method, request.scope["path"][:200]
        known = error.status_code == 405
        error.detail = f"{path} takes no {method}" if known else f"there is no route {method} {path}; see /docs"
    return for_http(error)


async def handle_invalid(request: Request, error: Exception) -> Response:
    """Answer a body or parameter that does not fit its shape."""
    problems: Sequence[Mapping[str, Any]] = error.errors()  # type: ignore[attr-defined]
    return for_error(from_problems(problems))
