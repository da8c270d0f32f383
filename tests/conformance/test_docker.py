"""The Docker backend keeps the contract, passes the faults and refuses the escapes. Needs root and a Docker engine."""

import pathlib
from typing import ClassVar

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.docker import DockerBackend
from agent_sandbox.config import load_settings
from agent_sandbox.conformance import (
    BackendSuite,
    ChecklistSuite,
    CommandSuite,
    EscapeSuite,
    ExecObjectSuite,
    ExecTreeSuite,
    FileOperationSuite,
    FileSuite,
    LargeFileSuite,
    LayerSuite,
    LimitSuite,
    NetworkSuite,
    NoCheckpointSuite,
    SnapshotSuite,
    TunnelSuite,
)


class Docker:
    """The factory."""

    settings: ClassVar[dict[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _engine(self, docker_host: str) -> None:
        self.docker_host = docker_host

    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        return self._made(tmp_path)

    def make_backend_with_daemon(self, tmp_path: pathlib.Path, daemon: pathlib.Path) -> Backend:
        return self._made(tmp_path, sandboxd=str(daemon))

    def _made(self, tmp_path: pathlib.Path, **more: str) -> Backend:
        values = {"data_dir": tmp_path / "data", "docker_host": self.docker_host, **self.settings, **more}
        return DockerBackend(load_settings(values, {}))


@pytest.mark.real
class TestDocker(Docker, BackendSuite, CommandSuite, FileSuite, SnapshotSuite, LimitSuite, NetworkSuite, EscapeSuite):
    """A first sandbox."""


@pytest.mark.real
class TestDockerGuest(Docker, ExecObjectSuite, ExecTreeSuite, FileOperationSuite, LargeFileSuite, TunnelSuite):
    """Everything else that its daemon does."""


@pytest.mark.real
class TestDockerChecklist(Docker, ChecklistSuite, NoCheckpointSuite):
    """What the checklist asks beside."""


@pytest.mark.real
class TestDockerLayers(Docker, LayerSuite):
    """Workspaces that begin as a state of the store."""
