"""Fixtures that several folders of tests use."""

from collections.abc import Iterator

import pytest

from tests import dockerd


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """The address of a Docker engine that runs for these tests, as ``AGENT_SANDBOX_DOCKER_HOST`` takes it."""
    with dockerd.engine() as host:
        yield host
