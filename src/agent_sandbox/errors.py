"""One tree of errors, each with a stable code.

::

    SandboxError                 code                raised when
    ├── InvalidRequestError      invalid_request     the caller asked for something that cannot be right
    ├── ValidationError          validation_error    a field has the wrong name, type or range
    ├── UnauthorizedError        unauthorized        no key, or an unknown one
    ├── ForbiddenError           forbidden           policy, or the rights of the sandbox user, do not allow it
    ├── NotFoundError            not_found           there is no such sandbox, snapshot, image or file
    ├── ConflictError            conflict            it is in a state, or changes while, this cannot be done
    ├── PayloadTooLargeError     payload_too_large   above a limit of size
    ├── LimitExceededError       limit_exceeded      a quota or the sandbox's own budget is used up
    ├── UnsupportedError         unsupported         the backend does not have the capability; nothing was done
    ├── BackendError             backend_error       the isolation technology or the guest failed
    │   └── ConnectionLostError  backend_error       the wire to a guest broke; what it was doing is unknown
    └── StoreError               store_error         the versioned store could not do its work
        ├── StoreDamagedError    store_damaged       bytes that it kept are not what was written
        ├── StoreVersionError    store_version       it was made by a newer version; nothing was touched
        ├── StoreBusyError       store_busy          another process holds it, for longer than was waited
        └── StoreFullError       store_full          its disk is full; nothing acknowledged was lost

The first groups say "you asked for the wrong thing"; :class:`BackendError` says "the other side misbehaved".
HTTP status codes live in ``server/errors.py`` and exit codes in ``cli``: this module knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SandboxError(Exception):
    """Base of every error that reaches a user. ``message`` is one sentence with the remedy where there is one."""

    code = "backend_error"

    def __init__(self, message: str, *, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = dict(details or {})


class InvalidRequestError(SandboxError):
    """The request cannot be right, whatever the state of the server."""

    code = "invalid_request"


class ValidationError(SandboxError):
    """A field of the request is unknown, has the wrong type, or is out of its range."""

    code = "validation_error"


class UnauthorizedError(SandboxError):
    """The request carries no key, or one that the server does not know."""

    code = "unauthorized"


class ForbiddenError(SandboxError):
    """The server's policy, or the rights of the sandbox user, do not allow the request."""

    code = "forbidden"


class NotFoundError(SandboxError):
    """The named thing does not exist, or no longer does."""

    code = "not_found"


class ConflictError(SandboxError):
    """The thing is in a state in which this cannot be done."""

    code = "conflict"


class PayloadTooLargeError(SandboxError):
    """A body, file, archive or listing is above its limit."""

    code = "payload_too_large"


class LimitExceededError(SandboxError):
    """A quota of the server or a budget of the sandbox (processes, memory, disk) is used up."""

    code = "limit_exceeded"


class UnsupportedError(SandboxError):
    """The backend lacks a capability. Raised before any effect."""

    code = "unsupported"

    def __init__(self, capability: str, backend: str, reason: str = "") -> None:
        message = f"backend {backend!r} does not support {capability}"
        if reason:
            message += f": {reason}"
        super().__init__(message, details={"capability": capability, "backend": backend})
        self.capability = capability
        self.backend = backend


class BackendError(SandboxError):
    """The isolation technology or the guest failed; the message says what to do about it."""

    code = "backend_error"


class ConnectionLostError(BackendError):
    """The wire to the guest broke in the middle of an operation, whose outcome is unknown."""


class StoreError(SandboxError):
    """The versioned store could not do its work; what it had acknowledged is there."""

    code = "store_error"


class StoreDamagedError(StoreError):
    """Bytes that the store kept are not what was written: a damaged pack, index or object."""

    code = "store_damaged"


class StoreVersionError(StoreError):
    """The store was made by a newer version. Raised before anything is written."""

    code = "store_version"


class StoreBusyError(StoreError):
    """Another process holds the store for longer than the caller wanted to wait."""

    code = "store_busy"


class StoreFullError(StoreError):
    """The disk of the store is full, or its quota used up; everything acknowledged is there."""

    code = "store_full"
