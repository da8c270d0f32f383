"""Where no Firecracker can be jailed: where there are no devices or programs, or apart from what goes into the jail."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.backends.microvm.firecracker import FirecrackerMonitor
from agent_sandbox.backends.microvm.monitor import MachineSpec
from agent_sandbox.errors import BackendError

pytestmark = pytest.mark.real
USER = 1_900_000_000
"""Nobody's, and above every range of sandboxes."""


@contextlib.contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},size=1m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def spec(home: Path, kernel: Path) -> MachineSpec:
    files = {name: home / name for name in ("initrd", "root", "workspace", "config", "layers")}
    for path in (kernel, *files.values()):
        path.write_bytes(b"\x7fELF")
    (home / "run").mkdir()
    places = {"directory": home / "run", "jail": home / "jail"}
    return MachineSpec(kernel=kernel, **files, **places, memory_mb=16, vcpus=1, uid=USER, gid=USER)


@pytest.mark.parametrize(
    ("options", "words"), [("nodev", "nodev"), ("noexec", "noexec"), ("nodev,noexec", "nodev and")]
)
async def test_a_file_system_without_devices_or_programs_is_refused(tmp_path: Path, options: str, words: str) -> None:
    with mounted(tmp_path / "data", options) as home:
        machine = spec(home, home / "kernel")
        with pytest.raises(BackendError, match=f"mounted {words}.*put AGENT_SANDBOX_DATA_DIR on another"):
            await FirecrackerMonitor().start(machine)
        assert not machine.jail.exists()
        assert not list(machine.directory.iterdir())


async def test_a_kernel_on_another_file_system_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    with mounted(tmp_path / "other", "dev") as other:
        machine = spec(home, other / "kernel")
        with pytest.raises(BackendError, match=r"is on another file system.*AGENT_SANDBOX_MACHINE_DIR"):
            await FirecrackerMonitor().start(machine)
    assert not machine.jail.exists()
    assert not list(machine.directory.iterdir())
    assert machine.workspace.stat().st_nlink == 1
