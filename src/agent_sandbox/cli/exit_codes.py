"""Exit codes: the one table from error codes to numbers.

``run``, ``exec`` and ``shell`` end with the command's own code, so every error of ours is 125 there, as in other
container tools.
When adding an error code to ``errors.py`` or the SDK, give it a row here: a test asks for one.
"""

from __future__ import annotations

from agent_sandbox.errors import BackendError, ForbiddenError, SandboxError

OK = 0
FAILED = 1
USAGE = 2
OURS = 125
"""What ``run``, ``exec`` and ``shell`` end with when the failure is ours and not the command's."""
NOT_WRITTEN = 122
"""``run --pull-changes`` without ``--yes``, where nobody can be asked: nothing was written."""
CONFLICTS = 123
"""``run --pull-changes``: some of it could not be written, since it was changed here meanwhile."""
BROKEN_PIPE = 141


class NeedsRootError(ForbiddenError):
    """The command works on this machine's sandboxes directly, which takes root in this version."""

    code = "needs_root"


class LocalServerError(BackendError):
    """The local server could not be started or stopped; ``details`` may hold the name of its log and the last lines."""

    code = "local_server"


BY_CODE: dict[str, int] = {
    "invalid_request": 64,
    "validation_error": 65,
    "unauthorized": 66,
    "forbidden": 67,
    "not_found": 68,
    "conflict": 69,
    "payload_too_large": 70,
    "limit_exceeded": 71,
    "unsupported": 72,
    "backend_error": 73,
    "transport": 74,
    "unreachable": 75,
    "reply_lost": 76,
    "needs_root": 77,
    "local_server": 78,
    "store_error": 79,
    "store_damaged": 80,
    "store_version": 81,
    "store_busy": 82,
    "store_full": 83,
}

_MEANINGS = {
    "transport": "the server could not be talked to",
    "unreachable": "no server answers, nothing was done",
    "reply_lost": "the connection broke, whether it was done is unknown",
    "needs_root": "root is needed",
    "local_server": "the local server cannot be started or stopped",
    "store_error": "the versioned store could not do its work",
    "store_damaged": "bytes that the store kept are not what was written",
    "store_version": "the store was made by a newer version, nothing was touched",
    "store_busy": "another process holds the store",
    "store_full": "the disk of the store is full",
}
_OTHERS = {
    OK: "done",
    FAILED: "a check failed (doctor, quickstart), or a local file cannot be used",
    USAGE: "wrong usage",
    OURS: "run, exec and shell only: the error is ours, not the command's",
    NOT_WRITTEN: "run --pull-changes only: nobody could be asked, nothing was written",
    CONFLICTS: "run --pull-changes only: what was changed here meanwhile was not written",
    130: "interrupted",
    BROKEN_PIPE: "the reader of the output has gone",
    143: "terminated",
}


def describe() -> list[tuple[int, str]]:
    """Return every exit code with its meaning, for ``--help`` and the reference page."""
    return sorted({**_OTHERS, **{number: _MEANINGS.get(code, code) for code, number in BY_CODE.items()}}.items())


HELP = (
    "Exit codes: "
    + "; ".join(f"{number} {meaning}" for number, meaning in describe())
    + ". run, exec and shell end with the command's own code (128 + signal when one killed it)."
)


def of(error: SandboxError) -> int:
    """Return the exit code of an error: by its code, or by that of the nearest class above it with a known one."""
    for code in (error.code, *(vars(kind).get("code", "") for kind in type(error).__mro__)):
        if code in BY_CODE:
            return BY_CODE[code]
    return BY_CODE[SandboxError.code]
