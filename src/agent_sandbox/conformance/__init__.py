"""The public kit: suites that prove a backend keeps the contract. Needs pytest; production never imports it."""

import pytest

_MODULES = (
    "box",
    "checkpoints",
    "commands",
    "diary",
    "execs",
    "files",
    "isolation",
    "layers",
    "operations",
    "requirements",
    "suite",
    "trees",
    "tunnels",
)
pytest.register_assert_rewrite(*(f"agent_sandbox.conformance.{name}" for name in _MODULES))

from agent_sandbox.conformance.checkpoints import CheckpointSuite, NoCheckpointSuite
from agent_sandbox.conformance.commands import CommandSuite
from agent_sandbox.conformance.execs import ExecObjectSuite
from agent_sandbox.conformance.files import FileSuite, SnapshotSuite
from agent_sandbox.conformance.isolation import EscapeSuite, LimitSuite, NetworkSuite
from agent_sandbox.conformance.layers import LayerSuite, NoLayerSuite
from agent_sandbox.conformance.operations import FileOperationSuite, LargeFileSuite
from agent_sandbox.conformance.requirements import ChecklistSuite
from agent_sandbox.conformance.suite import BackendSuite, SuiteBase
from agent_sandbox.conformance.trees import ExecTreeSuite
from agent_sandbox.conformance.tunnels import TunnelSuite

__all__ = [
    "BackendSuite",
    "ChecklistSuite",
    "CheckpointSuite",
    "CommandSuite",
    "EscapeSuite",
    "ExecObjectSuite",
    "ExecTreeSuite",
    "FileOperationSuite",
    "FileSuite",
    "LargeFileSuite",
    "LayerSuite",
    "LimitSuite",
    "NetworkSuite",
    "NoCheckpointSuite",
    "NoLayerSuite",
    "SnapshotSuite",
    "SuiteBase",
    "TunnelSuite",
]
