"""Known failures that belong to a technology and not to one backend, by isolation class; each with its reason.

They are strict: one that passes fails the run. A backend's own stand on it, in ``Backend.known_failures``.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent_sandbox.backends.base import Backend

BY_ISOLATION: Mapping[str, Mapping[str, str]] = {}


def known_failures(backend: Backend) -> Mapping[str, str]:
    """Why each check, ``test_name`` or ``test_name[parameter]``, is known to fail on this backend."""
    return {**BY_ISOLATION.get(backend.capabilities.isolation, {}), **backend.known_failures}
