"""States as drives: a file is made once for each, shared, kept while somebody needs it, and else makes room."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.backends.microvm import layers as under_test
from agent_sandbox.backends.microvm.layers import MOST_HOLE_BYTES, SIZE, Layers
from agent_sandbox.errors import BackendError, ConflictError, UnsupportedError

pytestmark = pytest.mark.real

ONE, TWO, THREE = (digit * 64 for digit in "123")
OWNER = (1000, 1000)
KEY = f"{ONE}-1000-1000"


class State:
    """Lays one file out, and counts how often."""

    def __init__(self, data: bytes = b"data", hole: int = 0) -> None:
        self.times, self.data, self.hole = 0, data, hole

    def __call__(self, directory: int, owner: tuple[int, int], unwanted: Callable[[], bool]) -> None:
        self.times += 1
        descriptor = os.open("f", os.O_CREAT | os.O_WRONLY, 0o640, dir_fd=directory)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.data)
            file.truncate(len(self.data) + self.hole)
        if unwanted():
            raise BackendError("nobody waits")


def never() -> bool:
    return False


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    made = Layers(tmp_path / "layers", "qemu", 1 << 30)
    made.prepare()
    return made


def superblock(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(1024)
        return file.read(4)


def test_a_state_is_made_once_and_all_have_the_same_file(layers: Layers, tmp_path: Path) -> None:
    state = State()
    assert layers.link(ONE, OWNER, state, never, tmp_path / "a") == KEY
    assert layers.link(ONE, OWNER, state, never, tmp_path / "b") == KEY
    assert state.times == 1
    one, other = (tmp_path / "a").stat(), (tmp_path / "b").stat()
    assert one.st_ino == other.st_ino
    assert (one.st_size, stat.S_IMODE(one.st_mode)) == (SIZE, 0o444)
    assert one.st_blocks * 512 < 1 << 20
    assert superblock(tmp_path / "a") == bytes.fromhex("e2e1f5e0")  # the kernel's EROFS_SUPER_MAGIC_V1, little-endian
    # Its files have the owner in them, so another user's is another one.
    assert layers.link(ONE, (7, 7), state, never, tmp_path / "c") != KEY
    assert state.times == 2
    layers.link_blank(tmp_path / "none")
    assert (tmp_path / "none").stat().st_size == SIZE
    assert superblock(tmp_path / "none") == bytes(4)


def test_what_a_drive_cannot_show_is_refused_and_remembered(layers: Layers, tmp_path: Path) -> None:
    state = State(hole=MOST_HOLE_BYTES + (1 << 16))
    for _ in range(2):
        with pytest.raises(UnsupportedError):
            layers.link(ONE, OWNER, state, never, tmp_path / "a")
    assert state.times == 1
    assert not (tmp_path / "a").exists()
    layers.link(TWO, OWNER, State(hole=MOST_HOLE_BYTES // 2), never, tmp_path / "a")
    # The next server looks again: it may be one that can.
    layers.prepare()
    with pytest.raises(UnsupportedError):
        layers.link(ONE, OWNER, state, never, tmp_path / "b")
    assert state.times == 2


def test_what_is_used_or_kept_by_a_checkpoint_stays_and_the_oldest_other_goes(
    layers: Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, state in (("used", ONE), ("kept", TWO), ("idle", THREE)):
        layers.link(state, OWNER, State(), never, tmp_path / name)
    layers.keep(f"{TWO}-1000-1000", tmp_path / "mark")
    for name in ("kept", "idle"):
        (tmp_path / name).unlink()
    monkeypatch.setattr(layers, "_max_bytes", 0)
    layers.link("4" * 64, OWNER, State(), never, tmp_path / "new")
    names = {path.name[0] for path in (tmp_path / "layers").glob("*.erofs")}
    assert names == {"1", "2", "4"}
    layers.link_known(f"{TWO}-1000-1000", tmp_path / "again")
    (tmp_path / "again").unlink()
    (tmp_path / "mark").unlink()
    layers.link("5" * 64, OWNER, State(), never, tmp_path / "newer")
    with pytest.raises(ConflictError, match="not there any more"):
        layers.link_known(f"{TWO}-1000-1000", tmp_path / "again")


def test_what_fails_or_is_given_up_leaves_nothing_and_is_made_again(layers: Layers, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="nobody waits"):
        layers.link(ONE, OWNER, State(), lambda: True, tmp_path / "a")
    for wrong in ("", "../../etc", ONE[1:], ONE.upper() + "A"):
        with pytest.raises(BackendError, match="names no state"):
            layers.link(wrong, OWNER, State(), never, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert not list((tmp_path / "layers").glob("*.erofs"))
    # What a killed server left is cleared by the next.
    (tmp_path / "layers/.new-x").write_bytes(b"half")
    (tmp_path / "layers/trees/x").mkdir()
    layers.prepare()
    layers._removing.shutdown(wait=True)
    assert not (tmp_path / "layers/.new-x").exists()
    assert not list((tmp_path / "layers/trees").iterdir())
    again = Layers(tmp_path / "layers", "qemu", 1 << 30)
    # One that was cut off is no file of ours.
    again.link(ONE, OWNER, State(), never, tmp_path / "a")
    os.truncate(tmp_path / "a", 100)
    (tmp_path / "a").unlink()
    again.link(ONE, OWNER, State(), never, tmp_path / "a")
    assert (tmp_path / "a").stat().st_size == under_test.SIZE
