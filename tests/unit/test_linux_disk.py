"""What is read of a disk image without mounting it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agent_sandbox.backends.linux.disk import Templates, clone, met_errors


@pytest.fixture
def image(tmp_path: Path) -> Path:
    made = tmp_path / "disk.img"
    clone(Templates(tmp_path / "templates").get(16), made)
    return made


def debugfs(image: Path, command: str) -> None:
    subprocess.run(["/sbin/debugfs", "-w", "-R", command, image], check=True, capture_output=True)


def test_a_file_system_that_met_errors_says_so_until_it_is_mended(image: Path) -> None:
    assert not met_errors(image)
    debugfs(image, "set_super_value state 3")
    assert met_errors(image)
    debugfs(image, "feature needs_recovery")
    assert met_errors(image)
    debugfs(image, "feature -needs_recovery")
    subprocess.run(["/sbin/e2fsck", "-p", "-f", image], capture_output=True, check=False)
    assert not met_errors(image)


@pytest.mark.parametrize("content", [b"", b"\xff" * 1100, b"\xff" * 4096])
def test_what_is_no_file_system_met_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "disk.img").write_bytes(content)
    assert not met_errors(tmp_path / "disk.img")
