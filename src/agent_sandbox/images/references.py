"""How images are named. Pure.

A name is lower-case letters, digits and ``. _ / -``, with an optional ``:tag``. A reference is a name, a name with
``@sha256:…``, which asks for exactly this content, or ``sha256:…`` alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agent_sandbox.errors import InvalidRequestError

HOST = "host"
"""The image that is the host's own programs."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._/-]{0,127}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference; at least one part is not empty."""

    name: str
    digest: str


def parse_reference(text: str) -> Reference:
    """Take a reference apart. :class:`InvalidRequestError` when it is none."""
    if text.startswith("sha256:"):
        return Reference("", check_digest(text))
    name, at, digest = text.partition("@")
    return Reference(check_name(name), check_digest(digest) if at else "")


def check_name(name: str) -> str:
    """Return ``name`` when it can name an image; :class:`InvalidRequestError` else."""
    if not _NAME.fullmatch(name) or ".." in name or "//" in name:
        raise InvalidRequestError(
            f"{name[:140]!r} is not an image name: lower-case letters, digits and ._/- with an optional :tag"
        )
    return name


def check_digest(digest: str) -> str:
    """Return ``digest`` when it is one; :class:`InvalidRequestError` else."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequestError(f"{digest[:80]!r} is not an image digest (sha256: and 64 hexadecimal digits)")
    return digest
