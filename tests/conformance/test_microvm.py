"""The qemu backend keeps the contract and refuses the escapes. Needs root, QEMU, and no KVM: emulated here."""

import pathlib

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.microvm import MicrovmBackend
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
    LimitSuite,
    NetworkSuite,
    NoLayerSuite,
    SnapshotSuite,
    TunnelSuite,
)


class Microvm:
    """The factory."""

    @pytest.fixture(autouse=True)
    def _machines(self, machine_dir: pathlib.Path) -> None:
        self.machine_dir = machine_dir

    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        return self._made(tmp_path)

    def make_backend_with_daemon(self, tmp_path: pathlib.Path, daemon: pathlib.Path) -> Backend:
        return self._made(tmp_path, sandboxd=str(daemon))

    def _made(self, tmp_path: pathlib.Path, **more: str) -> Backend:
        told = {"data_dir": tmp_path / "data", "machine_dir": str(self.machine_dir), "allow_tcg": True, **more}
        return MicrovmBackend(load_settings(told, {}))


@pytest.mark.real
class TestMicrovm(
    Microvm, BackendSuite, CommandSuite, FileSuite, SnapshotSuite, LimitSuite, NetworkSuite, EscapeSuite, NoLayerSuite
):
    """A first sandbox."""


@pytest.mark.real
class TestMicrovmGuest(Microvm, ExecObjectSuite, ExecTreeSuite, FileOperationSuite, LargeFileSuite, TunnelSuite):
    """Everything else that its daemon does."""


@pytest.mark.real
class TestMicrovmChecklist(Microvm, ChecklistSuite):
    """What the checklist asks beside."""
