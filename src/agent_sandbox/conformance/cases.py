"""The suites over a backend that the settings name: what ``agent-sandbox conformance`` runs.

The backend is made as ``serve`` would make it, but each check gets a data directory of its own, so that a server which
runs here is not touched.
"""

from __future__ import annotations

import pathlib
from typing import ClassVar

from agent_sandbox.backends import make_backends
from agent_sandbox.backends.base import Backend
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
    NoCheckpointSuite,
    NoLayerSuite,
    SnapshotSuite,
    SuiteBase,
    TunnelSuite,
)


class FromSettings(SuiteBase):
    """The factory; the runner sets ``backend_name``, and ``spec`` for the image that was asked for."""

    backend_name: ClassVar[str] = ""

    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        return made(self.backend_name, tmp_path)

    def make_backend_with_daemon(self, tmp_path: pathlib.Path, daemon: pathlib.Path) -> Backend | None:
        return made(self.backend_name, tmp_path, sandboxd=str(daemon))


def made(name: str, directory: pathlib.Path, **settings: str) -> Backend:
    """A backend by its name, not yet started, with its state beneath ``directory`` and all else from the settings.

    Guest kernels and root disks are the server's own: what microVMs start from is made once and never changed.
    """
    machines = str(load_settings().machine_directory())
    told = {"data_dir": directory / "data", "backends": [name], "machine_dir": machines, **settings}
    return make_backends(load_settings(told))[name]


class TestMethods(FromSettings, BackendSuite): ...


class TestChecklist(FromSettings, ChecklistSuite): ...


class TestCommands(FromSettings, CommandSuite): ...


class TestFiles(FromSettings, FileSuite): ...


class TestSnapshots(FromSettings, SnapshotSuite): ...


class TestLimits(FromSettings, LimitSuite): ...


class TestNetwork(FromSettings, NetworkSuite): ...


class TestEscapes(FromSettings, EscapeSuite): ...


class TestExecObjects(FromSettings, ExecObjectSuite): ...


class TestExecTrees(FromSettings, ExecTreeSuite): ...


class TestFileOperations(FromSettings, FileOperationSuite): ...


class TestLargeFiles(FromSettings, LargeFileSuite): ...


class TestTunnels(FromSettings, TunnelSuite): ...


class TestLayers(FromSettings, LayerSuite): ...


class TestNoLayers(FromSettings, NoLayerSuite): ...


class TestCheckpoints(FromSettings, CheckpointSuite): ...


class TestNoCheckpoints(FromSettings, NoCheckpointSuite): ...
