"""The public kit: suites that prove a backend keeps the contract. Needs pytest; production never imports it."""

import pytest

pytest.register_assert_rewrite(
    *(f"agent_sandbox.conformance.{name}" for name in ("box", "commands", "files", "isolation", "suite"))
)

from agent_sandbox.conformance.commands import CommandSuite
from agent_sandbox.conformance.files import FileSuite, SnapshotSuite
from agent_sandbox.conformance.isolation import EscapeSuite, LimitSuite, NetworkSuite
from agent_sandbox.conformance.suite import BackendSuite, SuiteBase

__all__ = [
    "BackendSuite",
    "CommandSuite",
    "EscapeSuite",
    "FileSuite",
    "LimitSuite",
    "NetworkSuite",
    "SnapshotSuite",
    "SuiteBase",
]
