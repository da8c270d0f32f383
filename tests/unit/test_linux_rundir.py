"""Whose a directory below ``/run`` is, and which ones a starting server removes."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from agent_sandbox.backends.linux.rundir import OWNER, RunDirectory, clear_vanished, instance_of


@pytest.fixture
def top(tmp_path: Path) -> Path:
    place = tmp_path / "agent-sandbox"
    place.mkdir()
    (place / "server.sock.lock").touch()
    return place


def claimed(top: Path, data: Path, suffix: str = "") -> RunDirectory:
    data.mkdir(exist_ok=True)
    made = RunDirectory(top / f"{instance_of(data)}{suffix}", data)
    made.claim((made.path / "box", 0o711), (made.path / "runc", 0o700))
    return made


def killed(made: RunDirectory) -> Path:
    """Let go as the kernel does when the server's process ends."""
    made._let_go()
    return made.path


def left(top: Path) -> set[str]:
    return {path.name for path in top.iterdir() if path.is_dir()}


def test_it_says_whose_it_is_and_goes_with_its_server(top: Path, tmp_path: Path) -> None:
    made = claimed(top, tmp_path / "data")
    assert (made.path / OWNER).readlink() == tmp_path / "data"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made.path, made.path / "runc")] == [0o711, 0o700]
    made.claim((made.path / "box", 0o711))
    another = RunDirectory(made.path, tmp_path / "data")
    another.release(made.path / "box")
    assert (made.path / "box").is_dir()
    (made.path / "runc/id").mkdir()
    made.release(made.path / "runc", made.path / "box")
    assert sorted(path.name for path in made.path.iterdir()) == [OWNER, "runc"]
    (made.path / "runc/id").rmdir()
    made.claim()
    made.release(made.path / "runc")
    assert left(top) == set()


def test_what_a_killed_server_left_goes_once_its_data_directory_is_gone(top: Path, tmp_path: Path) -> None:
    path = killed(claimed(top, tmp_path / "data", "-qemu"))
    (path / "box/sb1-1").mkdir()
    (path / "box/sb1-1/process.json").write_text("{}")
    (path / "link").symlink_to(tmp_path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path / "box/sb1-1/s"))
    clear_vanished(top)
    assert left(top) == {path.name}
    shutil.rmtree(tmp_path / "data")
    clear_vanished(top)
    assert left(top) == set()
    assert tmp_path.is_dir()
    assert (top / "server.sock.lock").exists()


def test_what_may_be_anybodys_stays(top: Path, tmp_path: Path) -> None:
    data = [tmp_path / name for name in ("live", "busy", "filled", "another", "unnamed")]
    live = claimed(top, data[0])
    busy, filled, another, unnamed = (killed(claimed(top, path)) for path in data[1:])
    (filled / "box/kept").write_text("what nobody expects here")
    unseen = Path("/" + "x" * 300)  # not ENOENT: nobody can say whether it is there
    hidden = RunDirectory(top / instance_of(unseen), unseen)
    hidden.claim()
    killed(hidden)
    (another / OWNER).unlink()
    (another / OWNER).symlink_to(tmp_path / "gone")  # which does not give this name
    (unnamed / OWNER).unlink()
    for path in data:
        path.rmdir()
    everything = left(top)
    clear_vanished(top, is_busy=lambda run: run == busy)
    assert left(top) == everything
    assert (filled / "box/kept").exists()
    assert (filled / OWNER).is_symlink()
    killed(live)
    clear_vanished(top, is_busy=lambda run: run == busy)
    assert left(top) == everything - {live.path.name}
    clear_vanished(top)
    assert left(top) == everything - {live.path.name, busy.name}


def test_nothing_is_removed_while_a_server_starts(top: Path, tmp_path: Path) -> None:
    path = killed(claimed(top, tmp_path / "data"))
    (tmp_path / "data").rmdir()
    starting = os.open(top, os.O_RDONLY)
    fcntl.flock(starting, fcntl.LOCK_SH)
    clear_vanished(top)
    assert path.is_dir()
    os.close(starting)
    clear_vanished(top)
    assert not path.exists()


def test_where_there_is_nothing_yet_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clear_vanished(tmp_path / "none")
    (tmp_path / ("0" * 12)).mkdir()
    clear_vanished(tmp_path)
    assert left(tmp_path) == set()
    assert caplog.text == ""
