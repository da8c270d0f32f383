"""The example of the backend author's guide passes the kit, is found by its entry point, and says what it lacks."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.config import Settings, load_settings
from agent_sandbox.conformance import (
    BackendSuite,
    ChecklistSuite,
    CommandSuite,
    EscapeSuite,
    ExecObjectSuite,
    ExecTreeSuite,
    FileOperationSuite,
    FileSuite,
    NetworkSuite,
    NoLayerSuite,
    SnapshotSuite,
    TunnelSuite,
)
from agent_sandbox.conformance.report import from_json
from agent_sandbox.errors import UnsupportedError

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "bubblewrap"


@functools.cache
def example() -> Callable[[Settings], Backend]:
    """What the entry point of the example names."""
    points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, value),) = points["agent_sandbox.backends"].items()
    assert name == "bubblewrap"
    sys.path.insert(0, str(EXAMPLE / "src"))
    found: Callable[[Settings], Backend] = EntryPoint(name, value, "agent_sandbox.backends").load()
    return found


class Bubblewrap:
    """The factory."""

    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        return example()(load_settings({"data_dir": tmp_path, "allow_unenforced": True}, {}))

    def make_backend_with_daemon(self, tmp_path: pathlib.Path, daemon: pathlib.Path) -> Backend:
        told = {"data_dir": tmp_path, "allow_unenforced": True, "sandboxd": str(daemon)}
        return example()(load_settings(told, {}))


@pytest.mark.real
class TestBubblewrap(Bubblewrap, BackendSuite, ChecklistSuite, CommandSuite, FileSuite, SnapshotSuite, NetworkSuite):
    """A first sandbox."""


@pytest.mark.real
class TestBubblewrapGuest(
    Bubblewrap, EscapeSuite, ExecObjectSuite, ExecTreeSuite, FileOperationSuite, NoLayerSuite, TunnelSuite
):
    """Refusals, and everything else that the daemon does."""


@pytest.mark.real
def test_the_command_finds_the_example_by_its_entry_point(tmp_path: pathlib.Path) -> None:
    installed = tmp_path / "packages"
    installed.mkdir()
    laid_out = subprocess.run([sys.executable, str(ROOT / "examples/install"), str(installed)], timeout=60)
    assert laid_out.returncode == 0
    environment = {**os.environ, "PYTHONPATH": str(installed), "AGENT_SANDBOX_ALLOW_UNENFORCED": "true"}
    words = ["--backend", "bubblewrap", "--only", "B1", "--only", "B14", "--json", f"{tmp_path}/run.json"]
    done = subprocess.run(
        [sys.executable, "-m", "agent_sandbox.cli", "conformance", *words],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = from_json((tmp_path / "run.json").read_text())
    rows = {row.item.id: row for row in told.rows()}
    assert (rows["B1"].verdict, rows["B14"].verdict) == ("pass", "unsupported")
    assert "memory: bubblewrap makes namespaces and no control groups" in rows["B14"].evidence
    assert told.versions["bubblewrap"][0].isdigit()


@pytest.mark.real
async def test_limits_that_it_cannot_keep_are_refused_unless_accepted(tmp_path: pathlib.Path) -> None:
    backend = example()(load_settings({"data_dir": tmp_path}, {}))
    await backend.start()
    with pytest.raises(UnsupportedError, match="AGENT_SANDBOX_ALLOW_UNENFORCED"):
        await backend.create("sbkit-1", BackendSuite.spec)
    assert await backend.list_ids() == []
    await backend.close()
