"""The gvisor backend keeps the contract, passes the faults and refuses the escapes. Needs root and runsc."""

import pathlib

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.oci import GvisorBackend
from agent_sandbox.config import load_settings
from agent_sandbox.conformance import (
    BackendSuite,
    ChecklistSuite,
    CheckpointSuite,
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
    SnapshotSuite,
    TunnelSuite,
)


class Gvisor:
    """The factory."""

    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        return GvisorBackend(load_settings({"data_dir": tmp_path / "data"}, {}))

    def make_backend_with_daemon(self, tmp_path: pathlib.Path, daemon: pathlib.Path) -> Backend:
        return GvisorBackend(load_settings({"data_dir": tmp_path / "data", "sandboxd": str(daemon)}, {}))


@pytest.mark.real
class TestGvisor(Gvisor, BackendSuite, CommandSuite, FileSuite, SnapshotSuite, LimitSuite, NetworkSuite, EscapeSuite):
    """A first sandbox."""


@pytest.mark.real
class TestGvisorGuest(Gvisor, ExecObjectSuite, ExecTreeSuite, FileOperationSuite, LargeFileSuite, TunnelSuite):
    """Everything else that its daemon does."""

    # A thousand commands take a minute there, and what keeps them is the daemon, which is asked on runc.
    test_only_the_newest_thousand_that_ended_are_kept = None  # type: ignore[assignment]


@pytest.mark.real
class TestGvisorChecklist(Gvisor, ChecklistSuite):
    """What the checklist asks beside."""


@pytest.mark.real
class TestGvisorLayers(Gvisor, LayerSuite):
    """Workspaces that begin as a state of the store."""


@pytest.mark.real
class TestGvisorCheckpoints(Gvisor, CheckpointSuite):
    """Processes that go on from a snapshot."""
