"""Removing and measuring trees that are deeper than Python's stack, and than a path may be long."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.store.trees import disk_bytes, remove_tree


def deep(at: Path, name: str, depth: int) -> None:
    """Make directories inside each other, by descriptors, and a file in the last one."""
    at.mkdir()
    here = os.open(at, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize("name", ["d", "n" * 255])
def test_deep_trees_are_measured_and_go(tmp_path: Path, name: str) -> None:
    tree = tmp_path / "tree"
    deep(tree, name, 1_000)
    counted = subprocess.run(["du", "-s", "--block-size=1", tree], capture_output=True, check=True).stdout.split()[0]
    assert disk_bytes(tree) == int(counted)
    remove_tree(tree)
    assert not tree.exists()


def test_what_links_lead_to_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o750)
    (outside / "kept").write_text("kept")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(outside)
    (tmp_path / "top").symlink_to(tree)
    remove_tree(tmp_path / "top")
    assert (tree / "link").is_symlink()
    remove_tree(tree)
    assert not tree.exists()
    assert (outside / "kept").read_text() == "kept"
    assert stat.S_IMODE(outside.stat().st_mode) == 0o750


def test_rights_that_the_owner_took_from_himself_hold_nothing_back(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").touch()
    for place, mode in (("a/b", 0), ("a", 0o500), ("", 0o500)):
        (tree / place).chmod(mode)
        if os.getuid() == 0:
            os.chown(tree / place, 65_534, 65_534)
    tmp_path.chmod(0o777)
    child = os.fork()
    if child == 0:  # as a user whom rights hold back, who need not be able to come here by a path
        os.chdir(tmp_path)
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65_534)
            os.setuid(65_534)
        remove_tree(Path("tree"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not tree.exists()


def test_what_is_not_there(tmp_path: Path) -> None:
    remove_tree(tmp_path / "no")
    assert disk_bytes(tmp_path / "no") == 0
