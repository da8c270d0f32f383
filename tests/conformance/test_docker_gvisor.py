"""The Docker backend on runsc: the contract, the limits and every escape. Needs root, a Docker engine and runsc."""

from typing import ClassVar

import pytest

from agent_sandbox.conformance import (
    BackendSuite,
    EscapeSuite,
    LayerSuite,
    LimitSuite,
    NetworkSuite,
)
from tests.conformance.test_docker import Docker


class DockerOnRunsc(Docker):
    """The factory."""

    settings: ClassVar[dict[str, str]] = {"docker_runtime": "runsc"}


@pytest.mark.real
class TestDockerOnRunsc(DockerOnRunsc, BackendSuite, LimitSuite, NetworkSuite, EscapeSuite):
    """A first sandbox."""


@pytest.mark.real
class TestDockerOnRunscLayers(DockerOnRunsc, LayerSuite):
    """Workspaces that begin as a state of the store."""
