"""The embedded backend keeps the contract, passes the faults and refuses the escapes. Needs root and runc."""

import pathlib

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.config import load_settings
from agent_sandbox.conformance import (
    BackendSuite,
    CommandSuite,
    EscapeSuite,
    FileSuite,
    LimitSuite,
    NetworkSuite,
    SnapshotSuite,
)


@pytest.mark.real
class TestRunc(BackendSuite, CommandSuite, FileSuite, SnapshotSuite, LimitSuite, NetworkSuite, EscapeSuite):
    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        return OciBackend(load_settings({"data_dir": tmp_path / "data"}, {}))
