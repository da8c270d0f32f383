"""The registry of backends: the built-in ones, and those that other distributions offer.

A distribution offers a backend by an entry point in the group ``agent_sandbox.backends``: a callable that takes the
:class:`~agent_sandbox.config.Settings` and returns a :class:`~agent_sandbox.backends.base.Backend`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points

from agent_sandbox.backends.base import Backend
from agent_sandbox.config import Settings
from agent_sandbox.errors import InvalidRequestError

GROUP = "agent_sandbox.backends"
BUILT_IN = {
    "docker": "agent_sandbox.backends.docker:DockerBackend",
    "qemu": "agent_sandbox.backends.microvm:MicrovmBackend",
    "firecracker": "agent_sandbox.backends.microvm:FirecrackerBackend",
    "fake": "agent_sandbox.backends.fake:FakeBackend",
    "runc": "agent_sandbox.backends.oci:OciBackend",
    "gvisor": "agent_sandbox.backends.oci:GvisorBackend",
}


def backend_names() -> list[str]:
    """Every name that ``BACKENDS`` may hold here."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def make_backends(settings: Settings) -> dict[str, Backend]:
    """Make the backends that the settings name, in their order, not yet started; the first is the default.

    Raises :class:`InvalidRequestError` for a name that nobody offers.
    """
    return {name: _factory(name)(settings) for name in settings.backends}


def _factory(name: str) -> Callable[[Settings], Backend]:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        factory: Callable[[Settings], Backend] = getattr(importlib.import_module(module), attribute)
        return factory
    for point in entry_points(group=GROUP, name=name):
        loaded: Callable[[Settings], Backend] = point.load()
        return loaded
    raise InvalidRequestError(f"there is no backend {name!r}; known here: {', '.join(backend_names())}")
