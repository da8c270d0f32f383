"""MicroVMs keep the contract and refuse the escapes. Needs root and QEMU, emulated here, or Firecracker
(``tests/nested``)."""

import pathlib

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.config import load_settings
from agent_sandbox.conformance import (
    BackendSuite,
    ChecklistSuite,
    CheckpointSuite,
    EscapeSuite,
    LayerSuite,
    LimitSuite,
    NetworkSuite,
)
from tests import microvms


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
        return microvms.make_backend(load_settings(told, {}))


@pytest.mark.real
class TestMicrovm(Microvm, BackendSuite, LimitSuite, NetworkSuite, EscapeSuite):
    """What is the machine's own. Commands, files and tunnels are its daemon's, asked on runc, and here by the kit."""

    # Emulated it takes minutes, all of them in the guest's own kernel.
    test_f35_an_export_of_too_many_names_fails_and_hurts_nobody = None  # type: ignore[assignment]
    test_f35_socket_buffers = None  # type: ignore[assignment]


@pytest.mark.real
class TestMicrovmChecklist(Microvm, ChecklistSuite):
    """What the checklist asks beside."""


@pytest.mark.real
class TestMicrovmLayers(Microvm, LayerSuite):
    """Workspaces that begin as a state of the store."""


@pytest.mark.real
class TestMicrovmCheckpoints(Microvm, CheckpointSuite):
    """Machines that go on from a snapshot."""
