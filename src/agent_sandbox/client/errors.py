"""What a client can meet: the server's errors as their own classes, and trouble on the way to it.

::

    SandboxError
    ├── SandboxAPIError                 the server answered with an error; ``status_code`` says which
    │   └── one class for each code, which is also the class of that code in ``agent_sandbox.errors``
    └── TransportError
        ├── ServerUnreachableError      nobody answered; nothing was done
        └── ReplyLostError              the connection broke; whether it was done is unknown

So ``except NotFoundError`` works with the classes of :mod:`agent_sandbox.errors`, and ``except SandboxAPIError``
catches every answer of the server. A code that this client does not know is a ``BackendError``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agent_sandbox import errors
from agent_sandbox.errors import SandboxError

URL_VARIABLE = "AGENT_SANDBOX_URL"

MAX_UNSHAPED_TEXT = 500
"""Characters quoted from a reply that has not the error shape, such as a proxy's page."""


class SandboxAPIError(SandboxError):
    """The server answered with an error: ``status_code``, ``code``, ``message`` and ``details`` are its own."""

    def __init__(self, status_code: int, code: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        SandboxError.__init__(self, message, details=details)
        self.status_code = status_code
        self.code = code

    def __str__(self) -> str:
        return f"{self.status_code} {self.code}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return api_error, (self.status_code, self.code, self.message, self.details)


class TransportError(SandboxError):
    """The server could not be talked to."""

    code = "transport"


class ServerUnreachableError(TransportError):
    """Nobody answers at the address; nothing was done."""

    code = "unreachable"


def unreachable(address: str, error: object) -> ServerUnreachableError:
    """Say that nobody answers at an address, with the remedy."""
    why = str(error) or type(error).__name__
    return ServerUnreachableError(
        f"no server answers at {address} ({why}); start one with `agent-sandbox serve`, or set {URL_VARIABLE}"
    )


class ReplyLostError(TransportError):
    """The connection broke, or (``timed_out``) the answer took too long: whether it was carried out is unknown."""

    code = "reply_lost"

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class _UnsupportedAPIError(SandboxAPIError, errors.UnsupportedError):
    def __init__(self, status_code: int, code: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        SandboxAPIError.__init__(self, status_code, code, message, details)
        self.capability = str(self.details.get("capability", ""))
        self.backend = str(self.details.get("backend", ""))


def _both(cls: type[SandboxError]) -> type[SandboxAPIError]:
    return type(cls.__name__, (SandboxAPIError, cls), {"__doc__": cls.__doc__, "__module__": __name__})


BY_CODE: Mapping[str, type[SandboxAPIError]] = {
    "unsupported": _UnsupportedAPIError,
    **{
        cls.code: _both(cls)
        for cls in (
            errors.InvalidRequestError,
            errors.ValidationError,
            errors.UnauthorizedError,
            errors.ForbiddenError,
            errors.NotFoundError,
            errors.ConflictError,
            errors.PayloadTooLargeError,
            errors.LimitExceededError,
            errors.BackendError,
            errors.StoreError,
            errors.StoreDamagedError,
            errors.StoreVersionError,
            errors.StoreBusyError,
            errors.StoreFullError,
        )
    },
}


def api_error(status_code: int, code: str, message: str, details: Mapping[str, Any] | None = None) -> SandboxAPIError:
    """Make the error of a code; the class of ``backend_error`` for a code that this client does not know."""
    return BY_CODE.get(code, BY_CODE["backend_error"])(status_code, code, message, details)


def from_reply(status_code: int, body: bytes) -> SandboxAPIError:
    """Read an error reply, whatever it holds."""
    try:
        error = json.loads(body)["error"]
        code, message, details = error["code"], error["message"], error.get("details") or {}
        if isinstance(code, str) and isinstance(message, str) and isinstance(details, dict):
            return api_error(status_code, code, message, details)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    text = body[: 4 * MAX_UNSHAPED_TEXT].decode("utf-8", "replace")[:MAX_UNSHAPED_TEXT]
    return api_error(status_code, "http_error", text or "the reply was empty")


def from_last_line(data: str) -> SandboxAPIError:
    """Read the last line of a stream that broke: ``CODE: MESSAGE``. Its status had been sent: 200."""
    code, colon, message = data.partition(": ")
    return api_error(200, code, message) if colon else api_error(200, "http_error", data)
