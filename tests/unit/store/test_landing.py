"""Where a checkout lands: as a whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import ConflictError, InvalidRequestError, NotFoundError
from agent_sandbox.store.landing import landing, opened
from tests.unit.store.engines import unprivileged
from tests.unit.store.trees import scratch


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that other users than root can reach."""
    with scratch() as directory:
        yield directory


def fill(fd: int) -> None:
    """Make a file, a deep chain of directories, a locked directory with something in it, and a symlink to outside."""
    os.symlink("/etc", "link", dir_fd=fd)
    os.mkdir("locked", dir_fd=fd)
    Path(f"/proc/self/fd/{fd}/locked/file").write_bytes(b"x")
    Path(f"/proc/self/fd/{fd}/locked/in").mkdir()
    Path(f"/proc/self/fd/{fd}/locked/in").chmod(0)
    Path(f"/proc/self/fd/{fd}/locked").chmod(0o500)
    at = os.dup(fd)
    for _ in range(1_200):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def test_a_new_directory_is_not_there_before_the_end(tmp_path: Path) -> None:
    target = tmp_path / "new"
    with landing(target) as fd:
        os.mkdir("in", dir_fd=fd)
        assert not target.exists()
        assert [path.name.startswith(".new.") for path in tmp_path.iterdir()] == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert [path.name for path in target.iterdir()] == ["in"]


def failing(target: Path, error: BaseException, then: Callable[[int], None] = fill) -> None:
    """Begin at ``target``, do something there, and fail."""
    with landing(target) as fd:
        then(fd)
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), ConflictError("x")])
def test_nothing_is_left_of_a_new_one_that_failed(open_path: Path, error: BaseException) -> None:
    with unprivileged(open_path), pytest.raises(type(error)) as raised:
        failing(open_path / "new", error)
    assert raised.value is error
    assert not hasattr(error, "__notes__")
    assert list(open_path.iterdir()) == []


def test_an_empty_directory_is_filled_in_place_and_emptied_on_failure(open_path: Path) -> None:
    target = open_path / "there"
    target.mkdir(0o750)
    os.utime(target, ns=(5, 6))
    with landing(target) as fd:
        assert os.path.samestat(os.fstat(fd), target.stat())
    with unprivileged(open_path, target), pytest.raises(KeyboardInterrupt):
        failing(target, KeyboardInterrupt())
    assert list(open_path.iterdir()) == [target]
    assert list(target.iterdir()) == []
    assert (stat.S_IMODE(target.stat().st_mode), target.stat().st_mtime_ns) == (0o750, 6)


def test_what_is_there_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("full", "file", "dangling"):
        with pytest.raises(ConflictError), landing(tmp_path / name):
            pytest.fail("must not begin")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "full"]
    with pytest.raises(NotFoundError), landing(tmp_path / "no" / "parent"):
        pytest.fail("must not begin")
    with pytest.raises(ConflictError), landing(tmp_path / "file" / "below"):
        pytest.fail("must not begin")


def test_what_turns_up_meanwhile_stays(tmp_path: Path) -> None:
    target = tmp_path / "new"

    def meet() -> None:
        with landing(target) as fd:
            os.mkdir("ours", dir_fd=fd)
            target.mkdir()
            (target / "theirs").touch()

    with pytest.raises(ConflictError):
        meet()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert [path.name for path in target.iterdir()] == ["theirs"]


def test_the_directory_we_stand_in_can_be_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with landing(Path()) as fd:
        os.mkdir("in", dir_fd=fd)
    assert (tmp_path / "in").is_dir()


def test_a_long_name_has_room_for_the_hidden_one(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    with landing(target):
        pass
    assert target.is_dir()


def test_an_error_stays_when_cleaning_up_fails(open_path: Path) -> None:
    with unprivileged(open_path), pytest.raises(ValueError, match="first") as raised:
        failing(open_path / "new", ValueError("first"), lambda _: open_path.chmod(0o500))
    (left,) = open_path.iterdir()
    assert raised.value.__notes__ == [f"what was built is left in {left}: Permission denied"]


def test_opened_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError, match="no directory"), opened(tmp_path / "nothing"):
        pass
    with pytest.raises(InvalidRequestError, match="is no directory"), opened(tmp_path / "file"):
        pass
