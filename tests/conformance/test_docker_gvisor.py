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
from agent_sandbox.conformance.box import Box
from agent_sandbox.errors import BackendError
from tests.conformance.test_docker import Docker


class DockerOnRunsc(Docker):
    """The factory."""

    settings: ClassVar[dict[str, str]] = {"docker_runtime": "runsc"}


@pytest.mark.real
class TestDockerOnRunsc(DockerOnRunsc, BackendSuite, LimitSuite, NetworkSuite, EscapeSuite):
    """A first sandbox."""

    async def test_f35_processes_used_up_is_a_typed_error_and_passes(self, box: Box) -> None:
        """gVisor lets many that fork at once pass its limit of processes, and they may then pass that of memory.

        So the bomb ends by its deadline or with its whole sandbox, whichever the machine is fast enough for; what must
        hold is that it is told, that it hurts nobody else, and that the sandbox is there again with its workspace.
        """
        other = await self.new_box(box.backend)
        await box.put("f", b"kept")
        bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
        try:
            assert (await box.python(bomb, timeout=5)).exit.timed_out
        except BackendError:
            assert not await box.backend.is_running(box.id)
        assert await other.shell("echo fine") == "fine\n"
        await box.backend.stop_environment(box.id)
        await box.backend.start_environment(box.id)
        assert await box.get("f") == b"kept"


@pytest.mark.real
class TestDockerOnRunscLayers(DockerOnRunsc, LayerSuite):
    """Workspaces that begin as a state of the store."""
