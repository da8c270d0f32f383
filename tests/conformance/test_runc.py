"""The embedded backend keeps the contract, passes the faults and refuses the escapes. Needs root and runc."""

import pathlib

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.oci import OciBackend
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


class Runc:
    """The factory."""

    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        return OciBackend(load_settings({"data_dir": tmp_path / "data"}, {}))

    def make_backend_with_daemon(self, tmp_path: pathlib.Path, daemon: pathlib.Path) -> Backend:
        return OciBackend(load_settings({"data_dir": tmp_path / "data", "sandboxd": str(daemon)}, {}))


@pytest.mark.real
class TestRunc(Runc, BackendSuite, CommandSuite, FileSuite, SnapshotSuite, LimitSuite, NetworkSuite, EscapeSuite):
    """A first sandbox."""


@pytest.mark.real
class TestRuncGuest(Runc, ExecObjectSuite, ExecTreeSuite, FileOperationSuite, LargeFileSuite, TunnelSuite):
    """Everything else that its daemon does."""


@pytest.mark.real
class TestRuncChecklist(Runc, ChecklistSuite, NoCheckpointSuite):
    """What the checklist asks beside."""


@pytest.mark.real
class TestRuncLayers(Runc, LayerSuite):
    """Workspaces that begin as a state of the store."""


@pytest.mark.real
class TestRuncCopies(Runc, LayerSuite):
    """The same where the kernel or the rights do not allow overlays, which a setting asks for here."""

    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        return OciBackend(load_settings({"data_dir": tmp_path / "data", "workspaces": "copy"}, {}))
